"""The mathematics of one chunk of linear attention whose decay has a value for every key channel, on two-dimensional tiles.

With g [C, K] the log decay of a chunk, b its inclusive sums, S the memory before the chunk and S' that after it, O the output and P the
decayed scores, each memory does

    O = P v + scale (q e^b) S,    S' = e^(b_C) S + (k e^(b_C - b))ᵀ v,    P_ij = scale Σ_c q_ic k_jc e^(b_i - b_j)_c,  j <= i

(GLA, arXiv 2312.06635, Eq. 4 and appendix C). e^-b overflows, and a difference b_i - b_j loses the decays after j to the rounding of a
strong decay before j. So the pairs i > j are divided into levels by halving the chunk down to single rows: on the level of blocks
of `half` rows, i is in the later and j in the earlier of two neighbouring blocks. Then e^(b_i - b_j) is the product of two factors,
e^(sum from the later block's first row to i) of the later row and e^(sum after j to the earlier block's last row) of the earlier row.
Both factors are at most 1; their exponents are sums of terms of one sign, and depend on no token after i. On a level each row is in a later or in an earlier
block, never in both. So one tile X, with the rows of q times their factors in later blocks and those of k in earlier blocks, contains
both operands: the level's scores are the pairs (i, j) of X Xᵀ that `is_pair` selects, and the gradient of X is a symmetric matrix
times X. The sums are products with a matrix of zeros and ones, `in_factor`.

`exclusive` is the read before the write (RWKV6, arXiv 2404.05892, Eq. 18): the decay between j and i excludes i's, and the diagonal
is Σ_c bonus_c q_ic k_ic.

The gradient of g, from dq and dk: g_l is a term of b_i - b_j for every pair j < l <= i, of b_i for i >= l, of b_C - b_j for j < l,
and of b_C:

    dg_l = Σ_{i>=l} (q dq)_i - Σ_{j>=l} (k dk(P))_j + Σ_{j<l} (k dk(S'))_j + e^(b_C) Σ_v S dS',

where dk(P) and dk(S') are the terms of dk through P and through S'. No decay separates a token from itself, so the terms of the
diagonal of P are excluded. (With `exclusive`, the first sum is over i > l.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tiles.scalar_decay import dot, iota

FLOOR = -128.0  # e^-128 is 0 in float32


class Chunk(NamedTuple):
    """The arrays of one chunk that depend on no memory, by which `read` and `write` multiply values and
    memory. b are the inclusive sums of the log decay per key channel, b_C the sum over the whole chunk.

    Attributes:
        scores: [C, C], P: the decayed, scaled scores of queries and keys, 0 where token i does not read token
            j.
        read: [C, K], scale q e^b: the queries, decayed since the chunk's start.
        written: [C, K], k e^(b_C - b): the keys, decayed up to the chunk's end.
        chunk_decay: [K], e^(b_C): the decay of the memory over the whole chunk.
    """

    scores: jax.Array
    read: jax.Array
    written: jax.Array
    chunk_decay: jax.Array


class Gradient(NamedTuple):
    """The gradients of the inputs of one chunk of linear attention with a decay per key channel, as
    `backward` returns them.

    Attributes:
        q: [C, K], the gradient of the queries.
        k: [C, K], the gradient of the keys.
        v: [C, V], the gradient of the values.
        g: [C, K], the gradient of the log decay.
        memory: [K, V], the gradient of the memory before the chunk.
        bonus: [K], the gradient of the bonus; 0 if there is none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    memory: jax.Array
    bonus: jax.Array


def levels(size: int) -> tuple[int, ...]:
    """Return the number of rows in a block on each level of the halving of a chunk of `size` tokens: 1, 2, 4, ..., size / 2."""
    return tuple(2**n for n in range(size.bit_length() - 1))


