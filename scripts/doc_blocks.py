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
MARK = re.compile(r"<!-- not run:\s+(.+?)\s+-->", re.DOTALL)
PROGRAMS = ("python", "lsm", "make", "pip")
_FENCE = re.compile(r"( {0,3})(```+)(.*)")


class Block(NamedTuple):
    """One block of code of a markdown page.

    Attributes:
        page: the page's path.
        line: the number of its first line, from 1.
        language: the word after the fence; "indented" for a block that is indented by four spaces.
        text: its lines without fence and indentation.
        reason: why it is not run, from a comment `<!-- not run: REASON -->` in front of it; empty if there is none.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of code of a markdown page in order; `text` is its content if it is not read from the file."""
    lines = (page.read_text() if text is None else text).splitlines()
    found, i, reason, before_is_empty = [], 0, "", True
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
            found.append(Block(page, start + 1, language, body.strip("\n"), reason))
            reason = ""
        elif line.lstrip().startswith("<!--"):
            while "-->" not in lines[i]:
                i += 1
            comment = MARK.search("\n".join(lines[start : i + 1]))
            reason = " ".join(comment[1].split()) if comment else reason
        elif line:
            reason = ""
        before_is_empty = not lines[i].strip() or language is not None or "-->" in lines[i]
        i += 1
    return found


def commands(block: Block, variables: dict[str, str]) -> Iterator[list[str]]:
    """Return the words of each command of a block of shell commands, with the shell's variables put in.

    Args:
        block: the block.
        variables: the variables by name; assignments of the block are added.

    Raises:
        ValueError: a line is neither a command of this project nor an assignment, and does not end in
            `# not run: REASON`.
    """
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        line = re.sub(r"\$\(.*?\)", "SOURCE", line)
        line = re.sub(r"\$(\w+)", lambda found: variables[found[1]], line)
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not words or words[0] == "export" or re.search(r"# not run: \S", line):
            continue
        words[0] = words[0].removeprefix(".venv/bin/")
        if words[0] not in PROGRAMS:
            raise ValueError(f"{line!r}: no command of {', '.join(PROGRAMS)}")
        yield words
