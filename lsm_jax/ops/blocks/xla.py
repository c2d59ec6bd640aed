"""Compute `block_attention` and `native_sparse_attention` by XLA in two forms: recurrent (token by token), and for one
chunk of queries after another, or for tiles of queries that attend to one block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.shared_rows import gather_tokens, part_of_device
from lsm_jax.ops.attention.state import AttentionState, without_free_places
from lsm_jax.ops.attention.token_positions import (
    TokenPositions,
    prepend_state,
    token_positions,
    write_tokens,
)
from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.blocks.means import attend_means
from lsm_jax.ops.blocks.selected import attend_selected, rows_of, window_tile
from lsm_jax.ops.blocks.units import Plan
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import per_chunk, scan_tokens
from lsm_jax.ops.core.segments import Tokens, finish_output, read_tokens, select


class Options(NamedTuple):
    """The options of `block_attention` or `native_sparse_attention` that are constant when a program is compiled.

    Attributes:
        block_size: tokens in a block.
        num_blocks: the number of blocks that a query attends to, its own among them.
        window: the window of `native_sparse_attention`; None for `block_attention`.
        scale: multiplies the scores.
        by_token: whether the form is "recurrent".
        size: queries in a chunk.
        tile: queries in a tile, which attend to one block; None if all scores are computed, chunk by chunk.
        no_state: whether the caller gave no state.
        dtype: the dtype of all sums.
        precision: the precision of matrix products.
        axis: the mesh axis that rows are split over; None if a device has complete rows.
    """

    block_size: int
    num_blocks: int
    window: int | None
    scale: float
    by_token: bool
    size: int
    tile: int | None
    no_state: bool
    dtype: Any
    precision: jax.lax.Precision
    axis: str | None = None


class _Queries(NamedTuple):
    """Queries, and what is known of them.

    Attributes:
        q: [B, T, G, R, K].
        gates: [B, T, G, R, 3], the weights of three kinds of attention; None for `block_attention`.
        rank: [B, T], the number of written tokens of the document up to and with the query, less 1.
        block: [B, T], the number of the query's own block.
    """

    q: Array
    gates: Array | None
    rank: Array
    block: Array


class _Keys(NamedTuple):
    """Keys and values of tokens and of blocks.

    Attributes:
        keys, values: [B, S, G, ...].
        rank: [B or 1, S], the number of tokens of the document ahead of each.
        block: [B or 1, S], the number of each token's block.
        mean_keys, mean_values: [B, N, G, ...], the means of blocks; used only where a block is complete.
    """

    keys: Array
    values: Array
    rank: Array
    block: Array
    mean_keys: Array
    mean_values: Array


def run_xla(
    options: Options, q, k, v, gates, state: AttentionState, segment_ids, update_mask
) -> tuple[Array, AttentionState]:
    """Compute attention to blocks by XLA on one device: return the output [B, T, H, V] in v's dtype and the state with the
    new keys and values.

    Where devices have consecutive parts of each row, every device receives all keys and values and computes the outputs of
    its own queries; token by token it computes complete rows. Every query meets all keys, masked or not, or as many blocks as
    the others, so that devices have equal work.
    """
    length = q.shape[1]
    part = functools.partial(part_of_device, options.axis, length)
    k, v, segment_ids, update_mask = gather_tokens(options.axis, (k, v, segment_ids, update_mask))
    batch, row_length, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    no_id: Any = None
    own_tokens = part(tokens._replace(last_id=no_id))
    positions = token_positions(tokens, state, batch, row_length)

    def of_queries(x):
        return checks.group_queries(select(own_tokens.real, x), heads)

    q = of_queries(q)
    narrow, q = q, q.astype(options.dtype)
    gates = None if gates is None else of_queries(gates).astype(options.dtype)
    k, v = select(tokens.written, checks.spread_keys(k, heads)), select(tokens.written, v)
    if options.by_token:
        step = functools.partial(_step, options)
        # In the wide dtype, so that gradients of keys and values are summed in it.
        rings = state.keys.astype(options.dtype), state.values.astype(options.dtype)
        output, (keys, values, count) = scan_tokens(
            step,
            (*gather_tokens(options.axis, (q, gates)), k, v, positions.written),
            (*rings, state.count),
            tokens.run,
            tokens.slot,
        )
        output = part(output)
        keys, values = keys.astype(state.keys.dtype), values.astype(state.values.dtype)
        final = AttentionState(keys, values, count, tokens.last_id, None)
    else:
        if options.tile is None:
            output = _by_chunks(options, q, gates, k, v, positions, tokens, state)
        else:
            all_write = update_mask is None and options.axis is None  # besides padding
            output = _by_tiles(options, narrow, gates, k, v, positions, tokens, all_write)
        final = write_tokens(state, k, v, None, positions, tokens)
    output = output.reshape(batch, length, -1, output.shape[-1])
    if not options.no_state:
        beyond = part(positions.rank) >= state.keys.shape[-3]
        output = jnp.where(beyond[:, :, None, None], jnp.nan, output)
    return finish_output(own_tokens, output).astype(v.dtype), without_free_places(final)


def _step(options: Options, memory: tuple, token: tuple) -> tuple[tuple, Array]:
    """Store one token's key and value in [B, C, G, ...], and attend; return them, and the output [B, G, R, V]."""
    (keys, values, count), (q, gates, k, v, written) = memory, token
    place, size = jnp.arange(keys.shape[1]), options.block_size
    new = (place == count[:, None]) & written[:, None]

    def store(ring, x):
        return jnp.where(per_chunk(new, ring), x[:, None].astype(ring.dtype), ring)

    keys, values, count = store(keys, k), store(values, v), count + written
    blocks = (keys.shape[1] - 1) // size + 1

    def mean(x):
        return jnp.moveaxis(jax.ops.segment_sum(jnp.moveaxis(x, 1, 0), place // size, blocks), 0, 1) / size  # fmt: skip

    rank = (count - 1)[:, None]
    gates = None if gates is None else gates[:, None]
    one = _Queries(q[:, None], gates, rank, rank // size)
    stored = _Keys(keys, values, place[None], place[None] // size, mean(keys), mean(values))
    seen = (place < count[:, None])[:, None]
    document = jnp.ones((1, 1, blocks), bool)
    return (keys, values, count), _attend(options, one, stored, seen, document)[:, 0]


def _by_tiles(
    options: Options, q, gates, k, v, positions: TokenPositions, tokens: Tokens, all_write: bool
) -> Array:
    """Return the output [B, T, G, R, V] for queries [B, T, G, R, K], with the scores alone that are not masked because of a block
    or a window; keys, values and `positions` are those of complete rows. `all_write` says that rows are complete and the outputs of
    tokens that are not written are not used.
    """
    assert options.tile is not None
    narrow = all(x.dtype == jnp.bfloat16 for x in (q, k, v))
    operand = jnp.bfloat16 if narrow else options.dtype
    plan = Plan(
        block_size=options.block_size,
        earlier=options.num_blocks - 1,
        tile=options.tile,
        together=1,
        window=None,
        scale=options.scale,
        dtype=options.dtype,
        operand=operand,
        precision=options.precision,
    )
    length, start = q.shape[1], 0
    if options.axis is not None:
        start = jax.lax.axis_index(options.axis) * length
    gaps = tokens.written is not None or options.axis is not None

    def read(plan: Plan):
        of_tokens = positions.rank, positions.written
        return rows_of(plan, *of_tokens, start, length, gaps=gaps, all_write=all_write)

    rows = read(plan)
    if options.window is None or gates is None:
        return attend_selected(plan, q, k, v, rows)
    means, chosen = attend_means(plan, q, k, v, rows)
    shared = plan._replace(together=q.shape[3])
    window = min(options.window, k.shape[1])  # a longer one has no more keys
    size = window_tile(window)
    near = shared._replace(block_size=size, earlier=0, window=window, tile=max(1, size // 4))
    selected = attend_selected(shared, q, k, v, rows, chosen)
    outputs = (means, selected, attend_selected(near, q, k, v, read(near)))
    return _gated(gates, outputs)


def _by_chunks(
    options: Options, q, gates, k, v, positions: TokenPositions, tokens: Tokens, state: AttentionState
) -> Array:  # fmt: skip
    """Return the output [B, T, G, R, V] for queries [B, T, G, R, K], for `options.size` queries at a time; keys, values and
    `positions` are those of complete rows.

    Blocks of all documents are numbered in the order of their tokens, or of their segment and tokens.
    """
    size, length, row_length = options.block_size, q.shape[1], k.shape[1]
    key_positions, keys, values = positions, k, v
    if not options.no_state:
        key_positions, (keys, values, _) = prepend_state(state, positions, (k, v, None))
    in_state = keys.shape[1] - row_length
    rank = key_positions.rank
    if tokens.slot is None:
        blocks = -(-keys.shape[1] // size) + 1
        if tokens.run is not None:
            blocks = -(-in_state // size) + row_length
        begins = positions.written & (positions.rank % size == 0)
        own = -(-state.count // size)[:, None] + jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
        of_keys = jnp.concatenate([rank[:, :in_state] // size, own], axis=1)
    else:
        each = -(-keys.shape[1] // size) + 1
        blocks = each * state.keys.shape[1]
        of_keys = key_positions.document * each + rank // size
        own = of_keys[:, in_state:]
    member = jnp.where(key_positions.written, of_keys, blocks)
    wide = keys.astype(options.dtype), values.astype(options.dtype)

    def of_blocks(reduce, x):
        return jax.vmap(lambda x, i: reduce(x, i, blocks + 1))(x, member)[:, :blocks]

    means = [of_blocks(jax.ops.segment_sum, x) / size for x in wide]
    document = of_blocks(jax.ops.segment_max, key_positions.document)
    stored = _Keys(*wide, rank, of_keys, *means)

    def attend(_, chunk):
        queries, of_query = chunk
        same = of_query[:, :, None] == key_positions.document[:, None]
        causal = queries.rank[:, :, None] >= rank[:, None]
        seen = same & causal & key_positions.written[:, None]
        return None, _attend(
            options, queries, stored, seen, of_query[:, :, None] == document[:, None]
        )

    chunks = -(-length // options.size)

    def split(x):  # [B, T, ...] -> [chunks, B, size, ...]
        padding = [(0, 0), (0, chunks * options.size - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, options.size, *x.shape[2:]), 1, 0)

    places = part_of_device(options.axis, length, (positions.rank, own, positions.document))
    arrays = jax.tree.map(split, (_Queries(q, gates, *places[:2]), places[2]))
    body = jax.checkpoint(attend, prevent_cse=False)
    output = jnp.moveaxis(jax.lax.scan(body, None, arrays)[1], 0, 1)
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :length]


def _attend(options: Options, queries: _Queries, stored: _Keys, seen: Array, document: Array) -> Array:  # fmt: skip
    """Return the output [B, T, G, R, V] of queries.

    Args:
        options: the options of the op.
        queries, stored: the queries, and the tokens and blocks that they may attend to.
        seen: [B, T, S], the tokens of the query's document up to itself.
        document: [B, T, N], the blocks of the query's document.
    """
    own, numbers = queries.block[:, :, None], jnp.arange(document.shape[-1])
    scores = jnp.einsum(
        "btgrk,bngk->bgrtn", queries.q, stored.mean_keys, precision=options.precision
    )
    if options.window is None or queries.gates is None:
        earlier = document & (numbers < own)
        best = jnp.where(earlier[:, None, None], jax.lax.stop_gradient(scores), -jnp.inf)
        mask = (stored.block[:, None] == own)[:, None, None]
        mask = mask | _selected(best, options.num_blocks - 1, stored.block)
        return _softmax(options, queries.q, stored.keys, stored.values, mask & seen[:, None, None])
    rank = queries.rank[:, :, None]
    ended = (rank + 1) % options.block_size == 0
    complete = document & ((numbers < own) | (ended & (numbers == own)))
    weights = _weights(options.scale * jax.lax.stop_gradient(scores), complete[:, None, None])
    first = own - rank // options.block_size
    forced = document & ((numbers == own) | (numbers == first) | (numbers == own - 1))
    best = jnp.where(forced[:, None], jnp.inf, jnp.mean(weights, axis=2))
    best = jnp.where((complete | forced)[:, None], best, -jnp.inf)  # [B, G, T, N]
    chosen = _selected(best, options.num_blocks, stored.block)[:, :, None] & seen[:, None, None]
    near = seen & (rank - stored.rank[:, None] < options.window)
    outputs = (
        _softmax(options, queries.q, stored.mean_keys, stored.mean_values, complete[:, None, None]),
        _softmax(options, queries.q, stored.keys, stored.values, chosen),
        _softmax(options, queries.q, stored.keys, stored.values, near[:, None, None]),
    )
    return _gated(queries.gates, outputs)


def _gated(gates: Array, outputs: tuple[Array, ...]) -> Array:
    """Return the sum of the outputs [..., V] of three kinds of attention, each with its gate of [..., 3]."""
    parts = zip(jnp.moveaxis(gates, -1, 0), outputs, strict=True)
    return sum((gate[..., None] * output for gate, output in parts), jnp.zeros(()))


def _selected(best: Array, count: int, of_keys: Array) -> Array:
    """Return whether each key [..., T, S] is of one of the `count` blocks with the largest `best` [..., T, N], of those above
    -inf; `of_keys` [B or 1, S] are the keys' blocks.
    """
    axes = (slice(None), *(None,) * (best.ndim - 2))
    of_keys = of_keys[axes]
    selected = jnp.zeros((), bool)
    if count:
        value, index = jax.lax.top_k(best, min(count, best.shape[-1]))
        index = jnp.where(value > -jnp.inf, index, -1)
        for place in range(index.shape[-1]):
            selected = selected | (index[..., place, None] == of_keys)
    return selected


def _weights(scores: Array, mask: Array) -> Array:
    """Return the softmax of scores where the mask is True, 0 elsewhere; 0 where nothing is True."""
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def _softmax(options: Options, q, keys, values, mask) -> Array:
    """Return softmax attention [B, T, G, R, V] of queries [B, T, G, R, K] to keys and values [B, S, G, ...] where the mask,
    which broadcasts to [B, G, R, T, S], is True.
    """
    precision = options.precision
    scores = options.scale * jnp.einsum("btgrk,bsgk->bgrts", q, keys, precision=precision)
    return jnp.einsum("bgrts,bsgv->btgrv", _weights(scores, mask), values, precision=precision)


for _op in ("block_attention", "native_sparse_attention"):
    register(_op, Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)))
