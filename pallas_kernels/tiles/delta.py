"""The mathematics of one chunk of the delta rule with no decay or a scalar one, on two-dimensional tiles.

A chunk of C tokens moves the memory S [K, V] by `S_t = (I - beta_t k_tᵀ k_t) e^{g_t} S_{t-1} + beta_t k_tᵀ v_t`,
`o_t = scale q_t S_t` (DeltaNet, arXiv 2406.06484; Gated DeltaNet, 2412.06464, Eq. 10). With b the inclusive sums of g over the chunk,
G_ij = e^(b_i - b_j) where i >= j belong to one document, else 0, and x_i the error of token i (its value less what the memory has at
its key), all x solve one triangular system:

    N = (G ⊙ k kᵀ) below its diagonal        X = (I + N diag(beta))⁻¹        P = scale G ⊙ q kᵀ
    x = X (v - e^b ⊙ (k S))                  O = scale e^b ⊙ (q S) + P (beta ⊙ x)
    S' = e^b_C S + kᵀ (e^(b_C - b) ⊙ beta ⊙ x)

(beta multiplies the columns of N, so that nothing is divided by it.) X and P depend on no memory: `chunk_forward` computes all chunks
in parallel. `scan_forward` then computes one chunk after another. From the last chunk to the first, `scan_backward` carries dS, the
gradient of the memory:

    du = Pᵀ dO + e^(b_C - b) ⊙ (k dS')       dv = Xᵀ (beta ⊙ du)
    dS = e^b_C dS' + (scale e^b ⊙ q)ᵀ dO - (e^b ⊙ k)ᵀ dv

and `chunk_backward` computes the other gradients, again for all chunks in parallel, from A = scale G ⊙ (dO uᵀ), E = -(G ⊙ dv uᵀ) below
its diagonal, and u = beta ⊙ x:

    dq = A k + scale e^b ⊙ (dO Sᵀ)           dk = Aᵀ q + (E + Eᵀ) k - e^b ⊙ (dv Sᵀ) + e^(b_C - b) ⊙ (u dS'ᵀ)
    beta ⊙ dbeta = column sums of (q kᵀ ⊙ A + k kᵀ ⊙ E) + e^(b_C - b) k · (u dS'ᵀ) = x · dv

A log decay g_l is a term of b_i - b_j for j < l <= i, of b_i for l <= i, of b_C - b_j for j < l, and of b_C, so that its gradient
requires no further product. Documents zero e^b where they begin inside the chunk, e^(b_C - b) where they end in it, and e^b_C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_NEVER = -1e30
_FLOOR = -128.0  # e^-128 is 0 in float32


class Chunk(NamedTuple):
    """The decay factors of one chunk of C tokens, and the mask of the tokens that read each other. b are the
    inclusive sums of the log decay over the chunk, b_C the sum over all of it.

    Attributes:
        weights: [C, C], G: e^(b_i - b_j) where token i reads token j, else 0.
        read_decay: [C, 1], e^b, the decay of the memory from the chunk's start to each token's read; 0 for
            tokens of documents that begin in the chunk.
        write_decay: [C, 1], e^(b_C - b), the decay of each token's write up to the chunk's end; 0 for tokens
            of documents that end before the chunk's last token.
        chunk_decay: [1, 1], e^b_C, the decay of the memory over the whole chunk.
        seen: [C, C] bool, whether token i reads token j: i >= j, in one document.
    """

    weights: jax.Array
    read_decay: jax.Array
    write_decay: jax.Array
    chunk_decay: jax.Array
    seen: jax.Array


class Gradients(NamedTuple):
    """The gradients of a chunk's queries and keys [C, K], write strengths beta [C] and log decays [C], from `chunk_backward`."""

    q: jax.Array
    k: jax.Array
    beta: jax.Array
    log_decay: jax.Array


