"""Softmax attention in blocks of queries, whose scores the backward pass recomputes: no array of [T, T] is kept."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.forget_gates import GateSum, gate_bias
from lsm_jax.ops.core import checks

_LONG = 4096


def attend_causally(q, k, v, sums: GateSum | None, *, window: int | None, scale: float) -> Array:
    """Whole documents: masks from positions alone; with a window, only the keys in reach of a block are read."""
    length = q.shape[1]
    block = _block_size(length, length)
    position = jnp.arange(length)[None]
    if window is None or window + block >= length:
        # A long row in four parts, each of which looks no further than its end: 5/8 of the work.
        ends = [length * part // 4 for part in range(5)] if length >= _LONG else [0, length]

        def part(begin, end):
            kept = jax.tree.map(lambda x: x[:, :end], (k, v, sums))
            asked, where = jax.tree.map(lambda x: x[:, begin:end], ((q, sums), (position,)))

            def near(start):
                distance = start[:, :, None] - position[:, None, :end]
                seen = distance >= 0
                seen = seen if window is None else seen & (distance < window)
                return kept, seen

            return attend_in_blocks(asked, where, near, scale)

        parts = [part(begin, end) for begin, end in itertools.pairwise(ends)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    reach = window - 1
    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (reach, block)] + [(0, 0)] * (x.ndim - 2)), (k, v, sums)
    )

    def band(start):
        first = start[0, 0]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=reach + block, axis=1
        )
        there = first - reach + jnp.arange(reach + block)
        distance = start[:, :, None] - there
        seen = (distance >= 0) & (distance < window) & (there >= 0)
        return jax.tree.map(cut, padded), seen

    return attend_in_blocks((q, sums), (position,), band, scale, block)


def _block_size(length: int, keys: int) -> int:
    """Queries a block: about a million scores a head, so that memory does not grow with T squared."""
    return min(length, max(128, (1 << 20) // keys))


def attend_in_blocks(asked, where, lookup, scale: float, block: int | None = None) -> Array:
    """Softmax attention of blocks of queries, scanned; the backward pass recomputes the scores.

    `asked` holds the queries [B, T, H, K] and their gates' sums or None, `where` [B or 1, T] descriptions of them;
    `lookup(*where of a block)` gives (keys [B, S, G, K], values, the keys' sums), and which of them each query sees,
    [B or 1, block, S].
    """
    batch, length = asked[0].shape[:2]
    num_keys = jax.eval_shape(lambda *w: lookup(*w)[0][0], *where).shape[1]

    def attend(asked, where):
        (q, own), ((keys, values, sums), seen) = asked, lookup(*where)
        heads = values.shape[2]
        queries = checks.group_queries(q, heads)
        dtype = checks.compute_dtype(q, keys, values)
        precision = checks.matmul_precision(q, keys, values)
        scores = scale * jnp.einsum(
            "btgrk,bsgk->bgrts", queries.astype(dtype), keys.astype(dtype), precision=precision
        )
        if own is not None:
            scores = scores + gate_bias(own, sums).reshape(scores.shape)
        seen = seen[:, None, None]
        top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
        top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        output = jnp.einsum("bgrts,bsgv->btgrv", weights, values.astype(dtype), precision=precision)
        return output.reshape(*output.shape[:2], -1, output.shape[-1])

    block = block or _block_size(length, num_keys)
    if block >= length:
        return attend(asked, where)
    count = -(-length // block)

    def blocks(x):
        x = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    body = jax.checkpoint(lambda _, x: (None, attend(*x)))
    _, output = jax.lax.scan(body, None, jax.tree.map(blocks, (asked, where)))
    output = jnp.moveaxis(output, 0, 1).reshape(batch, count * block, *output.shape[3:])
    return output[:, :length]
