"""The commands of the documentation run, page by page, at small sizes; those that cannot are marked with the reason."""

from __future__ import annotations

import time

import pytest

from lsm_jax import mixers
from scripts import doc_blocks
from scripts.doc_blocks import PAGES, ROOT
from tests import doc_files, doc_runs

COMMANDS = {page.relative_to(ROOT).as_posix(): doc_blocks.commands_of(page) for page in PAGES}
RUN = {page: [c for c in found if not c.reason] for page, found in COMMANDS.items()}
RUN = {page: found for page, found in RUN.items() if found}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A folder in which the files that commands read are made once."""
    folder = tmp_path_factory.mktemp("files") / "cache"
    doc_files.prepare(folder)
    return folder


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
