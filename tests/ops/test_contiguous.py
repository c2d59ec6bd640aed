"""Tests of short convolutions and token shifts of packed documents without gaps: `contiguous=True` gives the
results of the general case.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops

IDS = jnp.array([[2, 2, 2, 2, 1, 3, 3, 0, 0, 5, 5, 5], [0, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0, 0]])


def test_without_gaps_shifts_equal_pointers():
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = jax.random.normal(keys[0], (2, 12, 3)), jax.random.normal(keys[1], (4, 3))
    tail = jax.random.normal(keys[2], (2, 3, 3)) * jnp.array([1.0, 0.0])[:, None, None]
    state = ops.ShiftState(tail, jnp.array([2, 0], jnp.int32))

    def results_and_gradients(contiguous):
        def loss(x, weight, state):
            options = dict(segment_ids=IDS, initial_state=state, contiguous=contiguous)
            y, after = ops.short_convolution(x, weight, **options)
            z, last = ops.token_shift(
                x, **options | dict(initial_state=state._replace(tail=state.tail[:, -1:]))
            )
            weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
            total = jnp.sum(weights * (y + z * z)) + jnp.sum(after.tail**2) + jnp.sum(last.tail)
            return total, (y, z, after, last)

        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        return jax.jit(lambda x, w: gradient(x, w, state))(x, weight)

    for a, b in zip(
        *(jax.tree.leaves(results_and_gradients(c)) for c in (True, False)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
