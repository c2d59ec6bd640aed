"""Compute `log_linear_memory` by XLA in two forms: recurrent (token by token), and by chunks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import per_chunk, run_masks, scan_chunks, scan_tokens
from lsm_jax.ops.core.decays import forget, halve, inverse_unit_lower, pairwise_decay
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.log_linear.entering import entering_memories
from lsm_jax.ops.log_linear.levels import (
    level_between,
    levels_of_rows,
    merge_levels,
    positions_of,
)
from lsm_jax.ops.log_linear.state import LogLinearState


class Options(NamedTuple):
    """The options of `log_linear_memory` that are constant when a program is compiled.

    Attributes:
        scale: multiplies the queries.
        form: "recurrent" or "chunk", how the op is computed.
        size: tokens in a chunk.
        dtype: the dtype of the state and of all sums.
        precision: the precision of matrix products.
        fresh: whether each row begins with an empty state, at position 0.
    """

    scale: float
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision
    fresh: bool


class _Inputs(NamedTuple):
    """The arrays of `log_linear_memory`, split by head: queries q [..., G, R, K], keys k [..., G, K], values v
    [..., G, V], level scales [..., G, R, L], and write strengths beta and log decays [..., G] or None.
    """

    q: Array
    k: Array
    v: Array
    scales: Array
    beta: Array | None
    decay: Array | None


class _Chunk(NamedTuple):
    """One chunk as an update of the memories of all levels, of which it drops the earlier document's if one begins.

    Attributes:
        kept: [B, N, G, 1, 1], the decay of what was before.
        erasing: [B, N, G, C, K], the WY form's rows that read what is erased; None without beta.
        decayed_keys: [B, N, G, C, K], keys decayed to the chunk's end, at which it is erased; None without beta.
        writing: [B, N, G, C, K], each token's value is written to this key.
        v: [B, N, G, C, V].
    """

    kept: Array
    erasing: Array | None
    decayed_keys: Array | None
    writing: Array
    v: Array


def run_xla(
    options: Options,
    q,
    k,
    v,
    level_scales,
    beta,
    log_decay,
    state: LogLinearState,
    segment_ids,
    update_mask,
) -> tuple[Array, LogLinearState]:
    """Compute `log_linear_memory` by XLA on one device: return the output [B, T, H, V] in v's dtype and the state after
    the last token.
    """
    batch, length, heads, _ = v.shape
    dtype, levels = options.dtype, level_scales.shape[-1]
    filled = levels_of_rows(length, levels) if options.fresh else levels
    num_segments = state.position.shape[1] if state.position.ndim == 2 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    before, after, count = positions_of(tokens, batch, length, state.position)
    # Positions of rows without documents are constants, and XLA would compute the levels of all pairs as it compiles.
    before, after = jax.lax.optimization_barrier((before, after))

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
        k=prepare(checks.spread_keys(k, heads)),
        v=prepare(v),
        scales=checks.group_queries(
            select(tokens.real, level_scales[..., :filled]).astype(dtype), heads
        ),
        beta=prepare(beta),
        decay=prepare(log_decay),
    )
    memory = state.memory[..., :filled, :, :].astype(dtype)
    if options.form == "recurrent":
        merged = level_between(after, before, levels)
        output, memory = scan_tokens(_step, (inputs, merged), memory, tokens.run, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        aligned = options.fresh and segment_ids is None and update_mask is None
        output, memory = _chunked(inputs, before, after, memory, chunks, options, aligned)
        output = chunks.join(output, length)
    memory = _pad_levels(memory, after=levels - filled)
    output = output.reshape(batch, length, -1, output.shape[-1])
    output = finish_output(tokens, output).astype(v.dtype)
    return output, LogLinearState(memory, count, tokens.last_id)


def _step(memory: Array, inputs: tuple[_Inputs, Array]) -> tuple[Array, Array]:
    """Apply one token to the memories [B, G, L, K, V]; return them, and the output [B, G, R, V]."""
    x, level = inputs
    memory = merge_levels(memory, per_chunk(level, memory), -3)
    v = x.v
    if x.decay is not None:
        memory = forget(memory, x.decay[..., None, None, None])
    if x.beta is not None:
        held = jnp.sum(x.k[..., None, :, None] * memory, axis=-2)
        erased = x.k[..., None, :, None] * (x.beta[..., None, None] * held)[..., None, :]
        memory, v = memory - erased, x.beta[..., None] * v
    memory = memory.at[:, :, 0].add(x.k[..., None] * v[..., None, :])
    read = jnp.sum(x.q[..., None, :, None] * memory[:, :, None], axis=-2)  # [B, G, R, L, V]
    return memory, jnp.sum(x.scales[..., None] * read, axis=-2)


def _chunked(
    inputs: _Inputs, before, after, memory, chunks: Chunks, options: Options, aligned: bool
):
    """Return the output [B, N, C, G, R, V] and the final memories, computed by chunks, from inputs [B, T, ...] and the
    positions of tokens.

    The highest bits in which positions differ are ultrametric: between tokens of two chunks the level is the maximum of
    those from each to the position between the chunks. So the memories that a chunk starts from are read with the scales
    of max(level, level of the token's own distance to the chunk's start).

    If every chunk begins at a multiple of its size (`aligned`), no token reads those of lower levels apart, and one
    memory contains them all.
    """
    precision, levels = options.precision, inputs.scales.shape[-1]

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)
    weights, through, chunk = _responses(x, same, enters, stays, precision)

    before, after, used = (chunks.split(p) for p in (before, after, jnp.ones_like(after)))
    used = jnp.sum(used, axis=2, keepdims=True)
    last = jnp.take_along_axis(after, jnp.maximum(used - 1, 0), axis=2)
    first = jnp.where(used > 0, before[:, :, :1], last)
    level = level_between(last, first, levels)[..., 0], level_between(last, after, levels)
    lowest = min(options.size.bit_length(), levels - 1) if aligned else 0

    # XLA's CPU compiler misreads known zeros below, and its GPU compiler keeps the zeros of all layers for a whole step.
    memory, _ = jax.lax.optimization_barrier((memory, jax.lax.stop_gradient(x.v)))
    update = functools.partial(_update, precision)
    if chunks.slot is not None:
        # Without it, the backward pass would store what `_update` computes, several times the memories, for all chunks.
        again = jax.checkpoint(lambda m, chunk: update(m, *chunk), prevent_cse=False)
        entering, memory = scan_chunks(again, (chunk, level), memory, chunks)
    else:
        by_chunk = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (chunk, level))
        entering = memory[None]
        if chunks.count > 1:
            earlier, into = jax.tree.map(lambda x: x[:-1], by_chunk)
            into = jax.tree.map(lambda x: jnp.maximum(x, lowest) - lowest, into)
            entering = entering_memories(update, memory[:, :, lowest:], earlier, into)
            memory = _pad_levels(entering[-1], before=lowest)
            memory = jax.lax.optimization_barrier(memory)
        memory = update(memory, *jax.tree.map(lambda x: x[-1], by_chunk))
        entering = jnp.moveaxis(entering, 0, 1)

    scales = x.scales  # [B, N, G, R, C, L]
    inside = level_between(after[..., :, None], after[..., None, :], levels)  # [B, N, C, C]
    at = inside[..., None] == jnp.arange(levels)
    inside = jnp.sum(jnp.where(at[:, :, None, None], scales[..., None, :], 0), axis=-1)
    output = jnp.einsum("bngrij,bngjv->bngriv", weights * inside, x.v, precision=precision)
    if chunks.count > 1 or not options.fresh:
        start = level_between(after, first, levels)[:, :, None, None, :, None]
        start, scales = jnp.maximum(start, lowest) - lowest, scales[..., lowest:]
        index = jnp.arange(levels - lowest)
        own = jnp.sum(jnp.where(index == start, scales, 0), axis=-1, keepdims=True)
        carried = jnp.where(index >= start, scales, own)
        output = output + _read_levels(through, carried, entering, precision)
    return jnp.moveaxis(output, -2, 2), memory


def _update(precision, m: Array, chunk: _Chunk, level: tuple[Array, Array]) -> Array:
    """Apply one chunk to the memories m [B, G, L, K, V].

    `level` is the level [B] into which the chunk merges the lower ones, and that of each token's write at the chunk's
    end, [B, C].
    """
    merged, leaving = level
    kept = chunk.kept[:, :, None] * m
    if chunk.erasing is not None:
        held = jnp.einsum("bgck,bglkv->bglcv", chunk.erasing, m, precision=precision)
        kept = kept - jnp.einsum("bgck,bglcv->bglkv", chunk.decayed_keys, held, precision=precision)
    kept = merge_levels(kept, per_chunk(merged, kept), -3)
    at = jnp.arange(m.shape[2])[:, None] == leaving[:, None]  # [B, L, C]
    keys = jnp.where(at[:, None, :, :, None], chunk.writing[:, :, None], 0)
    return kept + jnp.einsum("bglck,bgcv->bglkv", keys, chunk.v, precision=precision)


def _pad_levels(memory: Array, before: int = 0, after: int = 0) -> Array:
    """Return memories [..., L, K, V] with empty ones of `before` lower and `after` higher levels."""
    return jnp.pad(memory, [(0, 0)] * (memory.ndim - 3) + [(before, after), (0, 0), (0, 0)])


@functools.partial(jax.checkpoint, static_argnums=3)
def _read_levels(through: Array, scales: Array, memory: Array, precision) -> Array:
    """Return Σ_l scales[l] · through memory[l], [B, N, G, R, C, V], of through [B, N, G, R, C, K], scales [B, N, G, R, C, L] and
    memory [B, N, G, L, K, V]; the backward pass computes the intermediate array again.

    It has an entry for each token, level and channel: of the keys, or of the values where these are fewer.
    """
    *_, levels, key_dim, value_dim = memory.shape
    if key_dim <= value_dim:
        rows = (scales[..., None] * through[..., None, :]).reshape(*through.shape[:-1], -1)
        joined = memory.reshape(*memory.shape[:3], levels * key_dim, value_dim)
        return jnp.einsum("bngrck,bngkv->bngrcv", rows, joined, precision=precision)
    read = jnp.einsum("bngrck,bnglkv->bngrclv", through, memory, precision=precision)
    return jnp.sum(scales[..., None] * read, axis=-2)


def _responses(x: _Inputs, same, enters, stays, precision) -> tuple[Array, Array, _Chunk]:
    """Return how the outputs and the final memory of each chunk depend on its values and on the memory before it, if
    all levels have the scale 1.

    Returns:
        weights [B, N, G, R, C, C], by which outputs read values; through [B, N, G, R, C, K], by which they read the
        memory before; and the chunk's update without levels.
    """
    groups = x.q.shape[3]
    rows = x.q if x.beta is None else jnp.concatenate([x.q, x.k[:, :, :, None]], axis=3)
    scores = jnp.tril(jnp.einsum("bngrik,bngjk->bngrij", rows, x.k, precision=precision))
    read, keys, kept = rows, x.k, jnp.ones((1, 1, 1, 1, 1), x.k.dtype)
    if x.decay is not None:
        halving = halve(x.decay[..., None])
        scores = scores * pairwise_decay(halving)[:, :, :, None]
        read = read * jnp.exp(halving.prefix)[:, :, :, None]
        keys = keys * jnp.exp(halving.suffix)
        kept = jnp.exp(halving.total)[..., None]
    if same is not None:
        scores = jnp.where(same[:, :, None, None], scores, 0)
        read = jnp.where(enters[:, :, None, None, :, None], read, 0)
        keys = jnp.where(stays[:, :, None, :, None], keys, 0)
        kept = jnp.where(per_chunk(enters[:, :, -1], kept), kept, 0)
    kept = jnp.broadcast_to(kept, (*x.k.shape[:3], 1, 1))
    if x.beta is None:
        return scores, read, _Chunk(kept, None, None, keys, x.v)
    beta = x.beta[..., None]
    lower = jnp.tril(beta * scores[:, :, :, groups], -1)
    solved = inverse_unit_lower(lower) * jnp.swapaxes(beta, -1, -2)  # (I + L)⁻¹ diag(β)
    erasing = jnp.matmul(solved, read[:, :, :, groups], precision=precision)
    weights = jnp.matmul(scores[:, :, :, :groups], solved[:, :, :, None], precision=precision)
    through = read[:, :, :, :groups] - jnp.matmul(
        scores[:, :, :, :groups], erasing[:, :, :, None], precision=precision
    )
    writing = jnp.matmul(jnp.swapaxes(solved, -1, -2), keys, precision=precision)
    return weights, through, _Chunk(kept, erasing, keys, writing, x.v)


register(
    "log_linear_memory",
    Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)),
)
