"""Tests of the functions of `pallas_kernels.tiles.delta` for one chunk of the delta rule: values and
gradients are compared with the recurrence in float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tiles import delta as tiles
from tests.kernels.test_tiles import DECAYS

SCALE = 0.4
SHAPES = {"small": (8, 4, 3), "narrow": (16, 3, 5), "long": (32, 8, 4)}  # C, K, V


def inputs(shape, decays, runs, alike, seed):
    """Return random inputs of one chunk of the delta rule: queries and keys [C, K], values [C, V], write
    strengths beta [C], log decays [C] and the memory S before the chunk [K, V]; the documents of its tokens
    [C] and that of the token before it; and the gradients of the output, dO [C, V], and of the final memory,
    dS' [K, V].

    Arrays are float64, keys have norm 1.
    """
    size, key_dim, value_dim = SHAPES[shape]
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, size, key_dim))
    k = k + 100 * alike * rng.normal(size=key_dim)
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    v, d_out = rng.normal(size=(2, size, value_dim))
    memory, d_memory = rng.normal(size=(2, key_dim, value_dim))
    beta = rng.choice([0.0, 0.3, 1.0, 2.0], size=size)
    log_decay = rng.choice(DECAYS[decays] or [0.0], size=size)
    before = int(rng.integers(0, 2))
    run = np.sort(rng.integers(before, before + 3, size=size)) if runs else np.full(size, before)
    return (q, k, v, beta, log_decay, memory), (run, before), (d_out, d_memory)


def recurrence(arrays, begins):
    """Compute the outputs O [C, V] and the final memory S' [K, V] of the tokens of one chunk, one by one, by
    Gated DeltaNet (arXiv 2412.06464, Eq. 10), in this library's order: decay, erase, write, read.
    """
    *tokens, memory = arrays

    def step(memory, x):
        q, k, v, beta, log_decay, begin = x
        memory = jnp.where(begin, 0, memory) * jnp.exp(log_decay)
        memory = memory + beta * jnp.outer(k, v - k @ memory)
        return memory, SCALE * (q @ memory)

    memory, out = jax.lax.scan(step, memory, (*tokens, begins))
    return out, memory


@jax.jit
def expected(arrays, runs, cotangents):
    begins = jnp.diff(runs[0], prepend=runs[1]) > 0
    values, pull = jax.vjp(lambda *x: recurrence(x, begins), *arrays)
    return *values, *pull(cotangents)


@jax.jit
def by_tiles(arrays, runs, cotangents):
    q, k, v, beta, log_decay, memory = arrays
    d_out, d_memory = cotangents
    chunk = tiles.read_chunk(log_decay, *runs)
    solved = tiles.chunk_forward(q, k, beta, chunk, SCALE)
    out, missing, final = tiles.scan_forward(q, k, v, beta, memory, *solved, chunk, SCALE)
    dv, d_initial = tiles.scan_backward(q, k, beta, d_out, d_memory, *solved, chunk, SCALE)
    rest = tiles.chunk_backward(q, k, beta, missing, d_out, dv, memory, d_memory, chunk, SCALE)
    return out, final, rest.q, rest.k, dv, rest.beta, rest.log_decay, d_initial


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    decays=st.sampled_from(sorted(DECAYS)),
    runs=st.booleans(),
    alike=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_chunk_equals_the_recurrence(shape, decays, runs, alike, seed):
    case = inputs(shape, decays, runs, alike, seed)
    names = ("out", "memory", "dq", "dk", "dv", "d_beta", "d_decay", "d_memory")
    with jax.enable_x64(True):
        case = jax.tree.map(jnp.asarray, case)
        wanted, got = expected(*case), by_tiles(*case)
    for name, a, b in zip(names, wanted, got, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-11 * max(1, np.abs(a).max()), err_msg=name)


def test_the_inverse_in_16_bit_products_is_as_good_as_float32s():
    """The inverse of the delta rule's triangular matrix, computed by products in 16 bits, is within 1e-3 of
    the exact one. With nearly equal keys and beta up to 2, powers of the matrix would overflow, and one pass
    in 16 bits would have an error of 1e-2.
    """
    rng = np.random.default_rng(0)
    k = rng.normal(size=64) + 0.3 * rng.normal(size=(64, 64))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    strict = np.tril(k @ k.T * rng.uniform(1, 2, size=64), -1).astype(np.float32)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    def product(a, b):
        return jnp.matmul(rounded(a), rounded(b), precision="highest")

    def exact(a, b):
        return rounded(b), product(a, b) + product(a - rounded(a), b)

    i, j = np.indices((64, 64))
    got = tiles.unit_inverse(jnp.asarray(strict), jnp.asarray(i ^ j), product, exact)
    wanted = np.linalg.inv(np.eye(64) + strict)
    assert np.linalg.norm(got - wanted) < 1e-3 * np.linalg.norm(wanted)