def in_factor(i, j, half, later, exclusive: bool = False):
    """Return whether the decay factor of token i on a level of the halving contains the decay of token j, as a mask over pairs (i, j).

    For a token in the later of two neighbouring blocks of `half` tokens (`later`) these are the tokens j of its block up to i; for one in
    the earlier block those after i. If `exclusive`, a token in a later block excludes its own decay.
    """
    stop = i - jnp.where(later, 1, 0) if exclusive else i
    return ((i ^ j) < half) & ((j <= stop) == later)


def is_pair(i, j, half):
    """Return whether tokens i and j are in two neighbouring blocks of `half` tokens, in either order: the pairs whose scores one level of
    the halving computes.
    """
    return ((i ^ j) >= half) & ((i ^ j) < 2 * half)


class Documents(NamedTuple):
    """Which documents the C tokens of one chunk belong to.

    Attributes:
        same: [C, C], whether two tokens belong to one document.
        enters: [C, 1], 1 where a token's document is that of the last token before the chunk, else 0.
        stays: [C, 1], 1 where a token's document is that of the chunk's last token, else 0.
    """

    same: jax.Array
    enters: jax.Array
    stays: jax.Array


def chunk_forward(
    q, k, g, *, scale: float, documents: Documents | None = None, bonus=None
) -> Chunk:
    """Compute the arrays of one chunk that depend on no memory, as a `Chunk`: the decayed scores [C, C], the
    decayed queries and keys [C, K], and the decay of the memory over the chunk [K].

    Args:
        q: [C, K], the queries, C a power of two.
        k: [C, K], the keys.
        g: [C, K] float32, the log decay, at most 0.
        scale: the factor by which the queries are multiplied.
        documents: which tokens belong to the same document; None is one document.
        bonus: [K], the weight of the token's own product of query and key; a token then reads before it
            writes. None is no bonus.
    """
    size, exclusive = len(g), bonus is not None
    i, j = iota(size, size, 0), iota(size, size, 1)
    current = jnp.sum(q * k * (1 if bonus is None else bonus), axis=1, keepdims=True)
    scores = jnp.where(i == j, current, 0)
    for half in levels(size):
        x = where_later(half, q, k) * factor(g, half, exclusive=exclusive)
        scores += jnp.where(is_pair(i, j, half) & (i > j), dot(x, x, "nt"), 0)
    read_decay, write_decay = factor(g, size, True, exclusive), factor(g, size, False)
    chunk_decay = jnp.exp(jnp.sum(jnp.maximum(g, FLOOR), axis=0))
    if documents is not None:
        scores = jnp.where(documents.same, scores, 0)
        read_decay, write_decay = read_decay * documents.enters, write_decay * documents.stays
        chunk_decay *= jnp.min(documents.enters)
    return Chunk(scale * scores, scale * q * read_decay, k * write_decay, chunk_decay)


def where_later(half: int, of_later, of_earlier):
    """Combine two tiles [C, *] with a row for each token of a chunk, such as queries and keys: of every two
    neighbouring blocks of `half` rows, return the later block from `of_later` and the earlier one from
    `of_earlier`.
    """
    return jnp.where(iota(len(of_later), 1, 0) & half > 0, of_later, of_earlier)


def factor(g, half: int, later=None, exclusive: bool = False):
    """Return the decay factors [C, K] by which one level of the halving multiplies queries and keys, from the log decay g [C, K].

    A token in the later of two neighbouring blocks of `half` tokens has the decay from its block's start to itself (without its own if
    `exclusive`), and one in the earlier block the decay after itself to its block's end. With `later`, all tokens count as tokens of later
    blocks (True) or of earlier blocks (False).
    """
    size = len(g)
    i, j = iota(size, size, 0), iota(size, size, 1)
    later = (i & half) > 0 if later is None else jnp.full((1, 1), later)
    span = in_factor(i, j, half, later, exclusive)
    return jnp.exp(dot(span.astype(jnp.float32), jnp.maximum(g, FLOOR)))


def read(chunk: Chunk, v, memory):
    """Return the output of a chunk's tokens, O = P v + scale (q e^b) S [C, V]: what they read of each other's
    values v [C, V], by the decayed scores P, and of the memory S before the chunk [K, V].
    """
    return dot(chunk.scores, v) + dot(chunk.read, memory)