def read_chunk(log_decay: jax.Array, run: jax.Array, before: jax.Array) -> Chunk:
    """Compute a chunk's decay factors, and its mask of the tokens that read each other, as a `Chunk`.

    Args:
        log_decay: [C], the log decay of each token.
        run: [C], the number of each token's document.
        before: the number of the document of the last token before the chunk.
    """
    i, j = _indices(len(log_decay))
    log_decay = jnp.maximum(log_decay, _FLOOR)
    seen = (i >= j) & (run[:, None] == run)
    sums = jnp.cumsum(log_decay)[:, None]
    after = jnp.sum(jnp.where(j > i, log_decay, 0), axis=1, keepdims=True)
    read_decay = jnp.exp(jnp.where((run == before)[:, None], sums, _NEVER))
    write_decay = jnp.exp(jnp.where((run == run[-1])[:, None], after, _NEVER))
    weights = jnp.exp(jnp.where(seen, sums - sums.T, _NEVER))
    return Chunk(weights, read_decay, write_decay, read_decay[-1:], seen)


def unit_inverse(
    strict: Any,
    apart: Any,
    product: Callable[[Any, Any], Any],
    exact: Callable[[Any, Any], Any],
) -> Any:
    """Return the inverse `(I + strict)⁻¹` of a chunk's triangular system, for a strictly lower triangular matrix [C, C], C a power of two.

    Blocks on the diagonal of 1, 2, 4, ... rows are inverted, one size after another: `X - X S X`, with S the part of `strict` between the
    two halves of a block, inverts the blocks of twice the size. Unlike powers of `strict`, it is never larger than the inverse, however
    similar the keys are. A Newton step at the end squares the error of products in 16 bits.

    Args:
        strict: [C, C], the system without its unit diagonal; 0 on and above the diagonal.
        apart: [C, C] integers, `i ^ j` of the entry's row index i and column index j.
        product: returns the matrix product of two matrices [C, C].
        exact: returns its second argument rounded as `product` rounds operands, and the matrix product of the first argument, which is
            not rounded, with it.
    """
    x = jnp.where(apart == 0, 1.0, 0.0) - jnp.where(apart == 1, strict, 0.0)
    size = 2
    while size < strict.shape[-1]:
        between = jnp.where((apart >= size) & (apart < 2 * size), strict, 0.0)
        x = x - product(product(x, between), x)
        size *= 2
    rounded, left = exact(strict, x)
    return rounded + product(rounded, jnp.where(apart == 0, 1.0, 0.0) - rounded - left)


def chunk_forward(q, k, beta, chunk: Chunk, scale: float) -> tuple[jax.Array, jax.Array]:
    """Compute the two matrices [C, C] of a chunk of the delta rule that depend on no memory: X, the inverse
    of its triangular system, and P, the decayed and scaled scores of queries and keys. All chunks can be
    computed in parallel.

    Args:
        q: [C, K], the queries.
        k: [C, K], the keys.
        beta: [C], the write strength of each token.
        chunk: the chunk's decay factors.
        scale: the factor by which the queries are multiplied.
    """
    i, j = _indices(len(k))
    strict = jnp.where(i > j, k @ k.T * chunk.weights, 0)
    inverse = unit_inverse(strict * beta, i ^ j, jnp.matmul, lambda a, b: (b, a @ b))
    return inverse, q @ k.T * chunk.weights * scale


def scan_forward(q, k, v, beta, memory, inverse, scores, chunk: Chunk, scale: float):
    """Compute one chunk of the delta rule from the memory before it: return the output [C, V], the tokens'
    errors [C, V] (each token's value less what the memory returns for its key), and the memory after the
    chunk [K, V].

    Args:
        q: [C, K], the queries.
        k: [C, K], the keys.
        v: [C, V], the values.
        beta: [C], the write strength of each token.
        memory: [K, V], the memory before the chunk.
        inverse: [C, C], the inverse of the chunk's triangular system, from `chunk_forward`.
        scores: [C, C], the decayed and scaled scores of queries and keys, from `chunk_forward`.
        chunk: the chunk's decay factors.
        scale: the factor by which the queries are multiplied.
    """
    missing = inverse @ (v - chunk.read_decay * (k @ memory))
    writes = beta[:, None] * missing
    out = scale * chunk.read_decay * (q @ memory) + scores @ writes
    return out, missing, chunk.chunk_decay * memory + k.T @ (chunk.write_decay * writes)


