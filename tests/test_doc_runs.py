"""The commands of the documentation run, page by page, at small sizes; those that cannot are marked with the reason."""

from __future__ import annotations

import time

import pytest

from lsm_jax import mixers
from scripts import doc_blocks
from scripts.doc_blocks import PAGES, ROOT, Command
from tests import doc_commands, doc_files, doc_runs

COMMANDS = {page.relative_to(ROOT).as_posix(): doc_blocks.commands_of(page) for page in PAGES}
RUN = {page: [c for c in found if not c.reason] for page, found in COMMANDS.items()}
RUN = {page: found for page, found in RUN.items() if found}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A folder in which the files that commands read are made once."""
    folder = tmp_path_factory.mktemp("files") / "cache"
    doc_files.prepare(folder)
    return folder


def test_each_command_is_run_or_marked_by_a_reason():
    marked = [c for found in COMMANDS.values() for c in found if c.reason]
    assert sum(map(len, RUN.values())) > 150 and len(marked) > 40
    for command in (c for found in RUN.values() for c in found):
        name = command.words[0]
        assert name not in ("pip",) and command.words[:3] != ["python", "-m", "pytest"], command
        if name == "make":
            assert all(doc_runs.recipe(target) for target in command.words[1:])


def test_only_sizes_are_changed():
    words = "python train.py --config=configs/lm.py:gla-340m --workdir=x --config.model.hidden_size=128".split()
    changed = doc_runs.small(words)
    assert changed[: len(words)] == words
    assert (
        "--config.model.num_layers=2" in changed and "--config.model.hidden_size=256" not in changed
    )
    words = (
        "python eval.py --workdir=x --max_tokens=2147483648 --num_tokens=4 --tasks=needle".split()
    )
    changed = doc_runs.small(words)
    assert changed[2] == "--workdir=x" and "--max_tokens=512" in changed
    assert words[4:] == changed[4:6] and words[3] not in changed
    words = "python -m benchmarks lengths --tokens 16777216 --output -".split()
    assert doc_runs.small(words)[3:8] == ["lengths", "--tokens", "2048", "--output", "-"]


def test_a_command_that_fails_is_noticed(tmp_path):
    words = "python -m benchmarks report --unknown".split()
    with pytest.raises(AssertionError, match="unrecognized arguments: --unknown"):
        doc_commands.run(words, tmp_path)
    failing = Command(1, ["sed", "x"], {}, "", "sed --unknown")
    with pytest.raises(AssertionError, match="sed"):
        doc_runs.run(failing, tmp_path, tmp_path)


def test_a_page_runs_in_a_folder_of_its_own(tmp_path):
    """The commands about a store of docs/training.md, of which the first reads a file that is made for it."""
    doc_files.prepare(cache := tmp_path / "cache")
    doc_files.prepare(folder := tmp_path / "page")
    found = [c for c in RUN["docs/training.md"] if "lsm_jax.data.checksums" in c.words]
    assert len(found) == 2
    for command in found:
        doc_runs.run(command, folder, cache)
    assert (folder / "longcrawl64/train.zarr/checksums.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(mixers.method, "METHODS", methods := dict(mixers.METHODS))
    monkeypatch.setattr(mixers, "METHODS", methods)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    doc_files.prepare(folder := tmp_path / "page")
    for command in RUN[page]:
        start = time.monotonic()
        try:
            doc_runs.run(command, folder, cache)
        except AssertionError as error:
            raise AssertionError(f"{page}:{command.line}: {error}") from None
        print(f"{time.monotonic() - start:5.1f} s  {' '.join(command.words)[:150]}")
