"""Tests of passes over the ranks of Mamba-3's tokens: values and gradients are those of plain products and sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.mixers import ranks

B, T, R, H, P = 2, 5, 3, 2, 4


def plain_values(x, factor, weights):
    return jnp.einsum("bthp,bth,rhp->btrhp", x, factor, weights)


def plain_own(o, scores, x, weights):
    return o + jnp.einsum("btijh,bthp,jhp->btihp", scores, x, weights)


def plain_gate(o, z, gate_weights, weights):
    gate = jax.nn.silu(z[:, :, None] * gate_weights)
    return jnp.einsum("btrhp,btrhp,rhp->bthp", o, gate, weights)


X, OF_RANKS, WEIGHTS = (B, T, H, P), (B, T, R, H, P), (R, H, P)
CASES = {
    "values": (ranks.values_of_ranks, plain_values, (X, (B, T, H), WEIGHTS)),
    "own": (ranks.add_own_writes, plain_own, (OF_RANKS, (B, T, R, R, H), X, WEIGHTS)),
    "gate": (ranks.gate_ranks, plain_gate, (OF_RANKS, X, WEIGHTS, WEIGHTS)),
}


def drawn(shapes, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_products(name):
    function, plain, shapes = CASES[name]
    with jax.enable_x64(True):
        given = drawn(shapes, jnp.float64)
        expected, plain_pull = jax.vjp(plain, *given)
        result, pull = jax.vjp(function, *given)
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
        cotangent = jnp.sin(expected)
        for got, wanted in zip(pull(cotangent), plain_pull(cotangent), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_float32_beside_bfloat16(name):
    """Results have the dtype of the first argument, gradients those of the arguments; weights are float32, and what is rounded is the
    result alone."""
    function, plain, shapes = CASES[name]
    given = [
        x.astype(jnp.bfloat16 if s in (X, OF_RANKS) else jnp.float32)
        for s, x in zip(shapes, drawn(shapes, jnp.float32), strict=True)
    ]
    result, pull = jax.vjp(function, *given)
    wide, plain_pull = jax.vjp(plain, *(x.astype(jnp.float32) for x in given))
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(result.astype(jnp.float32), wide, rtol=2**-8, atol=1e-5)
    cotangent = jnp.sin(result)
    gradients = zip(pull(cotangent), plain_pull(cotangent.astype(jnp.float32)), given, strict=True)
    for got, wanted, x in gradients:
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-5)


def test_one_rank_without_weights():
    o, scores, x, factor = drawn([(B, T, 1, H, P), (B, T, 1, 1, H), X, (B, T, H)], jnp.float32)
    one = jnp.ones((1, H, P))
    for function, plain, given in (
        (ranks.values_of_ranks, plain_values, (x, factor)),
        (ranks.add_own_writes, plain_own, (o, scores, x)),
    ):
        np.testing.assert_allclose(function(*given, None), plain(*given, one), rtol=1e-6, atol=1e-6)
