"""Compare the results tables of the documentation with the stored rows: `python -m benchmarks report [--write | --check]`.

Fills the marked places of README.md and docs/results/*.md with the tables of `benchmarks.tables`:

    <!-- table: NAME -->
    ... replaced ...
    <!-- end of table -->

Without an option it prints which pages differ from the rows; `--write` rewrites those; `--check` also exits
with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
START = re.compile(r"<!-- table: (\S+) -->")
END = "<!-- end of table -->"
PLACE = re.compile(rf"({START.pattern}\n)(.*?)({END})", re.DOTALL)


def pages(root: Path) -> list[Path]:
    """Return the paths of README.md and the pages of docs/ that may contain generated results tables."""
    return [root / "README.md", *sorted((root / "docs" / "results").glob("*.md"))]


def names(text: str) -> list[str]:
    """Return the names of the results tables that a page's text marks, in order."""
    return START.findall(text)


def fill(text: str, page: Path, root: Path) -> str:
    """Return `text`, the markdown of `page`, with every marked table generated again from the stored rows
    below `root`.

    Raises:
      ValueError: If a marked name is not that of a results table, if a table's mark has no end, or if a table has no
        stored rows.
    """

    def replace(place: re.Match[str]) -> str:
        start, name, _, end = place.groups()
        if name not in TABLES:
            near = difflib.get_close_matches(name, TABLES, n=1, cutoff=0)
            raise ValueError(
                f"{page.name}: there is no table {name!r}; the nearest name is {near[0]!r}"
            )
        if START.search(place.group(3)):
            raise ValueError(f"{page.name}: table {name!r} has no {END!r}")
        return f"{start}\n{TABLES[name].markdown(root / 'docs', page)}\n\n{end}"

    filled, count = PLACE.subn(replace, text)
    if count != len(names(text)):
        raise ValueError(
            f"{page.name}: {len(names(text))} results tables begin and {count} end; each requires the mark {END!r} after it"
        )
    return filled


def stale(root: Path) -> dict[Path, str]:
    """Return the pages whose results tables differ from the stored rows, each with the content that it
    should have.
    """
    fresh = {page: fill(page.read_text(), page, root) for page in pages(root)}
    return {page: text for page, text in fresh.items() if text != page.read_text()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m benchmarks report`: print, rewrite or check the pages whose results tables
    differ from the stored rows. Return the exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report", description=__doc__.splitlines()[0]
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--write", action="store_true", help="rewrite the pages that differ from the rows"
    )
    action.add_argument(
        "--check", action="store_true", help="exit with status 1 if a page differs from the rows"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the checkout whose pages and rows are read"
    )
    args = parser.parse_args(argv)
    differing = stale(args.root)
    for page, text in differing.items():
        if args.write:
            page.write_text(text)
        print(
            f"{page.relative_to(args.root)}: {'rewritten' if args.write else 'differs from the rows'}"
        )
    if not differing:
        print("every page agrees with the rows")
    return 1 if args.check and differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
