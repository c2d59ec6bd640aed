"""The table of methods as markdown, from the registry: `python scripts/methods_table.py`, with `--write` into README.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from lsm_jax.mixers import METHODS

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- methods: scripts/methods_table.py --write -->", "<!-- end of methods -->"


def table() -> str:
    """A row a method, in the registry's order, with its notes below."""
    rows = [
        "| method | op | gate | write | read | state | forms | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for method in METHODS.values():
        mark = ""
        if method.note:
            notes.append(f"{len(notes) + 1}. `{method.name}`: {method.note}.")
            mark = f" <sup>{len(notes)}</sup>"
        forms = ", ".join(method.forms) or "one"
        cells = (
            f"`{method.name}`{mark}",
            f"`{method.op}`",
            method.gate,
            method.write,
            method.read,
            method.state,
            forms,
            method.paper,
        )
        rows.append(
            f"| {' | '.join(c.replace('|', '∣') for c in cells)} |"
        )  # a bar would end the cell
    return "\n".join(rows + [""] + notes)


def replace_table(text: str) -> str:
    """`text` with the present table between the marks.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    """Print the table, or write it into README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if parser.parse_args().write:
        README.write_text(replace_table(README.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
