"""Compute softmax attention for one block of queries after another; the backward pass computes the scores
again.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.forget_gates import GateSum, gate_bias
from lsm_jax.ops.core import checks

_LONG_ROW = 4096  # tokens


def attend_causally(q, k, v, sums: GateSum | None, *, window: int | None, scale: float) -> Array:
    """Return causal softmax attention's output for rows that are one document without masks, computed for a block of
    queries at a time. With a window, a block of queries reads only the keys of its window.
    """
    length = q.shape[1]
    block = _block_size(length, length)
    position = jnp.arange(length)[None]
    if window is None or window + block >= length:
        # A long row in four parts, each of which reads only the keys up to its end: 5/8 of the work.
        ends = [length * part // 4 for part in range(5)] if length >= _LONG_ROW else [0, length]

        def part(begin, end):
            keys = jax.tree.map(lambda x: x[:, :end], (k, v, sums))
            queries, of_queries = jax.tree.map(lambda x: x[:, begin:end], ((q, sums), (position,)))

            def keys_and_mask(query_position):
                distance = query_position[:, :, None] - position[:, None, :end]
                mask = distance >= 0
                mask = mask if window is None else mask & (distance < window)
                return keys, mask

            return attend_in_blocks(queries, of_queries, keys_and_mask, scale)

        parts = [part(begin, end) for begin, end in itertools.pairwise(ends)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    earlier = window - 1  # keys before a block's first query that its window contains
    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (earlier, block)] + [(0, 0)] * (x.ndim - 2)), (k, v, sums)
    )

    def keys_and_mask_of_window(query_position):
        first = query_position[0, 0]
        take_window = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=earlier + block, axis=1
        )
        key_position = first - earlier + jnp.arange(earlier + block)
        distance = query_position[:, :, None] - key_position
        mask = (distance >= 0) & (distance < window) & (key_position >= 0)
        return jax.tree.map(take_window, padded), mask

    return attend_in_blocks((q, sums), (position,), keys_and_mask_of_window, scale, block)


def _block_size(length: int, keys: int) -> int:
    """Return the number of queries in a block, with which a head has about a million scores at a time (at
    least 128 queries): the memory used then does not grow as T².
    """
    return min(length, max(128, (1 << 20) // keys))


def attend_in_blocks(
    queries: tuple, of_queries: tuple, keys_and_mask, scale: float, block: int | None = None
) -> Array:
    """Return the output of softmax attention, [B, T, N, V], computed for one block of queries after another.

    Args:
        queries: the queries [B, T, H, K], and the sums of their gates or None.
        of_queries: arrays [B or 1, T] that describe the queries, such as their positions.
        keys_and_mask: called with a block of each of `of_queries`. Returns (keys [B, S, G, K], values, sums
            of their gates), and a mask [B or 1, block, S] that is True where a query attends to a key.
        scale: multiplies the scores.
        block: queries in a block; None chooses by the number of keys.
    """
    batch, length = queries[0].shape[:2]
    num_keys = jax.eval_shape(lambda *x: keys_and_mask(*x)[0][0], *of_queries).shape[1]

    def attend(queries, of_queries):
        (q, q_sums), ((keys, values, sums), mask) = queries, keys_and_mask(*of_queries)
        heads = values.shape[2]
        q_by_head = checks.group_queries(q, heads)
        dtype = checks.compute_dtype(q, keys, values)
        precision = checks.matmul_precision(q, keys, values)
        scores = scale * jnp.einsum(
            "btgrk,bsgk->bgrts", q_by_head.astype(dtype), keys.astype(dtype), precision=precision
        )
        if q_sums is not None:
            scores = scores + gate_bias(q_sums, sums).reshape(scores.shape)
        mask = mask[:, None, None]
        top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
        top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
        weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        output = jnp.einsum("bgrts,bsgv->btgrv", weights, values.astype(dtype), precision=precision)
        return output.reshape(*output.shape[:2], -1, output.shape[-1])

    block = block or _block_size(length, num_keys)
    if block >= length:
        return attend(queries, of_queries)
    count = -(-length // block)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    body = jax.checkpoint(lambda _, x: (None, attend(*x)))
    _, output = jax.lax.scan(body, None, jax.tree.map(split, (queries, of_queries)))
    output = jnp.moveaxis(output, 0, 1).reshape(batch, count * block, *output.shape[3:])
    return output[:, :length]
