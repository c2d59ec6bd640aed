"""Tests of the functions for one chunk of linear attention with a decay per key channel: their values and
gradients are compared with the recurrence, token by token in float64.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tiles import channel_decay as tiles

SCALE = 0.4
DECAYS = {"mild": [-1e-3, -0.1, -0.5], "strong": [-30.0, -8.0], "mixed": [0.0, -1e-4, -0.7, -30.0]}


@jax.jit
def recurrence(q, k, v, g, memory, bonus, begins):
    """Compute outputs and final memory of linear attention with a decay per key channel, token by token, by
    GLA's recurrence (arXiv 2312.06635, Eq. 3), or with a bonus RWKV6's (arXiv 2404.05892, Eq. 18).
    """

    def step(memory, x):
        q, k, v, g, begin = x
        memory = jnp.where(begin, 0, memory)
        write = k[:, None] * v
        after = memory * jnp.exp(g)[:, None] + write
        seen = after if bonus is None else memory + bonus[:, None] * write
        return after, SCALE * q @ seen

    memory, out = jax.lax.scan(step, memory, (q, k, v, g, begins))
    return out, memory


@functools.partial(jax.jit, static_argnums=6)
def by_tiles(arrays, bonus, run, before, d_out, d_memory, documents):
    q, k, v, g, memory = (x.astype(jnp.float32) for x in arrays)
    masks = None
    if documents:
        flags = ((run == x)[:, None].astype(jnp.float32) for x in (before, run[-1]))
        masks = tiles.Documents(run[:, None] == run, *flags)
    chunk = tiles.chunk_forward(q, k, g, scale=SCALE, documents=masks, bonus=bonus)
    values = tiles.read(chunk, v, memory), tiles.write(chunk, v, memory)
    return values, tiles.backward(
        q, k, v, g, memory, d_out, d_memory, scale=SCALE, documents=masks, bonus=bonus
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    dims=st.sampled_from([(8, 4, 3), (16, 3, 4)]),
    decays=st.sampled_from(sorted(DECAYS)),
    documents=st.booleans(),
    with_bonus=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_chunk_equals_the_recurrence(dims, decays, documents, with_bonus, seed):
    size, key_dim, value_dim = dims
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, size, key_dim))
    v, d_out = rng.normal(size=(2, size, value_dim))
    memory, d_memory = rng.normal(size=(2, key_dim, value_dim))
    g = rng.choice(DECAYS[decays], size=(size, key_dim))
    bonus = rng.normal(size=key_dim) if with_bonus else None
    before = int(rng.integers(0, 2))
    run = np.sort(rng.integers(before, before + 3, size=size)) if documents else np.full(size, before)  # fmt: skip
    begins = np.diff(run, prepend=before) > 0
    arrays = q, k, v, g, memory
    with jax.enable_x64(True):
        values, pull = jax.vjp(lambda *x: recurrence(*x, begins), *arrays, bonus)
        wanted = pull((jnp.asarray(d_out), jnp.asarray(d_memory)))
    wanted = dict(zip(("q", "k", "v", "g", "memory", "bonus"), wanted, strict=True))
    narrow = None if bonus is None else bonus.astype(np.float32)
    got, gradient = by_tiles(
        arrays, narrow, run, before, d_out.astype(np.float32), d_memory.astype(np.float32), documents
    )  # fmt: skip
    for a, b in zip(got, values, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(b).max()))
    for name, b in wanted.items():
        if b is not None:
            a = getattr(gradient, name)
            np.testing.assert_allclose(
                a, b, rtol=0, atol=4e-6 * max(1, np.abs(b).max()), err_msg=name
            )


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_strong_decay_takes_nothing_from_the_precision_of_a_weak_one(exclusive):
    """The results of a chunk with a decay per key channel are precise where weak decays follow strong ones:
    after 32 decays of e^-30, a difference of cumulative sums would have an error of 1e-4.
    """
    g = np.full((64, 1), -0.01, np.float32)
    g[:32] = -30.3
    ones = jnp.ones((64, 1))
    bonus = ones[0] if exclusive else None
    scores = tiles.chunk_forward(ones, ones, jnp.asarray(g), scale=1.0, bonus=bonus).scores
    i, j = np.indices((32, 32))
    exact = np.exp(-np.float64(np.float32(0.01)) * np.maximum(i - j - exclusive, 0)) * (i >= j)
    np.testing.assert_allclose(np.asarray(scores)[32:, 32:], exact, rtol=3e-7, atol=0)
