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
from decimal import Decimal
from typing import Any

from absl import flags

from lsm_jax import programs
from lsm_jax.names import did_you_mean
from lsm_jax.training.config_json import flatten, suggest

_POWER = re.compile(r"\d+(\.\d*)?[eE]\+?\d{1,2}")  # a number such as 1e6
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
    argv = programs.expand_arguments(argv)
    if len(argv) == 1:
        page = (sys.modules["__main__"].__doc__ or "").strip()
        sys.exit(f"{program}: {_problem(argv, workdir)}\n\n{page}\n\n--help lists all flags.")
    path = _given(argv).get("config", "").partition(":")[0]
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or device would be read forever
        sys.exit(f"{program}: --config={path}: {path!r} is no regular file; {_ACCEPTED}")
    plain = _plain_numbers(argv, program)
    unset = [a for a in plain[1:] if re.fullmatch(r"--?config\.[^=]+=None", a)]
    changed = dict(zip(argv, plain, strict=True))
    sys.argv = [changed.get(a, a) for a in sys.argv if a not in unset]
    try:
        rest = known([a for a in plain if a not in unset])
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
        sys.exit(f"{program}: {_problem(argv, workdir, known) or text}")
    config = known["config"].value
    if (workdir and not known["workdir"].value) or not dataclasses.is_dataclass(config):
        sys.exit(f"{program}: {_problem(argv, workdir, known)}")
    names = [name.removeprefix("config.") for name in _given(argv) if name.startswith("config.")]
    for name in names:
        if problem := _unused_layer(config, name):
            sys.exit(f"{program}: {problem}")
    if "total_tokens" in names and "optimizer.warmup_tokens" not in names:
        _fit_warmup(config, program)
    return rest


def _given(argv: list[str]) -> dict[str, str]:
    """Return the flags of a command line by name, as text; a flag without "=" has the next argument as its value."""
    return {
        name.lstrip("-"): value if equals else following
        for (name, equals, value), following in itertools.zip_longest(
            (a.partition("=") for a in argv[1:]), argv[2:], fillvalue=""
        )
        if name.startswith("-")
    }


def _plain_numbers(argv: list[str], program: str) -> list[str]:
    """Return the command line with whole numbers such as 1e6 and 2.5e9 written out, where an override is of an integer
    field of the config; a number that is not whole ends the process with a message."""
    if not any(_POWER.fullmatch(a.partition("=")[2]) for a in argv):
        return argv
    try:
        config = _load_config(_given(argv).get("config", ""))
    except Exception:
        return argv  # the error is reported when the flags are parsed
    plain = []
    for argument in argv:
        name, _, value = argument.partition("=")
        field = name.lstrip("-").removeprefix("config.")
        kinds = _kind(config, field) if "config." in name and _POWER.fullmatch(value) else None
        if int in (typing.get_args(kinds) or (kinds,)):
            number = Decimal(value)
            if number != number.to_integral_value():
                sys.exit(f"{program}: {argument}: accepted are whole numbers")
            argument = f"{name}={int(number)}"
        plain.append(argument)
    return plain


def _load_config(text: str) -> Any:
    """Return the config that the value FILE.py:VARIANT of the flag `--config` names."""
    path, colon, variant = text.partition(":")
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config={text}: {path!r} is not a Python file; {_ACCEPTED}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant) if colon else module.get_config()


def _kind(config: Any, name: str) -> Any:
    """Return the annotated type of the config's field with a dotted name; None if there is no such field."""
    *path, last = name.split(".")
    for part in path:
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return (
        typing.get_type_hints(type(config)).get(last) if dataclasses.is_dataclass(config) else None
    )


def _unused_layer(config: Any, name: str) -> str | None:
    """Return an error message if an override is of a layer whose letter the model's pattern does not have, such that it
    would change nothing; otherwise None. `name` is the dotted name of the field."""
    prefix, _, rest = name.partition("model.layers.")
    letter, pattern = rest.partition(".")[0], getattr(getattr(config, "model", None), "pattern", "")
    if prefix or not rest or letter in pattern:
        return None
    return (
        f"--config.{name}: no layer of the model has the letter {letter}, its pattern is {pattern!r}; accepted are fields of "
        f"model.layers.{', model.layers.'.join(sorted(set(pattern)))}, or another pattern"
    )


