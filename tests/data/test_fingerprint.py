"""Tests of the fingerprint of training data: which changes of files it shows."""

from __future__ import annotations

import json
import shutil

import pytest

from lsm_jax.data import DataConfig, fingerprint, fingerprint_changes, write_demo_store
from tests.data.stores import write_texts


def test_names_and_sizes_of_text_files(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "a", {"x.txt": "one", "y.md": "three", "z.png": "no text"})
    first = fingerprint(DataConfig(path=str(folder)))
    assert first == {
        "kind": "text",
        "tokenizer": "bytes",
        "bytes": 8,
        "files": {"x.txt": 3, "y.md": 5},
    }
    shutil.copytree(folder, tmp_path / "b")
    assert fingerprint(DataConfig(path=str(tmp_path / "b"))) == json.loads(json.dumps(first))
    (folder / "x.txt").write_text("one and more")
    (folder / "y.md").rename(folder / "w.md")
    second = fingerprint(DataConfig(path=str(folder)))
    assert fingerprint_changes(first, second) == [
        "bytes: 8 -> 17",
        "missing files: y.md",
        "new files: w.md",
        "files whose size changed: x.txt",
    ]
    assert fingerprint_changes(first, first) == []
    monkeypatch.setattr("lsm_jax.data.fingerprints._MOST_NAMES", 1)
    digest = fingerprint(DataConfig(path=str(folder)))
    assert len(digest["files"]) == 64
    (folder / "w.md").rename(folder / "v.md")
    other = fingerprint(DataConfig(path=str(folder)))
    assert fingerprint_changes(digest, other) == ["names or sizes of files changed"]


def test_metadata_and_chunks_of_a_store(tmp_path):
    write_demo_store(tmp_path / "demo", row_length=64, max_bytes=150_000)
    config = DataConfig(path=str(tmp_path / "demo"), sequence_length=64)
    first = fingerprint(config)
    assert first["kind"] == "token store" and first[".zattrs"]["encoder"] == "bytes"
    assert json.loads(json.dumps(first)) == first
    store = tmp_path / "demo" / "train.zarr"
    metadata = json.loads((store / ".zarray").read_text())
    metadata["shape"][0] -= 1
    (store / ".zarray").write_text(json.dumps(metadata))
    (line,) = [s for s in fingerprint_changes(first, fingerprint(config)) if ".zarray:" in s]
    assert "'shape'" in line
    with pytest.raises(ValueError, match="data.path='/nowhere' does not exist"):
        fingerprint(DataConfig(path="/nowhere"))
