"""Parse the flag `--config=FILE.py:VARIANT` and command-line overrides `--config.NAME=VALUE` of the config's
fields, with error messages of one line."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import sys
import types
import typing
from typing import Any

from absl import flags

from lsm_jax.training.config_json import suggest

_MISSING = object()
_ACCEPTED = "accepted is FILE.py:VARIANT, e.g. configs/lm.py:gla-340m"


def parse_config(
    known: flags.FlagValues, argv: list[str], program: str, *, workdir: bool
) -> list[str]:
    """Parse a program's command line, which has the flag `--config=FILE.py:VARIANT` and may override fields of
    the config by `--config.NAME=VALUE`.

    A wrong field, variant or value ends the process with a message of one line that says what is accepted.

    Args:
        known: the program's flags, as absl defines them.
        argv: the process's arguments. Overrides of fields with None are removed from `sys.argv`, which
            ml-collections reads: it would parse None as a value of the field's current type.
        program: the program's name, for error messages.
        workdir: whether the flag `--workdir` is required.

    Returns:
        The arguments that are not flags, with the program's name first.
    """
    unset = [a for a in argv[1:] if re.fullmatch(r"--?config\.[^=]+=None", a)]
    sys.argv = [a for a in sys.argv if a not in unset]
    path = _values(argv).get("config", "").partition(":")[0]
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or device would be read forever
        sys.exit(f"{program}: --config={path}: {path!r} is no regular file; {_ACCEPTED}")
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
    """Set a field of the config, given by its dotted name, to None.

    Raises:
        ValueError: the config's field does not accept None.
        KeyError, AttributeError: the config has no field of that name.
    """
    *path, last = name.split(".")
    for part in path:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    kind = typing.get_type_hints(type(config))[last]
    if kind is not Any and types.NoneType not in typing.get_args(kind):
        raise ValueError(
            f"--config.{name}=None: accepted is {getattr(kind, '__name__', kind)}, and the config has {getattr(config, last)!r}"
        )
    setattr(config, last, None)


def _values(argv: list[str]) -> dict[str, str]:
    """Return the values of a command line's flags by name."""
    return {
        name.lstrip("-"): value if equals else following
        for (name, equals, value), following in itertools.zip_longest(
            (a.partition("=") for a in argv[1:]), argv[2:], fillvalue=""
        )
        if name.startswith("-")
    }


def _problem(argv: list[str], workdir: bool) -> str | None:
    """Return the message about the first error in the command line's arguments, or None if they are valid.

    Checks `--config` (the flag, the file, the variant), `--workdir`, and then each override
    `--config.NAME=VALUE`.
    """
    values = _values(argv)
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
            return f"--config={values['config']}: {path!r} is not a Python file; {_ACCEPTED}"
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
    """Check a command-line override `--config.NAME=VALUE` of the field with the dotted name `name`: return an
    error message if the config has no such field, or if the field has no type that a value can be parsed to
    (such as `base`); otherwise None."""
    node, parent = config, None
    for part in name.split("."):
        inner = (
            node.get(part, _MISSING) if isinstance(node, dict) else getattr(node, part, _MISSING)
        )
        if inner is _MISSING:
            return f"--config.{name}: {suggest(config, name)}"
        node, parent = inner, node
    last = name.rpartition(".")[2]
    kind = (
        typing.get_type_hints(type(parent)).get(last) if dataclasses.is_dataclass(parent) else None
    )
    if kind is Any and value != "None":
        return (
            f"--config.{name}={value}: accepted is None; set the fields one by one, --config.{name}.FIELD=VALUE, and select another "
            "kind of value by the variant of --config"
        )
    return None
