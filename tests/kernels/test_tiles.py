"""Tests of the functions of `pallas_kernels.tiles` for one chunk of linear attention: their values and
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

from pallas_kernels.tiles import scalar_decay as tiles

SCALE = 0.4
DECAYS = {
    "none": None,
    "zero": [0.0],
    "mild": [-1e-3, -0.1, -0.5],
    "strong": [-30.0, -8.0],
    "mixed": [0.0, -1e-4, -0.7, -30.0],
}


def inputs(size, key_dim, value_dim, heads, decays, runs, seed):
    """Return random inputs of one chunk of linear attention: q, k [C, keys, K], v and the output's gradient
    dO [C, n, V], the memory S before the chunk and the gradient dS' of the memory after it [n, K, V], log
    decays [C, n] or None, document numbers [C] or None, and the document number of the token before the
    chunk.
    """
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, size, heads.keys, key_dim))
    v, d_out = rng.normal(size=(2, size, heads.count, value_dim))
    memory, d_memory = rng.normal(size=(2, heads.count, key_dim, value_dim))
    choices = DECAYS[decays]
    log_decay = None if choices is None else rng.choice(choices, size=(size, heads.count))
    before = int(rng.integers(0, 2))
    run = np.sort(rng.integers(before, before + 3, size=size)) if runs else None
    return (q, k, v, log_decay, memory), run, before, (d_out, d_memory)


@jax.jit
def recurrence(q, k, v, log_decay, memory, begins):
    """Compute linear attention's outputs and final memory token by token: M <- a M + kᵀ v with the decay a, o
    = q M (Linear-MoE, arXiv 2503.05447, Eq. 5).
    """

    def step(memory, x):
        q, k, v, log_decay, begin = x
        memory = jnp.where(begin, 0, memory) * jnp.exp(log_decay)[:, None, None]
        memory = memory + k[..., None] * v[:, None]
        return memory, SCALE * jnp.sum(q[..., None] * memory, axis=1)

    memory, out = jax.lax.scan(step, memory, (q, k, v, log_decay, begins))
    return out, memory


def expected(arrays, run, before, cotangents):
    q, k, v, log_decay, memory = arrays
    begins = np.zeros(len(q), bool) if run is None else np.diff(run, prepend=before) > 0
    log_decay = np.zeros(v.shape[:2]) if log_decay is None else log_decay
    with jax.enable_x64(True):
        values, vjp = jax.vjp(recurrence, q, k, v, log_decay, memory, begins)
        return *values, *vjp(jax.tree.map(jnp.asarray, cotangents))[:-1]


@functools.partial(jax.jit, static_argnums=4)
def by_tiles(arrays, run, before, cotangents, heads):
    """Compute the results of linear attention in one chunk, and their gradients for the given cotangents, by
    the functions of `pallas_kernels.tiles` that the kernels call.
    """
    q, k, v, log_decay, memory = arrays
    decays = log_decay is not None
    size, count = len(q), heads.count
    narrow = lambda x: jnp.asarray(x.reshape(size, -1), jnp.float32)  # noqa: E731
    side_by_side = lambda m: jnp.moveaxis(jnp.asarray(m, jnp.float32), 0, 1).reshape(m.shape[1], -1)  # noqa: E731
    by_memory = lambda m: jnp.moveaxis(m.reshape(len(m), count, -1), 1, 0)  # noqa: E731
    q, k, v, d_out = (narrow(x) for x in (q, k, v, cotangents[0]))
    memory, d_memory = (tiles.unfold(side_by_side(m), heads) for m in (memory, cotangents[1]))
    if decays:
        log_decay = jnp.zeros((8, size)).at[heads.first : heads.first + count].set(log_decay.T)
    if run is not None:
        run = jnp.zeros((8, size)).at[:3].set(jnp.stack([run, run == before, run == run[-1]]))
    chunk = tiles.read_chunk(log_decay, run, size, SCALE)
    scales = [tiles.weights(chunk, heads.first + h) for h in range(count)]
    out = tiles.read(q, k, v, memory, scales, chunk, heads)
    final = tiles.fold(tiles.write(k, v, memory, chunk, heads), heads)
    reads = tiles.read_backward(q, k, v, d_out, memory, scales, chunk, heads, decays=decays)
    writes = tiles.write_backward(k, v, memory, d_memory, chunk, heads, decays=decays)
    d_decay = np.zeros((size, count))
    if decays:
        d_decay = tiles.decay_gradient(
            reads.columns, reads.rows, writes.columns, writes.totals, chunk
        )
        d_decay = d_decay[:count].T
    by_head = lambda x, n: x.reshape(size, n, -1)  # noqa: E731
    return (
        by_head(out, count),
        by_memory(final),
        by_head(reads.q, heads.keys),
        by_head(reads.k + writes.k, heads.keys),
        by_head(reads.v + writes.v, count),
        d_decay,
        by_memory(tiles.fold(reads.memory + writes.memory, heads)),
    )


GEOMETRIES = {  # size, K, V, and the heads of the tile: the first one, and the numbers of memories and of key heads
    "one": (8, 4, 4, tiles.Heads(5, 1, 1)),
    "two": (24, 8, 2, tiles.Heads(2, 2, 2)),
    "one key for three": (16, 4, 3, tiles.Heads(4, 3, 1)),
}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    geometry=st.sampled_from(sorted(GEOMETRIES)),
    decays=st.sampled_from(sorted(DECAYS)),
    runs=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_chunk_equals_the_recurrence(geometry, decays, runs, seed):
    *dims, heads = GEOMETRIES[geometry]
    case = inputs(*dims, heads, decays, runs, seed)
    names = ("out", "memory", "dq", "dk", "dv", "d_decay", "d_memory")
    wanted = dict(zip(names, expected(*case), strict=True))
    if decays == "none":
        wanted["d_decay"] = np.zeros_like(wanted["d_decay"])
    for (name, a), b in zip(wanted.items(), by_tiles(*case, heads), strict=True):
        a, b = np.asarray(a), np.asarray(b, np.float64)
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-6 * max(1, np.abs(a).max()), err_msg=name)


def test_a_strong_decay_takes_nothing_from_the_precision_of_a_weak_one():
    """The results of a chunk of linear attention are precise where weak decays follow strong ones: after 64
    decays of e^-30, a difference of plain cumulative sums would have an error of 1e-4.
    """
    log_decay = np.full((8, 128), -0.01, np.float32)
    log_decay[:, :64] = -30.3
    chunk = tiles.read_chunk(jnp.asarray(log_decay), None, 128, 1.0)
    weights = np.asarray(tiles.weights(chunk, 0), np.float64)[64:, 64:]
    sums = np.cumsum(log_decay[0, 64:].astype(np.float64))
    exact = np.tril(np.exp(np.minimum(sums[:, None] - sums, 0)))
    np.testing.assert_allclose(weights, exact, rtol=2e-7, atol=0)


@pytest.mark.parametrize("strongest", [-3e38, -200.0])
def test_a_decay_beyond_float32_forgets_everything_and_is_no_nan(strongest):
    log_decay = jnp.zeros((8, 16)).at[:, 4:7].set(strongest)
    chunk = tiles.read_chunk(log_decay, None, 16, 1.0)
    i, j = np.indices((16, 16))
    between = (np.maximum(j, 3) < np.minimum(i, 6)).astype(int)
    wanted = np.where((i >= j) & (between == 0), 1.0, 0.0)
    np.testing.assert_array_equal(tiles.weights(chunk, 0), wanted)
    np.testing.assert_array_equal(chunk.chunk_decay, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_exact_sums_are_those_of_float32(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(8 * count, 128)).astype(np.float32) * np.exp(rng.normal(size=(1, 128)) * 3)
    x = x.astype(np.float32)
    mask = rng.random((128, 64)) < 0.5
    exact = x.astype(np.float64) @ mask
    sums = np.asarray(tiles.exact_sums(jnp.asarray(x), jnp.asarray(mask)), np.float64)
    scale = np.abs(x).astype(np.float64) @ mask
    assert np.max(np.abs(sums - exact) / scale) < 5e-7  # one pass in bfloat16 has an error of 4e-3
