"""What commands that take `--config=FILE.py:VARIANT` share: parsing it, and saying in one line what is wrong with it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
import types
import typing
from typing import Any

from absl import flags

from lsm_jax.training.config import suggest

_MISSING = object()
_ACCEPTED = "accepted is FILE.py:VARIANT, e.g. configs/lm.py:gla-340m"


def parse_config(
    known: flags.FlagValues, argv: list[str], program: str, *, workdir: bool
) -> list[str]:
    """Parse flags, of which `config` is one; a wrong field, variant or value ends the process in one line, with what exists.

    Args:
        known: the flags.
        argv: as of the process. Overrides of fields with None are left out of `sys.argv`, which ml-collections reads: it would
            take them for values of the type that stands there.
        program: its name, ahead of what is wrong.
        workdir: whether `--workdir` is needed too.

    Returns:
        What is left of `argv`, the program's name first.
    """
    unset = [a for a in argv[1:] if re.fullmatch(r"--?config\.[^=]+=None", a)]
    sys.argv = [a for a in sys.argv if a not in unset]
    try:
        rest = known([a for a in argv if a not in unset])
        for argument in unset:
            _unset(known["config"].value, argument.partition("=")[0].partition("config.")[2])
    except (
        flags.Error, KeyError, AttributeError, ValueError, TypeError, OSError, SyntaxError,
    ) as error:  # fmt: skip
        text = " ".join(str(error).replace("Error: ", "").split())
        sys.exit(f"{program}: {_problem(argv, workdir) or text}")
    if (workdir and not known["workdir"].value) or not dataclasses.is_dataclass(known["config"].value):  # fmt: skip
        sys.exit(f"{program}: {_problem(argv, workdir)}")
    return rest


def _unset(config: Any, name: str) -> None:
    """Set a field to None. One that does not accept it raises ValueError, one that does not exist KeyError or AttributeError."""
    *holders, last = name.split(".")
    for part in holders:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    kind = typing.get_type_hints(type(config))[last]
    if kind is not Any and types.NoneType not in typing.get_args(kind):
        raise ValueError(
            f"--config.{name}=None: accepted is {getattr(kind, '__name__', kind)}, as the field's {getattr(config, last)!r}"
        )
    setattr(config, last, None)


def _problem(argv: list[str], workdir: bool) -> str | None:
    """What is wrong with --config, --workdir or the first override that names no field, if anything is."""
    values = {
        name.lstrip("-"): value if equals else following
        for (name, equals, value), following in zip(
            (a.partition("=") for a in argv[1:]), [*argv[2:], ""], strict=True
        )
        if name.startswith("-")
    }
    path, colon, variant = values.get("config", "").partition(":")
    if not path:
        return f"--config is missing; {_ACCEPTED}"
    if not os.path.isfile(path):
        return f"--config={values['config']}: there is no file {path!r}; {_ACCEPTED}"
    if workdir and not values.get("workdir"):
        return "--workdir is missing; give the run's directory"
    try:
        spec = importlib.util.spec_from_file_location("config_file", path)
        if spec is None or spec.loader is None:
            return f"--config={values['config']}: {path!r} is no Python file; {_ACCEPTED}"
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(variant) if colon else module.get_config()
    except Exception as error:
        return str(error)
    for name, value in values.items():
        if name.startswith("config.") and (wrong := _override(config, name[len("config.") :], value)):  # fmt: skip
            return wrong
    return None


def _override(config: Any, name: str, value: str) -> str | None:
    """What is wrong with an override, as far as its field's name and kind tell."""
    holder, parent = config, None
    for part in name.split("."):
        inner = holder.get(part, _MISSING) if isinstance(holder, dict) else getattr(holder, part, _MISSING)  # fmt: skip
        if inner is _MISSING:
            return f"--config.{name}: {suggest(config, name)}"
        holder, parent = inner, holder
    last = name.rpartition(".")[2]
    kind = typing.get_type_hints(type(parent)).get(last) if dataclasses.is_dataclass(parent) else None  # fmt: skip
    if kind is Any and value != "None":
        return (
            f"--config.{name}={value}: accepted are None, and values for its fields one by one; --config's variant says what "
            "stands there"
        )
    return None
