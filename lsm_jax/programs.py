"""Find and run the repository's programs and configs, in a checkout and in an installed wheel.

A wheel has train.py, eval.py and configs/ in the folder `lsm_jax/shipped`, laid out as in the repository.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = re.compile(r"(?:configs/)?(\w+)(?:\.py)?")
_running = ""  # the name of the command that `run` runs; `runpy` replaces `sys.argv[0]`


def root() -> Path:
    """Return the folder that has train.py, eval.py and configs/: `lsm_jax/shipped`, or in a checkout the repository."""
    shipped = _PACKAGE / "shipped"
    return shipped if shipped.is_dir() else _PACKAGE.parent


def config_files() -> dict[str, str]:
    """Return the first sentence of the docstring of each config file that the library has, by name ("lm", "fox", ...)."""
    found = {}
    for path in sorted((root() / "configs").glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body
        ):
            first = (ast.get_docstring(tree) or "").split("\n\n")[0]
            found[path.stem] = " ".join(first.split()).split(": `--config")[0]
    return found


def expand(config: str) -> str:
    """Return the value of `--config` with the path of the file that it names.

    "lm:gla-tiny", "lm.py:gla-tiny" and "configs/lm.py:gla-tiny" name the library's file, unless there is a file of that
    name in the current folder. Other values are returned unchanged.
    """
    name, colon, variant = config.partition(":")
    match = _SHIPPED.fullmatch(name)
    if match is None or Path(name).is_file() or match[1] not in config_files():
        return config
    return f"{root() / 'configs' / match[1]}.py{colon}{variant}"


def expand_arguments(arguments: list[str]) -> list[str]:
    """Return a command line in which the value of the flag `--config` is expanded by `expand`, and make the library's
    config files importable as `configs`, as they are in the repository's folder."""
    if str(root()) not in sys.path:
        sys.path.append(str(root()))
    expanded = list(arguments)
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config", "-config") and equals:
            expanded[i] = f"{flag}={expand(value)}"
        elif i and arguments[i - 1] in ("--config", "-config"):
            expanded[i] = expand(argument)
    return expanded


def shown_name(program: str) -> str:
    """Return the name of a program for a message: "lsm train" where `run` runs it as that command, otherwise `program`."""
    return _running or (sys.argv[0] if sys.argv[0].startswith("lsm ") else program)


def run(program: str, name: str, arguments: list[str]) -> None:
    """Run a program of the repository in this process, as `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` would.

    Args:
        program: the file "train.py" or "eval.py", or a module of this package, such as "plan".
        name: the command's name in messages, and `sys.argv[0]`.
        arguments: the command's arguments.

    Raises:
        SystemExit: the program ended; its message begins with `name` instead of the program's.
    """
    global _running
    sys.argv, _running = [name, *arguments], name
    try:
        if program.endswith(".py"):
            runpy.run_path(str(root() / program), run_name="__main__")
        else:
            runpy.run_module(f"lsm_jax.{program}", run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str) and end.code.startswith(f"{program}: "):
            end.code = name + end.code.removeprefix(program)
        raise
    finally:
        _running = ""
