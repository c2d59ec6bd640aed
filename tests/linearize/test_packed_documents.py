"""Packed instructions never leak: loss and gradient of a packed row are those of its documents, each in a row of its own.

Trainers that pack documents for softmax attention (a mask, or positions that begin again) let them leak in models with linear
layers, in three places: the tails of short convolutions, the token that a token shift remembers, and the memory. The first tests
show each leak in the models of the released goldens, by what a state carries over a border; the others that ours has none.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.data import DataConfig, load_tokenizer, make_train_iterator
from lsm_jax.mixers import LoRAConfig
from lsm_jax.models import Decoder, abstract, mean_next_token_loss
from lsm_jax.training.partition import join, leaves_of, split
from tests.convert.test_released import GOLDENS, expected_of, imported, marked, model_of
from tests.data.world import write_vocabulary
from tests.linearize.released_models import VOCAB, model

# Models in which more than the memory crosses a border: the tails of convolutions, or of token shifts (RWKV).
WITH_TAILS = (
    "fla-rwkv7",
    "fla-rwkv6",
    "transformers-mamba2",
    "transformers-mamba",
    "fla-gated_deltanet",
    "fla-kda",
)
CARRYING = (*WITH_TAILS, "fla-gla", "fla-gla-hybrid")
FAST = ("fla-rwkv7",)
NAMES = sorted(p.name for p in GOLDENS.iterdir() if p.is_dir())


def part_of(path) -> str:
    """Return the part of a decoder's state, "memory", "tail" or "place", to which an array belongs."""
    text = jax.tree_util.keystr(path)
    return "memory" if ".memory" in text else "tail" if ".tail" in text else "place"


@pytest.mark.parametrize("name", marked(CARRYING, FAST))
def test_every_part_of_a_state_would_leak(name):
    """A trainer that forgets one part of the state at a border lets the first document change the second one's logits."""
    decoder = model_of(GOLDENS / name)
    (first, _), (second, logits) = expected_of(name)
    empty = decoder.init_state(1, len(first) + len(second))
    call = jax.jit(lambda m, t, s: m(t, state=s)[:2])
    _, full = call(decoder, first[None], empty)
    parts = {part_of(path) for path, _ in jax.tree.leaves_with_path(full)} - {"place"}
    assert parts == ({"memory", "tail"} if name in WITH_TAILS else {"memory"})
    for kept in (*sorted(parts), "none"):
        state = jax.tree_util.tree_map_with_path(
            lambda path, old, new, kept=kept: old if part_of(path) == kept else new, full, empty
        )
        output = np.asarray(call(decoder, second[None], state)[0][0])
        if kept == "none":
            np.testing.assert_allclose(output, logits, rtol=0, atol=1e-4)
        else:
            assert np.abs(output - logits).max() > 1e-2, kept


def objective(graph, params, batch):
    """Return the summed loss of a batch's predicted tokens, as the trainer computes it."""
    decoder = nnx.merge(graph, params)
    hidden, _, _ = decoder.hidden(
        batch["tokens"], segment_ids=batch.get("segment_ids"), positions=batch.get("positions"), contiguous=True
    )  # fmt: skip
    return mean_next_token_loss(
        hidden, decoder.head(), batch["labels"], batch["loss_mask"], 1, chunk_size=64
    )


def measured(graph, params, trainable, batch):
    """Return the loss, and the gradients of the trained parameters."""
    trained, frozen = split(params, trainable)
    function = jax.jit(jax.value_and_grad(lambda p: objective(graph, join(frozen, p), batch)))
    return jax.tree.map(np.asarray, function(trained))


def documents_of(batch):
    """Return a batch in which each document of a packed batch has a row of its own, padded at the end."""
    rows, length = [], batch["tokens"].shape[1]
    for tokens, labels, mask, ids in zip(*(batch[n] for n in ("tokens", "labels", "loss_mask", "segment_ids")), strict=True):  # fmt: skip
        for number in sorted(set(ids.tolist()) - {0}):
            (at,) = np.nonzero(ids == number)
            pad = (0, length - len(at))
            rows.append([np.pad(x[at], pad) for x in (tokens, labels, mask, np.ones_like(ids))])
    return dict(zip(("tokens", "labels", "loss_mask", "segment_ids"), map(np.stack, zip(*rows, strict=True)), strict=True))  # fmt: skip


