"""README and the generated pages say what is true now."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import kernels_table, methods_table

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_methods_is_fresh():
    fresh = methods_table.page()
    assert methods_table.PAGE.read_text() == fresh, "run python -m scripts.methods_table --write"


def test_the_page_of_kernels_is_fresh():
    fresh = kernels_table.page()
    assert kernels_table.PAGE.read_text() == fresh, "run python -m scripts.kernels_table --write"


def test_the_readme_stays_short_and_its_links_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
