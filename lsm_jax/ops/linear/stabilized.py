"""Memories with exponential input gates, `C_t = f_t C_{t-1} + i_t k_tᵀ v_t` with i of any size, stored scaled
(mLSTM).

The stored memory is `M = e^-m C` with the stabiliser `m_t = max(log f_t + m_{t-1}, log i_t)` (xLSTM, arXiv
2405.04517 Eqs. 15 and 19-21), and m = 0 before the first token as in the authors' code. m does not depend on
the memory, so that the chunkwise forms compute it first, by a scan over (max, +). Every factor of a memory, a
key or a score is then the exponential of a number of at most 0, in which decays are added and never
subtracted; the factors of token t do not depend on later tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.core.chunk_scans import (
    associate_chunks,
    fold_chunks,
    run_masks,
    scan_tokens,
)
from lsm_jax.ops.core.decays import halve, pairwise_log_decay
from lsm_jax.ops.core.segments import Chunks, Tokens

NEVER = -1e30
"""The logarithm of a closed gate: finite, so that differences are finite."""


class Gated(NamedTuple):
    """The arrays of `linear_memory` with exponential gates, split by head: queries q [B, T, G, R, K], keys k [B, T, G,
    K], values v [B, T, G, V]; the logarithms of the decay and of the input gate [B, T, G].
    """

    q: Array
    k: Array
    v: Array
    decay: Array
    gate: Array


def normalized(
    output: Float[Array, "... V"], product: Float[Array, "... 1"], m: Float[Array, "... 1"], eps
) -> Array:
    """Return the normalised output of a stabilised memory (mLSTM), `output / (max(|product|, e^-m) + eps)`,
    where `output` is q M, `product` is the query's product with the stored normaliser, and m is the
    stabiliser.

    If m < 0, numerator and denominator are multiplied by e^m, so that nothing overflows.
    """
    scale = jnp.exp(jnp.minimum(m, 0))
    floor = jnp.exp(-jnp.maximum(m, 0))
    return scale * output / (jnp.maximum(scale * jnp.abs(product), floor) + eps * scale)


def by_token(x: Gated, memory: Array, stabilizer: Array, tokens: Tokens):
    """Compute memories with exponential gates (mLSTM) token by token. Return the output [B, T, G, R, V], the
    stabiliser m after each token [B, T, G], the final memory and the final stabiliser.
    """

    def step(state, x: Gated):
        memory, before = state
        m = jnp.maximum(x.decay + before, x.gate)
        kept, gained = jnp.exp(x.decay + (before - m)), jnp.exp(x.gate - m)
        write = x.k[..., :, None] * (gained[..., None] * x.v)[..., None, :]
        memory = kept[..., None, None] * memory + write
        return (memory, m), (jnp.sum(x.q[..., None] * memory[:, :, None], axis=-2), m)

    (output, m), (memory, stabilizer) = scan_tokens(
        step, x, (memory, stabilizer), tokens.run, tokens.slot
    )
    return output, m, memory, stabilizer


def by_chunk(
    x: Gated, written: Array, memory: Array, stabilizer: Array, chunks: Chunks, form: str, precision
):
    """Compute memories with exponential gates (mLSTM) by chunks.

    Args:
        x: the queries, keys, values and gates of all tokens.
        written: [B, T], False if the token's update is the identity.
        memory: the initial memory, stored divided by the exponential of its stabiliser.
        stabilizer: the initial stabiliser.
        chunks: the layout of tokens in chunks.
        form: "chunk" or "associative".
        precision: the precision of matrix products.

    Returns:
        The outputs and the stabilisers m of the tokens, in N chunks of C tokens: [B, N, C, G, R, V] and
        [B, N, C, G]; the final memory; and the final stabiliser.
    """

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    live = chunks.split(written)[:, :, None]  # empty places do not write either
    x = jax.tree.map(by_head, x)
    gate = jnp.where(live, x.gate, NEVER)
    same, enters, stays = run_masks(chunks)
    allowed = jnp.tri(chunks.size, dtype=bool)
    halving = halve(x.decay[..., None])
    prefix, suffix, total = halving.prefix[..., 0], halving.suffix[..., 0], halving.total[..., 0]
    top = gate  # the candidates for the stabiliser
    if chunks.run is not None:
        allowed = allowed & same[:, :, None]
        prefix = jnp.where(enters[:, :, None], prefix, NEVER)
        suffix = jnp.where(stays[:, :, None], suffix, NEVER)
        total = jnp.where(enters[:, :, None, -1], total, NEVER)
        top = jnp.where(_begins(chunks.run)[:, :, None], jnp.maximum(gate, x.decay), gate)
    between = jnp.where(allowed, pairwise_log_decay(halving), NEVER)

    # The stabiliser that each chunk starts from, then that of each row.
    highest = _largest(suffix + top)
    if form == "chunk":
        entering_m, stabilizer = fold_chunks(
            jnp.add, jnp.add, total, highest, stabilizer, chunks, add=jnp.maximum
        )
    else:
        entering_m, stabilizer = associate_chunks(
            jnp.add, jnp.add, total, highest, stabilizer, chunks, add=jnp.maximum, zero=NEVER
        )
    leaving_m = jnp.maximum(total + entering_m, highest)
    if chunks.slot is None:  # equal to the bit to what the next chunk starts from
        leaving_m = jnp.concatenate([entering_m[:, 1:], stabilizer[:, None]], axis=1)
    m = _largest(between + top[..., None, :])
    m = jnp.maximum(prefix + entering_m[..., None], m)

    scores = jnp.einsum("bngrik,bngjk->bngrij", x.q, x.k, precision=precision)
    scores = jnp.where(allowed[..., None, :, :], scores, 0)
    weights = jnp.exp(between + (gate[..., None, :] - m[..., None]))
    output = jnp.einsum(
        "bngrij,bngjv->bngriv", scores * weights[:, :, :, None], x.v, precision=precision
    )

    read = x.q * jnp.exp(prefix + (entering_m[..., None] - m))[:, :, :, None, :, None]
    keys = x.k * jnp.exp(suffix + (gate - leaving_m[..., None]))[..., None]
    write = jnp.einsum("bngck,bngcv->bngkv", keys, x.v, precision=precision)
    kept = jnp.exp(total + (entering_m - leaving_m))[..., None, None]
    entering, memory = _apply(form, kept, write, memory, chunks)
    output = output + jnp.einsum("bngrck,bngkv->bngrcv", read, entering, precision=precision)
    return jnp.moveaxis(output, -2, 2), jnp.moveaxis(m, -1, 2), memory, stabilizer


def _apply(form: str, kept: Array, write: Array, memory: Array, chunks: Chunks) -> Any:
    scan = fold_chunks if form == "chunk" else associate_chunks
    return scan(jnp.multiply, jnp.multiply, kept, write, memory, chunks)


def _largest(x: Array) -> Array:
    """Return the largest entry of x along the last axis; its gradient goes to one entry only, the first of the largest.

    The derivative of `jnp.max` compares x with its maximum. If the compiler computes x twice with different
    rounding, no entry equals the maximum, and the derivative divides by zero.
    """
    place = jnp.argmax(jax.lax.stop_gradient(x), axis=-1, keepdims=True)
    return jnp.take_along_axis(x, place, axis=-1)[..., 0]


def _begins(run: Array) -> Array:
    """Return which tokens are the first of a document that begins in this call, [B, N, C]: the stabiliser
    starts from 0 there. `run` [B, N, C] numbers the documents.
    """
    flat = run.reshape(run.shape[0], -1)
    begins = jnp.diff(flat, axis=1, prepend=jnp.zeros_like(flat[:, :1])) > 0
    return begins.reshape(run.shape)