def write(chunk: Chunk, v, memory):
    """Return the memory after a chunk, S' = e^(b_C) S + (k e^(b_C - b))ᵀ v [K, V]: the memory S before it,
    decayed, plus the decayed writes of the chunk's values v [C, V].
    """
    return chunk.chunk_decay[:, None] * memory + dot(chunk.written, v, "tn")


def backward(
    q, k, v, g, memory, d_out, d_memory, *, scale: float, documents: Documents | None = None,
    bonus=None,
) -> Gradient:  # fmt: skip
    """Return the gradients of all inputs of one chunk of linear attention with a decay per key channel, as a
    `Gradient`.

    Args:
        q: [C, K], the queries.
        k: [C, K], the keys.
        v: [C, V], the values.
        g: [C, K] float32, the log decay, at most 0.
        memory: [K, V], the memory before the chunk.
        d_out: [C, V], the gradient of the output.
        d_memory: [K, V], the gradient of the memory after the chunk.
        scale: the factor by which the queries are multiplied.
        documents: which tokens belong to the same document; None is one document.
        bonus: [K], the weight of the token's own product of query and key; a token then reads before it
            writes. None is no bonus.
    """
    size, exclusive = len(g), bonus is not None
    i, j = iota(size, size, 0), iota(size, size, 1)
    chunk = chunk_forward(q, k, g, scale=scale, documents=documents, bonus=bonus)
    dv = dot(chunk.scores, d_out, "tn") + dot(chunk.written, d_memory)
    d_start = chunk.chunk_decay[:, None] * d_memory + dot(chunk.read, d_out, "tn")

    # A symmetric matrix: dP on and below the diagonal, its transpose above.
    weights = scale * jnp.where(i >= j, dot(d_out, v, "nt"), dot(v, d_out, "nt"))
    if documents is not None:
        weights = jnp.where(documents.same, weights, 0)
    dq, dk, current = scores_backward(weights, q, k, g, exclusive)
    read_decay, write_decay = factor(g, size, True, exclusive), factor(g, size, False)
    if documents is not None:
        read_decay, write_decay = read_decay * documents.enters, write_decay * documents.stays
    dq += scale * read_decay * dot(d_out, memory, "nt")
    dk_write = write_decay * dot(v, d_memory, "nt")

    dg = dot(((j > i) if exclusive else (j >= i)).astype(jnp.float32), q * dq)
    dg -= dot((j >= i).astype(jnp.float32), k * dk)
    dg += dot((j < i).astype(jnp.float32), k * dk_write)
    dg += chunk.chunk_decay * jnp.sum(memory * d_memory, axis=1)
    factors = 1 if bonus is None else bonus
    d_bonus = jnp.sum(q * k * current, axis=0) * (bonus is not None)
    dq, dk = dq + factors * current * k, dk + dk_write + factors * current * q
    return Gradient(dq, dk, dv, dg, d_start, d_bonus)


def scores_backward(weights, q, k, g, exclusive: bool = False):
    """Given `weights`, the gradient dP of a chunk's decayed scores [C, C] before their scaling, return the gradients of q and k [C, K]
    that come from entries of the scores off the diagonal, and the diagonal of dP [C, 1], which the caller applies.

    `weights` is symmetric: dP on and below the diagonal, its transpose above. g [C, K] is the log decay; if `exclusive`, a token reads
    before its own decay.
    """
    size = len(g)
    i, j = iota(size, size, 0), iota(size, size, 1)
    dq, dk = jnp.zeros_like(q), jnp.zeros_like(k)
    for half in levels(size):
        factors = factor(g, half, exclusive=exclusive)
        x = where_later(half, q, k) * factors
        dx = dot(jnp.where(is_pair(i, j, half), weights, 0), x) * factors
        dq += where_later(half, dx, jnp.zeros_like(dx))
        dk += where_later(half, jnp.zeros_like(dx), dx)
    return dq, dk, jnp.sum(jnp.where(i == j, weights, 0), axis=1, keepdims=True)
