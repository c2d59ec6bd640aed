"""Parses the commands of the documentation with the parsers of the programs that they name."""

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
from collections.abc import Sequence
from unittest import mock

from absl import app, flags
from absl.testing import flagsaver

from lsm_jax import cli, interrupts
from scripts.doc_blocks import ROOT


class Parsed(BaseException):
    """Raised in place of running a program, after its command line has been parsed."""


def parse(words: Sequence[str]) -> None:
    """Parse a command line with the parser of its program, and do not run the program.

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
    else:
        _start(program, [_concrete(word) for word in rest])


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
    """Remove the flags of programs that other tests have imported; afterwards they are back."""
    known = flags.FLAGS
    saved = {
        name: {k: list(v) if isinstance(v, list) else v for k, v in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in vars(known).items()
    }
    for name in list(known):
        if not str(known.find_module_defining_flag(name)).startswith("absl"):
            delattr(known, name)
    try:
        yield
    finally:
        vars(known).clear()
        vars(known).update(saved)


def _start(program: str, words: list[str]) -> None:
    """Start `python` or `lsm` with the arguments `words` in this process, until they have been parsed."""
    output, parse_args = io.StringIO(), argparse.ArgumentParser.parse_args

    def stop(parser, *args, **options):
        parse_args(parser, *args, **options)
        raise Parsed

    def run_app(main, argv=None, flags_parser=flags.FLAGS):
        try:
            flags_parser(sys.argv if argv is None else argv)
        except flags.Error as error:
            sys.exit(str(error))
        raise Parsed

    patches = [
        _without_flags_of_programs(),
        flagsaver.flagsaver(),
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        mock.patch.object(app, "run", run_app),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(interrupts, "leave_on_signals", lambda *_, **__: None),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            status = _run(stack, program, words)
        except Parsed:
            return
        except SystemExit as end:
            status = end.code
    assert status in (0, None), f"{program} {' '.join(words)}: {output.getvalue()}{status}"


def _run(stack: contextlib.ExitStack, program: str, words: list[str]) -> int | None:
    """Run `lsm` or `python` with its arguments, as `_start` has prepared it; return the exit status."""
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
