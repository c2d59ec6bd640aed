"""Write the table of the corpus's packages into docs/corpus.md: `python -m scripts.corpus_table --write [--corpus=FOLDER]`.

The packages, versions and licences are those of `scripts/corpus/sources.toml`. `--corpus` names a corpus that
`scripts.make_corpus` made of them, whose counts are stored in docs/corpus.json and shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scripts.corpus.sources import Source, read_sources

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "corpus.md"
COUNTS = ROOT / "docs" / "corpus.json"
BEGIN, END = "<!-- table: packages -->", "<!-- end of table -->"


def table(sources: list[Source], counts: dict[str, dict[str, Any]]) -> str:
    """Return the table of packages in markdown, with the counts of those that have some."""
    lines = ["| package | version | by | kind | licence |", "|---|---|---|---|---|"]
    if counts:
        lines = [f"{lines[0]} documents | MB | M tokens |", f"{lines[1]}---|---|---|"]
    total = [0.0, 0.0, 0.0]
    for source in sources:
        line = f"| {source.package} | {source.version} | {source.registry} | {source.kind} | {source.licence} |"
        if counts:
            found = counts.get(source.package)
            cells = ["-"] * 3
            if found is not None:
                parts = [f"{part} documents" for part in ("train", "heldout", "long", "records")]
                values = [
                    sum(found.get(part, 0) for part in parts),
                    found.get("bytes", 0) / 1e6,
                    found.get("tokens", 0) / 1e6,
                ]
                total = [a + b for a, b in zip(total, values, strict=True)]
                cells = [str(values[0]), f"{values[1]:.1f}", f"{values[2]:.2f}"]
            line += f" {' | '.join(cells)} |"
        lines.append(line)
    if counts:
        lines.append(f"| all | | | | | {total[0]:.0f} | {total[1]:.1f} | {total[2]:.2f} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table as it should be, from the page's present text."""
    counts = json.loads(COUNTS.read_text())["packages"] if COUNTS.is_file() else {}
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: it has no lines {BEGIN} and {END}")
    return f"{before}{begin}\n\n{table(read_sources(), counts)}\n\n{end}{after}"


def main() -> None:
    """Print the page, or write it with `--write`."""
    parser = argparse.ArgumentParser("python -m scripts.corpus_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/corpus.md")
    parser.add_argument("--corpus", type=Path, help="a corpus, whose counts are stored")
    options = parser.parse_args()
    if options.corpus is not None:
        COUNTS.write_text((options.corpus / "corpus.json").read_text())
    text = page(PAGE.read_text())
    if options.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
