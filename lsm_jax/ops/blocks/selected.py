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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.blocks.tiles import (
    Row,
    Spans,
    Tiles,
    consecutive_windows,
    map_chunks,
    places_of,
    queries_of,
    row_with_gaps,
    sum_tiles,
    take,
)
from lsm_jax.ops.blocks.units import (
    Mask,
    Plan,
    fits,
    gradients,
    in_blocks,
    largest,
    map_units,
    outside_of,
    queries_at_a_time,
    read_blocks,
    softmax,
)
from lsm_jax.ops.core.saved import saved

_LARGEST_TILE = 128  # queries of one head
_LARGEST_SHARED_TILE = 512  # of all heads that select together


def tile_size(block_size: int, earlier: int, queries_per_key: int, together: int = 1) -> int:
    """Return the number of queries in a tile, or of tokens whose `together` query heads select the same blocks: a power of two of at
    most a quarter of those by which a block is selected on average, so that padding adds at most a quarter. `earlier` is the number
    of selected blocks of a query, of which `queries_per_key` may select different ones.
    """
    quarter = block_size * max(1, earlier) * queries_per_key // 4
    largest = _LARGEST_TILE if together == 1 else max(1, _LARGEST_SHARED_TILE // together)
    return 1 << (max(1, min(largest, quarter)).bit_length() - 1)


def window_tile(window: int) -> int:
    """Return for how many consecutive tokens the keys of their windows are read together: a power of two of at most an eighth of the
    window, so that few are masked, but from 16 to 128.
    """
    return min(128, max(16, 1 << ((window // 8).bit_length() - 1 if window >= 8 else 0)))


def attend_selected(
    plan: Plan, q: Array, k: Array, v: Array, rows: Row, chosen: Array | None = None
) -> Array:
    """Return the output [B, T, G, R, V], in `plan.operand`, of queries q [B, T, G, R, K] for keys and values [B, S, G, ...] that
    are 0 for tokens that are not written.

    Args:
        plan: the constants.
        q, k, v: as above.
        rows: the rows' tokens, each array [B, ...].
        chosen: [B G, T, P], the earlier blocks of each token's queries, all different, the number of blocks for none. None to
            select those with the largest q · mean(k), for each query, or for a window.
    """
    batch, length, heads, group, _ = q.shape
    k, v = (jnp.moveaxis(x, 2, 1).reshape(batch * heads, x.shape[1], -1) for x in (k, v))
    parts = _parts(plan, length, group, k, v, rows)
    if plan.together > 1:
        plan = plan._replace(together=group // parts)
    q = q.reshape(batch, length, heads * parts, group // parts, -1)
    q = jnp.moveaxis(q, 2, 1).reshape(batch * heads * parts, length * group // parts, -1)
    q, k, v = (x.astype(plan.operand) for x in (q, k, v))
    output = _attend(plan, q, k, v, rows, chosen)
    output = output.reshape(batch, heads * parts, length, group // parts, -1)
    return jnp.moveaxis(output, 1, 2).reshape(batch, length, heads, group, -1)


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
        row_with_gaps, size=plan.block_size, before=plan.before, start=start, length=length,
        all_write=all_write,
    )  # fmt: skip
    rows = jax.vmap(of_row)(rank, written)
    return rows if plan.window is None else rows._replace(first=None, blocks=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, rows: Row, chosen: Array | None) -> Array:
    """Return the output [U, T R, V] of queries [U, T R, K]: for each pair of a row and a memory, or for several parts of its R
    query heads. Keys and values are those of a pair, rows those of a row.
    """
    return _forward(plan, q, k, v, rows, chosen)[0]


def _forward(plan, q, k, v, rows, chosen):
    most = _numbers(plan, q.shape[1], q.shape[1] // rows.rank.shape[1], k, v, rows)
    if chosen is None and plan.earlier:
        most = max(most, _numbers_of_selection(plan, q, k))
    arguments = _for_each(q, (k, v, rows, chosen))
    results = map_units(functools.partial(_forward_of_row, plan), most, q, *arguments)
    results = jax.tree.map(saved, results)
    return results[0], (q, k, v, rows, *results)


def _backward(plan, residuals, d_output):
    q, k, v, rows, output, log_total, places = residuals
    # The mean of the gradients of a query's weights, whose sum is 1.
    mean = jnp.sum(d_output.astype(plan.dtype) * output.astype(plan.dtype), axis=-1)
    parts = len(q) // len(k)
    of_keys = plan.operand if parts == 1 else plan.dtype
    backward = functools.partial(_backward_of_row, plan, of_keys)
    most = _numbers(plan, q.shape[1], q.shape[1] // rows.rank.shape[1], k, v, rows)
    dq, *d_keys = map_units(
        backward, most, q, *_for_each(q, (k, v, rows)), d_output, mean, log_total, places
    )
    if parts > 1:
        d_keys = (jnp.sum(x.reshape(-1, parts, *x.shape[1:]), axis=1) for x in d_keys)
    return dq, *(x.astype(plan.operand) for x in d_keys), None, None


_attend.defvjp(_forward, _backward)


def _for_each(q: Array, tree):
    """Return arrays [N, ...] repeated for the units of q [U, ...]."""
    return jax.tree.map(lambda x: jnp.repeat(x, len(q) // len(x), axis=0), tree)


def _parts(plan: Plan, tokens: int, group: int, k: Array, v: Array, rows: Row) -> int:
    """Return in how many parts the `group` query heads of a memory are computed: as few as have arrays of not too many numbers, if
    that is possible.
    """
    for parts in range(1, group):
        each = group // parts
        if group % parts == 0 and fits(
            max(_numbers_of_parts(plan, tokens * each, each, k, v, rows))
        ):
            return parts
    return group


def _numbers(plan: Plan, queries: int, group: int, k: Array, v: Array, rows: Row) -> int:
    """Return the sum of `_numbers_of_parts`."""
    return sum(_numbers_of_parts(plan, queries, group, k, v, rows))


def _numbers_of_parts(
    plan: Plan, queries: int, group: int, k: Array, v: Array, rows: Row
) -> tuple[int, int]:
    """Return how many scores, or entries of outputs, keys and values if these are more, the tiles of selected blocks of one row and
    memory have, with `group` queries for each token; and how many the own blocks or windows.
    """
    size, dims = plan.block_size, (k.shape[-1], v.shape[-1])
    blocks, together = -(-k.shape[1] // size), min(plan.together, group)
    entries = queries // together * min(plan.earlier, blocks)
    tiles = entries // plan.tile + min(blocks, entries)
    near = size if plan.window is None and rows.windows is None else (plan.before + 1) * size
    tile = max(plan.tile * together * max(size, *dims), size * sum(dims))
    return tiles * tile, queries * max(near, sum(dims))


def _numbers_of_selection(plan: Plan, q: Array, k: Array) -> int:
    """Return how many scores of queries and blocks one row and memory has at a time."""
    queries, blocks = q.shape[1], -(-k.shape[1] // plan.block_size)
    return queries_at_a_time(queries, blocks) * blocks


# ----------------------------------------------------------------------------------------------------------------
# of one row and memory


class _Part(NamedTuple):
    """One or more spans of keys for each query: its own block, its window, or the selected blocks.

    Attributes:
        tiles: the tiles of queries; None if the queries of span n are tile n.
        size: queries in a tile, if `tiles` is None.
        group: queries that follow each other and have the same places in `tiles`.
        spans: the spans of keys; None for consecutive blocks.
        mask: the keys of the span that each query attends to; None for all.
    """

    tiles: Tiles | None
    size: int
    group: int
    spans: Spans | None
    mask: Mask | None

    def queries(self, x: Array, fill=0) -> Array:
        """Return an array of queries [T R, ...] in tiles, [M, C, ...], with `fill` in empty places."""
        if self.tiles is None:
            return in_blocks(self.size, x)
        x = take(x.reshape(-1, self.group, *x.shape[1:]), self.tiles.query, fill)
        return x.reshape(len(x), -1, *x.shape[3:])

    def pairs(self, x: Array, length: int, fill=0) -> Array:
        """Return an array of tiles [M, C, ...] for the spans of each of `length` queries, [T R / N, P, N, ...], N queries with
        the same spans; `fill` for spans that do not exist.
        """
        x = x.reshape(-1, self.group, *x.shape[2:])
        if self.tiles is None:
            return x[: length // self.group, None]
        return take(x, self.tiles.place, fill)

    def sums(self, x: Array, length: int) -> Array:
        """Return the sums of an array of tiles [M, C, ...] over the spans of each of `length` queries, [T R, ...]."""
        return _of_queries(jnp.sum(self.pairs(x, length), axis=1))

    def keys(self, plan: Plan, k: Array, v: Array) -> tuple[Array, Array]:
        """Return keys and values [S, ...] for each tile, [M, J, ...]; zeros for tiles without queries."""
        keys, values = read_blocks(plan, self.spans, k), read_blocks(plan, self.spans, v)
        if self.tiles is None or self.tiles.span is None:
            return keys, values
        return take(keys, self.tiles.span), take(values, self.tiles.span)

    def of_keys(self, plan: Plan, x: Array, length: int) -> Array:
        """Return the sum over tiles [M, J, ...] for each of `length` keys or values, [S, ...]: the gradient of `keys`."""
        if self.tiles is not None:
            blocks = -(-length // plan.block_size)
            spans = blocks if self.spans is None else len(self.spans.token)
            x = _sum_tiles(plan, self.tiles, x, spans)
        x = x.reshape(-1, *x.shape[2:])
        return x[:length] if self.spans is None else jnp.sum(take(x, self.spans.places), axis=1)


def _of_queries(x: Array) -> Array:
    """Return x [T R / N, N, ...] as [T R, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _forward_of_row(plan: Plan, q: Array, k: Array, v: Array, row: Row, chosen: Array | None):
    """Return the output [T R, V] of queries [T R, K], the logarithm [T R] of the sum of each query's weights, 0 without any, and
    the tiles of the selected blocks without their queries, None without any.
    """
    row, near = _near(plan, row, q)
    blocks = -(-len(k) // plan.block_size) if row.blocks is None else len(row.blocks.token)
    if chosen is None and plan.earlier:
        chosen = _choose(plan, q, read_blocks(plan, row.blocks, k), row)
    places = None if chosen is None or not chosen.size else _places(plan, chosen, blocks)
    results = []
    for part in (near, *_selected_blocks(plan, row, places)):
        output, total, top = softmax(plan, part.queries(q), *part.keys(plan, k, v), part.mask)
        results.append((part, output, total, part.pairs(top, len(q), -jnp.inf)))
    tops = [_of_queries(jnp.max(top, axis=1)) for *_, top in results]
    highest = functools.reduce(jnp.maximum, tops)
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    sums = []
    for part, output, total, top in results:
        weights = jnp.exp(top - highest.reshape(-1, 1, part.group))
        total = jnp.sum(weights * part.pairs(total, len(q)), axis=1)
        output = jnp.sum(weights[..., None] * part.pairs(output, len(q)), axis=1)
        sums.append((_of_queries(output), _of_queries(total)))
    output, total = (functools.reduce(jnp.add, x) for x in zip(*sums, strict=True))
    total = jnp.where(total > 0, total, 1)
    return (output / total[:, None]).astype(plan.operand), highest + jnp.log(total), places


def _backward_of_row(
    plan: Plan, of_keys, q, k, v, row: Row, d_output, mean, log_total, places
):  # fmt: skip
    """Return the gradients of queries [T R, K], and of keys and values [S, ...] in the dtype `of_keys`; `mean` [T R] is the sum of
    `d_output` times the output.
    """
    row, near = _near(plan, row, q)
    dq, dk, dv = [], [], []
    for part in (near, *_selected_blocks(plan, row, places)):
        # An empty place has zeros, whose weights are finite and whose gradients are 0.
        of_queries = (part.queries(x) for x in (q, d_output, log_total, mean))
        d_queries, d_keys, d_values = gradients(
            plan, *part.keys(plan, k, v), part.mask, *of_queries
        )
        dq.append(part.sums(d_queries, len(q)))
        dk.append(part.of_keys(plan, d_keys, len(k)))
        dv.append(part.of_keys(plan, d_values, len(k)))
    sums = (functools.reduce(jnp.add, x) for x in (dq, dk, dv))
    dtypes = (plan.operand, of_keys, of_keys)
    return tuple(x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True))


def _sum_tiles(plan: Plan, tiles: Tiles, x: Array, spans: int) -> Array:
    """Return the sums [N, J, ...] of the arrays x [M, J, ...] of the tiles of each of N spans."""
    if tiles.span is None:
        return x
    places = tiles.query.shape[1]
    if spans > places:
        return sum_tiles(x, tiles.span, spans, -(-len(tiles.place) // places))
    # A product with zeros and ones reads x once, and costs no more than one of a tile's products.
    member = (jnp.arange(spans)[:, None] == tiles.span).astype(plan.dtype)
    return jnp.einsum("nm,mjk->njk", member, x, precision=plan.precision)


def _near(plan: Plan, row: Row, q: Array) -> tuple[Row, _Part]:
    """Return the `Row` with its arrays of queries [T] repeated for the R queries [T R, K] of each token, and the queries' own
    blocks or windows.
    """
    size, group, tokens = plan.block_size, len(q) // len(row.rank), len(row.rank)

    def repeat(x: Array | None, times: int = group) -> Array | None:
        return None if x is None else jnp.repeat(x, times)

    window = repeat(row.window, group // plan.together)
    outside, token, rank = outside_of(plan.dtype, jnp.arange(tokens), row.rank)
    rank = jnp.repeat(rank, group)
    row = row._replace(rank=rank, first=repeat(row.first), window=window, last=repeat(row.last))
    if row.window is None or row.last is None or row.windows is None:
        if plan.window is None:
            seen = jnp.arange(size * group)[:, None] // group >= jnp.arange(size)
            return row, _Part(None, size * group, group, None, Mask(seen[None], outside))
        spans = consecutive_windows(tokens, size, plan.before)
        last = jnp.repeat(plan.before * size + token % size, group)
        part = _Part(None, size * group, group, spans, None)
    elif row.queries is None:
        place, span = _places(plan, row.window[:, None], len(row.windows.token))
        tiles, last = Tiles(queries_of(place, len(span), plan.tile), span, place), row.last
        part = _Part(tiles, 0, plan.together, row.windows, None)
    else:
        part, last = _Part(row.queries, 0, group, row.windows, None), row.last
    last, rank = (part.queries(x, -1)[..., None] for x in (last, rank))
    depth = rank % size if plan.window is None else jnp.minimum(rank, plan.window - 1)
    place = jnp.arange((plan.before + 1) * size)
    seen = (rank >= 0) & (place <= last) & (place >= last - depth)
    return row, part._replace(mask=Mask(seen, outside))


def _selected_blocks(plan: Plan, row: Row, places: tuple[Array, Array] | None) -> list[_Part]:
    """Return the part of the selected blocks, from the results of `places_of`; none for None."""
    if places is None:
        return []
    place, span = places
    tiles = Tiles(queries_of(place, len(span), plan.tile), span, place)
    return [_Part(tiles, 0, plan.together, row.blocks, None)]


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
        value, index = largest(jnp.where(exists, scores, -jnp.inf), count)
        return jnp.where(value > -jnp.inf, index, blocks).astype(jnp.int32)

    arrays = (q, row.rank) if row.first is None else (q, row.rank, row.first)
    chunk = queries_at_a_time(len(q), blocks)
    if chunk == len(q):
        return of_queries(*arrays)
    return map_chunks(of_queries, chunk, *arrays).reshape(-1, count)[: len(q)]


def _places(plan: Plan, span: Array, spans: int) -> tuple[Array, Array]:
    """Return the places of queries in tiles, and the span of each tile; see `places_of`."""
    return places_of(span, spans, plan.tile, queries_at_a_time(len(span), spans))
