"""Softmax attention to the query's own block of tokens and to selected earlier blocks, in which only these scores are computed.

The pairs of a query and a selected block are put in the order of blocks and padded to tiles of queries that attend to one block
(`lsm_jax.ops.blocks.tiles`). Each tile is a product of its queries and the block's keys, and a softmax of its own; the
parts of a query are then added with the weights of their sums. The backward pass computes the weights of a tile again from the
logarithm of the query's whole sum, as FlashAttention's does (arXiv 2307.08691, algorithm 2). Nothing is scattered but integers:
gradients come back by the tables that say where each query and key was read, and those of a block's tiles are summed in a
fixed order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.blocks.tiles import (
    Row,
    Spans,
    Tiles,
    map_chunks,
    places_of,
    queries_of,
    row_with_gaps,
    sum_tiles,
    take,
)
from lsm_jax.ops.core.saved import saved

# Numbers of one array, 512 MiB in float32. The tiles of one row and memory may have more, since they are computed together.
_NUMBERS = 1 << 27
_LARGEST_TILE = 128  # queries
_FEW = 8  # largest numbers that are cheaper to find one after another than by sorting


class Plan(NamedTuple):
    """The constants of attention to selected blocks; hashable.

    Attributes:
        block_size: tokens in a block.
        earlier: the number of earlier blocks that a query attends to.
        tile: queries in a tile.
        scale: multiplies the scores.
        dtype: the dtype of all sums.
        operand: the dtype of the factors of matrix products, and of the output.
        precision: the precision of matrix products.
    """

    block_size: int
    earlier: int
    tile: int
    scale: float
    dtype: Any
    operand: Any
    precision: jax.lax.Precision


def tile_size(block_size: int, earlier: int, queries_per_key: int) -> int:
    """Return the number of queries in a tile: a power of two of at most a quarter of the queries by which a block is
    selected on average, so that padding adds at most a quarter. `earlier` is the number of selected blocks of a query.
    """
    quarter = block_size * max(1, earlier) * queries_per_key // 4
    return min(_LARGEST_TILE, 1 << max(0, quarter.bit_length() - 1))


def attend_selected(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> Array:
    """Return the output [B, T, G, R, V], in `plan.operand`, of queries q [B, T, G, R, K] for keys and values [B, S, G, ...] that
    are 0 for tokens that are not written.

    Args:
        plan: the constants.
        q, k, v: as above.
        rows: the rows' tokens, each array [B, ...].
    """
    batch, length, heads, group, _ = q.shape
    q = jnp.moveaxis(q, 2, 1).reshape(batch * heads, length * group, -1)
    k, v = (jnp.moveaxis(x, 2, 1).reshape(batch * heads, x.shape[1], -1) for x in (k, v))
    q, k, v = (x.astype(plan.operand) for x in (q, k, v))
    rows = jax.tree.map(lambda x: jnp.repeat(x, heads, axis=0), rows)
    output = _attend(plan, q, k, v, rows).reshape(batch, heads, length, group, -1)
    return jnp.moveaxis(output, 1, 2)


def rows_of(
    plan: Plan,
    rank: Array,
    written: Array,
    start: Array | int,
    length: int,
    *,
    gaps: bool,
    all_write: bool,
) -> Row:
    """Return the `Row` of each row, arrays [B, ...], for the `length` queries from token `start`; `rank` and `written` [B, S]
    are those of complete rows. Without `gaps` the queries are a whole row that is one document, all of it written;
    `all_write` is as in `row_with_gaps`.
    """
    if not gaps:
        return Row(rank)
    of_row = functools.partial(
        row_with_gaps, size=plan.block_size, start=start, length=length, all_write=all_write
    )
    return jax.vmap(of_row)(rank, written)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> Array:
    """Return the output [U, T R, V] of queries [U, T R, K] for U pairs of a row and a memory."""
    return _forward(plan, q, k, v, rows)[0]


def _forward(plan, q, k, v, rows):
    most = max(_numbers(plan, q, k, v, rows), _numbers_of_selection(plan, q, k))
    results = _map(functools.partial(_forward_of_row, plan), most, q, k, v, rows)
    results = jax.tree.map(saved, results)
    return results[0], (q, k, v, rows, *results)


def _backward(plan, residuals, d_output):
    q, k, v, rows, output, *saved_ones = residuals
    # The mean of the gradients of a query's weights, whose sum is 1.
    mean = jnp.sum(d_output.astype(plan.dtype) * output.astype(plan.dtype), axis=-1)
    backward = functools.partial(_backward_of_row, plan)
    most = _numbers(plan, q, k, v, rows)
    return *_map(backward, most, q, k, v, rows, d_output, mean, *saved_ones), None


_attend.defvjp(_forward, _backward)


def _numbers(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> int:
    """Return how many scores, or entries of keys and values if these are more, the tiles of one row and memory have."""
    queries, blocks = q.shape[1], -(-k.shape[1] // plan.block_size)
    pairs = queries * min(plan.earlier, blocks)
    tiles = pairs // plan.tile + min(blocks, pairs)
    dims = k.shape[-1] + v.shape[-1]
    own = plan.block_size if rows.windows is None else 2 * plan.block_size
    return tiles * max(plan.tile, dims) * plan.block_size + queries * max(own, dims)


def _numbers_of_selection(plan: Plan, q: Array, k: Array) -> int:
    """Return how many scores of queries and blocks one row and memory has at a time."""
    queries, blocks = q.shape[1], -(-k.shape[1] // plan.block_size)
    return _queries_at_a_time(queries, blocks) * blocks


def _queries_at_a_time(queries: int, blocks: int) -> int:
    """Return for how many queries at a time numbers [queries, blocks] are computed: all, or parts of nearly equal size."""
    most = max(1, _NUMBERS // blocks)
    return -(-queries // -(-queries // most))


def _map(function, numbers: int, *arrays) -> Any:
    """Return `function` of each row and memory, arrays [U, ...]: of as many at a time as have `_NUMBERS` numbers, if each has
    `numbers`, and of at least one.
    """
    units = len(arrays[0])
    most = max(1, _NUMBERS // numbers)
    step = next(n for n in range(min(units, most), 0, -1) if units % n == 0)
    function, arguments = jax.vmap(function), arrays
    if step == units:
        return function(*arguments)
    split = jax.tree.map(lambda x: x.reshape(units // step, step, *x.shape[1:]), arguments)
    result = jax.lax.map(lambda x: function(*x), split)
    return jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), result)


# ----------------------------------------------------------------------------------------------------------------
# of one row and memory


class _Part(NamedTuple):
    """One or more spans of keys for each query: its own block, or the selected ones.

    Attributes:
        tiles: the tiles of queries; None if the queries of span n are tile n.
        size: queries in a tile.
        spans: the spans of keys; None for consecutive blocks.
        seen: [M or 1, C, J], the keys of the span that each query attends to; None for all.
    """

    tiles: Tiles | None
    size: int
    spans: Spans | None
    seen: Array | None

    def queries(self, x: Array) -> Array:
        """Return an array of queries [T R, ...] in tiles, [M, C, ...], with zeros in empty places."""
        return _in_blocks(self.size, x) if self.tiles is None else take(x, self.tiles.query)

    def pairs(self, x: Array, length: int, fill=0) -> Array:
        """Return an array of tiles [M, C, ...] for the spans of each of `length` queries, [T R, P, ...]; `fill` for spans that
        do not exist.
        """
        x = x.reshape(-1, *x.shape[2:])
        return x[:length, None] if self.tiles is None else take(x, self.tiles.place, fill)

    def keys(self, plan: Plan, k: Array, v: Array) -> tuple[Array, Array]:
        """Return keys and values [S, ...] for each tile, [M, J, ...]; zeros for tiles without queries."""
        keys, values = _read(plan, self.spans, k), _read(plan, self.spans, v)
        if self.tiles is None or self.tiles.span is None:
            return keys, values
        return take(keys, self.tiles.span), take(values, self.tiles.span)

    def of_keys(self, plan: Plan, x: Array, length: int) -> Array:
        """Return the sum over tiles [M, J, ...] for each of `length` keys or values, [S, ...]: the gradient of `keys`."""
        if self.tiles is not None:
            blocks = -(-length // plan.block_size)
            x = _sum_tiles(
                plan, self.tiles, x, blocks if self.spans is None else len(self.spans.token)
            )
        x = x.reshape(-1, *x.shape[2:])
        return x[:length] if self.spans is None else jnp.sum(take(x, self.spans.places), axis=1)


def _forward_of_row(plan: Plan, q: Array, k: Array, v: Array, row: Row):
    """Return the output [T R, V] of queries [T R, K], the logarithm [T R] of the sum of each query's weights, 0 without any, and
    the tiles of the selected blocks without their queries, None without any.
    """
    row, own = _own_block(plan, row, q)
    k_blocks = _read(plan, row.blocks, k)
    chosen = _choose(plan, q, k_blocks, row)
    places = _places(plan, chosen, len(k_blocks)) if chosen.size else None
    outputs, totals = [], []
    for part in (own, *_selected_blocks(plan, row, places)):
        output, total = _softmax(plan, part.queries(q), *part.keys(plan, k, v), part.seen)
        outputs.append(part.pairs(output, len(q)))
        totals.append(part.pairs(total, len(q), -jnp.inf))
    output, total = jnp.concatenate(outputs, axis=1), jnp.concatenate(totals, axis=1)
    top = jnp.max(total, axis=1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(total - top)
    total = jnp.sum(weights, axis=1)
    total = jnp.where(total > 0, total, 1)
    output = jnp.sum(weights[..., None] * output, axis=1) / total[:, None]
    return output.astype(plan.operand), top[:, 0] + jnp.log(total), places


def _backward_of_row(plan: Plan, q, k, v, row: Row, d_output, mean, log_total, places):
    """Return the gradients of queries [T R, K], keys and values [S, ...]; `mean` [T R] is the sum of `d_output` times the
    output.
    """
    row, own = _own_block(plan, row, q)
    dq, dk, dv = [], [], []
    for part in (own, *_selected_blocks(plan, row, places)):
        # An empty place has zeros, whose weights are finite and whose gradients are 0.
        of_queries = (part.queries(x) for x in (q, d_output, log_total, mean))
        d_queries, d_keys, d_values = _gradients(
            plan, *part.keys(plan, k, v), part.seen, *of_queries
        )
        dq.append(jnp.sum(part.pairs(d_queries, len(q)), axis=1))
        dk.append(part.of_keys(plan, d_keys, len(k)))
        dv.append(part.of_keys(plan, d_values, len(k)))
    return tuple(functools.reduce(jnp.add, x).astype(plan.operand) for x in (dq, dk, dv))


def _sum_tiles(plan: Plan, tiles: Tiles, x: Array, spans: int) -> Array:
    """Return the sums [N, J, ...] of the arrays x [M, J, ...] of the tiles of each of N spans."""
    if tiles.span is None:
        return x
    if spans > plan.tile:
        return sum_tiles(x, tiles.span, spans, -(-len(tiles.place) // plan.tile))
    # A product with zeros and ones reads x once, and costs no more than one of a tile's products.
    member = (jnp.arange(spans)[:, None] == tiles.span).astype(plan.dtype)
    return jnp.einsum("nm,mjk->njk", member, x, precision=plan.precision)


def _own_block(plan: Plan, row: Row, q: Array) -> tuple[Row, _Part]:
    """Return the `Row` with its arrays of queries [T] repeated for the R queries [T R, K] of each token, and the queries' own
    blocks.
    """
    size, group = plan.block_size, len(q) // len(row.rank)

    def repeat(x: Array | None) -> Array | None:
        return None if x is None else jnp.repeat(x, group)

    rank = jnp.repeat(row.rank, group)
    row = row._replace(
        rank=rank, first=repeat(row.first), window=repeat(row.window), last=repeat(row.last)
    )
    if row.window is None or row.last is None or row.windows is None:
        seen = jnp.arange(size * group)[:, None] // group >= jnp.arange(size)
        return row, _Part(None, size * group, None, seen[None])
    if row.queries is None:
        place, span = _places(plan, row.window[:, None], len(row.windows.token))
        tiles = Tiles(queries_of(place, len(span), plan.tile), span, place)
    else:
        query, place = (
            (x[..., None] * group + jnp.arange(group))
            for x in (row.queries.query, row.queries.place)
        )
        tiles = Tiles(query.reshape(-1, size * group), None, place.reshape(-1, 1))
    last, rank = (take(x, tiles.query, -1)[..., None] for x in (row.last, row.rank))
    place = jnp.arange(2 * size)
    seen = (rank >= 0) & (place <= last) & (place >= last - rank % size)
    return row, _Part(tiles, plan.tile, row.windows, seen)


def _selected_blocks(plan: Plan, row: Row, places: tuple[Array, Array] | None) -> list[_Part]:
    """Return the part of the selected blocks, from the results of `places_of`; none for None."""
    if places is None:
        return []
    place, span = places
    tiles = Tiles(queries_of(place, len(span), plan.tile), span, place)
    return [_Part(tiles, plan.tile, row.blocks, None)]


def _choose(plan: Plan, q: Array, k_blocks: Array, row: Row) -> Array:
    """Return the earlier blocks of its document with the largest q · mean(k), [T R, P], for each query of [T R, K]; N, the
    number of blocks [N, J, K], in the place of those that do not exist.
    """
    blocks = len(k_blocks)
    count = min(plan.earlier, blocks)
    if not count:
        return jnp.zeros((len(q), 0), jnp.int32)
    means, number = jnp.mean(k_blocks.astype(plan.dtype), axis=1), jnp.arange(blocks)

    def of_queries(q: Array, rank: Array, first: Array | None = None) -> Array:
        scores = jnp.einsum("tk,nk->tn", q.astype(plan.dtype), means, precision=plan.precision)
        begin = 0 if first is None else first[:, None]
        exists = (number >= begin) & (number < begin + rank[:, None] // plan.block_size)
        value, index = _largest(jnp.where(exists, scores, -jnp.inf), count)
        return jnp.where(value > -jnp.inf, index, blocks).astype(jnp.int32)

    arrays = (q, row.rank) if row.first is None else (q, row.rank, row.first)
    chunk = _queries_at_a_time(len(q), blocks)
    if chunk == len(q):
        return of_queries(*arrays)
    return map_chunks(of_queries, chunk, *arrays).reshape(-1, count)[: len(q)]


def _places(plan: Plan, span: Array, spans: int) -> tuple[Array, Array]:
    """Return the places of queries in tiles, and the span of each tile; see `places_of`."""
    return places_of(span, spans, plan.tile, _queries_at_a_time(len(span), spans))


def _largest(x: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` largest entries of each row of x [T, N] and their indices, [T, count]; of equal ones the first."""
    if count > _FEW:
        return jax.lax.top_k(x, count)
    values, indices = [], []
    for _ in range(count):
        indices.append(jnp.argmax(x, axis=1))
        values.append(jnp.max(x, axis=1))
        x = jnp.where(jnp.arange(x.shape[1]) == indices[-1][:, None], -jnp.inf, x)
    return jnp.stack(values, axis=1), jnp.stack(indices, axis=1)


