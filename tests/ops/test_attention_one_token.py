"""Tests of attention of one token, which reads the ring buffers in which the token is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops

B, T, H, G, K = 2, 23, 4, 2, 8


@pytest.mark.parametrize(
    ("window", "capacity", "slots"), [(None, T, None), (5, 5, None), (5, 7, 3)]
)
def test_tokens_one_by_one_equal_the_whole_row(window, capacity, slots):
    """The same outputs as a call on the whole row: documents, masked and padded tokens, rings that wrap, a state for each segment."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, K)), jnp.float32) for n in (H, G, G))
    gates = jnp.asarray(-rng.exponential(size=(B, T, H)), jnp.float32)
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (B, T))))
    ids = ids.at[1, -3:].set(0)
    mask = jnp.asarray(rng.random((B, T)) < 0.8)
    state = ops.attention_state(B, capacity, G, K, K, num_segments=slots, forget_heads=H)
    rows = dict(segment_ids=ids, update_mask=mask)
    whole, after = ops.attention(
        q, k, v, log_forget=gates, initial_state=state, window=window, **rows
    )

    @jax.jit
    def step(state, token):
        q, k, v, gates, ids, mask = (x[:, None] for x in token)
        rows = dict(segment_ids=ids, update_mask=mask)
        output, state = ops.attention(
            q, k, v, log_forget=gates, initial_state=state, window=window, **rows
        )
        return state, output[:, 0]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, gates, ids, mask))
    final, outputs = jax.lax.scan(step, state, tokens)
    np.testing.assert_allclose(jnp.moveaxis(outputs, 0, 1), whole, atol=2e-6)
    assert (final.count == after.count).all() and (final.segment_id == after.segment_id).all()
