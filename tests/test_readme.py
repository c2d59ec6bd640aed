"""Tests that README, the guides and the generated pages agree with the code: links, commands, paths and
names.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

import lsm_jax
from lsm_jax import programs
from lsm_jax.cli.table import COMMANDS
from lsm_jax.data import NeedleConfig
from lsm_jax.evaluation import HarnessConfig, MapsConfig
from lsm_jax.training import TrainConfig
from scripts import kernels_table, methods_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]  # the built site
# Pages of results describe past measurements, with the commands and names of their time.
GUIDES = [page for page in PAGES if "results" not in str(page.relative_to(ROOT))]
GROUPS = dict(needle=NeedleConfig, maps=MapsConfig, lm_eval=HarnessConfig)
PACKAGES = ("lsm_jax", "pallas_kernels", "benchmarks", "scripts", "configs", "tests")


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
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page)):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def prose(page: Path) -> str:
    """Return the text of a markdown page without its fenced blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Return the words of each shell command of a markdown page: lines indented by four spaces that begin
    with python, lsm, make or pip.
    """
    lines = re.sub(r"\\\n", " ", page.read_text()).splitlines()
    return [
        shlex.split(re.sub(r"\$\(.*?\)", "SOURCE", line), comments=True)
        for line in lines
        if re.match(r"    (python|lsm|make|pip) ", line)
    ]


CASES = [
    pytest.param(words, id=f"{page.name}:{' '.join(words)[:60]}")
    for page in GUIDES
    for words in commands(page)
]


@pytest.mark.parametrize("words", CASES)
def test_a_command_parses(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *rest = words
    if program == "make":
        target = re.compile(rf"^{re.escape(rest[0])}:", re.MULTILINE)
        assert target.search((ROOT / "Makefile").read_text())
        return
    if program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[([\w-]+)\]", " ".join(rest)):
            assert extra in project["optional-dependencies"], extra
        return
    if program == "lsm":
        check_lsm(rest)
        return
    if rest[0] == "-m":
        if rest[1] in ("pytest", "benchmarks"):
            return
        source = source_of(rest[1])
        rest = rest[2:]
    else:
        source, rest = ROOT / rest[0], rest[1:]
    check_arguments(source, rest)


def check_lsm(words: list[str]) -> None:
    """Check the command and the flags of a command line of `lsm`, given without that word."""
    name, *rest = words
    (command,) = (command for command in COMMANDS if command.name == name)
    source = ROOT / "lsm_jax" / command.source
    source = source if source.is_file() else ROOT / command.source
    if command.source and rest:
        check_arguments(source, programs.expand_arguments(rest))


def source_of(module: str) -> Path:
    """Return the source file that `python -m MODULE` runs, for the dotted name `module`."""
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def check_arguments(source: Path, arguments: list[str]) -> None:
    """Check that the source file of a command exists and that the flags, the config and the config's fields
    in the command's `arguments` exist in it.
    """
    text = source.read_text() + (ROOT / "lsm_jax" / "convert" / "runs.py").read_text()
    known = set(re.findall(r'(?:DEFINE_\w+|add_argument|add)\(\s*"(?:--)?([\w-]+)"', text))
    known |= set(
        re.findall(r'^ {8}(\w+)=f?"', text, re.MULTILINE)
    )  # options of `convert.runs.command`
    overrides: dict[str, list[str]] = {}
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument.removeprefix("--").partition("=")[0]
        group, dot, _ = name.partition(".")
        if dot or name == "config":
            overrides.setdefault(group, []).append(argument)
        else:
            boolean = name.removeprefix("no") in known
            assert name in known or boolean, f"{source.name} has no flag --{name}"
    for group, given in overrides.items():
        values = flags.FlagValues()
        # A source is a folder that is not here.
        argv = [re.sub(r",source=[^,\s]+", "", argument) for argument in (source.name, *given)]
        options: dict = dict(flag_values=values, sys_argv=argv)
        if group in GROUPS:
            config_flags.DEFINE_config_dataclass(group, GROUPS[group](), **options)
        else:
            config_flags.DEFINE_config_file(group, lock_config=True, **options)
        values(argv)
        assert dataclasses.is_dataclass(values[group].value)


@pytest.mark.parametrize(
    ("program", "argument"),
    [
        ("train.py", "--config.model.layers.L.mixer.form=chunk"),
        ("train.py", "--config.batch_size=many"),
        ("train.py", "--folder=runs/x"),
        ("eval.py", "--needle.length=1000"),
    ],
)
def test_a_wrong_argument_is_noticed(program, argument, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, AttributeError, KeyError, flags.Error)):
        check_arguments(
            ROOT / program, ["--config=configs/lm.py:gla-tiny", argument][program == "eval.py" :]
        )


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
