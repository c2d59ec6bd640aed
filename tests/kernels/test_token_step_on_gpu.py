"""Tests of the kernels of a generated token (products of a few tokens, the step with its gate, whole models) that run on an NVIDIA Hopper GPU:
`make test-gpu`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import models
from lsm_jax.models import token_step
from pallas_kernels.decode_step import (
    Gate,
    apply_writes,
    decode_step,
    deferred_step,
    empty_writes,
)
from pallas_kernels.decode_step import deferred as deferred_kernel
from pallas_kernels.row_product.cases import COMPILED, TILES_COMPILED
from tests.kernels import test_row_product_gpu as row_product
from tests.kernels import test_tile_product_gpu as tile_product
from tests.kernels.marks import on_hopper
from tests.kernels.test_linear_attention_gpu import error

pytestmark = on_hopper


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.id)
def test_a_product_equals_the_plain_form(case):
    """On the card, the products of a few tokens are those of the definition; a second run gives the same bits."""
    arrays = row_product.make(case)
    run = jax.jit(functools.partial(row_product.run, case))
    got = run(arrays)
    row_product.check(case, got, arrays)
    for a, b in zip(got, run(arrays), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", TILES_COMPILED, ids=lambda case: case.id)
def test_a_product_by_tiles_equals_the_definition(case):
    """On the card, the products of many tokens are those of the definition; a second run gives the same bits."""
    arrays = tile_product.make(case)
    run = jax.jit(functools.partial(tile_product.run, case))
    got = run(arrays)
    tile_product.check(case, got, arrays)
    jax.tree.map(np.testing.assert_array_equal, got, run(arrays))


@pytest.mark.parametrize("batch", [1, 256])
def test_a_step_with_its_gate_equals_that_with_decays(batch):
    """On the card, the step that computes its decays, of one row from the low-rank gate, of many from its product and with q, k and v in one
    array, gives the output and memory of the step with log decays.
    """
    heads, keys, values, rank = 4, 128, 256, 16
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    memory, tokens = normal(batch, heads, keys, values, dtype=jnp.float32), normal(batch, 2048)
    q, k, v = (x.reshape(batch, heads, -1) for x in jnp.split(tokens, [512, 1024], axis=1))
    down, up, bias = normal(batch, rank), normal(rank, 512), 3 + normal(512, dtype=jnp.float32)
    logits = jnp.matmul(down, up, preferred_element_type=jnp.float32)
    log_decay = jax.nn.log_sigmoid(logits + bias).reshape(batch, heads, keys) / 16
    wanted = jax.jit(functools.partial(decode_step, scale=0.1))(
        memory, q, k, v, log_decay=log_decay
    )
    if batch == 1:
        arrays, columns, gate = (q, k, v), None, (down, up)
    else:
        arrays, columns, gate = (tokens,) * 3, (0, 512, 1024), (logits, None)

    def run(memory, arrays, gate, bias):
        given = Gate(*gate, bias, 16.0)
        return decode_step(memory, *arrays, gate=given, columns=columns, scale=0.1)

    for a, b in zip(jax.jit(run)(memory, arrays, gate, bias), wanted, strict=True):
        assert error(a, b) < (5e-3 if a.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(
    ("batch", "keys", "programs"),
    [(256, 128, None), (256, 128, "default"), (33, 128, 20), (33, 256, None)],
)
def test_a_step_that_defers_its_write_equals_that_which_writes(
    batch, keys, programs, group, monkeypatch
):
    """On the card, over 2n + 3 tokens the outputs of the step that writes a memory once in n tokens, and its memory with the pending writes,
    are those of the step that writes at each token; a second run gives the same bits. Decays are strong and slow.
    """
    if programs != "default":
        monkeypatch.setattr(deferred_kernel, "PROGRAMS", {group: programs} if programs else {})
    heads, values, rank = 4, 2 * keys, 16
    rng, wide = np.random.default_rng(0), heads * keys
    columns = 0, wide, 2 * wide, 2 * wide + heads * values

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    first = normal(batch, heads, keys, values, dtype=jnp.float32)
    tokens = normal(2 * group + 3, batch, columns[-1] + rank)
    up, bias = normal(rank, wide), jnp.asarray(rng.uniform(-100, 30, wide), jnp.float32)

    @jax.jit
    def each(memory, token):
        logits = jnp.matmul(token[:, columns[-1] :], up, preferred_element_type=jnp.float32)
        gate = Gate(logits, None, bias, 16.0)
        return decode_step(memory, *[token] * 3, gate=gate, columns=columns[:3], scale=0.1)

    @jax.jit
    def deferred(memory, pending, count, token):
        call = dict(columns=columns, temperature=16.0, scale=0.1)
        return deferred_step(memory, pending, count, token, up, bias, **call)

    def run():
        memory, pending = first, empty_writes(first, group, tokens.dtype)
        for t, token in enumerate(tokens):
            count = jnp.int32(t % group)
            output, memory, pending = deferred(memory, pending, count, token)
            yield output, memory, pending, jnp.int32((t + 1) % group)

    wanted = first
    for token, (output, memory, pending, count), again in zip(tokens, run(), run(), strict=True):
        known, wanted = each(wanted, token)
        assert error(output, known) < 5e-3
        assert error(apply_writes(memory, pending, count), wanted) < 2e-6
        np.testing.assert_array_equal(output, again[0])
        np.testing.assert_array_equal(memory, again[1])


@pytest.mark.parametrize("batch", [1, 8, 64, 128, 256])
@pytest.mark.parametrize("method", ["gla", "gated_deltanet"])
def test_tokens_of_a_model_are_those_of_its_layers(method, batch, monkeypatch):
    """On the card, greedy tokens by the kernels are those of the layers up to a tie that rounding decides: the layers' logits of both are equal but
    for a tenth of their standard deviation. Of many rows, most tokens are equal.
    """
    config = models.lm(method, "340m", vocab_size=512)
    config.num_layers = 2
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    noise = jax.random.normal(jax.random.key(2), (1024,))
    other = lambda x: x * (1 + 0.3 * noise[: x.shape[-1]]) if (x == 1).all() else x  # noqa: E731
    model = nnx.merge(graph, jax.tree.map(other, params))  # scales of norms that are not 1
    monkeypatch.setattr(token_step, "OTHER_MIXERS", True)
    assert token_step.serves(model, batch) is (batch == 1 or method == "gla")
    prompt = jax.random.randint(jax.random.key(1), (batch, 16), 0, 512)
    call = dict(num_tokens=16, key=jax.random.key(0), temperature=0.0, unroll_layers=True)
    got = models.sample(model, prompt, **call)
    monkeypatch.setattr(token_step, "serves", lambda *_: False)
    wanted = models.sample(model, prompt, **call)
    first = np.argmax(np.asarray(got != wanted), axis=1) + 16 * np.asarray((got == wanted).all(1))
    assert batch == 1 or first.mean() >= 8
    row, at = np.arange(batch), np.minimum(first, 15)
    logits = np.asarray(model(jnp.concatenate([prompt, wanted], axis=1))[0])[row, 15 + at]
    gap = logits[row, wanted[row, at]] - logits[row, got[row, at]]
    assert (gap <= 0.1 * logits.std(axis=-1)).all()
