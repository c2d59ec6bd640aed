"""Compute `block_attention` by XLA in two forms: recurrent (token by token), and for one chunk of queries after another."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.state import AttentionState, without_free_places
from lsm_jax.ops.attention.token_positions import (
    TokenPositions,
    prepend_state,
    token_positions,
    write_tokens,
)
from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import per_chunk, scan_tokens
from lsm_jax.ops.core.segments import Tokens, finish_output, read_tokens, select


class Options(NamedTuple):
    """The options of `block_attention` that are constant when a program is compiled.

    Attributes:
        block_size: tokens in a block.
        num_blocks: the number of blocks that a query attends to, its own among them.
        scale: multiplies the scores.
        by_token: whether the form is "recurrent".
        size: queries in a chunk.
        no_state: whether the caller gave no state.
        dtype: the dtype of all sums.
        precision: the precision of matrix products.
    """

    block_size: int
    num_blocks: int
    scale: float
    by_token: bool
    size: int
    no_state: bool
    dtype: Any
    precision: jax.lax.Precision


def run_xla(
    options: Options, q, k, v, state: AttentionState, segment_ids, update_mask
) -> tuple[Array, AttentionState]:
    """Compute `block_attention` by XLA on one device: return the output [B, T, H, V] in v's dtype and the state with the
    new keys and values.
    """
    batch, length, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    positions = token_positions(tokens, state, batch, length)
    q = checks.group_queries(select(tokens.real, q).astype(options.dtype), heads)
    k, v = select(tokens.written, checks.spread_keys(k, heads)), select(tokens.written, v)
    if options.by_token:
        step = functools.partial(_step, options)
        memory = state.keys, state.values, state.count
        output, (keys, values, count) = scan_tokens(
            step, (q, k, v, positions.written), memory, tokens.run, tokens.slot
        )
        final = AttentionState(keys, values, count, tokens.last_id, None)
    else:
        output = _by_chunks(options, q, k, v, positions, tokens, state)
        final = write_tokens(state, k, v, None, positions, tokens)
    output = output.reshape(batch, length, -1, output.shape[-1])
    if not options.no_state:
        beyond = positions.rank >= state.keys.shape[-3]
        output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return finish_output(tokens, output).astype(v.dtype), without_free_places(final)


def _step(options: Options, memory: tuple, token: tuple) -> tuple[tuple, Array]:
    """Store one token's key and value in [B, C, G, ...], and attend; return them, and the output [B, G, R, V]."""
    (keys, values, count), (q, k, v, written) = memory, token
    place = jnp.arange(keys.shape[1])
    new = (place == count[:, None]) & written[:, None]

    def store(ring, x):
        return jnp.where(per_chunk(new, ring), x[:, None].astype(ring.dtype), ring)

    keys, values, count = store(keys, k), store(values, v), count + written
    of_keys = place // options.block_size
    blocks = int(keys.shape[1] - 1) // options.block_size + 1
    wide = keys.astype(options.dtype)
    means = jax.ops.segment_sum(jnp.moveaxis(wide, 1, 0), of_keys, blocks) / options.block_size
    own = (count - 1) // options.block_size
    earlier = jnp.arange(blocks) < own[:, None]
    output = _attend(
        options, q[:, None], wide, values, jnp.moveaxis(means, 0, 1), earlier[:, None],
        of_keys[None], own[:, None], (place < count[:, None])[:, None],
    )  # fmt: skip
    return (keys, values, count), output[:, 0]


def _by_chunks(
    options: Options, q, k, v, positions: TokenPositions, tokens: Tokens, state: AttentionState
) -> Array:
    """Return the output [B, T, G, R, V] for queries [B, T, G, R, K], for `options.size` queries at a time.

    Blocks of all documents are numbered in the order of their tokens, or of their segment and tokens.
    """
    size, length = options.block_size, q.shape[1]
    key_positions, keys, values = positions, k, v
    if not options.no_state:
        key_positions, (keys, values, _) = prepend_state(state, positions, (k, v, None))
    begins = positions.written & (positions.rank % size == 0)
    if tokens.slot is None:
        blocks = -(-keys.shape[1] // size) + 1
        if tokens.run is not None:
            blocks = -(-(keys.shape[1] - length) // size) + length
        before = -(-state.count // size)[:, None]
        own = before + jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
        stored = key_positions.rank[:, : keys.shape[1] - length] // size
    else:
        each = -(-keys.shape[1] // size) + 1
        blocks = each * state.keys.shape[1]
        own = positions.document * each + positions.rank // size
        stored = key_positions.document * each + key_positions.rank // size
        stored = stored[:, : keys.shape[1] - length]
    of_keys = own if options.no_state else jnp.concatenate([stored, own], axis=1)
    member = jnp.where(key_positions.written, of_keys, blocks)
    sums = jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, blocks + 1))
    means = sums(keys.astype(options.dtype), member)[:, :blocks] / size
    document = jax.vmap(lambda x, i: jax.ops.segment_max(x, i, blocks + 1))
    document = document(key_positions.document, member)[:, :blocks]

    def attend(_, chunk):
        q, of_query, rank, own = chunk
        same = of_query[:, :, None] == key_positions.document[:, None]
        causal = rank[:, :, None] >= key_positions.rank[:, None]
        seen = same & causal & key_positions.written[:, None]
        earlier = of_query[:, :, None] == document[:, None]
        earlier = earlier & (jnp.arange(blocks) < own[:, :, None])
        return None, _attend(options, q, keys, values, means, earlier, of_keys, own, seen)

    chunks = -(-length // options.size)

    def split(x):  # [B, T, ...] -> [chunks, B, size, ...]
        padding = [(0, 0), (0, chunks * options.size - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, options.size, *x.shape[2:]), 1, 0)

    arrays = jax.tree.map(split, (q, positions.document, positions.rank, own))
    body = jax.checkpoint(attend, prevent_cse=False)
    output = jnp.moveaxis(jax.lax.scan(body, None, arrays)[1], 0, 1)
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :length]


def _attend(options: Options, q, keys, values, means, earlier, of_keys, own, seen) -> Array:
    """Return the output [B, T, G, R, V] of queries for the keys of their own block and of the blocks that they select.

    Args:
        options: the options of the op.
        q: [B, T, G, R, K].
        keys, values: [B, S, G, ...].
        means: [B, N, G, K], the mean of each block's keys; used only where a block is complete.
        earlier: [B, T, N], the blocks of the query's document ahead of its own.
        of_keys: [B or 1, S], each key's block.
        own: [B, T], each query's block.
        seen: [B, T, S], the tokens of the query's document up to itself.
    """
    precision, dtype = options.precision, options.dtype
    mask = (of_keys[:, None] == own[:, :, None])[:, None, None]
    count = min(options.num_blocks - 1, means.shape[1])
    if count:
        scores = jax.lax.stop_gradient(
            jnp.einsum("btgrk,bngk->bgrtn", q, means, precision=precision)
        )
        scores = jnp.where(earlier[:, None, None], scores, -jnp.inf)
        best, index = jax.lax.top_k(scores, count)
        index = jnp.where(best > -jnp.inf, index, -1)
        for place in range(count):
            mask = mask | (index[..., place, None] == of_keys[:, None, None, None])
    mask = mask & seen[:, None, None]
    scores = options.scale * jnp.einsum(
        "btgrk,bsgk->bgrts", q, keys.astype(dtype), precision=precision
    )
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bgrts,bsgv->btgrv", weights, values.astype(dtype), precision=precision)


register(
    "block_attention",
    Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)),
)
