"""The forward kernel of softmax attention with forget gates on Mosaic GPU (Hopper).

Query i sees key j <= i with the score `scale q_i . k_j + F_i - F_j`, where F is the running sum of the log forget gates (FoX,
arXiv 2503.02130, Eq. 3); `scores` explains how the bias is computed. Each of two warpgroups has 64 queries and loops over the
keys, which a third one loads (`pipeline`). The first two use the tensor cores and compute exponentials in turn
(`Schedule.alternate`). Tiles of keys that no query of a tile sees are skipped (`Bounds`): those of a later token or an earlier
document, before the window, or pruned because the gates make their weights negligible.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.forgetting_attention.bounds import Bounds, Rows
from pallas_kernels.forgetting_attention.hopper.pipeline import Pipeline, Warpgroup
from pallas_kernels.forgetting_attention.hopper.schedule import (
    ROWS,
    TILE,
    Products,
    Schedule,
)
from pallas_kernels.forgetting_attention.hopper.scores import (
    LOG2E,
    Biases,
    add_bias,
    add_columns,
    full_column,
    hide_unseen,
    key_biases,
    load_rows,
    partial_sums,
    query_arrays,
    zeros,
)
from pallas_kernels.hopper import warpgroups as wg

# By the channels of a head. An output of 256 channels leaves registers for only 64 scores of each query.
_ALTERNATE = Schedule(128, deferred=False, stages=2, alternate=True)
_SCHEDULES = {
    64: _ALTERNATE,
    128: _ALTERNATE,
    256: Schedule(64, deferred=False, stages=2, alternate=False),
}


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Compute attention with forget gates on a Hopper GPU; return its output for each query, and the
    logarithm of the sum of the query's weights, which the backward pass needs.

    Args:
        q: [B, Q, H, D] queries, Q a multiple of `TILE`.
        k: [B, T, G, D] keys, T a multiple of `TILE`.
        v: [B, T, G, D] values.
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        bounds: which tiles of queries see which tiles of keys.
        scale: the factor by which the scores q . k are multiplied.
        window: the number of last tokens that a query sees, or None for all.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The output [B, Q, H, D], 0 where a query sees no key; and [B, H, Q] float32, the base-2 logarithm of the sum of each
        query's weights. In these weights, the running sum F of the log forget gates at the query is replaced by F at the first
        query of its warpgroup.
    """
    batch, length, heads, depth = q.shape
    schedule = _SCHEDULES[depth]
    size, per_tile = schedule.size, TILE // schedule.size
    shape = (ROWS, size)

    def compute(group: Warpgroup):
        at, resident, left, traversal, refs = group
        biases = Biases(refs, at, size, traversal.start)
        first_seen: Any = None
        first_common: Any = None
        if bounds.first_of_query is not None:
            first_seen = load_rows(refs["first of query"].at[at.b, at.h, at.tokens])
            first_common = refs["first common"][at.b, at.h, at.tile] * per_tile

        def scores(tiles, out):
            plgpu.wgmma(out, resident["q"], tiles["k"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False, pruned=False):
            top, total, last = carry
            bias, shift, last = biases.at(n, tiles, last, masked)
            x = add_bias(values[0], scale, bias)
            x = hide_unseen(x, at.row, n * size, tiles, refs, at, masked, window)
            if pruned:
                seen = wg.spread_rows(first_seen * per_tile, shape) <= n
                x = jnp.where(seen, x, wg.NEVER)
            new_top = jnp.maximum(top, jnp.max(x, axis=1) + shift)
            factor = jnp.exp2(top - new_top)
            weights = jnp.exp2(x - wg.spread_rows(new_top - shift, shape))
            total = add_columns(total * wg.spread_rows(factor, total.shape), weights)
            return [weights], factor, (new_top, total, last)

        def add(tiles, operands, out):
            plgpu.wgmma(out, wg.as_left(operands[0], left, interpret), tiles["v"])

        diagonal = traversal.stop - per_tile
        parts = [(first_common, diagonal, {}), (diagonal, None, dict(masked=True))]
        if first_common is not None:
            parts.insert(0, (None, first_common, dict(pruned=True)))
        carry = full_column(wg.NEVER), partial_sums(), biases.first_last
        products = Products(scores, [shape], use, add)
        (out,), carry = traversal.accumulate(products, [zeros((ROWS, depth))], carry, parts)
        _store(refs, at, resident["q"], out, *carry[:2])

    pruning = {}
    if bounds.first_of_query is not None:
        pruning = {"first of query": bounds.first_of_query, "first common": bounds.first_common}
    streamed, in_global = key_biases(rows, length)
    pipeline = Pipeline(
        resident=dict(q=q),
        streamed=dict(k=k, v=v) | streamed,
        in_global=query_arrays(rows, length) | in_global | pruning,
        schedule=schedule,
        begin=bounds.first,
        end=bounds.diagonal,
    )
    sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    outputs = dict(output=jax.ShapeDtypeStruct(q.shape, q.dtype), sums=sums)
    name = "forgetting_attention_forward"
    results = pipeline.launch(compute, outputs, name=name, interpret=interpret)
    return results["output"], results["sums"]


def _store(refs, at, buffer, out, top, total) -> None:
    """Write the attention output of a warpgroup's 64 queries to global memory, and the logarithms of the sums
    of their weights.

    Args:
        refs: references to the outputs in global memory, by name.
        at: the row, the head and the queries of the warpgroup.
        buffer: a buffer [ROWS, D] in shared memory.
        out: [64, D], for each query the sum of the values times their weights, not yet divided by the sum of
            the weights.
        top: [ROWS], the largest score of each query, which its weights are relative to.
        total: [ROWS, 8], partial sums of each query's weights.
    """
    total = jnp.sum(total, axis=1)
    sees_none = top < 0.5 * wg.NEVER
    inverse = jnp.where(sees_none, 0.0, 1 / total)
    buffer[...] = (out * wg.spread_rows(inverse, out.shape)).astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, refs["output"].at[at.b, at.tokens, at.h])
    sums = jnp.where(sees_none, -wg.NEVER, top + jnp.log(total) * LOG2E)
    refs["sums"].at[at.b, at.h, at.tokens][...] = sums
    plgpu.wait_smem_to_gmem(0)
