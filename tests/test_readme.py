"""Tests that README, the guides and the generated pages agree with the code: links, paths and names."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import lsm_jax
from lsm_jax.training import TrainConfig
from scripts import kernels_table, method_files, methods_table, newcomer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]  # the built site
# Pages of results describe past measurements, with the commands and names of their time.
GUIDES = [page for page in PAGES if "results" not in str(page.relative_to(ROOT))]
PACKAGES = ("lsm_jax", "pallas_kernels", "benchmarks", "scripts", "configs", "tests")


def test_the_page_of_methods_is_up_to_date():
    generated = methods_table.page()
    assert methods_table.PAGE.read_text() == generated, (
        "run python -m scripts.methods_table --write"
    )


@pytest.mark.slow
def test_the_page_of_methods_files_is_generated():
    generated = method_files.page()
    assert method_files.PAGE.read_text() == generated, "run python -m scripts.method_files --write"


def test_the_page_of_kernels_is_up_to_date():
    generated = kernels_table.page()
    assert kernels_table.PAGE.read_text() == generated, (
        "run python -m scripts.kernels_table --write"
    )


def test_the_readme_is_short_and_all_links_exist():
    text = (ROOT / "README.md").read_text()
    shown = re.sub(r"\n*<!-- (not )?run.*?-->\n+", "\n", text)  # without the marks of blocks
    assert len(shown.splitlines()) <= 150
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page)):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def prose(page: Path) -> str:
    """Return the text of a markdown page without its fenced blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def code_words(page: Path) -> set[str]:
    """Return the texts in backticks of a markdown page, outside of blocks of code."""
    return {word for code in re.findall(r"`([^`\n]+)`", prose(page)) for word in code.split()}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/papers/*.md")), ids=lambda page: page.name)
def test_the_variants_of_a_papers_page_exist(page):
    variants = {word for word in code_words(page) if re.match(r"configs/\w+\.py:\w", word)}
    assert len(variants) > 5
    for word in variants:
        file, _, variant = re.sub(r",source=[^,]+", "", word).partition(":")
        if "VARIANT" not in variant:
            importlib.import_module(f"configs.{Path(file).stem}").get_config(variant)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_files_and_names_exist(page):
    wrong = []
    for word in code_words(page):
        word = word.strip("(),;:").partition("(")[0].partition("=")[0].partition(":")[0]
        if re.fullmatch(r"(\w[\w.-]*/)+[\w.-]*\w\.(py|md|ipynb|jobs)", word):
            found = (ROOT / word).exists()
        elif re.fullmatch(r"[a-z]\w*\.py", word):  # without its folder
            found = (ROOT / word).exists() or any(
                list(ROOT.glob(f"{package}/**/{word}")) for package in PACKAGES
            )
        elif re.fullmatch(r"[a-z]\w*(\.\w+)+", word) and not word.endswith((".json", ".jsonl")):
            found = exists(word)
        else:
            continue
        if not found:
            wrong.append(word)
    assert not wrong, f"{page.name} names what does not exist: {sorted(wrong)}"


def exists(name: str) -> bool:
    """Return whether a dotted name of this project is a module, an attribute of one, or a field of a training
    config; True for a name that begins with none of this project's words.
    """
    first, *rest = name.split(".")
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    if first in fields and rest[0] in fields_of(first):
        return True
    if first in PACKAGES:
        return resolves(name)
    if first in lsm_jax.__all__:
        return resolves(f"lsm_jax.{name}")
    return first not in fields


def fields_of(field: str) -> set[str]:
    """Return the names of the fields that the config in the field `field` of a `TrainConfig` (such as "data")
    has; empty if that field is no config.
    """
    config = importlib.import_module("configs.lm").get_config("gla-tiny")
    part = getattr(config, field)
    return {f.name for f in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()


def resolves(name: str) -> bool:
    """Return whether a dotted name, such as "lsm_jax.ops.attention", is a module that can be imported, or an
    attribute of one.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if "." in module and importlib.util.find_spec(module.rpartition(".")[0]) is None:
            continue
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:
            continue
        value = importlib.import_module(module)
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("name", ["lsm_jax.nothing", "ops.linear_memories", "mesh.room", "tests.x"])
def test_a_wrong_name_is_noticed(name):
    assert not exists(name)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    heading = re.search(r"## (\S+) - (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert heading and heading[1] == citation["version"] == lsm_jax.__version__
    assert heading[2] == str(citation["date-released"])


def test_targets_of_make_are_named_alike():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    rules = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    helped = set(re.findall(r'"make (\S+)', makefile))
    assert phony and rules == set(phony[1].split())
    assert helped == rules - {"help"}
    for page in [*PAGES, ROOT / ".ci/run"]:
        for target in re.findall(r"(?:`|^ {4,}|^)make ([a-z][\w-]*)(?:`| {2,}|$)", page.read_text(), re.MULTILINE):  # fmt: skip
            assert target in rules, f"{page.name}: make {target}"


def test_the_home_page_shows_a_newcomers_five_commands():
    commands = newcomer.page_commands(ROOT, "docs/index.md", "my_texts")
    assert [line.split()[1] for line in commands] == ["train", "eval", "train", "eval", "compare"]
    demo = newcomer.page_commands(ROOT, "docs/index.md", "make demo")
    assert [line.partition("#")[0].split() for line in demo] == [["make", "demo"], [".venv/bin/lsm", "compare", "runs/demo"]]  # fmt: skip
    (install,) = newcomer.page_commands(ROOT, "docs/index.md", "[datasets]")
    assert install.startswith("pip install ")
    assert newcomer.page_python(ROOT, "docs/new_method.md")[0].startswith('"""')