def scan_backward(q, k, beta, d_out, d_memory, inverse, scores, chunk: Chunk, scale: float):
    """Compute the gradients of a chunk's values [C, V] and of the memory before the chunk [K, V] by the delta
    rule, from those of the chunk's output and of the memory after it.

    Args:
        q: [C, K], the queries.
        k: [C, K], the keys.
        beta: [C], the write strength of each token.
        d_out: [C, V], the gradient of the output.
        d_memory: [K, V], the gradient of the memory after the chunk.
        inverse: [C, C], the inverse of the chunk's triangular system, from `chunk_forward`.
        scores: [C, C], the decayed and scaled scores of queries and keys, from `chunk_forward`.
        chunk: the chunk's decay factors.
        scale: the factor by which the queries are multiplied.
    """
    d_writes = scores.T @ d_out + chunk.write_decay * (k @ d_memory)
    dv = inverse.T @ (beta[:, None] * d_writes)
    entering = (scale * chunk.read_decay * q).T @ d_out - (chunk.read_decay * k).T @ dv
    return dv, chunk.chunk_decay * d_memory + entering


def chunk_backward(q, k, beta, missing, d_out, dv, memory, d_memory, chunk: Chunk, scale: float):
    """Compute the gradients of a chunk's queries, keys, beta and log decays by the delta rule, from the
    results of `scan_forward` and `scan_backward`; all chunks can be computed in parallel.

    Args:
        q: [C, K], the queries.
        k: [C, K], the keys.
        beta: [C], the write strength of each token.
        missing: [C, V], the tokens' errors, from `scan_forward`.
        d_out: [C, V], the gradient of the output.
        dv: [C, V], the gradient of the values, from `scan_backward`.
        memory: [K, V], the memory before the chunk.
        d_memory: [K, V], the gradient of the memory after the chunk.
        chunk: the chunk's decay factors and mask.
        scale: the factor by which the queries are multiplied.
    """
    i, j = _indices(len(k))
    scores, alike = q @ k.T, k @ k.T
    # A and E without beta, so that nothing is divided by it.
    pairs = chunk.weights * scale * (d_out @ missing.T)
    erased = jnp.where(i > j, -chunk.weights * (dv @ missing.T), 0)
    read = scale * chunk.read_decay * (d_out @ memory.T)
    erase = chunk.read_decay * (dv @ memory.T)
    write = chunk.write_decay * (missing @ d_memory.T)
    products = scores * pairs + alike * erased
    written = jnp.sum(k * write, axis=1)
    d_beta = jnp.sum(products, axis=0) + written

    pairs, erased, write = pairs * beta, erased * beta, write * beta[:, None]
    dq = read + pairs @ k
    dk = pairs.T @ q + erased @ k + erased.T @ k - erase + write
    products = jnp.where(i > j, products * beta, 0)
    later = jnp.sum(products, axis=1) - jnp.sum(products, axis=0)
    later += jnp.sum(q * read - k * erase, axis=1)
    total = chunk.chunk_decay[0, 0] * jnp.sum(memory * d_memory)
    d_decay = jnp.sum(jnp.where(chunk.seen, later[:, None], 0), axis=0)
    d_decay += jnp.sum(jnp.where(i < j, (beta * written)[:, None], 0), axis=0) + total
    return Gradients(dq, dk, d_beta, d_decay)


def _indices(size: int) -> tuple[jax.Array, jax.Array]:
    """Return two tiles [size, size] int32, for masks over pairs of tokens: the row index of each entry, and the column index of each
    entry.
    """
    i = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return i, i.T