def assert_equal(packed, separate, what):
    np.testing.assert_allclose(packed[0], separate[0], rtol=1e-5)
    ours, theirs = leaves_of(packed[1]), leaves_of(separate[1])
    scale = max(np.abs(x).max() for x in theirs.values())
    assert scale > 1e-3
    for name, value in theirs.items():
        np.testing.assert_allclose(
            ours[name], value, rtol=1e-3, atol=2e-5 * scale, err_msg=f"{what} {name}"
        )


@functools.cache
def golden_batch():
    """Return a packed batch of two rows, of three and two documents of the goldens' vocabulary, and padding."""
    rng = np.random.default_rng(1)
    ids = np.array([[1] * 9 + [2] * 7 + [3] * 8, [1] * 13 + [2] * 9 + [0] * 2])
    tokens = rng.integers(0, 48, ids.shape).astype(np.int32)
    labels = np.roll(tokens, -1, axis=1)
    mask = (np.diff(ids, axis=1, append=0) == 0) & (ids != 0)
    positions = np.stack(
        [np.arange(24) - np.searchsorted(row, row) for row in np.where(ids == 0, 9, ids)]
    )
    return dict(
        tokens=tokens,
        labels=labels,
        loss_mask=mask.astype(np.float32),
        segment_ids=ids,
        positions=positions,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(NAMES, FAST))
def test_packed_documents_of_released_models_are_separate(name):
    config, params = imported(GOLDENS / name)
    graph, batch = nnx.graphdef(abstract(config)), golden_batch()
    separate = documents_of(batch)
    packed = measured(graph, params, (), batch)
    if not any(isinstance(x.mixer, mixers.MoMConfig) for x in config.layers.values()):
        assert_equal(packed, measured(graph, params, (), separate), name)
    # Without segment ids the row is one document, and the gradients are others. (A sum of losses may be equal by chance.)
    one = {k: v for k, v in batch.items() if k != "segment_ids"}
    ours, others = leaves_of(packed[1]), leaves_of(measured(graph, params, (), one)[1])
    scale = max(np.abs(x).max() for x in ours.values())
    assert max(np.abs(others[path] - x).max() for path, x in ours.items()) > 1e-2 * scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rwkv7", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_packed_instructions_train_adapters_as_separate_ones(kind, tmp_path):
    vocabulary = write_vocabulary(tmp_path)
    rows = [
        dict(instruction=f"Say {i}", output=f"It is the thing {i}. " * (1 + i % 3))
        for i in range(12)
    ]
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        path=str(tmp_path / "alpaca.jsonl"), tokenizer=str(vocabulary), format="alpaca", packing="first_fit", add_bos=False,
        sequence_length=512, num_threads=0, prefetch=0, heldout_fraction=0.0,
    )  # fmt: skip
    batch = next(
        make_train_iterator(
            data, load_tokenizer(str(vocabulary)), global_batch_size=2, seed=0, vocab_size=VOCAB
        )
    )
    batch = {name: np.asarray(value) for name, value in batch.items()}
    assert batch["segment_ids"].max() >= 2
    config = dataclasses.replace(model(kind), lora=LoRAConfig(targets=("all",), rank=2))
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape, np.float32)), params
    )
    graph = nnx.graphdef(decoder)
    # With rows of padding, so that one program computes both batches.
    separate = documents_of(batch)
    rows = len(separate["tokens"]) - len(batch["tokens"])
    packed = {name: np.pad(batch[name], ((0, rows), (0, 0))) for name in separate}
    trained, frozen = split(params, ("lora",))
    call = jax.jit(jax.value_and_grad(lambda p, batch: objective(graph, join(frozen, p), batch)))
    ours, theirs = (jax.tree.map(np.asarray, call(trained, x)) for x in (packed, separate))
    assert_equal(ours, theirs, kind)
