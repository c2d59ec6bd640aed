"""Run the command `lsm`, and print its pages of help."""

from __future__ import annotations

import os
import runpy
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence

from lsm_jax import __version__, interrupts, programs
from lsm_jax.cli.declared import Declared
from lsm_jax.cli.table import COMMANDS, IMPORTERS, Command
from lsm_jax.names import did_you_mean

_HELP = ("--help", "-h", "-help")
_FIRST = ("train", "eval", "compare")  # commands with an example in the overview


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `lsm`, and return the exit status.

    If the reader of the output is gone, as in `lsm methods | head -5`, the command ends without a word, as programs do that
    SIGPIPE ends. Ctrl-C ends the process's own command with one line.

    Args:
        arguments: the command's name and its arguments; None is those of the process.
    """
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # it was another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command as `main` does, whoever reads its output."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # before the slow imports
        interrupts.leave_on_signals(" ".join(["lsm", *given[:1]]), cleanup_seconds=5.0)
    commands = {command.name: command for command in COMMANDS}
    if given and given[0] == "--version":
        print(f"lsm_jax {__version__}")
        return 0
    if given and (given[0] in _HELP or given[0] == "help"):
        given = [*given[1:2], "--help"] if given[1:2] and given[1] in commands else []
    if not given:
        print(overview())
        return 0
    name, *rest = given
    if name not in commands:
        hint = did_you_mean(name, commands)
        print(f"lsm: there is no command {name!r}{hint or ';'} Commands: {', '.join(commands)}", file=sys.stderr)  # fmt: skip
        return 2
    command = commands[name]
    kind = bool(rest) and name == "convert" and rest[0] in IMPORTERS
    if not kind and any(argument in _HELP for argument in rest):
        print(page(command))
        return _print_fields(rest) if name in ("train", "plan") else 0
    if not rest and command.required:
        print(page(command), file=sys.stderr)
        return 2
    program, sys.argv[0] = (
        sys.argv[0],
        f"lsm {name}",
    )  # the name in messages, see `programs.shown_name`
    try:
        return command.run(rest) or 0
    finally:
        sys.argv[0] = program


def overview() -> str:
    """Return the page that `lsm --help` prints."""
    width = max(len(command.name) for command in COMMANDS)
    lines = ["Linear sequence models in JAX: train, evaluate, convert and compare them.", "", "    lsm COMMAND [arguments]", ""]  # fmt: skip
    lines += [f"  {command.name:{width}}  {command.summary}" for command in COMMANDS]
    lines += ["", "Examples:", ""]
    lines += [f"    lsm {c.examples[0][1]}" for c in COMMANDS if c.name in _FIRST]
    lines += ["", "`lsm COMMAND --help` has the flags and examples of a command, `lsm --version` the version."]  # fmt: skip
    return "\n".join(lines)


def page(command: Command) -> str:
    """Return the page of help of a command: usage, examples, flags, and what else it accepts."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [f"{command.summary[0].upper()}{command.summary[1:]}.", "", f"    lsm {command.name} {command.usage}", ""]  # fmt: skip
    lines += [*textwrap.wrap(command.text, width), "", "Examples:", ""]
    for comment, line in command.examples:
        line = line if "lsm" in line else f"lsm {line}"
        wrapped = textwrap.wrap(line, width - 6, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines += [f"    # {comment}", *textwrap.indent(" \\\n".join(wrapped), "    ").splitlines(), ""]  # fmt: skip
    if command.name in ("train", "plan"):
        lines += ["Configs (docs/training.md lists their variants):", ""]
        lines += _rows([Declared(name, text) for name, text in programs.config_files().items()], width)  # fmt: skip
    if command.name == "convert":
        lines += ["Kinds:", "", *_rows([Declared(name, text) for name, (_, text) in IMPORTERS.items()], width)]  # fmt: skip
    if flags := command.flags():
        lines += ["Flags:", "", *_rows(flags, width)]
    for mode, _ in command.modes:
        lines += [f"Flags with {mode}:", "", *_rows(command.mode_flags(mode), width)]
    for group, _, _ in command.groups:
        lines += [f"Options of the task {group}:", "", *_rows(command.fields(group), width)]
    return "\n".join(lines).rstrip()


def _print_fields(arguments: Sequence[str]) -> int:
    """Print the fields of the config that `--config=NAME:VARIANT` among the arguments names, with their values; nothing without
    it. Return the exit status."""
    given = next(
        (a for a in programs.expand_arguments(list(arguments)) if a.startswith("--config=")), ""
    )
    path, colon, variant = given.removeprefix("--config=").partition(":")
    if not path:
        print("\nWith --config=NAME:VARIANT before --help also the fields of that config.")
        return 0
    from lsm_jax.training.config_json import flatten

    try:
        make = runpy.run_path(path)["get_config"]
        values = flatten(make(variant) if colon else make())
    except (ValueError, OSError) as error:
        print(f"lsm: {error}", file=sys.stderr)
        return 2
    print("\nFields of this config and their values; --config.FIELD=VALUE sets one:\n")
    for field, value in values.items():
        print(f"  {field} = {value!r}")
    return 0


def _rows(entries: list[Declared], width: int) -> list[str]:
    """Return the lines of a list of flags or names, each with its text and default beside it, and an empty line at the end."""
    column = min(26, max(len(entry.name) for entry in entries) + 2)
    lines = []
    for entry in entries:
        text = entry.text + (f" (default: {entry.default})" if entry.default else "")
        wrapped = textwrap.wrap(text, max(30, width - column - 4)) or [""]
        if len(entry.name) > column - 2:
            lines.append(f"  {entry.name}")
        else:
            lines.append(f"  {entry.name:{column}}{wrapped.pop(0)}")
        lines += [" " * (column + 2) + line for line in wrapped]
    return [line.rstrip() for line in lines] + [""]
