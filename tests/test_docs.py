"""Tests of the documentation's site: the code of its pages runs, its figures are those of the script, and its links are
checked by a builder that fails on warnings.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lsm_jax
from scripts import check_links, draw_figures, draw_logo, draw_results

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = ("myst_nb", "sphinx_book_theme")


def test_each_figure_is_drawn_in_both_modes(tmp_path):
    drawn = {path.name: path.read_text() for path in draw_figures.write(tmp_path)}
    stored = {path.name: path.read_text() for path in (ROOT / "docs/figures").glob("*.svg")}
    assert set(drawn) == set(stored), "run python -m scripts.draw_figures"
    pages = "".join(path.read_text() for path in ROOT.glob("docs/*.md"))
    for name in drawn:
        assert f"(figures/{name}){{.only-{name.removesuffix('.svg').rpartition('-')[2]}" in pages
        assert "<text" not in drawn[name]  # text as outlines: the same in every browser


@pytest.mark.parametrize("script, folder", [(draw_results, "results/plots"), (draw_logo, "static")])
def test_plots_and_logo_are_those_of_their_scripts(script, folder, tmp_path):
    drawn = {path.name: path.read_text() for path in script.write(tmp_path)}
    stored = {path.name: path.read_text() for path in (ROOT / "docs" / folder).glob("*.svg")}
    assert drawn == stored, f"run python -m {script.__name__}"
    pages = "".join(path.read_text() for path in ROOT.glob("docs/results/*.md"))
    assert script is draw_logo or all(f"(plots/{name})" in pages for name in drawn)


def test_every_page_is_in_the_table_of_contents():
    listed = set(
        re.findall(r"^(?:.*<)?([\w/]+)>?$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    )
    listed |= {
        f"api/{name}"
        for name in re.findall(r"^\w+$", (ROOT / "docs/api/index.md").read_text(), re.MULTILINE)
    }
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in ROOT.glob("docs/**/*.md")
    }
    built = {page for page in pages if page.startswith(("_build/", "notebooks/"))}
    assert pages - built - {"index"} <= listed


def test_every_package_has_a_page_of_its_api():
    packages = set(lsm_jax.__all__) - {"__version__", "load_run"}
    assert {path.stem for path in ROOT.glob("docs/api/*.md")} - {"index", "extending"} == packages
    for name in packages:
        assert f"automodule:: lsm_jax.{name}\n" in (ROOT / f"docs/api/{name}.md").read_text()


def test_the_api_describes_each_object_on_one_page():
    """If an object is on two pages, the links from its source lead to a place that does not exist."""
    described: dict[int, str] = {}
    for page in ROOT.glob("docs/api/*.md"):
        for module, options in re.findall(r"automodule:: (\S+)\n((?:   :.*\n)*)", page.read_text()):
            left_out = re.findall(r":exclude-members: (.*)", options)
            names = set(getattr(importlib.import_module(module), "__all__", ()))
            for name in names - set(", ".join(left_out).split(", ")):
                value = getattr(importlib.import_module(module), name)
                if inspect.isclass(value) or inspect.isfunction(value):
                    place = f"{page.name}: {name}"
                    assert described.setdefault(id(value), place) == place


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#no">2</a><a href="c.html">3</a>')  # fmt: skip
    (tmp_path / "b.html").write_text('<p id="there"><a href="https://example.org/x">4</a><img src="a.png">')  # fmt: skip
    assert check_links.broken(tmp_path) == ["a.html: b.html#no", "a.html: c.html", "b.html: a.png"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    missing = [name for name in EXTENSIONS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed (extra [docs])")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "doctrees"), "docs", str(tmp_path / "html")]
    run = subprocess.run([*build, *folders], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert check_links.broken(tmp_path / "html") == []
    assert "linear_memory" in (tmp_path / "html" / "searchindex.js").read_text()
