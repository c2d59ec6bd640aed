"""Forget-gated softmax attention on Mosaic GPU (Hopper): one kernel forward, two backward.

With F the sum of log forget gates, query i gives key j <= i the score `scale q_i . k_j + F_i - F_j` (FoX, arXiv 2503.02130,
Eq. 3). F_i is the same for a whole row and drops out of its softmax, so within a block of queries whose first is i0 a bias of the
column alone is added, `F_i0 - F_j`: it is small where it matters, and exact because F is kept as a pair of numbers.

Forward and the gradient of q: two warpgroups have 64 queries each and walk over the keys, which a third loads. Gradients of k, v
and F_j: two have 64 keys each and walk over the queries. The gradient of F_i through its own row is zero. Blocks that nobody
sees (a later document, a window's or a gate's past) are not visited: `Bounds`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import warpgroups as wg
from pallas_kernels.compat import pl, plgpu
from pallas_kernels.forgetting_attention.bounds import Bounds, Rows, of_keys
from pallas_kernels.forgetting_attention.walk import ROWS, TILE, Place, launch

_F32 = jnp.float32
_LOG2E = math.log2(math.e)


def reason(q, k, v) -> str | None:
    """Why this backend does not serve these arguments (arrays or their shapes), or None."""
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dtype != jnp.bfloat16:
            return f"{name} in bfloat16, not {jnp.dtype(x.dtype).name}"
    if q.shape[-1] not in (64, 128, 256) or v.shape[-1] != q.shape[-1]:
        return f"heads of 64, 128 or 256, values too, not {q.shape[-1]} and {v.shape[-1]}"
    return None


def tile(length: int) -> int:
    """Tokens a tile of `Bounds`, whatever T is."""
    del length
    return TILE


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """The output [B, T, H, D], 0 where a token sees none, and the binary logarithm of each row's sum, [B, H, T] float32.

    T is a multiple of `TILE`. The sum's bias is that of the row's warpgroup.
    """
    size = (
        TILE if q.shape[-1] <= 128 else ROWS
    )  # keys a step: an output 256 wide leaves registers for 64 scores a row
    per_tile = TILE // size

    def compute(at: Place, own, rooms, walk, refs, outputs):
        begin = _begin(refs, at)
        of_row: Any = None
        settled: Any = None
        if bounds.of_row is not None:
            of_row = _far_rows(refs["of row"].at[at.b, at.h, at.tokens])
            settled = refs["settled"][at.b, at.h, at.tile] * per_tile

        def step(n, tiles, carry, *, masked=False, pruned=False):
            out, top, total = carry
            product = lambda x: plgpu.wgmma(x, own["q"], tiles["k"].transpose((1, 0)))  # noqa: E731
            (scores,) = _fresh(product, (ROWS, size))
            scores = _biased(scores, scale, _column_bias(begin, tiles))
            scores = _hide(scores, at.first, n * size, tiles, refs, at, masked, window)
            if pruned:
                seen = wg.spread_rows(of_row * per_tile, scores.shape) <= n
                scores = jnp.where(seen, scores, wg.NEVER)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - wg.spread_rows(new_top, scores.shape))
            out *= wg.spread_rows(fade, out.shape)
            total = total * fade + jnp.sum(weights, axis=1)
            left = wg.as_left(weights, rooms, interpret)
            add = lambda out: plgpu.wgmma(out, left, tiles["v"])  # noqa: E731
            (out,) = wg.accumulate(add, out, interpret=interpret)
            return out, new_top, total

        depth = q.shape[-1]
        carry = _zeros((ROWS, depth)), _column(wg.NEVER), _column(0.0)
        if settled is not None:
            carry = walk(functools.partial(step, pruned=True), carry, None, settled)
        diagonal = at.tile * per_tile
        carry = walk(step, carry, settled, diagonal)
        out, top, total = walk(functools.partial(step, masked=True), carry, diagonal, None)
        blind = top < 0.5 * wg.NEVER
        share = jnp.where(blind, 0.0, 1 / total)
        own["q"][...] = (out * wg.spread_rows(share, out.shape)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["q"], outputs[0].at[at.b, at.tokens, at.h])
        sums = jnp.where(blind, -wg.NEVER, top + jnp.log(total) * _LOG2E)
        outputs[1].at[at.b, at.h, at.tokens][...] = sums
        plgpu.wait_smem_to_gmem(0)

    batch, length, heads, _ = q.shape
    pruning = {} if bounds.of_row is None else {"of row": bounds.of_row, "settled": bounds.settled}
    return launch(
        compute,
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), _F32),
        ],
        own=dict(q=q),
        streamed=dict(k=k, v=v) | of_keys(rows),
        size=size,
        begin=bounds.first,
        end=None,
        far=_of_queries(rows) | pruning,
        interpret=interpret,
    )


def backward(
    q, k, v, rows: Rows, bounds: Bounds, sums, d_out, delta, *, scale: float, window: int | None,
    interpret: Any = False,
):  # fmt: skip
    """Gradients of q, of k and v ([B, T, H, D], one for each head of q) and of the sums of gates ([B, H, T]; None without).

    Those of heads of 256 are not there: two gradients of 64 keys would take all registers.

    Args:
        q: queries, and k, v.
        k: keys.
        v: values.
        rows: as in `forward`.
        bounds: as in `forward`.
        sums: what `forward` returned second.
        d_out: [B, T, H, D].
        delta: [B, H, T] float32, inner products of the output and its gradient.
        scale: of the scores.
        window: or None.
        interpret: parameters of the interpreter, or False.
    """
    if q.shape[-1] > 128:
        raise NotImplementedError(
            f"forgetting_attention: the gradient with implementation='mosaic_gpu' takes heads of 64 or 128, not {q.shape[-1]}"
        )
    shared = dict(scale=scale, window=window, interpret=interpret)
    dq, rest = _backward_of_queries(q, k, v, rows, bounds, sums, d_out, delta, **shared)
    # The output was rounded, so `delta` is a little off the mean it stands for. A gate's gradient sums that up over all later
    # tokens, where all else cancels.
    delta += rest
    return dq, *_backward_of_keys(q, k, v, rows, bounds, sums, d_out, delta, **shared)


def _backward_of_queries(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array]:
    """The gradient of q, and the sums of its scores' gradients, 0 but for rounding."""

    def compute(at: Place, own, rooms, walk, refs, outputs):
        begin = _begin(refs, at)
        square = (ROWS, ROWS)
        mine = lambda name: _far_rows(refs[name].at[at.b, at.h, at.tokens])  # noqa: E731
        row_sums, row_delta = mine("sums"), mine("delta")

        def step(n, tiles, carry, masked):
            dq, rest = carry

            def products(scores, d_weights):
                plgpu.wgmma(scores, own["q"], tiles["k"].transpose((1, 0)))
                plgpu.wgmma(d_weights, own["d_out"], tiles["v"].transpose((1, 0)))

            scores, d_weights = _fresh(products, square, square)
            scores = _biased(scores, scale, _column_bias(begin, tiles))
            scores = _hide(scores, at.first, n * ROWS, tiles, refs, at, masked, window)
            weights = jnp.exp2(scores - wg.spread_rows(row_sums, square))
            d_scores = weights * (d_weights - wg.spread_rows(row_delta, square))
            left = wg.as_left(d_scores, rooms, interpret)
            add = lambda dq: plgpu.wgmma(dq, left, tiles["k"])  # noqa: E731
            rest += jnp.sum(d_scores, axis=1)
            return *wg.accumulate(add, dq, interpret=interpret), rest

        diagonal = at.tile * (TILE // ROWS)
        carry = _zeros((ROWS, q.shape[-1])), _column(0.0)
        carry = walk(functools.partial(step, masked=False), carry, None, diagonal)
        dq, rest = walk(functools.partial(step, masked=True), carry, diagonal, None)
        outputs[1].at[at.b, at.h, at.tokens][...] = rest
        own["q"][...] = (dq * scale).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["q"], outputs[0].at[at.b, at.tokens, at.h])
        plgpu.wait_smem_to_gmem(0)

    return launch(
        compute,
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(delta.shape, _F32)],
        own=dict(q=q, d_out=d_out),
        streamed=dict(k=k, v=v) | of_keys(rows),
        size=ROWS,
        begin=bounds.first,
        end=None,
        far=_of_queries(rows) | dict(sums=sums, delta=delta),
        interpret=interpret,
    )


