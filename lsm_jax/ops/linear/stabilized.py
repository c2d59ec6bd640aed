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

    live = chunks.split(written)[:, :, None]  # empty places do not write either
    x = jax.tree.map(lambda x: _by_head(x, chunks), x)
    gate = jnp.where(live, x.gate, NEVER)
    decays = _decays(x.decay, gate, chunks)
    entering_m, leaving_m, m, stabilizer = _stabilizers(decays, stabilizer, chunks, form)
    allowed, prefix, suffix, total, between, _, _ = decays

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


def stabilizers(decay: Array, gate: Array, initial: Array, chunks: Chunks) -> tuple[Array, Array]:
    """Return the stabilisers m of all tokens [B, T, G], and the final one [B, G], by an associative scan over chunks.

    `decay` and `gate` [B, T, G] are the logarithms of the decay and of the input gate, 0 and `NEVER` at tokens that write nothing, and `initial`
    [B, G] is the stabiliser before the first token. `chunks` is a layout of tokens in their order.
    """
    length = gate.shape[1]
    real = chunks.split(jnp.ones(gate.shape[:2], bool))[:, :, None]
    decay, gate = (_by_head(x, chunks) for x in (decay, gate))
    decays = _decays(decay, jnp.where(real, gate, NEVER), chunks)
    _, _, m, final = _stabilizers(decays, initial, chunks, "associative")
    return chunks.join(jnp.moveaxis(m, -1, 2), length), final


class _Decays(NamedTuple):
    """The log decays of chunks [B, N, G, ...], and the candidates for the stabiliser.

    Attributes:
        allowed: [C, C] or [B, N, 1, C, C], whether token i reads token j.
        prefix: [B, N, G, C], of the memory before the chunk at each token.
        suffix: [B, N, G, C], of each token's write after the chunk.
        total: [B, N, G], of the memory before the chunk after it.
        between: [B, N, G, C, C], of token j's write at token i.
        top: [B, N, G, C], the candidate of each token.
        highest: [B, N, G], that of the chunk's tokens after it.
    """

    allowed: Array
    prefix: Array
    suffix: Array
    total: Array
    between: Array
    top: Array
    highest: Array


def _by_head(x: Array, chunks: Chunks) -> Array:
    """Return x [B, T, G, ..., *] in chunks by head, [B, N, G, ..., C, *]."""
    x = jnp.moveaxis(chunks.split(x), 2, 3)
    return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)


def _decays(decay: Array, gate: Array, chunks: Chunks) -> _Decays:
    """Return what log decays and log input gates [B, N, G, C] of chunks add up to."""
    same, enters, stays = run_masks(chunks)
    allowed = jnp.tri(chunks.size, dtype=bool)
    halving = halve(decay[..., None])
    prefix, suffix, total = halving.prefix[..., 0], halving.suffix[..., 0], halving.total[..., 0]
    top = gate  # the candidates for the stabiliser
    if chunks.run is not None:
        allowed = allowed & same[:, :, None]
        prefix = jnp.where(enters[:, :, None], prefix, NEVER)
        suffix = jnp.where(stays[:, :, None], suffix, NEVER)
        total = jnp.where(enters[:, :, None, -1], total, NEVER)
        top = jnp.where(_begins(chunks.run)[:, :, None], jnp.maximum(gate, decay), gate)
    between = jnp.where(allowed, pairwise_log_decay(halving), NEVER)
    return _Decays(allowed, prefix, suffix, total, between, top, _largest(suffix + top))


def _stabilizers(
    decays: _Decays, initial: Array, chunks: Chunks, form: str
) -> tuple[Array, Array, Array, Array]:
    """Return the stabiliser that each chunk starts from and the one after it [B, N, G], that of each token [B, N, G, C], and the final one."""
    total, highest = decays.total, decays.highest
    if form == "chunk":
        entering, final = fold_chunks(
            jnp.add, jnp.add, total, highest, initial, chunks, add=jnp.maximum
        )
    else:
        entering, final = associate_chunks(
            jnp.add, jnp.add, total, highest, initial, chunks, add=jnp.maximum, zero=NEVER
        )
    leaving = jnp.maximum(total + entering, highest)
    if chunks.slot is None:  # equal to the bit to what the next chunk starts from
        leaving = jnp.concatenate([entering[:, 1:], final[:, None]], axis=1)
    m = _largest(decays.between + decays.top[..., None, :])
    return entering, leaving, jnp.maximum(decays.prefix + entering[..., None], m), final


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
