"""Tests of `scripts.pack_corpus`: parts are small, give make_corpus' ids in any number of calls, and damage is named."""

from __future__ import annotations

import json
import tarfile

import pytest

from lsm_jax.data.store import TokenStore
from scripts import pack_corpus
from scripts.corpus import blocks, build
from tests.test_corpus import downloads, make  # noqa: F401  (a fixture)


def run(*arguments):
    return pack_corpus.main([*map(str, arguments), "--num_workers=1"])


@pytest.fixture
def corpora(tmp_path, downloads, monkeypatch):  # noqa: F811
    """Fixture: a folder with the texts of a corpus, "texts"; its blocks are small."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 12_000)
    assert make(tmp_path, "texts", "--text_only") == 0
    assert not (tmp_path / "texts" / "train.zarr").exists()
    (tmp_path / "texts" / "recall").mkdir()
    (tmp_path / "texts" / "recall" / "fields.jsonl").write_text("{}\n")
    return tmp_path


def test_parts_give_the_ids_of_make_corpus(corpora, capsys):
    parts, out = corpora / "parts", corpora / "out"
    assert make(corpora, "whole") == 0
    assert run("pack", "--corpus", corpora / "texts", "--out", parts, "--first_bytes=30000", "--group_bytes=60000", "--part_bytes=46000",
               "--also", "recall/fields.jsonl") == 0  # fmt: skip
    files = sorted(parts.iterdir())
    assert len(files) > 1 and all(path.stat().st_size <= 46000 for path in files)
    # The first part comes alone: it has a corpus of the first documents, whose ids are the beginning of all.
    first = corpora / "part"
    first.mkdir()
    files[0].rename(first / files[0].name)
    assert run("unpack", "--parts", first, "--out", out) == 1
    assert "blocks are missing, the first is .blocks/train-01-000.xz" in capsys.readouterr().err
    assert run("unpack", "--parts", first, "--out", corpora / "small", "--groups=1") == 0
    assert run("unpack", "--parts", parts, "--out", out, "--groups=9") == 1
    assert "--groups=9: the parts have 4 groups" in capsys.readouterr().err
    assert run("unpack", "--parts", parts, "--out", out) == 0
    expected = json.loads((corpora / "whole" / "corpus.json").read_text())["stores"]
    for name in ("train", "heldout", "long"):
        assert build.store_digest(out / f"{name}.zarr") == expected[name]["sha256"]
        assert TokenStore(out / f"{name}.zarr").attributes == TokenStore(corpora / "whole" / f"{name}.zarr").attributes  # fmt: skip
    assert (out / "recall" / "fields.jsonl").read_text() == "{}\n"
    small, all_rows = (TokenStore(corpora / name / "train.zarr") for name in ("small", "whole"))
    rows = range(small.num_documents)
    assert 0 < len(rows) < all_rows.num_documents
    ids = [store.read(rows, 0, store.length, vocab_size=300) for store in (small, all_rows)]
    assert (ids[0] == ids[1]).all()


def test_an_interrupted_pack_continues_and_wrong_inputs_are_named(corpora, capsys, monkeypatch):
    parts, texts = corpora / "parts", corpora / "texts"

    def error(*arguments):
        assert run(*arguments) == 1
        return capsys.readouterr().err

    assert "it has no texts; make them with" in error("pack", "--corpus", corpora, "--out", parts)  # fmt: skip
    assert "do not fit into the first part" in error("pack", "--corpus", texts, "--out", parts, "--part_bytes=25000")  # fmt: skip
    assert "accepted are groups of as many, not of 3" in error("pack", "--corpus", texts, "--out", parts, "--first_bytes=3")  # fmt: skip
    assert "no document is selected" in error("pack", "--corpus", texts, "--out", parts, "--train_bytes=3")  # fmt: skip
    monkeypatch.setattr(pack_corpus, "_MOST_GROUPS", 2)
    assert "more than 2 such groups" in error("pack", "--corpus", texts, "--out", parts, "--first_bytes=30000", "--group_bytes=30000")  # fmt: skip
    monkeypatch.setattr(pack_corpus, "_MOST_GROUPS", 100)
    assert run("pack", "--corpus", texts, "--out", parts, "--first_bytes=30000") == 0
    assert "it has parts already" in error("pack", "--corpus", texts, "--out", parts)
    part = parts / "part-000.tar"
    part.write_bytes(part.read_bytes()[:3000])
    assert "part-000.tar" in error("unpack", "--parts", parts, "--out", corpora / "out")
    assert "which has manifest.json, is missing" in error("unpack", "--parts", corpora / "none", "--out", corpora / "out2")  # fmt: skip
    # An interrupted call leaves its blocks, which are not compressed again.
    again, written = corpora / "again", []
    compress = blocks.write_block

    def interrupted(path, lines):
        written.append(len(lines))
        if len(written) == 3:
            raise KeyboardInterrupt
        return compress(path, lines)

    monkeypatch.setattr(blocks, "write_block", interrupted)
    arguments = ("pack", "--corpus", texts, "--out", again, "--first_bytes=30000")
    assert run(*arguments) == 130
    assert run(*arguments) == 0
    names = [name for path in again.iterdir() for name in tarfile.open(path).getnames()]
    assert len(written) == sum(name.startswith(".blocks/") for name in names) + 1
