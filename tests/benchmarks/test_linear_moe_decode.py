"""Tests that the benchmark of decoding with experts reads text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import text as texts
from benchmarks.__main__ import main
from benchmarks.cases import linear_moe_decode
from configs import linear_moe


def test_rows_read_their_own_text(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    monkeypatch.setattr(texts.data_config, "__kwdefaults__", dict(folder=None, max_bytes=300_000))
    config = linear_moe.get_config("tiny").model
    config.vocab_size = 300
    tokens = linear_moe_decode.text_tokens(config, 3)
    assert tokens.shape == (4, 16, 3, 1)
    stream = texts.stream(3, 64, 300)["tokens"]
    np.testing.assert_array_equal(tokens.reshape(64, 3).T, stream)
    assert len(np.unique(stream, axis=0)) == 3


@pytest.mark.slow
def test_steps_of_text_are_timed_and_load_more_experts_than_one_token_chooses(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    monkeypatch.setattr(texts.data_config, "__kwdefaults__", dict(folder=None, max_bytes=300_000))
    output = tmp_path / "rows.jsonl"
    small = "--size tiny --models linear_attention:LLLN --tokens 1024 --batch_size 4"
    main(["linear_moe_decode", *small.split(), f"--output={output}"])
    (row,) = map(json.loads, output.read_text().splitlines())
    top_k = linear_moe.get_config("tiny").model.layers["L"].feedforward.top_k
    assert row["inputs"] == "text" and row["experts"] > top_k and row["ms_a_token"] > 0
