"""The README is short, links in the documentation exist, and generated pages are up to date."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import kernels_table, methods_table

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_methods_is_up_to_date():
    generated = methods_table.page()
    assert methods_table.PAGE.read_text() == generated, (
        "run python -m scripts.methods_table --write"
    )


def test_the_page_of_kernels_is_up_to_date():
    generated = kernels_table.page()
    assert kernels_table.PAGE.read_text() == generated, (
        "run python -m scripts.kernels_table --write"
    )


def test_the_readme_is_short_and_all_links_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
