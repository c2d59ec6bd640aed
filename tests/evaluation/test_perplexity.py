"""Tests of scoring: reading rows in pieces gives the losses of one forward pass, masks and a short last batch
do not change them, and wrong token ids raise errors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import models
from lsm_jax.evaluation import Scorer, evaluate
from lsm_jax.parallel import largest_divisor

VOCAB = 257
ROOT = Path(__file__).resolve().parents[2]


def tiny_model(method: str = "retnet") -> models.Decoder:
    config = models.lm(method, "tiny", "LN", vocab_size=VOCAB)
    config.num_layers, config.dtype, config.remat = 2, "float32", "none"
    return models.Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def rows(number: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    text = np.random.default_rng(seed).integers(0, VOCAB - 1, (number, length)).astype(np.int32)
    tokens = np.roll(text, 1, axis=1)
    tokens[:, 0] = VOCAB - 1
    return {"tokens": tokens, "labels": text, "loss_mask": np.ones((number, length), np.float32)}


def logits_nll(model, batch):
    logits = model(jnp.asarray(batch["tokens"]), segment_ids=batch.get("segment_ids"))[0]
    logits = np.asarray(logits, np.float64)
    label_logits = np.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - label_logits


@pytest.mark.parametrize("piece_length", [pytest.param(60, marks=pytest.mark.slow), 25])
def test_losses_equal_one_forward_pass(model, piece_length):
    batch = rows(3, 60)
    expected = logits_nll(model, batch)
    pieces = list(Scorer(model, piece_length=piece_length)(batch))
    assert [start for start, _ in pieces] == list(range(0, 60, piece_length))
    np.testing.assert_allclose(np.concatenate([nll for _, nll in pieces], 1), expected, rtol=1e-5)


@pytest.mark.slow
def test_packed_rows_are_counted_by_document(model):
    batch = rows(2, 60)
    lengths = [(20, 30, 10), (45, 10, 5)]
    batch["segment_ids"] = np.stack([np.repeat([1, 2, 3], n) for n in lengths]).astype(np.int32)
    batch["positions"] = np.stack(
        [np.concatenate([np.arange(i) for i in n]) for n in lengths]
    ).astype(np.int32)
    batch["segment_ids"][1, 55:] = 0
    batch["loss_mask"][1, 55:] = 0
    expected = logits_nll(model, batch)
    for piece_length in (60, 30):
        evaluation = evaluate(model, [batch], piece_length=piece_length, progress=False)
        at_ten = [expected[0, 10], expected[0, 30], expected[1, 10]]
        assert evaluation.curve.count[9:11].tolist() == [5, 3]
        assert evaluation.curve.loss[10] == pytest.approx(np.mean(at_ten), rel=1e-5)
        assert evaluation.curve.num_tokens == 115


def test_short_last_batch_and_padding_rows_change_nothing(model):
    batch = rows(5, 40)
    whole = evaluate(model, [batch], progress=False)
    parts = [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, 5, 2)]
    del parts[2]["loss_mask"]
    split = evaluate(model, parts, progress=False)
    np.testing.assert_allclose(split.curve.loss, whole.curve.loss, rtol=1e-6)
    assert split.curve.num_tokens == 200 and split.num_sequences == 5

    padded = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in batch.items()}
    masked = evaluate(model, [padded], progress=False)
    np.testing.assert_allclose(masked.curve.loss, whole.curve.loss, rtol=1e-6)
    assert masked.curve.num_tokens == 200
    assert masked.num_byte_labels == 200
    assert masked.bits_per_byte == pytest.approx(masked.curve.mean / np.log(2))


@pytest.mark.slow
def test_row_perplexity_is_the_mean_of_the_rows_perplexities(model):
    """The row perplexity is, as in Liger's paper, the exponential of each row's mean loss over its scored
    tokens, averaged over rows.
    """
    batch = rows(5, 40)
    batch["loss_mask"] = (np.random.default_rng(1).random((5, 40)) < 0.3).astype(np.float32)
    batch["loss_mask"][3] = 0
    nll, scored = logits_nll(model, batch), batch["loss_mask"] > 0
    expected = [np.exp(nll[i][scored[i]].mean()) for i in (0, 1, 2, 4)]
    for piece_length in (40, 16):
        parts = [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, 5, 2)]
        evaluation = evaluate(model, parts, piece_length=piece_length, progress=False)
        assert evaluation.row_perplexity == pytest.approx(np.mean(expected), rel=1e-5)
        assert evaluation.num_sequences == 4


def test_memory_does_not_grow_with_length(model):
    config = models.lm("retnet", "tiny", vocab_size=VOCAB)
    config.num_layers = 1
    scorer = Scorer(models.Decoder(config, rngs=nnx.Rngs(0)), piece_length=32)
    sizes = []
    for length in (64, 640):
        batch = rows(1, length)
        state = jax.eval_shape(lambda n=length: scorer.init_state(1, n))
        sizes.append(sum(x.size for x in jax.tree.leaves(state)))
        assert {nll.shape for _, nll in scorer(batch)} == {(1, 32)}
    assert sizes[0] == sizes[1]
    assert scorer.score_piece._cache_size() == 1  # every piece ran the same program


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gla", "mamba", "softmax", "window"])
def test_a_long_document_needs_the_memory_of_a_piece(method):
    config = models.lm("softmax" if method == "window" else method, "tiny", vocab_size=VOCAB)
    config.num_layers = 2
    if method == "window":
        config.layers["L"].mixer.window = 32
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    scorer = Scorer(model, piece_length=64)
    bytes_needed, state_bytes = [], []
    for length in (256, 4096):
        bytes_needed.append(
            scorer.compiled(rows=1, length=length).memory_analysis().temp_size_in_bytes
        )
        state = jax.eval_shape(lambda n=length: model.init_state(1, n))
        state_bytes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))
    if method != "softmax":
        assert bytes_needed[0] == bytes_needed[1] and state_bytes[0] == state_bytes[1]
        return
    # Keys and values of every token, once in the state and a few times in temporary arrays; no scores of T
    # by T.
    assert state_bytes[1] == pytest.approx(16 * state_bytes[0], rel=0.01)
    assert bytes_needed[1] - bytes_needed[0] < 20 * (state_bytes[1] - state_bytes[0])


def test_ids_outside_the_vocabulary(model):
    batch = rows(1, 8)
    batch["tokens"][0, 3] = VOCAB
    with pytest.raises(ValueError, match="tokens has ids .* vocabulary has 257"):
        evaluate(model, [batch], progress=False)
    batch = rows(1, 8)
    batch["labels"][0, 3] = -100
    with pytest.raises(ValueError, match="labels has ids from -100"):
        evaluate(model, [batch], progress=False)
    batch["loss_mask"][0, 3] = 0
    with pytest.raises(ValueError, match="no batch"):
        evaluate(model, [], progress=False)
    with pytest.raises(ValueError, match="rows of 9 tokens, earlier ones of 8"):
        evaluate(model, [rows(1, 8), rows(1, 9)], progress=False)
    with pytest.raises(ValueError, match="piece_length=0"):
        Scorer(model, piece_length=0)


@pytest.mark.parametrize(
    ("rows", "devices", "shards"), [(5, 4, 4), (3, 4, 2), (1, 4, 1), (4, 6, 3), (8, 1, 1)]
)
def test_devices_without_a_row_share_rows(rows, devices, shards):
    assert largest_divisor(devices, rows) == shards


# (rows, tokens, tokens of a piece): a row for every device; one row on all four devices, in one piece and in
# unequal pieces.
SHARED = [(5, 40, 20), (3, 40, 40), (1, 40, 40), (1, 43, 9)]
METHODS = ("retnet", "fox", "gated_deltanet")
CODE = f"""
import jax
from lsm_jax.evaluation import evaluate
from tests.evaluation.test_perplexity import rows, tiny_model
assert jax.device_count() == 4
for number, length, piece in {SHARED}:
    for method in {METHODS}:
        found = evaluate(tiny_model(method), [rows(number, length)], piece_length=piece, progress=False)
        print(found.curve.num_tokens, repr(found.curve.mean))
"""


@pytest.mark.slow
def test_four_devices_give_the_loss_of_one():
    flags = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = iter(done.stdout.splitlines())
    for number, length, _ in SHARED:
        for method in METHODS:
            evaluation = evaluate(tiny_model(method), [rows(number, length)], progress=False)
            tokens, mean = next(lines).split()
            assert int(tokens) == number * length
            assert float(mean) == pytest.approx(evaluation.curve.mean, rel=1e-6)
