"""Tests of the first steps with data of one's own: two stores by default, the store's tokenizer, JSON, ids of the hub."""

from __future__ import annotations

import json

import pytest
import tokenizers

from lsm_jax.data import (
    DataConfig,
    TokenStore,
    fingerprint,
    load_tokenizer,
    make_eval_iterator,
    make_train_iterator,
)
from lsm_jax.data.documents import Documents
from lsm_jax.data.sources import with_tokenizer
from lsm_jax.data.tokenize import main

TEXT = "".join(f"{i}: to be or not to be, that is the question\n" for i in range(200))


def tokenize(tmp_path, *options, text=TEXT, name="train.zarr"):
    (tmp_path / "text.txt").write_text(text)
    command = ["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "my_store" / name)]
    command += ["--sequence_length", "64", "--pack", "--num_workers", "1", *options]
    return main(command)


def batches(config):
    options = dict(global_batch_size=2)
    train = make_train_iterator(config, seed=0, **options)
    return next(train), next(iter(make_eval_iterator(config, remainder="pad", **options)))


def test_documents_are_held_out_by_default(tmp_path):
    assert tokenize(tmp_path, "--tokenizer", "bytes") == 0
    config = DataConfig(path=str(tmp_path / "my_store"), sequence_length=64, num_threads=0)
    train, heldout = batches(config)
    assert train["tokens"].shape == heldout["tokens"].shape == (2, 64)
    number = TokenStore(tmp_path / "my_store" / "train.zarr").num_documents
    assert number > 20 * TokenStore(tmp_path / "my_store" / "heldout.zarr").num_documents > 0


def test_no_documents_are_held_out_on_request(tmp_path, capsys):
    assert tokenize(tmp_path, "--tokenizer", "bytes", "--heldout", "none") == 0
    assert not (tmp_path / "my_store" / "heldout.zarr").exists()
    with pytest.raises(ValueError, match="no heldout.zarr; set data.heldout_path, write both"):
        batches(DataConfig(path=str(tmp_path / "my_store"), sequence_length=64))
    # A store of another name is split when it is read.
    assert tokenize(tmp_path, "--tokenizer", "bytes", name="all") == 0
    batches(DataConfig(path=str(tmp_path / "my_store" / "all"), sequence_length=64))
    assert tokenize(tmp_path / "my_store", "--tokenizer", "bytes", text="short") == 1
    assert "accepted are texts of 128 bytes or more" in " ".join(capsys.readouterr().err.split())


def write_tokenizer(folder):
    folder.mkdir()
    model = tokenizers.models.WordLevel({"<s>": 0, "?": 1, "to": 2, "be": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "words.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return folder / "words.json"


def test_the_tokenizer_is_that_of_the_store(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path / "tokenizer")
    assert tokenize(tmp_path, "--tokenizer", str(path), "--json_escape") == 0
    path.unlink()
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / "my_store", "my_store", "my_store/train.zarr"):
        config = DataConfig(path=str(given), sequence_length=64, num_threads=0)
        known = with_tokenizer(config)
        assert known.tokenizer.startswith(str(given)) and known.json_escape
        assert load_tokenizer(known.tokenizer).name == fingerprint(config)["tokenizer"]
    assert batches(config)[0]["tokens"].max() < 4
    with pytest.raises(ValueError, match="4 ids; set model.vocab_size to at least that number"):
        make_train_iterator(config, global_batch_size=2, seed=0, vocab_size=3)
    (tmp_path / "my_store" / "train.zarr" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="set data.tokenizer to the path of that tokenizer.json"):
        with_tokenizer(config)
    text = DataConfig(path=str(tmp_path / "text.txt"))
    assert with_tokenizer(text).tokenizer == with_tokenizer(DataConfig()).tokenizer == "bytes"
    gpt2 = DataConfig(path=str(tmp_path / "text.txt"), tokenizer="gpt2")
    assert with_tokenizer(gpt2) is gpt2


def test_a_json_file_is_an_array_of_documents(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(4)]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [str(tmp_path / name) for name in ("x.json", "x.jsonl")]
    tokens = [batches(DataConfig(path=p, heldout_path=p, sequence_length=16))[1] for p in paths]
    assert tokens[0]["tokens"].tolist() == tokens[1]["tokens"].tolist()
    (tmp_path / "x.json").write_text((tmp_path / "x.jsonl").read_text())
    with pytest.raises(ValueError, match="x.json is no JSON array; accepted are .* or JSONL with"):
        batches(DataConfig(path=str(tmp_path / "x.json"), sequence_length=16))


def test_files_that_are_not_read_are_named(tmp_path, caplog):
    for name in ("x.txt", "y.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "x.png").write_bytes(b"PNG")
    batches(DataConfig(path=str(tmp_path), sequence_length=16))
    assert caplog.text.count("1 of 3 files are not read") == 1 and ".png" in caplog.text


def test_an_id_of_the_hub_that_is_not_there_is_explained(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="no such file or folder here, and HF_HUB_OFFLINE=1 permits only the cache"
    ):
        Documents(["HuggingFaceFW/fineweb-edu"])
    with pytest.raises(
        ValueError,
        match="tokenizer='org/some-7b': there is no such file or folder here, and HF_HUB_OFFLINE",
    ):
        load_tokenizer("org/some-7b")
    with pytest.raises(
        ValueError, match="unknown tokenizer 'x y'; accepted: 'bytes', 'gpt2', the path of"
    ):
        load_tokenizer("x y")
