"""Damaged stores, tokenizers and task files (tests/faults/damage_data.py): each is refused at once with a message of
one line that names the file, or read correctly."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from lsm_jax.data import TokenStore, load_tokenizer
from lsm_jax.evaluation.task_files import check_task_files
from tests.data.stores import write_array
from tests.faults import damage_data


def check(damage, read):
    start = time.perf_counter()
    if damage.expected == "accepted":
        read(damage.path)
    else:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            read(damage.path)
        text = str(error.value)
        assert re.search(damage.message, text) and "\n" not in text and len(text) < 1000, (
            damage.name
        )
    assert time.perf_counter() - start < 2, damage.name


def test_stores(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50257, (40, 70))
    store = write_array(tmp_path / "x.zarr", ids)
    (tmp_path / "copies").mkdir()
    count = 0
    for damage in damage_data.damaged_stores(store, tmp_path / "copies"):
        count += 1
        check(damage, lambda path: TokenStore(path).read(np.arange(40), 0, 70, vocab_size=50257))
    assert count > 80


def test_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.train_from_iterator(["ab ab cd"], tokenizers.trainers.BpeTrainer(vocab_size=20))
    (tmp_path / "t").mkdir()
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    (tmp_path / "copies").mkdir()
    for damage in damage_data.damaged_tokenizers(tmp_path / "t", tmp_path / "copies"):
        check(damage, lambda path: load_tokenizer(str(path)))
        if damage.name.startswith("chat template"):
            with pytest.raises(ValueError, match=damage.message):
                load_tokenizer(str(damage.path)).chat_text([])


def test_task_files(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "a.yaml").write_text("task: a\ndoc_to_text: text\n")
    (tmp_path / "copies").mkdir()
    for damage in damage_data.damaged_task_folders(tmp_path / "tasks", tmp_path / "copies"):
        check(damage, lambda path: check_task_files(path, trust=False))