def _backward_of_keys(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    batch, length, heads, depth = q.shape
    far = _of_queries(rows) | of_keys(rows)
    gated = "high" in far

    def compute(at: Place, own, rooms, walk, refs, outputs):
        square = (ROWS, ROWS)
        if gated:
            high, low = (_far_rows(refs[n].at[at.b, at.h, at.tokens]) for n in ("high", "low"))

        def first_of(n):  # a scalar from far is asked for a step ahead
            n = jnp.minimum(n, length // ROWS - 1)
            return refs["first high"][at.b, at.h, n], refs["first low"][at.b, at.h, n]

        def step(n, tiles, carry, masked):
            dk, dv, d_sums, begin = carry
            product = lambda x: plgpu.wgmma(x, own["k"], tiles["q"].transpose((1, 0)))  # noqa: E731
            (scores,) = _fresh(product, square)
            bias = None
            if gated:
                bias = ((begin[0] - high) + (begin[1] - low)) * _LOG2E
                bias = wg.spread_rows(bias, square)
                begin = first_of(n + 1)
            scores = _biased(scores, scale, bias)
            scores -= wg.spread_columns(_columns(tiles["sums"]), square)
            scores = _hide(scores, n * ROWS, at.first, tiles, refs, at, masked, window, turned=True)
            weights = jnp.exp2(scores)
            left = wg.as_left(weights, rooms, interpret)

            def products(dv, d_weights):
                plgpu.wgmma(dv, left, tiles["d_out"])
                plgpu.wgmma(d_weights, own["v"], tiles["d_out"].transpose((1, 0)))

            dv, d_weights = wg.accumulate(products, dv, _zeros(square), interpret=interpret)
            d_scores = weights * (d_weights - wg.spread_columns(_columns(tiles["delta"]), square))
            d_sums -= jnp.sum(d_scores, axis=1)
            left = wg.as_left(d_scores, rooms, interpret)
            add = lambda dk: plgpu.wgmma(dk, left, tiles["q"])  # noqa: E731
            (dk,) = wg.accumulate(add, dk, interpret=interpret)
            return dk, dv, d_sums, begin

        diagonal = at.tile * (TILE // ROWS)
        carry = _zeros((ROWS, depth)), _zeros((ROWS, depth)), _column(0.0)
        carry = *carry, first_of(diagonal) if gated else ()
        below = diagonal + TILE // ROWS
        carry = walk(functools.partial(step, masked=True), carry, None, below)
        dk, dv, d_sums, _ = walk(functools.partial(step, masked=False), carry, below, None)
        own["k"][...] = (dk * scale).astype(k.dtype)
        own["v"][...] = dv.astype(v.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["k"], outputs[0].at[at.b, at.tokens, at.h])
        plgpu.copy_smem_to_gmem(own["v"], outputs[1].at[at.b, at.tokens, at.h])
        if gated:
            outputs[2].at[at.b, at.h, at.tokens][...] = d_sums
        plgpu.wait_smem_to_gmem(0)

    outputs = [jax.ShapeDtypeStruct(q.shape, k.dtype), jax.ShapeDtypeStruct(q.shape, v.dtype)]
    if gated:
        outputs.append(jax.ShapeDtypeStruct((batch, heads, length), _F32))
    run = {} if rows.run is None else dict(run=rows.run)
    dk, dv, *d_sums = launch(
        compute,
        outputs,
        own=dict(k=k, v=v),
        streamed=dict(q=q, d_out=d_out, sums=sums, delta=delta) | run,
        size=ROWS,
        begin=None,
        end=bounds.last,
        far=far,
        interpret=interpret,
    )
    return dk, dv, d_sums[0] if gated else None


def _of_queries(rows: Rows) -> dict[str, jax.Array]:
    """What the scores' rows need: documents, and the sum of gates at the first of each warpgroup's."""
    given = {} if rows.run is None else {"run": rows.run}
    if rows.gates is None:
        return given
    high, low = rows.gates
    return given | {"first high": high[..., ::ROWS], "first low": low[..., ::ROWS]}


def _zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)


def _column(value):
    return plgpu.layout_cast(jnp.full((ROWS,), value, _F32), wg.LAYOUT.reduce(1))


def _columns(ref):
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(0))


def _far_rows(ref):
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(1), optimized=False)


