"""Tests of `linear_memory` whose tokens write with factors of their own, whose output has a skip, and whose tokens are several rows."""

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


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "form", ["recurrent", "chunk", pytest.param("associative", marks=pytest.mark.slow)]
)
def test_rows_of_a_token_read_all_of_them(form, masked):
    """Token by token in NumPy: a token of `rank` rows decays the memory once, writes all of its rows, and then reads it with each; rows of
    padding, which are NaN here, neither write nor read."""
    rank, count = 3, 6
    (q, k, v, log_decay), *_ = inputs(rank * count)
    first = (jnp.arange(rank * count) % rank == 0)[:, None]
    log_decay = jnp.where(first, log_decay, 0)
    ids = jnp.array([[1] * 6, [1] * 2 + [2] * 3 + [0]])
    mask = jnp.ones((2, count)).at[:, 1].set(0 if masked else 1)
    rows = {n: jnp.repeat(x, rank, axis=1) for n, x in dict(ids=ids, mask=mask).items()}
    padded = [x.at[1, -rank:].set(jnp.nan) for x in (q, k, v, log_decay)]
    output, state = ops.linear_memory(
        *padded, scale=0.5, segment_ids=rows["ids"], update_mask=rows["mask"] if masked else None, rank=rank, form=form,
        chunk_size=4,
    )  # fmt: skip
    memory, expected = np.zeros((2, 2, 8, 4)), np.zeros(output.shape)
    for b in range(2):
        for t in range(count):
            if ids[b, t] == 0:
                continue
            if t and ids[b, t] != ids[b, t - 1]:
                memory[b] = 0
            of_token = range(t * rank, (t + 1) * rank)
            if mask[b, t]:
                memory[b] *= np.exp(np.asarray(log_decay[b, t * rank]))[:, None, None]
                for row in of_token:
                    memory[b] += np.asarray(k[b, row, 0])[:, None] * np.asarray(v[b, row])[:, None]
            for row in of_token:
                for h in range(4):
                    expected[b, row, h] = 0.5 * np.asarray(q[b, row, h]) @ memory[b, h // 2]
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.memory, memory, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(rank=0), "rank=0"),
        (dict(rank=3), "divide the number of rows, 20"),
        (dict(rank=2, skip=jnp.ones(2)), "skip is given with rank=2"),
        (dict(rank=2, normalize=1e-6), "normalize is given with rank=2"),
        (dict(rank=2, log_decay=-jnp.ones(2)), "log_decay has shape"),
    ],
)
def test_wrong_ranks_are_refused(given, words):
    (q, k, v, log_decay), *_ = inputs()
    with pytest.raises(ValueError, match=words):
        ops.linear_memory(q, k, v, **(dict(log_decay=log_decay) | given))
