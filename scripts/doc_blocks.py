"""The blocks of code of the documentation: finds every block of a markdown page, and the commands of a block.

Only the standard library is imported, since `scripts.newcomer` runs before anything is installed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [p for p in sorted(ROOT.glob("docs/**/*.md")) if not {"_build", "notebooks"} & {*p.parts}]
MARK = re.compile(r"<!-- not (run|parsed):\s+(.+?)\s+-->", re.DOTALL)
PROGRAMS = ("python", "lsm", "make", "pip")
OTHERS = ("sed",)  # programs that are run, but have no parser here
_FENCE = re.compile(r"( {0,3})(```+)(.*)")


class Block(NamedTuple):
    """One block of code of a markdown page.

    Attributes:
        page: the page's path.
        line: the number of its first line, from 1.
        language: the word after the fence; "indented" for a block that is indented by four spaces.
        text: its lines without fence and indentation.
        reason: why it is not run, from a comment `<!-- not run: REASON -->` or `<!-- not parsed: REASON -->` in front of it;
            empty if there is none.
        parsed: whether its commands are parsed; they are not where the comment says so, such as for a list of files.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str
    parsed: bool = True


class Command(NamedTuple):
    """One command of a block of shell commands.

    Attributes:
        line: the number of the block's first line in its page.
        words: the program and its arguments, with the shell's variables put in.
        environment: variables of the environment that the page sets for it, such as XLA_FLAGS.
        reason: why it is not run: that of its block; empty if it is run.
        text: the line as a shell reads it.
    """

    line: int
    words: list[str]
    environment: dict[str, str]
    reason: str
    text: str


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of code of a markdown page in order; `text` is its content if it is not read from the file."""
    lines = (page.read_text() if text is None else text).splitlines()
    found, i, reason, parsed, before_is_empty = [], 0, "", True, True
    while i < len(lines):
        line, start, language = lines[i], i, None
        if fence := _FENCE.fullmatch(line):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == fence[2])
            language, inside, i = fence[3].strip() or "plain", lines[i + 1 : end], end
        elif line.startswith("    ") and before_is_empty:
            while i + 1 < len(lines) and (lines[i + 1].startswith("    ") or not lines[i + 1]):
                i += 1
            language, inside = "indented", lines[start : i + 1]
        if language is not None:
            body = "\n".join(
                x.removeprefix("    ") if language == "indented" else x for x in inside
            )
            found.append(Block(page, start + 1, language, body.strip("\n"), reason, parsed))
            reason, parsed = "", True
        elif line.lstrip().startswith("<!--"):
            while "-->" not in lines[i]:
                i += 1
            if comment := MARK.search("\n".join(lines[start : i + 1])):
                reason, parsed = " ".join(comment[2].split()), comment[1] == "run"
        elif line:
            reason, parsed = "", True
        before_is_empty = not lines[i].strip() or language is not None or "-->" in lines[i]
        i += 1
    return found


def commands(
    block: Block, variables: dict[str, str], exported: dict[str, str]
) -> Iterator[Command]:
    """Return the commands of a block of shell commands.

    Args:
        block: the block.
        variables: the shell's variables by name; assignments of the block are added.
        exported: variables of the environment by name; those of lines `export NAME=VALUE` are added.

    Raises:
        ValueError: a line is neither a command of this project nor an assignment.
    """
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        line = re.sub(r"\$\(.*?\)", "SOURCE", line)
        line = re.sub(r"\$(\w+)", lambda found: variables[found[1]], line)
        words, environment = shlex.split(line, comments=True), {}
        to = exported if words[:1] == ["export"] else environment
        words = words[words[:1] == ["export"] :]
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, to[name] = words.pop(0).partition("=")
        if not words:
            variables.update(environment)
            continue
        words[0] = words[0].removeprefix(".venv/bin/")
        if words[0] not in PROGRAMS + OTHERS:
            raise ValueError(f"{line!r}: no command of {', '.join(PROGRAMS + OTHERS)}")
        yield Command(block.line, words, exported | environment, block.reason, line)


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page that are parsed; `...` stands for the options of the command before it."""
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    found: list[Command] = []
    for block in blocks(page):
        if block.language == "indented" and block.parsed:
            for command in commands(block, variables, exported):
                words = command.words
                if "..." in words:
                    place = words.index("...")
                    before = next(c.words for c in reversed(found) if c.words[:place] == words[:place])  # fmt: skip
                    command = command._replace(words=[*before, *words[place + 1 :]])
                found.append(command)
    return found