def _fit_warmup(config: Any, program: str) -> None:
    """Shorten the warm-up of a config to a tenth of the run, and say so, if it is not shorter than the run."""
    optimizer = getattr(config, "optimizer", None)
    warmup = getattr(optimizer, "warmup_tokens", 0)
    if optimizer is not None and warmup >= config.total_tokens > 0:
        optimizer.warmup_tokens = config.total_tokens // 10
        print(
            f"{programs.shown_name(program)}: optimizer.warmup_tokens={optimizer.warmup_tokens}, a tenth of total_tokens, since the config's "
            f"{warmup} are not less than total_tokens={config.total_tokens}",
            file=sys.stderr,
        )


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


def _problem(argv: list[str], workdir: bool, known: flags.FlagValues | None = None) -> str | None:
    """Return the message about the first error in the command line's arguments, or None if they are valid.

    Checks `--config` (the flag, the file, the variant), flags that are not in `known`, `--workdir`, and then each
    override `--config.NAME=VALUE`.
    """
    values = _given(argv)
    path = values.get("config", "").partition(":")[0]
    if not path:
        return f"--config is missing; {_ACCEPTED}"
    if not os.path.isfile(path):
        shipped = list(programs.config_files())
        hint = did_you_mean(path.removeprefix("configs/").removesuffix(".py"), shipped)
        return (
            f"--config={values['config']}: there is no file {path!r}; {_ACCEPTED}, or the name of a config of this library "
            f"({', '.join(shipped)}) in its place, e.g. lm:gla-340m{hint}"
        )
    config: Any = None
    try:
        config = _load_config(values["config"])
    except Exception as error:
        problem = str(error)
    else:
        problem = _unknown_flag(values, config, known) if known is not None else None
    if workdir and not values.get("workdir"):
        problem = problem if config is not None and problem else None
        return problem or "--workdir is missing; give the run's directory"
    if problem is not None:
        return problem
    for name, value in values.items():
        if name.startswith("config.") and (
            problem := _override(config, name[len("config.") :], value)
        ):
            return problem
    return None


def _unknown_flag(values: dict[str, str], config: Any, known: flags.FlagValues) -> str | None:
    """Return the error message of the first flag that the program does not have, with the nearest flag or field of the
    config; None if it has all of them."""
    flag_of = {field.rpartition(".")[2]: f"'--config.{field}'" for field in flatten(config)}
    flag_of |= {flag: f"'--{flag}'" for flag in known}
    for name in values:
        if name.startswith("config.") or name in known or name.removeprefix("no") in known:
            continue
        near = re.sub(r"'(\w+)'", lambda found: flag_of[found[1]], did_you_mean(name, flag_of))
        return f"unknown flag --{name}{near or '; --help lists all flags'}"
    return None


def _override(config: Any, name: str, value: str) -> str | None:
    """Check a command-line override `--config.NAME=VALUE` of the field with the dotted name `name`: return an
    error message if the config has no such field, or if the field has no type that a value can be parsed to
    (such as `base`); otherwise None."""
    node, parent = config, None
    for part in name.split("."):
        fields = node if isinstance(node, dict) else vars(node) if hasattr(node, "__dict__") else {}
        if part not in fields:  # a property or method is no field
            return f"--config.{name}: {suggest(config, name)}"
        node, parent = fields[part], node
    last = name.rpartition(".")[2]
    kind = (
        typing.get_type_hints(type(parent)).get(last) if dataclasses.is_dataclass(parent) else None
    )
    if kind is Any and value != "None":
        return (
            f"--config.{name}={value}: accepted is None; set the fields one by one, --config.{name}.FIELD=VALUE, and select another "
            "kind of value by the variant of --config"
        )
    return _number(name, value, kind)


def _number(name: str, value: str, kind: Any) -> str | None:
    """Return an error message if a field's type is a number and `value` is none; otherwise None."""
    kinds = set(typing.get_args(kind) or (kind,)) - {types.NoneType}
    convert = int if kinds == {int} else float if kinds <= {int, float} else None
    if convert is None or value == "None":
        return None
    try:
        convert(value)
    except ValueError:
        accepted = (
            "whole numbers, such as 1000000 or 1e6" if convert is int else "numbers, such as 1e-3"
        )
        return f"--config.{name}={value}: accepted are {accepted}"
    return None