def _read(plan: Plan, spans: Spans | None, x: Array) -> Array:
    """Return keys or values [S, ...] in spans [N, J, ...]: in consecutive blocks if `spans` is None."""
    return _in_blocks(plan.block_size, x) if spans is None else take(x, spans.token)


def _in_blocks(size: int, x: Array) -> Array:
    """Return x [T, ...] in blocks [N, size, ...], the last of which may end with zeros."""
    x = jnp.pad(x, [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


# ----------------------------------------------------------------------------------------------------------------
# of tiles


def _softmax(plan: Plan, q: Array, keys: Array, values: Array, seen: Array | None):
    """Return softmax attention [M, C, V] of queries [M, C, K] to keys and values [M, J, ...], where `seen` is True, and the
    logarithm [M, C] of the sum of weights; 0 and -inf where nothing is seen.
    """
    scores = plan.scale * _multiply(plan, "mck,mjk->mcj", q, keys)
    top = jnp.max(scores if seen is None else jnp.where(seen, scores, -jnp.inf), axis=-1)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = _exp(scores - top[..., None], seen)
    total = jnp.sum(weights, axis=-1)
    output = _multiply(plan, "mcj,mjv->mcv", weights, values)
    return output / jnp.where(total > 0, total, 1)[..., None], top + jnp.log(total)


def _gradients(plan: Plan, keys, values, seen: Array | None, q, d_output, log_total, mean):
    """Return the gradients of queries [M, C, K], keys and values [M, J, ...] by the scores of a tile's queries and keys.

    Args:
        plan: the constants.
        keys, values, seen, q: as in `_softmax`.
        d_output: [M, C, V], the gradient of the queries' outputs.
        log_total: [M, C], the logarithm of the sum of all weights of a query, also of other tiles.
        mean: [M, C], the sum of `d_output` times the output.
    """
    multiply = functools.partial(_multiply, plan)
    weights = _exp(plan.scale * multiply("mck,mjk->mcj", q, keys) - log_total[..., None], seen)
    d_weights = multiply("mcv,mjv->mcj", d_output, values)
    d_scores = plan.scale * weights * (d_weights - mean[..., None])
    return (
        multiply("mcj,mjk->mck", d_scores, keys),
        multiply("mcj,mck->mjk", d_scores, q),
        multiply("mcj,mcv->mjv", weights, d_output),
    )


def _multiply(plan: Plan, equation: str, x: Array, y: Array) -> Array:
    """Return a product of factors in `plan.operand`, summed in `plan.dtype`."""
    x, y = x.astype(plan.operand), y.astype(plan.operand)
    return jnp.einsum(equation, x, y, precision=plan.precision, preferred_element_type=plan.dtype)


def _exp(x: Array, seen: Array | None) -> Array:
    """Return exp(x) where `seen` is True, and 0 elsewhere."""
    return jnp.exp(x) if seen is None else jnp.where(seen, jnp.exp(jnp.where(seen, x, 0)), 0)
