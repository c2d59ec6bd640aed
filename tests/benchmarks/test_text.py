"""Tests of `benchmarks.text`: batches of real text for benchmarks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import text
from lsm_jax.data import load_tokenizer

SMALL = dict(max_bytes=300_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.mark.parametrize("vocab_size", [257, 1000])
def test_a_batch_is_that_of_training(folder, vocab_size):
    rows = text.batch(3, 200, vocab_size, folder=folder, **SMALL)
    assert {name: (x.shape, x.dtype.kind) for name, x in rows.items()} == {
        name: ((3, 200), "f" if name == "loss_mask" else "i")
        for name in ("tokens", "labels", "segment_ids", "positions", "loss_mask")
    }
    tokens, labels, ids = rows["tokens"], rows["labels"], rows["segment_ids"]
    assert 0 <= tokens.min() <= tokens.max() < vocab_size
    same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
    np.testing.assert_array_equal(tokens[:, 1:][same], labels[:, :-1][same])
    assert (tokens != labels).mean() > 0.9
    # The tokens are as uneven as text: the most frequent one is far more frequent than 1 / vocabulary.
    assert np.bincount(tokens.ravel()).max() > 5 * tokens.size / vocab_size
    again = text.batch(3, 200, vocab_size, folder=folder, **SMALL)
    for name in rows:
        np.testing.assert_array_equal(rows[name], again[name])


def test_the_text_is_code_and_is_encoded_by_a_tokenizer_of_the_size(folder):
    config = text.data_config(64, 1000, folder=folder, **SMALL)
    tokenizer = load_tokenizer(config.tokenizer)
    assert tokenizer.vocab_size == 1000 and tokenizer.bos_id is not None
    written = tokenizer.decode(text.stream(1, 2000, 1000, folder=folder, **SMALL)["tokens"][0])
    assert "import" in written or "def " in written or "self" in written
    with pytest.raises(ValueError, match="vocab_size=256: accepted are 257"):
        text.data_config(64, 256, folder=folder)


def test_rows_of_a_stream_continue_and_activations_are_those_of_its_tokens(folder):
    rows = text.stream(2, 50, 1000, folder=folder, **SMALL)
    assert rows["tokens"].shape == (2, 50) and rows["loss_mask"].all()
    np.testing.assert_array_equal(rows["tokens"][:, 1:], rows["labels"][:, :-1])
    x = text.activations(2, 50, 8, folder=folder, **SMALL)
    tokens = text.stream(2, 50, text.MOST, folder=folder, **SMALL)["tokens"].ravel()
    flat = x.reshape(-1, 8)
    first = {token: index for index, token in reversed(list(enumerate(tokens)))}
    np.testing.assert_array_equal(flat, flat[[first[token] for token in tokens]])
    assert x.dtype == np.float32 and len(np.unique(flat, axis=0)) == len(first)
