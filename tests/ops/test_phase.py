"""Tests of the sums of angles: exact to the bit for any length, documents and masks, with the gradient of a sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops

TURN = 1686629713  # a full turn in the unit 2^-28 rad
LENGTHS = [1, 7, 8, 9, 129, 2100]  # of one block, of several, and of blocks of blocks
by_length = pytest.mark.parametrize("length", LENGTHS)


def case(length, packed):
    """Return angles [2, T, 3], and ids with padding and a mask [2, T] if `packed`, else none."""
    rng = np.random.default_rng(length)
    angle = rng.uniform(-np.pi, np.pi, size=(2, length, 3)).astype(np.float32)
    if not packed:
        return angle, {}
    ids = np.cumsum(rng.random((2, length)) < 0.05, axis=1, dtype=np.int32) % 4
    return angle, dict(segment_ids=ids, update_mask=rng.random((2, length)) < 0.8)


def documents(angle, segment_ids=None, update_mask=None):
    """Return, token by token, whether it is written [B, T], and the number of its document [B, T]."""
    shape = angle.shape[:2]
    ids = np.ones(shape, int) if segment_ids is None else segment_ids
    written = (ids != 0) & (np.ones(shape, bool) if update_mask is None else update_mask)
    number = np.zeros(shape, int)
    for b, row in enumerate(ids):
        last = count = 0
        for t, i in enumerate(row):
            count += i not in (0, last) and last != 0
            last = i or last
            number[b, t] = count
    return written, number


@by_length
@pytest.mark.parametrize("packed", [False, True])
def test_sums_are_exact_to_the_bit(length, packed):
    angle, rows = case(length, packed)
    phase, final = jax.jit(ops.cumulative_phase)(angle, **rows)
    written, number = documents(angle, **rows)
    counts = np.round(angle.astype(np.float64) * 2**28).astype(np.int64) * written[..., None]
    total = np.cumsum(counts, axis=1)
    begins = np.argmax(number[:, None] == number[:, :, None], axis=2)[..., None]
    total -= np.take_along_axis(total - counts, begins, axis=1)
    expected = (total + TURN // 2) % TURN - TURN // 2
    expected = expected.astype(np.float32) * np.float32(2**-28)
    np.testing.assert_array_equal(final, expected[:, -1])
    if packed:
        expected = np.where(rows["segment_ids"][..., None] == 0, 0, expected)
    np.testing.assert_array_equal(phase, expected)


@by_length
@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_is_that_of_a_sum(length, packed):
    angle, rows = case(length, packed)
    rng = np.random.default_rng(0)
    weights, last = rng.normal(size=angle.shape), rng.normal(size=(2, 3))

    def loss(angle):
        phase, final = ops.cumulative_phase(angle, **rows)
        return jnp.sum(phase * weights) + jnp.sum(final * last)

    written, number = documents(angle, **rows)
    of_sum = weights * (rows["segment_ids"] != 0)[..., None] if packed else weights.copy()
    of_sum[:, -1] += last
    token = np.arange(length)
    reads = (number[:, None] == number[:, :, None]) & (
        token[:, None] <= token
    )  # [B, written, read]
    expected = np.einsum("bij,bjh->bih", reads.astype(float), of_sum) * written[..., None]
    got = jax.jit(jax.grad(loss))(angle)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_gradients_of_mapped_sums_are_not_added():
    angle = np.random.default_rng(1).normal(size=(3, 2, 9, 2)).astype(np.float32)

    def loss(angle):
        phase, final = ops.cumulative_phase(angle)
        return jnp.sum(jnp.sin(phase)) + jnp.sum(final**2)

    mapped = jax.grad(lambda angle: jnp.sum(jax.vmap(loss)(angle)))(angle)
    np.testing.assert_allclose(mapped, [jax.grad(loss)(a) for a in angle], atol=1e-6)
