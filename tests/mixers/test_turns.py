"""Tests of turned pairs of channels: the published order, the gradient, and the numbers stored for bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.mixers import turns
from tests.mixers.test_mixers import close

BATCH, LENGTH, RANKS, GROUPS, HEADS, SIZE = 2, 5, 2, 2, 6, 12
by_order = pytest.mark.parametrize("halves", [False, True])
by_pairs = pytest.mark.parametrize("pairs", [1, 4, SIZE // 2])


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@by_order
@by_pairs
def test_pairs_turn_as_complex_numbers_where_they_are_published(halves, pairs):
    x, angle = normal(0, 3, SIZE), normal(1, 3, pairs)
    first = np.arange(pairs) if halves else 2 * np.arange(pairs)
    second = first + SIZE // 2 if halves else first + 1
    turned = (x[:, first] + 1j * x[:, second]) * np.exp(1j * angle)
    expected = x.copy()
    expected[:, first], expected[:, second] = turned.real, turned.imag
    close(turns.turn(x, angle, halves=halves), expected)


@by_order
@by_pairs
def test_pairs_first_is_an_order_that_is_undone(halves, pairs):
    x = np.arange(2 * SIZE).reshape(2, SIZE)
    ordered = turns.pairs_first(x, pairs, halves)
    assert sorted(ordered[0].tolist()) == x[0].tolist()
    distance = SIZE // 2 if halves else 1
    np.testing.assert_array_equal(ordered[:, pairs : 2 * pairs] - ordered[:, :pairs], distance)
    np.testing.assert_array_equal(turns.pairs_in_place(ordered, pairs, halves), x)


def heads_of(x, bias):
    repeat = np.repeat if isinstance(x, np.ndarray) else jnp.repeat
    return repeat(x, HEADS // GROUPS, axis=3) + bias


def arrays(pairs):
    x = normal(0, BATCH, LENGTH, RANKS, GROUPS, SIZE)
    return x, normal(1, RANKS, HEADS, SIZE), normal(2, BATCH, LENGTH, HEADS, pairs)


@by_pairs
def test_the_gradient_of_turned_heads_is_that_of_products(pairs):
    weights = normal(3, BATCH, LENGTH, RANKS, HEADS, SIZE)

    def turned(x, bias, angle):
        return turns.turned_heads(x, bias, angle, *turns.waves(angle, x.dtype))

    def expected(x, bias, angle):
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        return turns.turn_pairs(heads_of(x, bias), cos, sin)

    def results(function):
        y, pull = jax.vjp(function, *arrays(pairs))
        return y, pull(jnp.asarray(weights))

    close(results(turned), results(expected), 1e-6)


def test_bfloat16_turns_by_numbers_of_16_bits():
    """Sines for bfloat16 are exact to a multiple of 2^-14, also of several turns, and gradients to bfloat16."""
    angle = np.linspace(-7, 7, 10_001, dtype=np.float32).reshape(1, -1, 1, 1)
    cos, sin = turns.waves(angle, jnp.bfloat16)
    assert cos.dtype == sin.dtype == jnp.int16
    wide = angle.astype(np.float64)
    assert np.abs(cos - 2**14 * np.cos(wide)).max() < 0.6
    assert np.abs(sin - 2**14 * np.sin(wide)).max() < 0.6
    before = turns.waves_before(cos, sin)
    np.testing.assert_array_equal(before[0][:, 1:], cos[:, :-1])
    assert (before[0][0, 0, 0, 0], before[1][0, 0, 0, 0]) == (2**14, 0)

    def results(dtype):
        x, bias, angle = (jnp.asarray(a) for a in arrays(4))
        x = x.astype(jnp.bfloat16).astype(dtype)
        bias = bias.astype(jnp.bfloat16).astype(jnp.float32)

        def loss(x, bias, angle):
            y = turns.turned_heads(x, bias, angle, *turns.waves(angle, dtype))
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, bias, angle)
        return jax.tree.map(lambda a: a.astype(jnp.float32), (y, gradients))

    close(results(jnp.bfloat16), results(jnp.float32), 2e-2)


def test_scores_are_products_of_the_heads_queries_and_keys():
    q, q_bias, _ = arrays(1)
    k, k_bias = normal(4, BATCH, LENGTH, 3, GROUPS, SIZE), normal(5, 3, HEADS, SIZE)
    q, q_bias, k, k_bias = (a.astype(np.float64) for a in (q, q_bias, k, k_bias))
    expected = np.einsum("btihn,btjhn->btijh", heads_of(q, q_bias), heads_of(k, k_bias))
    with jax.enable_x64(True):
        got = turns.scores_of_heads(*map(jnp.asarray, (q, q_bias, k, k_bias)), jnp.float64)
        close(got, expected, 1e-12)
