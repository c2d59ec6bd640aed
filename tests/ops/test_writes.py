"""Tests of `linear_memory` whose tokens write with factors of their own, and whose output has a skip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops


def inputs(length=20):
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(x, (2, length, h, 8)) for x, h in zip(keys, (4, 1), strict=False))
    v = jax.random.normal(keys[2], (2, length, 2, 4))
    log_decay = -jax.random.uniform(keys[3], (2, length, 2))
    return (q, k, v, log_decay), jax.random.normal(keys[4], (2, length, 2)), jnp.array([0.5, -2.0])


@pytest.mark.parametrize("form", ["recurrent", pytest.param("chunk", marks=pytest.mark.slow)])
def test_writes_have_factors_and_outputs_a_skip(form):
    """Token by token in NumPy: `M ← a M + e^w kᵀ v`, `o = q M + skip v`; a token that is masked has its skip, padding has no output."""
    (q, k, v, log_decay), log_write, skip = inputs()
    ids = jnp.array([[1] * 20, [1] * 7 + [2] * 9 + [0] * 4])
    mask = jnp.ones((2, 20)).at[:, 5].set(0)
    output, state = ops.linear_memory(
        q, k, v, log_decay, log_write=log_write, skip=skip, scale=1.0, segment_ids=ids, update_mask=mask,
        form=form,
    )  # fmt: skip
    memory, expected = np.zeros((2, 2, 8, 4)), np.zeros(output.shape)
    for b in range(2):
        for t in range(20):
            if ids[b, t] == 0:
                continue
            if t and ids[b, t] != ids[b, t - 1]:
                memory[b] = 0
            if mask[b, t]:
                factor = np.exp(np.asarray(log_write[b, t]))[:, None, None]
                write = factor * np.asarray(k[b, t, 0])[:, None] * np.asarray(v[b, t])[:, None]
                memory[b] = np.exp(np.asarray(log_decay[b, t]))[:, None, None] * memory[b] + write
            for h in range(4):
                read = np.asarray(q[b, t, h]) @ memory[b, h // 2]
                expected[b, t, h] = read + float(skip[h // 2]) * np.asarray(v[b, t, h // 2])
    real = np.asarray(ids > 0)
    np.testing.assert_allclose(np.asarray(output)[real], expected[real], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.memory, memory, rtol=1e-5, atol=1e-5)


def test_wrong_factors_are_refused():
    arrays, log_write, skip = inputs()
    with pytest.raises(ValueError, match="log_write has shape"):
        ops.linear_memory(*arrays, log_write=log_write[:, :3])
    with pytest.raises(ValueError, match="skip has shape"):
        ops.linear_memory(*arrays, skip=jnp.ones(3))
    with pytest.raises(ValueError, match="normalize"):
        ops.linear_memory(*arrays, log_write=log_write, normalize=1e-6)
    with pytest.raises(NotImplementedError):
        ops.linear_memory(*arrays, log_write=log_write, skip=skip, implementation="mosaic_gpu")
