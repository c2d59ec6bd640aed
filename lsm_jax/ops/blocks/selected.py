"""Softmax attention to the query's own block of tokens and to selected earlier blocks, in which only these scores are computed.

The pairs of a query and a selected block are sorted by block and padded to tiles of queries that attend to one block
(`lsm_jax.ops.blocks.tiles`). Each tile is a product of its queries and the block's keys, and a softmax of its own; the
parts of a query are then added with the weights of their sums. The backward pass computes the weights of a tile again from the
logarithm of the query's whole sum, as FlashAttention's does (arXiv 2307.08691, algorithm 2). Nothing is scattered but integers:
gradients come back by the tables that say where each query and key was read, and those of a block's tiles are summed by a
product with zeros and ones.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.blocks.tiles import Row, Spans, Tiles, row_with_gaps, take, tiles_of
from lsm_jax.ops.core.saved import saved

_SCORES = 1 << 26  # that are computed at a time: 256 MiB in float32
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
        precision: the precision of matrix products.
    """

    block_size: int
    earlier: int
    tile: int
    scale: float
    dtype: Any
    precision: jax.lax.Precision


def tile_size(block_size: int, earlier: int, queries_per_key: int) -> int:
    """Return the number of queries in a tile: a power of two of at most a quarter of the queries by which a block is
    selected on average, so that padding adds at most a quarter.
    """
    quarter = block_size * earlier * queries_per_key // 4
    return min(_LARGEST_TILE, 1 << max(0, quarter.bit_length() - 1))


