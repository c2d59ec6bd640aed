"""Forget-gated softmax attention on Mosaic GPU (Hopper): the two backward kernels.

With weights P_ij, output gradient dO and `delta_i = O_i . dO_i`, the gradient of a score is
`dS_ij = P_ij (dO_i . v_j - delta_i)`. Then `dq_i = scale Σ_j dS_ij k_j`, `dk_j = scale Σ_i dS_ij q_i`,
`dv_j = Σ_i P_ij dO_i` and `dF_j = -Σ_i dS_ij`. The gradient of F_i as the bias of query i, `Σ_j dS_ij`, is 0.

In the kernel of dq, each of two warpgroups has 64 queries and loops over the keys. In the kernel of dk, dv
and dF, each has 64 keys and loops over the queries. A third one loads (`pipeline`). Where registers and
shared memory allow, the products that a step adds to the gradients run on the tensor cores during the next
step's exponentials (`Schedule.deferred`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.forgetting_attention.bounds import Bounds, Rows, key_arrays
from pallas_kernels.forgetting_attention.hopper.pipeline import Pipeline, Warpgroup
from pallas_kernels.forgetting_attention.hopper.schedule import (
    ROWS,
    TILE,
    Position,
    Products,
    Schedule,
)
from pallas_kernels.forgetting_attention.hopper.scores import (
    LOG2E,
    Biases,
    add_bias,
    add_columns,
    hide_unseen,
    key_biases,
    load_columns,
    load_rows,
    partial_sums,
    query_arrays,
    zeros,
)
from pallas_kernels.hopper import warpgroups as wg

_F32 = jnp.float32
# By the channels of a head.
_DEFERRED = Schedule(64, deferred=True, stages=4, alternate=False)
_QUERY_SCHEDULES = {64: _DEFERRED, 128: _DEFERRED}
_KEY_SCHEDULES = {64: _DEFERRED, 128: Schedule(64, deferred=False, stages=2, alternate=False)}


def backward(
    q,
    k,
    v,
    rows: Rows,
    bounds: Bounds,
    sums,
    d_out,
    delta,
    *,
    scale: float,
    window: int | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of the queries q [B, Q, H, D], of the keys k and the values v (both [B, T, H, D],
    one for each query head), and of F, the running sum of the log forget gates, as a bias of the keys ([B, H,
    T], or None without gates).

    Heads of 256 channels are not supported: the gradients of k and v of 64 keys would require all registers.

    Args:
        q: [B, Q, H, D] queries, Q a multiple of `TILE`.
        k: [B, T, G, D] keys, T a multiple of `TILE`.
        v: [B, T, G, D] values.
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        bounds: which tiles of queries see which tiles of keys.
        sums: [B, H, Q] float32, the base-2 logarithm of the sum of each query's weights: the second result of
            `forward`.
        d_out: [B, Q, H, D], the gradient of the output.
        delta: [B, H, Q] float32, the scalar product of each query's output and its gradient.
        scale: the factor by which the scores q . k are multiplied.
        window: the number of last tokens that a query sees, or None for all.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    if q.shape[-1] > 128:
        raise NotImplementedError(
            "forgetting_attention: the gradient with implementation='mosaic_gpu' requires "
            f"heads of 64 or 128 channels, not {q.shape[-1]}"
        )
    options = dict(scale=scale, window=window, interpret=interpret)
    dq, error = _backward_of_queries(q, k, v, rows, bounds, sums, d_out, delta, **options)
    # `delta` is computed from the rounded output, and differs a little from its exact value. A gate's gradient sums these
    # differences over all later tokens, and nearly everything else in that sum cancels.
    delta += error
    return dq, *_backward_of_keys(q, k, v, rows, bounds, sums, d_out, delta, **options)


def _backward_of_queries(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of the queries q [B, Q, H, D], and for each query the sum over keys of the
    gradients dS of its scores, [B, H, Q], which is 0 except for the rounding of `delta`, the scalar product
    of the output and its gradient.
    """
    schedule, shape = _QUERY_SCHEDULES[q.shape[-1]], (ROWS, ROWS)

    def compute(group: Warpgroup):
        at, resident, left, traversal, refs = group
        biases = Biases(refs, at, ROWS, traversal.start)
        row_sums, row_delta = (
            load_rows(refs[name].at[at.b, at.h, at.tokens]) for name in ("sums", "delta")
        )

        def scores(tiles, out, d_weights):
            plgpu.wgmma(out, resident["q"], tiles["k"].transpose((1, 0)))
            plgpu.wgmma(d_weights, resident["d_out"], tiles["v"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False):
            error, last = carry
            x, d_weights = values
            bias, shift, last = biases.at(n, tiles, last, masked)
            x = add_bias(x, scale, bias)
            x = hide_unseen(x, at.row, n * ROWS, tiles, refs, at, masked, window)
            weights = jnp.exp2(x - wg.spread_rows(row_sums - shift, shape))
            d_scores = weights * (d_weights - wg.spread_rows(row_delta, shape))
            return [d_scores], None, (add_columns(error, d_scores), last)

        def add(tiles, operands, dq):
            plgpu.wgmma(dq, wg.as_left(operands[0], left, interpret), tiles["k"])

        diagonal = traversal.stop - TILE // ROWS
        parts = [(None, diagonal, {}), (diagonal, None, dict(masked=True))]
        start = [zeros((ROWS, q.shape[-1]))]
        carry = partial_sums(), biases.first_last
        products = Products(scores, [shape] * 2, use, add)
        (dq,), (error, _) = traversal.accumulate(products, start, carry, parts)
        refs["error"].at[at.b, at.h, at.tokens][...] = jnp.sum(error, axis=1)
        resident["q"][...] = (dq * scale).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(resident["q"], refs["dq"].at[at.b, at.tokens, at.h])
        plgpu.wait_smem_to_gmem(0)

    streamed, in_global = key_biases(rows, q.shape[1])
    pipeline = Pipeline(
        resident=dict(q=q, d_out=d_out),
        streamed=dict(k=k, v=v) | streamed,
        in_global=query_arrays(rows, q.shape[1]) | in_global | dict(sums=sums, delta=delta),
        schedule=schedule,
        begin=bounds.first,
        end=bounds.diagonal,
    )
    struct = jax.ShapeDtypeStruct
    outputs = dict(dq=struct(q.shape, q.dtype), error=struct(delta.shape, _F32))
    name = "forgetting_attention_query_gradient"
    results = pipeline.launch(compute, outputs, name=name, interpret=interpret)
    return results["dq"], results["error"]


class _Queries:
    """The queries that a warpgroup with 64 resident keys reads at each step of its loop: their positions in
    the row, and F, the running sum of the log forget gates, at the first of them.
    """

    def __init__(self, refs, at: Position, length: int):
        self.refs, self.at, self.length = refs, at, length
        self.places = [refs["places"][i] for i in range(2)] if "places" in refs else []

    def first_sum(self, n):
        """Load from global memory F, the running sum of the log forget gates, as (high part, low part), at
        the first of the 64 queries that step n of the loop reads. The loop calls this one step ahead.
        """
        n = jnp.minimum(n, self.length // ROWS - 1)
        return tuple(self.refs[f"first {x}"][self.at.b, self.at.h, n] for x in ("high", "low"))

    def position(self, n):
        """Return the position in the row of the first of the 64 queries that step n of the loop reads: not 64
        n, where the queries are only two parts of the row.
        """
        if not self.places:
            return n * ROWS
        half = self.length // 2
        return n * ROWS + jnp.where(n * ROWS < half, self.places[0], self.places[1] - half)


def _backward_of_keys(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of the keys and of the values, [B, T, H, D] each, where each of the H query heads
    has its own term of them, and the gradient of F, the running sum of the log forget gates, as a bias of
    the keys ([B, H, T]; None without gates).
    """
    batch, length, heads, depth = q.shape
    in_global = query_arrays(rows, length) | key_arrays(rows)
    if rows.places is not None:
        in_global["places"] = rows.places
    gated = "high" in in_global
    schedule, shape = _KEY_SCHEDULES[depth], (ROWS, ROWS)

    def compute(group: Warpgroup):
        at, resident, left, traversal, refs = group
        if gated:
            high, low = (load_rows(refs[n].at[at.b, at.h, at.tokens]) for n in ("high", "low"))
        queries = _Queries(refs, at, length)

        def scores(tiles, out, d_weights):
            plgpu.wgmma(out, resident["k"], tiles["q"].transpose((1, 0)))
            plgpu.wgmma(d_weights, resident["v"], tiles["d_out"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False):
            d_sums, first = carry
            x, d_weights = values
            bias = None
            if gated:
                bias = ((first[0] - high) + (first[1] - low)) * LOG2E
                bias = wg.spread_rows(bias, shape)
                first = queries.first_sum(n + 1)
            x = add_bias(x, scale, bias)
            x -= wg.spread_columns(load_columns(tiles["sums"]), shape)
            first_query = queries.position(n)
            x = hide_unseen(
                x, first_query, at.row, tiles, refs, at, masked, window, keys_in_rows=True
            )
            weights = jnp.exp2(x)
            column_delta = wg.spread_columns(load_columns(tiles["delta"]), shape)
            d_scores = weights * (d_weights - column_delta)
            return [d_scores, weights], None, (add_columns(d_sums, d_scores), first)

        def add(tiles, operands, dk, dv):
            plgpu.wgmma(dk, wg.as_left(operands[0], left, interpret), tiles["q"])
            plgpu.wgmma(dv, wg.as_left(operands[1], left, interpret), tiles["d_out"])

        below = traversal.start + TILE // ROWS
        parts = [(None, below, dict(masked=True)), (below, None, {})]
        start = [zeros((ROWS, depth))] * 2
        carry = partial_sums(), queries.first_sum(traversal.start) if gated else ()
        products = Products(scores, [shape] * 2, use, add)
        (dk, dv), carry = traversal.accumulate(products, start, carry, parts)
        _store_key_gradients(refs, at, resident, dk * scale, dv, carry[0] if gated else None)

    run = {} if rows.run is None else dict(run=rows.at_queries(rows.run, length))
    pipeline = Pipeline(
        resident=dict(k=k, v=v),
        streamed=dict(q=q, d_out=d_out, sums=sums, delta=delta) | run,
        in_global=in_global,
        schedule=schedule,
        begin=bounds.begin,
        end=bounds.last,
        over_queries=True,
    )
    struct = jax.ShapeDtypeStruct
    by_head = (batch, k.shape[1], heads, depth)
    outputs = dict(dk=struct(by_head, k.dtype), dv=struct(by_head, v.dtype))
    if gated:
        outputs["d_sums"] = struct((batch, heads, k.shape[1]), _F32)
    name = "forgetting_attention_key_gradient"
    results = pipeline.launch(compute, outputs, name=name, interpret=interpret)
    return results["dk"], results["dv"], results.get("d_sums")


def _store_key_gradients(refs, at: Position, resident, dk, dv, d_scores) -> None:
    """Write to global memory the gradients that a warpgroup has computed for its 64 keys: of k, of v, and of
    F, the running sum of the log forget gates.

    Args:
        refs: references to the outputs in global memory, by name.
        at: the position of the warpgroup's keys.
        resident: the buffers of k and v in shared memory, which are overwritten.
        dk: the gradient of k, [64, D].
        dv: the gradient of v, [64, D].
        d_scores: [64, 8], partial sums over queries of the gradients of each key's scores, or None without
            gates.
    """
    for name, x in (("k", dk), ("v", dv)):
        resident[name][...] = x.astype(resident[name].dtype)
    plgpu.commit_smem()
    for name in ("k", "v"):
        plgpu.copy_smem_to_gmem(resident[name], refs[f"d{name}"].at[at.b, at.tokens, at.h])
    if d_scores is not None:
        refs["d_sums"].at[at.b, at.h, at.tokens][...] = -jnp.sum(d_scores, axis=1)
    plgpu.wait_smem_to_gmem(0)
