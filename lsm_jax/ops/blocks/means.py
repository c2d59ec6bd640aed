"""Softmax attention to the means of complete blocks of keys and values, and the selection of blocks by its weights.

A query has a score for each block of its row. They are computed for as many rows, memories and queries at a time as have not too
many of them, and again in the backward pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.blocks.tiles import Row, map_chunks, take
from lsm_jax.ops.blocks.units import (
    Mask,
    Plan,
    gradients,
    largest,
    map_units,
    outside_of,
    queries_at_a_time,
    read_blocks,
)
from lsm_jax.ops.core.saved import saved


def attend_means(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> tuple[Array, Array]:
    """Return the output [B, T, G, R, V], in `plan.operand`, of queries q [B, T, G, R, K] for the means of the complete blocks of
    their documents; and the `plan.earlier` blocks before the own one that each token's queries select, [B G, T, P], the number of
    blocks for none: the first of the document, the previous one, and those with the largest mean weights.

    Args:
        plan: the constants.
        q: as above.
        k, v: keys and values [B, S, G, ...], 0 for tokens that are not written.
        rows: the rows' tokens, each array [B, ...].
    """
    batch, length, heads, group, _ = q.shape
    q, k, v = (
        jnp.moveaxis(x, 2, 1).reshape(batch * heads, x.shape[1], *x.shape[3:]).astype(plan.operand)
        for x in (q, k, v)
    )
    of_queries = Row(rows.rank, first=rows.first, blocks=rows.blocks)
    of_queries = jax.tree.map(lambda x: jnp.repeat(x, heads, axis=0), of_queries)
    output, chosen = _attend(plan, q, k, v, of_queries)
    return jnp.moveaxis(output.reshape(batch, heads, length, group, -1), 1, 2), chosen


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, rows: Row) -> tuple[Array, Array]:
    """Return the output [U, T, R, V] of queries [U, T, R, K], and the selected blocks [U, T, P], for U pairs of a row and a memory."""
    return _forward(plan, q, k, v, rows)[0]


def _forward(plan, q, k, v, rows):
    results = map_units(
        functools.partial(_forward_of_row, plan), _numbers(plan, q, k), q, k, v, rows
    )
    output, log_total, chosen = jax.tree.map(saved, results)
    return (output, chosen), (q, k, v, rows, output, log_total)


def _backward(plan, residuals, gradients_of_results):
    *arrays, output, log_total = residuals
    d_output = gradients_of_results[0]
    # The mean of the gradients of a query's weights, whose sum is 1.
    mean = jnp.sum(d_output.astype(plan.dtype) * output.astype(plan.dtype), axis=-1)
    most = _numbers(plan, *arrays[:2])
    of_row = functools.partial(_backward_of_row, plan)
    return *map_units(of_row, most, *arrays, d_output, mean, log_total), None


_attend.defvjp(_forward, _backward)


def _numbers(plan: Plan, q: Array, k: Array) -> int:
    """Return how many scores one row and memory has at a time."""
    _, length, group, dim = q.shape
    each = group * max(dim, -(-k.shape[1] // plan.block_size))
    return queries_at_a_time(length, each) * each


def _chunk(plan: Plan, q: Array, blocks: int) -> int:
    """Return for how many queries [T, R, K] of one row and memory scores are computed at a time."""
    _, group, dim = q.shape
    return queries_at_a_time(len(q), group * max(dim, blocks))


def _means(plan: Plan, row: Row, x: Array) -> Array:
    """Return the means [N, ...] of the blocks of keys or values [S, ...]."""
    return jnp.mean(read_blocks(plan, row.blocks, x).astype(plan.dtype), axis=1)


def _of_queries(row: Row) -> tuple[Array, ...]:
    """Return the row's arrays of queries: rank and, if there are several documents or gaps, the first block."""
    return (row.rank,) if row.first is None else (row.rank, row.first)


