"""Parses the commands of the documentation with the parsers of the programs that they name, or runs them in this process."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import runpy
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import grain.python  # noqa: F401  (its flags are defined once, and would be lost with those of a program that imports it)
from absl import app, flags
from absl.testing import flagsaver

from lsm_jax import cli, interrupts
from scripts.doc_blocks import OTHERS, ROOT


class Parsed(BaseException):
    """Raised in place of running a program, after its command line has been parsed."""


def parse(words: Sequence[str], folder: Path = ROOT) -> None:
    """Parse a command line with the parser of its program, and do not run the program; paths are those of `folder`.

    `python FILE`, `python -m MODULE` and `lsm COMMAND` are started as Python would start them, up to the end of the parsing:
    flags, the config, its variant, overrides of its fields and their types are those that a user's command would have.
    Of `make` the target must exist; of `pip` the extras; of `pytest` the paths, modules and flags.

    Raises:
        AssertionError: the command line is not accepted; the message is the program's.
    """
    program, *rest = words
    if program == "make":
        rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest and set(rest) <= set(rules), f"make {' '.join(rest)}: there is no such target"
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[([\w,-]+)\]", " ".join(rest)):
            known = set(project["optional-dependencies"])
            assert set(extra.split(",")) <= known, f"there is no extra [{extra}]"
    elif rest[:2] == ["-m", "pytest"]:
        _check_pytest(rest[2:])
    elif program not in OTHERS:
        _start(program, [_concrete(word) for word in rest], folder, parse_only=True)


def run(words: Sequence[str], folder: Path) -> str:
    """Run `python FILE`, `python -m MODULE` or `lsm COMMAND` in this process, in a folder, and return what it printed.

    FILE is a file of the repository; other paths are those of the folder.

    Raises:
        AssertionError: the program ends with an error; the message is what it printed.
    """
    program, *rest = words
    return _start(program, rest, folder, parse_only=False)


def _concrete(word: str) -> str:
    """Return a word of a command line with a name in place of `<method>`, and without a `source`, a folder that is not here."""
    word = re.sub(r":auto,source=[^,\s]+", ":llama3.2-1b", word)
    return re.sub(r",source=[^,\s]+", "", re.sub(r"<\w+>", "gla", word))


def _check_pytest(words: Sequence[str]) -> None:
    """Raise AssertionError unless the paths, plugins and markers of a command line of pytest exist."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("paths", nargs="*")
    for flag in ("-p", "-k", "-m", "-n"):
        parser.add_argument(flag)
    for flag in ("-s", "-x", "-q"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args(list(words))
    for path in given.paths:
        assert (ROOT / path.partition("::")[0]).exists(), path
    if given.p:
        importlib.import_module(given.p)


@contextlib.contextmanager
def _without_flags_of_programs():
    """Remove the flags of programs that other tests have imported, and keep those of libraries; afterwards they are back."""
    known = flags.FLAGS
    saved = {
        name: {k: list(v) if isinstance(v, list) else v for k, v in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in vars(known).items()
    }
    for name in list(known):
        module = sys.modules.get(str(known.find_module_defining_flag(name)))
        if module is None or "site-packages" not in str(getattr(module, "__file__", "")):
            delattr(known, name)
    try:
        yield
    finally:
        vars(known).clear()
        vars(known).update(saved)


def _start(program: str, words: list[str], folder: Path, *, parse_only: bool) -> str:
    """Start `python` or `lsm` with the arguments `words` in this process, and return what it printed; with `parse_only` it stops
    when they have been parsed."""
    output, parse_args = io.StringIO(), argparse.ArgumentParser.parse_args

    def stop(parser, *args, **options):
        parse_args(parser, *args, **options)
        raise Parsed

    def run_app(main, argv=None, flags_parser=flags.FLAGS):
        try:
            rest = flags_parser(sys.argv if argv is None else argv)
        except flags.Error as error:
            sys.exit(str(error))
        if parse_only:
            raise Parsed
        sys.exit(main(rest))

    patches = [
        _without_flags_of_programs(),
        flagsaver.flagsaver(),
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        mock.patch.object(app, "run", run_app),
        mock.patch.object(interrupts, "leave_on_signals", lambda *_, **__: None),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ]
    if parse_only:
        patches.append(mock.patch.object(argparse.ArgumentParser, "parse_args", stop))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            status = _call(stack, program, words)
        except Parsed:
            status = 0
        except SystemExit as end:
            status = end.code
        except Exception:
            status = traceback.format_exc()
    assert status in (0, None), f"{program} {' '.join(words)}: {output.getvalue()}{status}"
    return output.getvalue()


def _call(stack: contextlib.ExitStack, program: str, words: list[str]) -> int | None:
    """Call `lsm` or `python` with its arguments, as `_start` has prepared it; return the exit status."""
    if program == "lsm":
        return cli.main(words)
    module = words[0] == "-m"
    arguments = words[2:] if module else words[1:]
    stack.enter_context(mock.patch.object(sys, "argv", [words[module], *arguments]))
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    return 0
