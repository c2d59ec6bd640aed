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


@pytest.mark.parametrize("masked", [True, False])  # a backend sees the factors without a mask
@pytest.mark.parametrize("form", ["recurrent", pytest.param("chunk", marks=pytest.mark.slow)])
def test_writes_have_factors_and_outputs_a_skip(form, masked):
    """Token by token in NumPy: `M ← a M + e^w kᵀ v`, `o = q M + skip v`; a token that is masked has its skip, padding has no output."""
    (q, k, v, log_decay), log_write, skip = inputs()
    ids = jnp.array([[1] * 20, [1] * 7 + [2] * 9 + [0] * 4])
    mask = jnp.ones((2, 20)).at[:, 5].set(0 if masked else 1)
    output, state = ops.linear_memory(
        q, k, v, log_decay, log_write=log_write, skip=skip, scale=1.0, segment_ids=ids,
        update_mask=mask if masked else None, form=form,
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
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.memory, memory, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_padding_may_have_any_numbers(masked):
    """Values and factors of padding, and factors of masked tokens, change neither outputs nor gradients, whatever they are."""
    (q, k, v, log_decay), log_write, skip = inputs(6)
    ids = jnp.array([[1] * 6, [1] * 4 + [0] * 2])
    mask = jnp.ones((2, 6)).at[0, 3].set(0) if masked else None

    def run(v, log_write):
        return ops.linear_memory(
            q, k, v, log_decay, log_write=log_write, skip=skip, segment_ids=ids, update_mask=mask,
            form="recurrent",
        )[0]  # fmt: skip

    expected, pull = jax.vjp(run, v, log_write)
    given = v.at[1, 4:].set(jnp.nan), log_write.at[1, 4:].set(jnp.nan)
    if masked:
        given = given[0], given[1].at[0, 3].set(jnp.nan)
    output, pull_given = jax.vjp(run, *given)
    np.testing.assert_array_equal(output, expected)
    for a, b in zip(pull_given(jnp.ones_like(output)), pull(jnp.ones_like(output)), strict=True):
        np.testing.assert_array_equal(a, b)


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