def _seen(plan: Plan, blocks: int, rank: Array, first: Array | None = None) -> Array:
    """Return which of the blocks of its document are complete at each query of rank [T], [T, N]."""
    number, first = jnp.arange(blocks), _column(first)
    return (number >= first) & (number < first + (rank[:, None] + 1) // plan.block_size)


def _column(first: Array | None) -> Array:
    """Return the first block of each query's document [T, 1], 0 for None."""
    return jnp.zeros((1, 1), jnp.int32) if first is None else first[:, None]


def _forward_of_row(plan: Plan, q: Array, k: Array, v: Array, row: Row):
    """Return the output [T, R, V] of queries [T, R, K], the logarithm [T, R] of the sum of each query's weights, 0 without any,
    and the selected blocks [T, P].
    """
    keys, values = _means(plan, row, k), _means(plan, row, v)
    blocks = len(keys)
    number, count = jnp.arange(blocks), min(plan.earlier, blocks)
    multiply = functools.partial(jnp.einsum, precision=plan.precision)

    def attend(q: Array, rank: Array, first: Array | None = None):
        outside, rank = outside_of(plan.dtype, rank)
        seen = _seen(plan, blocks, rank, first)[:, None]
        scores = plan.scale * multiply("trk,nk->trn", q.astype(plan.dtype), keys)
        scores = jnp.where(seen, scores, outside)
        top = jnp.max(scores, axis=-1, keepdims=True)
        top = jnp.where(jnp.isfinite(top), top, 0)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        total = jnp.where(total > 0, total, 1)
        output = multiply("trn,nv->trv", weights, values) / total
        best = jnp.mean(weights / total, axis=1)
        begin = _column(first)
        own = begin + rank[:, None] // plan.block_size
        best = jnp.where((number == begin) | (number == own - 1), jnp.inf, best)
        earlier = (number >= begin) & (number < own)
        value, index = largest(jnp.where(earlier, best, -jnp.inf), count)
        chosen = jnp.where(value > -jnp.inf, index, blocks).astype(jnp.int32)
        return output.astype(plan.operand), (top + jnp.log(total))[..., 0], chosen

    chunk, arrays = _chunk(plan, q, blocks), (q, *_of_queries(row))
    if chunk == len(q):
        return attend(*arrays)
    results = map_chunks(attend, chunk, *arrays)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: len(q)], results)


def _backward_of_row(plan: Plan, q, k, v, row: Row, d_output, mean, log_total):
    """Return the gradients of queries [T, R, K], keys and values [S, ...]; `mean` [T, R] is the sum of `d_output` times the output."""
    keys, values = _means(plan, row, k), _means(plan, row, v)
    group, wide = q.shape[1], plan._replace(operand=plan.dtype)

    def of_queries(*arrays):
        """Take arrays of C queries: q, gradients, sums of weights and means, and those of `_of_queries`."""
        outside, rank = outside_of(plan.dtype, arrays[4])
        seen = _seen(plan, len(keys), rank, *arrays[5:])
        mask = Mask(jnp.repeat(seen, group, axis=0)[None], outside)
        flat = (x.reshape(1, -1, *x.shape[2:]) for x in arrays[:4])
        dq, dk, dv = gradients(wide, keys[None], values[None], mask, *flat)
        return dq.reshape(arrays[0].shape).astype(plan.operand), dk[0], dv[0]

    chunk = _chunk(plan, q, len(keys))
    arrays = (q, d_output, log_total, mean, *_of_queries(row))
    if chunk == len(q):
        dq, *d_means = of_queries(*arrays)
    else:
        dq, *d_means = map_chunks(of_queries, chunk, *arrays)
        dq, d_means = dq.reshape(-1, *q.shape[1:])[: len(q)], [jnp.sum(x, axis=0) for x in d_means]

    def of_tokens(x):
        """Give each token of a block its part of the gradient of the block's mean."""
        x, size = x / plan.block_size, plan.block_size
        if row.blocks is None:
            x = jnp.repeat(x, size, axis=0)[: len(k)]
        else:
            x = take(x, row.blocks.places[:, 0] // size)
        return x.astype(plan.operand)

    return dq, *map(of_tokens, d_means)
