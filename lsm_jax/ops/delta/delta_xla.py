"""Compute `delta_memory` by XLA in three forms: recurrent (token by token), by chunks, and by an associative
scan over chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import (
    associate_chunks,
    per_chunk,
    run_masks,
    scan_chunks,
    scan_tokens,
)
from lsm_jax.ops.core.decays import (
    Halving,
    channel_scores,
    forget,
    halve,
    inverse_unit_lower,
    pairwise_decay,
    spread_constant,
)
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.states import DeltaState
from lsm_jax.ops.delta.options import MatrixOptions


class _Inputs(NamedTuple):
    """The arrays of `delta_memory`, split by head: queries q [..., G, R, K], keys k [..., G, K], values v [..., G, V],
    write strengths beta [..., G], and at most one log decay.
    """

    q: Array
    k: Array
    v: Array
    beta: Array
    decay: Array | None
    key_decay: Array | None


def by_xla(
    options: MatrixOptions,
    q,
    k,
    v,
    beta,
    log_decay,
    state,
    segment_ids,
    update_mask,
    constant_log_decay,
):
    """Compute `delta_memory` by XLA in the form that `options` says; return the output [B, T, H, V] in v's dtype and
    the state after the last token.
    """
    batch, length, heads, _ = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    log_decay = spread_constant(log_decay, constant_log_decay, tokens, v, dtype)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    log_decay = prepare(log_decay)
    by_channel = log_decay is not None and log_decay.ndim == 4
    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
        k=prepare(checks.spread_keys(k, heads)),
        v=prepare(v),
        beta=prepare(beta),
        decay=None if by_channel else log_decay,
        key_decay=log_decay if by_channel else None,
    )
    memory = state.memory.astype(dtype)
    if options.form == "recurrent":
        step = functools.partial(_step, options.erase)
        output, memory = scan_tokens(step, inputs, memory, tokens.run, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        output, memory = _chunked(inputs, memory, chunks, options)
        output = chunks.join(output, length)
    output = output.reshape(batch, length, -1, output.shape[-1])
    return finish_output(tokens, output).astype(v.dtype), DeltaState(memory, tokens.last_id)


def _step(erase: str, memory: Array, x: _Inputs) -> tuple[Array, Array]:
    def at_key(memory):
        return jnp.sum(x.k[..., None] * memory, axis=-2)

    held = at_key(memory) if erase == "undecayed" else None
    if x.decay is not None:
        memory = forget(memory, x.decay[..., None, None])
    if x.key_decay is not None:
        memory = forget(memory, x.key_decay[..., None])
    held = at_key(memory) if held is None else held
    memory = memory + x.k[..., None] * (x.beta[..., None] * (x.v - held))[..., None, :]
    return memory, jnp.sum(x.q[..., None] * memory[:, :, None], axis=-2)


def _chunked(inputs: _Inputs, memory, chunks: Chunks, options: MatrixOptions):
    """Return the output [B, N, C, G, R, V] and the final memory of `delta_memory`, computed by chunks, from
    inputs [B, T, ...].

    Inside a chunk the writes U solve `(I + L) U = β (V - K̃ M)`. L contains the decayed products of a key
    with earlier keys, weighted by β (the WY representation of DeltaNet as a linear system); V are the values,
    K̃ the keys decayed from the chunk's start, and M the memory that the chunk starts from. With `erase`
    "undecayed", the decays of L and K̃ end before the token of their row.
    """
    precision = options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)
    queries = x.q.shape[3]

    # Decayed products of keys with keys, and of queries with keys: [B, N, G, R + 1, C, C].
    rows = jnp.concatenate([x.q, x.k[:, :, :, None]], axis=3)
    if x.key_decay is not None:
        halving = _halve_by_row(x.key_decay, queries, options.erase)
        keys = x.k[:, :, :, None]
        scores = channel_scores(rows, keys, halving, jnp.sum(rows * keys, axis=-1), precision)
    else:
        scores = jnp.einsum("bngrik,bngjk->bngrij", rows, x.k, precision=precision)
        scores = jnp.tril(scores)
        if x.decay is None:
            halving = None
        else:
            halving = _halve_by_row(x.decay[..., None], queries, options.erase)
            scores = scores * pairwise_decay(halving)
    if same is not None:
        scores = jnp.where(same[:, :, None, None], scores, 0)
    beta = x.beta[..., None]
    inverse = inverse_unit_lower(jnp.tril(beta * scores[:, :, :, queries], -1))

    # The chunk as one update: U = new - erase M.
    read, written_keys, kept = rows, x.k, jnp.ones((1, 1, 1, 1, 1), x.k.dtype)
    if halving is not None:
        read = read * jnp.exp(halving.prefix)
        written_keys = written_keys * jnp.exp(halving.suffix)
        kept = jnp.exp(halving.total)[..., None]
    if same is not None:
        read = jnp.where(enters[:, :, None, None, :, None], read, 0)
        written_keys = jnp.where(stays[:, :, None, :, None], written_keys, 0)
        kept = jnp.where(per_chunk(enters[:, :, -1], kept), kept, 0)
    kept = jnp.broadcast_to(kept, (*x.k.shape[:2], *kept.shape[2:]))
    erase = jnp.matmul(inverse, beta * read[:, :, :, queries], precision=precision)
    new = jnp.matmul(inverse, beta * x.v, precision=precision)

    if options.form == "chunk":

        def update(m, chunk):
            kept, keys, new, erase = chunk
            writes = new - jnp.matmul(erase, m, precision=precision)
            return kept * m + jnp.einsum("bgck,bgcv->bgkv", keys, writes, precision=precision)

        arrays = (kept, written_keys, new, erase)
        entering, memory = scan_chunks(update, arrays, memory, chunks)
    else:
        identity = jnp.eye(x.k.shape[-1], dtype=x.k.dtype)
        erased = jnp.einsum("bngck,bngcl->bngkl", written_keys, erase, precision=precision)
        transition = kept * identity - erased
        write = jnp.einsum("bngck,bngcv->bngkv", written_keys, new, precision=precision)

        def product(a, b):
            return jnp.matmul(a, b, precision=precision)

        entering, memory = associate_chunks(product, product, transition, write, memory, chunks)

    writes = new - jnp.matmul(erase, entering, precision=precision)
    output = jnp.einsum(
        "bngrck,bngkv->bngrcv", read[:, :, :, :queries], entering, precision=precision
    )
    output = output + jnp.einsum(
        "bngrij,bngjv->bngriv", scores[:, :, :, :queries], writes, precision=precision
    )
    return jnp.moveaxis(output, -2, 2), memory


def _halve_by_row(log_decay: Array, queries: int, erase: str) -> Halving:
    """Return the sums of a chunk's log decay [B, N, G, C, K], those up to a token with an axis of the vectors that read
    the memory: the token's queries and, last, its key. The axis has size 1 if all read the decayed memory.
    """
    halving = halve(log_decay)

    def by_row(after, before):
        after = after[:, :, :, None]
        if before is None:
            return after
        return jnp.concatenate([jnp.repeat(after, queries, 3), before[:, :, :, None]], axis=3)

    before = halve(log_decay, exclusive=True) if erase == "undecayed" else None
    ahead = [None] * len(halving.levels) if before is None else [p for p, _ in before.levels]
    levels = tuple(
        (by_row(p, b), s[:, :, :, None]) for (p, s), b in zip(halving.levels, ahead, strict=True)
    )
    prefix = by_row(halving.prefix, None if before is None else before.prefix)
    return halving._replace(levels=levels, prefix=prefix)