def attend_selected(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> Array:
    """Return the output [B, T, G, R, V], in `plan.dtype`, of queries q [B, T, G, R, K] for keys and values [B, S, G, ...] that
    are 0 for tokens that are not written.

    Args:
        plan: the constants.
        q, k, v: as above.
        rows: the rows' tokens, each array [B, ...].
    """
    batch, length, heads, group, _ = q.shape
    q = jnp.moveaxis(q, 2, 1).reshape(batch * heads, length * group, -1)
    k, v = (jnp.moveaxis(x, 2, 1).reshape(batch * heads, x.shape[1], -1) for x in (k, v))
    rows = jax.tree.map(lambda x: jnp.repeat(x, heads, axis=0), rows)
    output = _attend(plan, q, k, v, rows).reshape(batch, heads, length, group, -1)
    return jnp.moveaxis(output, 1, 2)


def rows_of(
    plan: Plan, rank: Array, written: Array, gaps: bool, start: Array | int, length: int
) -> Row:
    """Return the `Row` of each row, arrays [B, ...], for the `length` queries from token `start`; `rank` and `written` [B, S]
    are those of complete rows. Without `gaps` the queries are a whole row that is one document, all of it written.
    """
    if not gaps:
        return Row(rank)
    of_row = functools.partial(row_with_gaps, size=plan.block_size, start=start, length=length)
    return jax.vmap(of_row)(rank, written)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> Array:
    """Return the output [U, T R, V] of queries [U, T R, K] for U pairs of a row and a memory."""
    return _forward(plan, q, k, v, rows)[0]


def _forward(plan, q, k, v, rows):
    output, log_total, chosen = _map(plan, functools.partial(_forward_of_row, plan), q, k, v, rows)
    output, log_total, chosen = (saved(x) for x in (output, log_total, chosen))
    return output, (q, k, v, rows, output, log_total, chosen)


def _backward(plan, residuals, d_output):
    q, k, v, rows, output, log_total, chosen = residuals
    mean = jnp.sum(d_output * output, axis=-1)  # of the gradients of a query's weights, whose sum is 1
    backward = functools.partial(_backward_of_row, plan)
    dq, dk, dv = _map(plan, backward, q, k, v, rows, d_output, log_total, mean, chosen)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _map(plan: Plan, function, q: Array, *arrays) -> Any:
    """Return `function` of each row and memory, arrays [U, ...]: of as many at a time as have `_SCORES` scores."""
    units, queries = q.shape[:2]
    scores = queries * (1.25 * plan.earlier + 1) * plan.block_size
    most = max(1, int(_SCORES // scores))
    step = next(n for n in range(min(units, most), 0, -1) if units % n == 0)
    function, arguments = jax.vmap(function), (q, *arrays)
    if step == units:
        return function(*arguments)
    split = jax.tree.map(lambda x: x.reshape(units // step, step, *x.shape[1:]), arguments)
    result = jax.lax.map(lambda x: function(*x), split)
    return jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), result)


# ----------------------------------------------------------------------------------------------------------------
# of one row and memory


class _Part(NamedTuple):
    """A span of keys for each query, or `each` of them: its own block, or the selected ones.

    Attributes:
        tiles: the tiles of queries; None if the queries of span n are tile n.
        size: queries in a tile.
        each: the number of spans of a query.
        spans: the spans of keys; None for consecutive blocks.
        seen: [M or 1, C, J], the keys of the span that each query attends to; None for all.
    """

    tiles: Tiles | None
    size: int
    each: int
    spans: Spans | None
    seen: Array | None

    def queries(self, x: Array) -> Array:
        """Return an array of queries [T R, ...] in tiles, [M, C, ...], with zeros in empty places."""
        return _in_blocks(self.size, x) if self.tiles is None else take(x, self.tiles.query)

    def pairs(self, x: Array, length: int, fill=0) -> Array:
        """Return an array of tiles [M, C, ...] for the spans of each of `length` queries, [T R, each, ...]; `fill` for spans that
        do not exist.
        """
        x = x.reshape(-1, *x.shape[2:])
        if self.tiles is None:
            return x[:length, None]
        return take(x, self.tiles.place.reshape(-1, self.each), fill)

    def keys(self, plan: Plan, x: Array) -> Array:
        """Return keys or values [S, ...] for each tile, [M, J, ...]; zeros for tiles without queries."""
        x = _read(plan, self.spans, x)
        return x if self.tiles is None else take(x, self.tiles.span)

    def of_keys(self, plan: Plan, x: Array, length: int) -> Array:
        """Return the sum over tiles [M, J, ...] for each of `length` keys or values, [S, ...]: the gradient of `keys`."""
        if self.tiles is not None:
            number = jnp.arange(-(-length // plan.block_size) if self.spans is None else len(self.spans.token))
            member = (number[:, None] == self.tiles.span).astype(plan.dtype)
            x = jnp.einsum("nm,mjk->njk", member, x, precision=plan.precision)
        x = x.reshape(-1, *x.shape[2:])
        return x[:length] if self.spans is None else jnp.sum(take(x, self.spans.places), axis=1)


def _forward_of_row(plan: Plan, q: Array, k: Array, v: Array, row: Row):
    """Return the output [T R, V], the logarithm [T R] of the sum of each query's weights, 0 without any, and the selected
    blocks [T R, M] of queries [T R, K].
    """
    row, own = _own_block(plan, row, q)
    chosen, blocks = _choose(plan, q, _read(plan, row.blocks, k), row)
    outputs, totals = [], []
    for part in (own, *_earlier_blocks(plan, row, chosen, blocks)):
        output, total = _softmax(plan, part.queries(q), part.keys(plan, k), part.keys(plan, v), part.seen)
        outputs.append(part.pairs(output, len(q)))
        totals.append(part.pairs(total, len(q), -jnp.inf))
    output, total = jnp.concatenate(outputs, axis=1), jnp.concatenate(totals, axis=1)
    top = jnp.max(total, axis=1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(total - top)
    total = jnp.sum(weights, axis=1)
    total = jnp.where(total > 0, total, 1)
    output = jnp.sum(weights[..., None] * output, axis=1) / total[:, None]
    return output, top[:, 0] + jnp.log(total), chosen


def _backward_of_row(plan: Plan, q, k, v, row: Row, d_output, log_total, mean, chosen):
    """Return the gradients of queries [T R, K], keys and values [S, ...]; `mean` [T R] is the sum of `d_output` times the
    output.
    """
    row, own = _own_block(plan, row, q)
    blocks = -(-len(k) // plan.block_size) if row.blocks is None else len(row.blocks.token)
    dq, dk, dv = [], [], []
    for part in (own, *_earlier_blocks(plan, row, chosen, blocks)):
        # An empty place has zeros, whose weights are finite and whose gradients are 0.
        of_queries = (part.queries(x) for x in (q, d_output, log_total, mean))
        keys, values = part.keys(plan, k), part.keys(plan, v)
        d_queries, d_keys, d_values = _gradients(plan, keys, values, part.seen, *of_queries)
        dq.append(jnp.sum(part.pairs(d_queries, len(q)), axis=1))
        dk.append(part.of_keys(plan, d_keys, len(k)))
        dv.append(part.of_keys(plan, d_values, len(k)))
    return tuple(functools.reduce(jnp.add, x) for x in (dq, dk, dv))


def _own_block(plan: Plan, row: Row, q: Array) -> tuple[Row, _Part]:
    """Return the `Row` with its arrays of queries [T] repeated for the R queries [T R, K] of each token, and the queries' own
    blocks.
    """
    size, group = plan.block_size, len(q) // len(row.rank)
    arrays = ((n, getattr(row, n)) for n in ("rank", "first", "window", "last"))
    row = row._replace(**{n: jnp.repeat(x, group) for n, x in arrays if x is not None})
    if row.window is None or row.last is None or row.windows is None:
        seen = jnp.arange(size * group)[:, None] // group >= jnp.arange(size)
        return row, _Part(None, size * group, 1, None, seen[None])
    tiles = tiles_of(row.window, 1, len(row.windows.token), plan.tile)
    last, rank = (take(x, tiles.query, -1)[..., None] for x in (row.last, row.rank))
    place = jnp.arange(2 * size)
    seen = (rank >= 0) & (place <= last) & (place >= last - rank % size)
    return row, _Part(tiles, plan.tile, 1, row.windows, seen)


def _earlier_blocks(plan: Plan, row: Row, chosen: Array, blocks: int) -> list[_Part]:
    """Return the part of the selected blocks [T R, M], numbers below `blocks`; none if M is 0."""
    each = chosen.shape[1]
    if not each:
        return []
    tiles = tiles_of(chosen.reshape(-1), each, blocks, plan.tile)
    return [_Part(tiles, plan.tile, each, row.blocks, None)]


def _choose(plan: Plan, q: Array, k_blocks: Array, row: Row) -> tuple[Array, int]:
    """Return the earlier blocks of its document with the largest q · mean(k), [T R, M], for each query of [T R, K], with N in
    the place of those that do not exist; and N, the number of blocks [N, J, K].
    """
    blocks = len(k_blocks)
    count = min(plan.earlier, blocks)
    if not count:
        return jnp.zeros((len(q), 0), jnp.int32), blocks
    means = jnp.mean(k_blocks.astype(plan.dtype), axis=1)
    scores = jnp.einsum("tk,nk->tn", q.astype(plan.dtype), means, precision=plan.precision)
    number, first = jnp.arange(blocks), 0 if row.first is None else row.first[:, None]
    exists = (number >= first) & (number < first + row.rank[:, None] // plan.block_size)
    value, index = _largest(jnp.where(exists, scores, -jnp.inf), count)
    return jnp.where(value > -jnp.inf, index, blocks).astype(jnp.int32), blocks


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
    scores = _scores(plan, q, keys)
    top = jnp.max(scores if seen is None else jnp.where(seen, scores, -jnp.inf), axis=-1)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = _exp(scores - top[..., None], seen)
    total = jnp.sum(weights, axis=-1)
    output = jnp.einsum("mcj,mjv->mcv", weights, values.astype(plan.dtype), precision=plan.precision)
    output = output / jnp.where(total > 0, total, 1)[..., None]
    return output, top + jnp.log(total)


def _gradients(plan: Plan, keys, values, seen: Array | None, q, d_output, log_total, mean):
    """Return the gradients of queries [M, C, K], keys and values [M, J, ...] by the scores of a tile's queries and keys.

    Args:
        plan: the constants.
        keys, values, seen, q: as in `_softmax`.
        d_output: [M, C, V], the gradient of the queries' outputs.
        log_total: [M, C], the logarithm of the sum of all weights of a query, also of other tiles.
        mean: [M, C], the sum of `d_output` times the output.
    """
    multiply = functools.partial(jnp.einsum, precision=plan.precision)
    weights = _exp(_scores(plan, q, keys) - log_total[..., None], seen)
    d_weights = multiply("mcv,mjv->mcj", d_output, values.astype(plan.dtype))
    d_scores = plan.scale * weights * (d_weights - mean[..., None])
    return (
        multiply("mcj,mjk->mck", d_scores, keys.astype(plan.dtype)),
        multiply("mcj,mck->mjk", d_scores, q.astype(plan.dtype)),
        multiply("mcj,mcv->mjv", weights, d_output),
    )


def _scores(plan: Plan, q: Array, keys: Array) -> Array:
    """Return the scaled products [M, C, J] of queries [M, C, K] and keys [M, J, K]; those of 16-bit numbers are exact in float32."""
    dtype = jnp.promote_types(q.dtype, keys.dtype)
    options: dict[str, Any] = dict(precision=plan.precision, preferred_element_type=plan.dtype)
    return plan.scale * jnp.einsum("mck,mjk->mcj", q.astype(dtype), keys.astype(dtype), **options)


def _exp(x: Array, seen: Array | None) -> Array:
    """Return exp(x) where `seen` is True, and 0 elsewhere."""
    return jnp.exp(x) if seen is None else jnp.where(seen, jnp.exp(jnp.where(seen, x, 0)), 0)
