"""The flag `--config=FILE.py:VARIANT` of commands: parse it, and report what is wrong with it in one line."""

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
    """Parse flags, one of which is `config`.

    A wrong field, variant or value ends the process with a message of one line that says what is accepted.

    Args:
        known: the flags.
        argv: the process's arguments. Overrides of fields with None are removed from `sys.argv`, which
            ml-collections reads: it would parse None as a value of the field's current type.
        program: the program's name, for messages.
        workdir: whether `--workdir` is required.

    Returns:
        The arguments that are no flags, with the program's name first.
    """
    unset = [a for a in argv[1:] if re.fullmatch(r"--?config\.[^=]+=None", a)]
    sys.argv = [a for a in sys.argv if a not in unset]
    try:
        rest = known([a for a in argv if a not in unset])
        for argument in unset:
            _unset(known["config"].value, argument.partition("=")[0].partition("config.")[2])
    except (
        flags.Error,
        KeyError,
        AttributeError,
        ValueError,
        TypeError,
        OSError,
        SyntaxError,
    ) as error:
        text = " ".join(str(error).replace("Error: ", "").split())
        sys.exit(f"{program}: {_problem(argv, workdir) or text}")
    if (workdir and not known["workdir"].value) or not dataclasses.is_dataclass(
        known["config"].value
    ):
        sys.exit(f"{program}: {_problem(argv, workdir)}")
    return rest


def _unset(config: Any, name: str) -> None:
    """Set a field to None.

    Raises:
        ValueError: the field does not accept None.
        KeyError, AttributeError: the field does not exist.
    """
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
    """What is wrong with --config, with --workdir or with the first wrong override; None if nothing is."""
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
        if name.startswith("config.") and (
            problem := _override(config, name[len("config.") :], value)
        ):
            return problem
    return None


def _override(config: Any, name: str, value: str) -> str | None:
    """What is wrong with an override, judged by the field's name and type; None if nothing is."""
    holder, parent = config, None
    for part in name.split("."):
        inner = (
            holder.get(part, _MISSING)
            if isinstance(holder, dict)
            else getattr(holder, part, _MISSING)
        )
        if inner is _MISSING:
            return f"--config.{name}: {suggest(config, name)}"
        holder, parent = inner, holder
    last = name.rpartition(".")[2]
    kind = (
        typing.get_type_hints(type(parent)).get(last) if dataclasses.is_dataclass(parent) else None
    )
    if kind is Any and value != "None":
        return (
            f"--config.{name}={value}: accepted are None, and values for its fields one by one; --config's variant says what "
            "stands there"
        )
    return None
