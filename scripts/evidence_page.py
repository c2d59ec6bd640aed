"""Write docs/results/evidence.md from the rows of docs/evidence.jsonl: `python -m scripts.evidence_page`.

The page begins with two sentences that the rows decide, the order of FoX's models and how many statements hold, and a list of these. It has
a section for each table that has a row (scripts/evidence_texts.py). The command also draws the plots, and adds the page to docs/index.md and docs/results/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import report
from benchmarks.tables import TABLES
from benchmarks.tables.evidence import FILE
from benchmarks.tables.table import read_rows
from scripts import draw_results
from scripts.evidence_texts import NOTES, SECTIONS, filled

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results" / "evidence.md"
ALT = {
    "loss": "Loss by position and perplexity of beginnings of long documents, with the training length marked",
    "recall": "Recall of real text against the size of the decode state",
    "routing": "Smallest and largest load of a memory in each layer over training, of each Mixture-of-Memories",
}


def page() -> str:
    """Return the page's markdown, with the marks of its tables and without their contents.

    Raises:
        LookupError: a text has a place for a number that no row has.
        ValueError: there is no row of a model.
    """
    if "evidence_found" not in TABLES:
        raise ValueError(f"docs/{FILE} has no row of a model; add those of python -m benchmarks evidence")  # fmt: skip
    parts, rows = ["# Evidence at size", _mark("evidence_found"), NOTES], read_rows(DOCS, FILE)
    for table, title, text in SECTIONS:
        if table in TABLES:
            text = filled(text.strip(), rows)
            parts += [f"## {title}", *([text] if text else []), _mark(table), *_plots(table)]
    return "\n\n".join(parts) + "\n"


def content() -> str:
    """Return the page with the contents of its tables; raises what `page` does."""
    return report.fill(page(), PAGE, DOCS.parent)


def _mark(table: str) -> str:
    return f"<!-- table: {table} -->\n{report.END}"


def _plots(table: str) -> list[str]:
    """Return the images of the plots of a table's rows."""
    return [
        "\n".join(f"![{ALT[name.rpartition('_')[2]]}](plots/{name}-{mode}.svg){{.only-{mode}}}" for mode in ("light", "dark"))
        for name, (shown, _) in draw_results.PLOTS.items()
        if shown == table
    ]  # fmt: skip


def add_to_contents(docs: Path) -> None:
    """Add the page to the site's contents and to the list of results pages, before the training steps, unless it is there.

    Raises:
        ValueError: a page has no line of the training steps.
    """
    for name, place, line in (
        ("index.md", "results/training_steps\n", "results/evidence\n"),
        ("results/README.md", "| [training_steps.md]", "| [evidence.md](evidence.md) | models of 125M on real text: what holds of the papers' statements |\n"),
    ):  # fmt: skip
        text = (docs / name).read_text()
        if line not in text and place not in text:
            raise ValueError(
                f"{docs / name} has no line {place.strip()!r}, before which the page is listed"
            )
        if line not in text:
            (docs / name).write_text(text.replace(place, line + place, 1))


def main() -> int:
    """Write the page, its plots and its line in the contents; return the exit status."""
    try:
        text = content()
    except (LookupError, ValueError) as error:
        print(f"evidence_page: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    draw_results.write(draw_results.FOLDER)
    try:
        add_to_contents(DOCS)
    except ValueError as error:
        print(f"evidence_page: {error}", file=sys.stderr)
        return 1
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