def _fresh(products, *shapes):
    """Matrix products that `products` adds to references to zeros."""

    def run(*refs):
        products(*refs)
        return [ref[...] for ref in refs]

    return pl.run_scoped(run, *(plgpu.ACC(shape, _F32) for shape in shapes))


def _begin(refs, at: Place):
    """The sum of gates at a warpgroup's first query, or None."""
    if "first high" not in refs:
        return None
    return tuple(refs[f"first {x}"][at.b, at.h, lax.div(at.first, ROWS)] for x in ("high", "low"))


def _column_bias(begin, tiles):
    if begin is None:
        return None
    bias = (begin[0] - _columns(tiles["high"])) + (begin[1] - _columns(tiles["low"]))
    return wg.spread_columns(bias * _LOG2E, (ROWS, tiles["k"].shape[0]))


def _biased(scores, scale, bias):
    scores = scores * (scale * _LOG2E)
    return scores if bias is None else scores + bias


def _hide(scores, first_query, first_key, tiles, refs, at, masked, window, turned=False):
    """Scores of keys that a query does not see become `NEVER`; `turned`: keys are the rows."""
    shape = scores.shape
    if not (masked or window is not None or "run" in tiles):
        return scores
    of_rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=wg.LAYOUT)
    of_columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=wg.LAYOUT)
    query, key = (of_columns, of_rows) if turned else (of_rows, of_columns)
    distance = (query - key) + (first_query - first_key)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if "run" in tiles:
        of_row = _far_rows(refs["run"].at[at.b, at.tokens])
        seen &= wg.spread_rows(of_row, shape) == wg.spread_columns(_columns(tiles["run"]), shape)
    return jnp.where(seen, scores, wg.NEVER)
