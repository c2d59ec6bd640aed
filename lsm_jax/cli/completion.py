"""Print a script by which a shell completes the commands of `lsm`, their flags, and the names of configs and methods."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from lsm_jax import programs
from lsm_jax.cli.table import COMMANDS, IMPORTERS
from lsm_jax.names import did_you_mean

SHELLS = ("bash", "zsh", "fish")

_BASH = """_lsm() {{
    local word words= before=
    word=${{COMP_LINE:0:$COMP_POINT}}
    word=${{word##* }}
    if [ "$COMP_CWORD" = 1 ]; then
        words="{commands}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    # bash begins a new word at = and :, and completes the part behind it.
    [ -n "$ZSH_VERSION" ] || before=${{word%"${{word##*[=:]}}"}}
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    COMPREPLY=("${{COMPREPLY[@]#"$before"}}")
    if [ -z "${{COMPREPLY[*]}}" ]; then
        local IFS=$'\\n'  # names of files may have blanks
        COMPREPLY=($(compgen -f -- "${{word##*=}}"))
        [ -n "$ZSH_VERSION" ] || compopt -o filenames  # of other words it would write \\= and \\:
    fi
    case "${{COMPREPLY[*]}}" in *=|*:) [ -n "$ZSH_VERSION" ] || compopt -o nospace ;; esac
}}
complete {options}-F _lsm lsm"""


def words_of(name: str) -> list[str]:
    """Return the words that can follow the command called `name`: its flags, and the names that it accepts."""
    (command,) = (c for c in COMMANDS if c.name == name)
    words: list[str] = []
    modes = [command.mode_flags(mode) for mode, _ in command.modes]
    for flag in itertools.chain(command.flags(), *modes):
        word = flag.name if flag.switch else f"{flag.name}="
        if flag.name.startswith("--") and word not in words:
            words.append(word)
    if "--config=" in words:
        words += [f"--config={config}:" for config in programs.config_files()]
    for group, _, _ in command.groups:
        words += [f"{field.name}=" for field in command.fields(group)]
    if name == "convert":
        words += [*IMPORTERS, "--source=", "--workdir="]
    if name == "methods":
        words += method_names()
    if name == "completion":
        words += SHELLS
    return [*words, "--help"]


def method_names() -> list[str]:
    """Return the names of the methods, read from the files in `lsm_jax/mixers` that have a row of the table."""
    folder = Path(programs.__file__).with_name("mixers")
    calls = (
        node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Method"
    )  # fmt: skip
    keywords = (keyword for call in calls for keyword in call.keywords)
    return sorted(ast.literal_eval(k.value) for k in keywords if k.arg == "name")


def script(shell: str) -> str:
    """Return the script for a shell, one of `SHELLS`.

    Raises:
        ValueError: another shell.
    """
    names = [command.name for command in COMMANDS]
    if shell == "fish":
        lines = ["complete -c lsm -f", f"complete -c lsm -n __fish_use_subcommand -a '{' '.join(names)}'"]  # fmt: skip
        for name in names:
            words = " ".join(words_of(name))
            lines.append(f"complete -c lsm -n '__fish_seen_subcommand_from {name}' -a '{words}'")
        return "\n".join(lines)
    if shell not in SHELLS:
        hint = did_you_mean(shell, SHELLS)
        raise ValueError(f"SHELL={shell!r}; accepted are {', '.join(SHELLS)}{hint}")
    cases = "\n".join(f'        {name}) words="{" ".join(words_of(name))}" ;;' for name in names)
    start, options = "", ""
    if shell == "zsh":
        start, options = "autoload -U +X bashcompinit && bashcompinit\n", "-o filenames "
    return start + _BASH.format(commands=" ".join(names), cases=cases, options=options)


def main(arguments: Sequence[str]) -> int:
    """Print the script for the shell that the command line names, and return the exit status."""
    try:
        print(script(*arguments[:1]))
    except ValueError as error:
        print(f"lsm completion: {error}", file=sys.stderr)
        return 2
    return 0
