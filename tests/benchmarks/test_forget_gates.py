"""Tests of the forget gates with which the benchmark of attention is timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import forget_gates
from benchmarks.__main__ import make_parser
from benchmarks.cases import attention
from lsm_jax.models import Decoder

SMALL = forget_gates.Training(
    width=32, layers=2, length=64, batch_size=2, steps=8, vocab_size=300, peak_lr=3e-2, max_bytes=300_000
)  # fmt: skip


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return dataclasses.replace(SMALL, folder=Path(tmp_path_factory.mktemp("text")))


def test_rows_say_where_their_gates_come_from():
    parser = make_parser(attention.BENCHMARK)
    cases = attention.cases(parser.parse_args(["--shapes=1x128x2x64"]))
    assert [(case["gates"], case.get("bias")) for case in cases] == [("text", None)]
    both = parser.parse_args(["--shapes=1x128x2x64", "--gates=text,made-up"])
    cases = attention.cases(both)
    assert [(case["gates"], case.get("bias")) for case in cases] == [("text", None), ("made-up", 2)]
    # Rows that were stored before the field are made-up.
    old = {name: value for name, value in cases[1].items() if name != "gates"}
    identity = attention.BENCHMARK.identity
    assert identity(old) == identity(cases[1]) != identity(cases[0])
    with pytest.raises(ValueError, match="heads of 5 channels: accepted are divisors of the width"):
        SMALL.config(5)


@pytest.mark.slow
def test_inputs_of_text_are_those_of_the_layers_of_a_trained_model(training):
    model, about = forget_gates.train_fox(8, training)
    assert about["tokens"] == 8 * 128 and about["heldout_loss"] < np.log(300)
    inputs, mean = attention.text_inputs("2x100x3x8", model, training)
    q, k, v, do, high, low = inputs
    assert q.shape == k.shape == v.shape == do.shape == (2, 100, 3, 8) and high.shape == (2, 100, 3)
    assert q.dtype == jnp.bfloat16 and high.dtype == low.dtype == jnp.float32
    sums = np.float64(high) + np.float64(low)
    gates = np.exp(np.diff(sums, axis=1))
    assert (gates > 0).all() and (gates < 1).all() and 0 < mean < 1
    # Tokens have different gates, unlike a model with initial parameters.
    initial = Decoder(training.config(8).model, rngs=nnx.Rngs(0))
    tokens = forget_gates.heldout_rows(2, 100, training)
    _, _, untrained = forget_gates.attention_inputs(initial, tokens, 3)
    assert gates.std() > 2 * np.exp(untrained).std()
    # The three heads are the first of layer 0, one of the middle, and the last of layer 1.
    layers = [x for _, x, _ in forget_gates.run_layers(model, tokens[1], range(2))]
    for head, (layer, of_layer) in {0: (0, 0), 2: (1, 3)}.items():
        theirs = layers[layer]["log_forget"][0, :, of_layer]
        np.testing.assert_allclose(sums[1, :, head], np.cumsum(np.float64(theirs)), rtol=1e-5)
        same = layers[layer]["k"][0, :, of_layer].astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(k[1, :, head]), np.asarray(same))
    with pytest.raises(ValueError, match="rows of 100 held-out tokens: the text has .*; accepted"):
        forget_gates.heldout_rows(10**4, 100, training)
    assert 0 <= attention.pruned_share(jax.tree.map(lambda x: x.repeat(2, 1)[:, :128], inputs)) < 1
