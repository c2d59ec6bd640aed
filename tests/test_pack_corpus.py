"""Tests of `scripts.pack_corpus`: parts are small, unpack to the same ids in any number of calls, and damage is named."""

from __future__ import annotations

import numpy as np
import pytest

from lsm_jax.data.store import TokenStore
from lsm_jax.data.writer import StoreWriter
from scripts import pack_corpus

LENGTH = 256


def read(path):
    store = TokenStore(path)
    return store.read(np.arange(store.num_documents), 0, store.length, vocab_size=1 << 16)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Fixture: a corpus with three stores of random ids, in blocks of eight rows."""
    monkeypatch.setattr(pack_corpus, "_BLOCK_TOKENS", 8 * LENGTH)
    folder = tmp_path / "corpus"
    random = np.random.default_rng(0)
    for name, rows in (("train", 64), ("heldout", 5), ("long", 3)):
        with StoreWriter(folder / f"{name}.zarr", LENGTH, vocab_size=3000, attributes={"encoder": name}) as writer:  # fmt: skip
            writer.add(random.integers(0, 3000, (rows, LENGTH)).astype(np.uint16))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "recall").mkdir()
    (folder / "recall" / "fields.jsonl").write_text("{}\n")
    return folder


def run(*arguments):
    return pack_corpus.main([str(argument) for argument in arguments])


def test_parts_are_small_and_unpack_to_the_same_ids(tmp_path, corpus, capsys):
    parts, out = tmp_path / "parts", tmp_path / "out"
    tokens = 40 * LENGTH
    assert run("pack", "--corpus", corpus, "--out", parts, f"--train_tokens={tokens}", "--long_rows=2",
               "--part_bytes=40000", "--also", "recall/fields.jsonl") == 0  # fmt: skip
    files = sorted(parts.iterdir())
    assert len(files) > 1 and all(path.stat().st_size <= 40000 for path in files)
    # The parts come in two calls; after the first, what is missing is named.
    first = tmp_path / "first"
    first.mkdir()
    files[0].rename(first / files[0].name)
    assert run("unpack", "--parts", parts, "--out", out) == 1
    assert "blocks are missing, the first is .blocks/train/000000.xz" in capsys.readouterr().err
    assert run("unpack", "--parts", first, "--out", out) == 0
    assert (read(out / "train.zarr") == read(corpus / "train.zarr")[:40]).all()
    assert (read(out / "heldout.zarr") == read(corpus / "heldout.zarr")).all()
    assert (read(out / "long.zarr") == read(corpus / "long.zarr")[:2]).all()
    assert TokenStore(out / "train.zarr").attributes == {"encoder": "train"}
    assert (out / "recall" / "fields.jsonl").read_text() == "{}\n"


def test_wrong_inputs_are_named(tmp_path, corpus, capsys):
    parts = tmp_path / "parts"

    def error(*arguments):
        assert run(*arguments) == 1
        return capsys.readouterr().err

    assert "is not a folder" in error("pack", "--corpus", tmp_path, "--out", parts)
    assert "alone has" in error("pack", "--corpus", corpus, "--out", parts, "--part_bytes=22000")
    assert "accepted is 1 or more" in error("pack", "--corpus", corpus, "--out", parts, "--train_tokens=3")  # fmt: skip
    assert run("pack", "--corpus", corpus, "--out", parts) == 0
    assert "it has parts already" in error("pack", "--corpus", corpus, "--out", parts)
    part = next(parts.iterdir())
    part.write_bytes(part.read_bytes()[:3000])
    assert "part-000.tar" in error("unpack", "--parts", parts, "--out", tmp_path / "out")
    assert "which has manifest.json, is missing" in error("unpack", "--parts", tmp_path / "none", "--out", tmp_path / "out2")  # fmt: skip
