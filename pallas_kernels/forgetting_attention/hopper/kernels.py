"""Forget-gated softmax attention on Mosaic GPU (Hopper): one kernel forward, two backward.

With F the sum of log forget gates, query i gives key j <= i the score `scale q_i . k_j + F_i - F_j` (FoX, arXiv 2503.02130,
Eq. 3). F_i is the same for a whole row and drops out of its softmax, so within a block of queries whose first is i0 a bias of the
column alone is added, `F_i0 - F_j`: it is small where it matters, and exact because F is kept as a pair of numbers. Over the keys
of an earlier tile, whose last is n, it is `(F_i0 - F_n) + (F_n - F_j)`, neither positive: one number a tile and one a key.

Forward and the gradient of q: two warpgroups have 64 queries each and walk over the keys, which a third loads. Gradients of k, v
and F_j: two have 64 keys each and walk over the queries. The gradient of F_i through its own row is zero. Blocks that nobody
sees (a later document, a window's or a gate's past) are not visited: `Bounds`. The forward's warpgroups take
turns between tensor cores and exponentials (`Plan.turns`); in the gradients what a step adds to the sums of the walk runs on the
tensor cores during the next step's exponentials (`Plan.late`), where registers and shared memory allow.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.forgetting_attention.bounds import Bounds, Rows, of_keys
from pallas_kernels.forgetting_attention.walk import ROWS, TILE, Place, Plan, launch
from pallas_kernels.hopper import warpgroups as wg

_F32 = jnp.float32
_LOG2E = math.log2(math.e)
# By the width of heads. An output 256 wide leaves registers for 64 scores a row.
_TURNS = Plan(128, late=False, stages=2, turns=True)
_FORWARD = {64: _TURNS, 128: _TURNS, 256: Plan(64, late=False, stages=2, turns=False)}
_LATE = Plan(64, late=True, stages=4, turns=False)
_OF_QUERIES = {64: _LATE, 128: _LATE}
_OF_KEYS = {64: _LATE, 128: Plan(64, late=False, stages=2, turns=False)}


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
    batch, length, heads, depth = q.shape
    plan = _FORWARD[depth]
    size, per_tile = plan.size, TILE // plan.size
    shape = (ROWS, size)

    def compute(at: Place, own, rooms, walk, refs, outputs):
        biases = _Biases(refs, at, size, walk.start)
        of_row: Any = None
        settled: Any = None
        if bounds.of_row is not None:
            of_row = _far_rows(refs["of row"].at[at.b, at.h, at.tokens])
            settled = refs["settled"][at.b, at.h, at.tile] * per_tile

        def products(tiles, scores):
            plgpu.wgmma(scores, own["q"], tiles["k"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False, pruned=False):
            top, total, ends = carry
            bias, shift, ends = biases.at(n, tiles, ends, masked)
            scores = _biased(values[0], scale, bias)
            scores = _hide(scores, at.row, n * size, tiles, refs, at, masked, window)
            if pruned:
                seen = wg.spread_rows(of_row * per_tile, shape) <= n
                scores = jnp.where(seen, scores, wg.NEVER)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1) + shift)
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - wg.spread_rows(new_top - shift, shape))
            total = _add_columns(total * wg.spread_rows(fade, total.shape), weights)
            return [weights], fade, (new_top, total, ends)

        def more(tiles, lefts, out):
            plgpu.wgmma(out, wg.as_left(lefts[0], rooms, interpret), tiles["v"])

        diagonal = walk.stop - per_tile
        parts = [(settled, diagonal, {}), (diagonal, None, dict(masked=True))]
        if settled is not None:
            parts.insert(0, (None, settled, dict(pruned=True)))
        carry = _column(wg.NEVER), _narrow(), biases.begin
        (out,), carry = walk.gather(
            products, [shape], use, more, [_zeros((ROWS, depth))], carry, parts
        )
        top, total = carry[0], jnp.sum(carry[1], axis=1)
        blind = top < 0.5 * wg.NEVER
        share = jnp.where(blind, 0.0, 1 / total)
        own["q"][...] = (out * wg.spread_rows(share, out.shape)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["q"], outputs[0].at[at.b, at.tokens, at.h])
        sums = jnp.where(blind, -wg.NEVER, top + jnp.log(total) * _LOG2E)
        outputs[1].at[at.b, at.h, at.tokens][...] = sums
        plgpu.wait_smem_to_gmem(0)

    pruning = {} if bounds.of_row is None else {"of row": bounds.of_row, "settled": bounds.settled}
    near, far = _falls(rows, length)
    return launch(
        compute,
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), _F32),
        ],
        own=dict(q=q),
        streamed=dict(k=k, v=v) | near,
        plan=plan,
        begin=bounds.first,
        end=bounds.own,
        far=_of_queries(rows, length) | far | pruning,
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

    plan, shape = _OF_QUERIES[q.shape[-1]], (ROWS, ROWS)

    def compute(at: Place, own, rooms, walk, refs, outputs):
        biases = _Biases(refs, at, ROWS, walk.start)
        mine = lambda name: _far_rows(refs[name].at[at.b, at.h, at.tokens])  # noqa: E731
        row_sums, row_delta = mine("sums"), mine("delta")

        def products(tiles, scores, d_weights):
            plgpu.wgmma(scores, own["q"], tiles["k"].transpose((1, 0)))
            plgpu.wgmma(d_weights, own["d_out"], tiles["v"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False):
            rest, ends = carry
            scores, d_weights = values
            bias, shift, ends = biases.at(n, tiles, ends, masked)
            scores = _biased(scores, scale, bias)
            scores = _hide(scores, at.row, n * ROWS, tiles, refs, at, masked, window)
            weights = jnp.exp2(scores - wg.spread_rows(row_sums - shift, shape))
            d_scores = weights * (d_weights - wg.spread_rows(row_delta, shape))
            return [d_scores], None, (_add_columns(rest, d_scores), ends)

        def more(tiles, lefts, dq):
            plgpu.wgmma(dq, wg.as_left(lefts[0], rooms, interpret), tiles["k"])

        diagonal = walk.stop - TILE // ROWS
        parts = [(None, diagonal, {}), (diagonal, None, dict(masked=True))]
        start = [_zeros((ROWS, q.shape[-1]))]
        carry = _narrow(), biases.begin
        (dq,), (rest, _) = walk.gather(products, [shape] * 2, use, more, start, carry, parts)
        outputs[1].at[at.b, at.h, at.tokens][...] = jnp.sum(rest, axis=1)
        own["q"][...] = (dq * scale).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["q"], outputs[0].at[at.b, at.tokens, at.h])
        plgpu.wait_smem_to_gmem(0)

    near, far = _falls(rows, q.shape[1])
    return launch(
        compute,
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(delta.shape, _F32)],
        own=dict(q=q, d_out=d_out),
        streamed=dict(k=k, v=v) | near,
        plan=plan,
        begin=bounds.first,
        end=bounds.own,
        far=_of_queries(rows, q.shape[1]) | far | dict(sums=sums, delta=delta),
        interpret=interpret,
    )


def _backward_of_keys(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    batch, length, heads, depth = q.shape
    far = _of_queries(rows, length) | of_keys(rows)
    if rows.places is not None:
        far["places"] = rows.places
    gated = "high" in far
    plan, shape = _OF_KEYS[depth], (ROWS, ROWS)

    def compute(at: Place, own, rooms, walk, refs, outputs):
        if gated:
            high, low = (_far_rows(refs[n].at[at.b, at.h, at.tokens]) for n in ("high", "low"))

        def first_of(n):  # a scalar from far is asked for a step ahead
            n = jnp.minimum(n, length // ROWS - 1)
            return refs["first high"][at.b, at.h, n], refs["first low"][at.b, at.h, n]

        places = [refs["places"][i] for i in range(2)] if "places" in refs else []

        def in_row(n):  # the first query of a step
            if not places:
                return n * ROWS
            half = length // 2
            return n * ROWS + jnp.where(n * ROWS < half, places[0], places[1] - half)

        def products(tiles, scores, d_weights):
            plgpu.wgmma(scores, own["k"], tiles["q"].transpose((1, 0)))
            plgpu.wgmma(d_weights, own["v"], tiles["d_out"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False):
            d_sums, begin = carry
            scores, d_weights = values
            bias = None
            if gated:
                bias = ((begin[0] - high) + (begin[1] - low)) * _LOG2E
                bias = wg.spread_rows(bias, shape)
                begin = first_of(n + 1)
            scores = _biased(scores, scale, bias)
            scores -= wg.spread_columns(_columns(tiles["sums"]), shape)
            scores = _hide(scores, in_row(n), at.row, tiles, refs, at, masked, window, turned=True)
            weights = jnp.exp2(scores)
            d_scores = weights * (d_weights - wg.spread_columns(_columns(tiles["delta"]), shape))
            return [d_scores, weights], None, (_add_columns(d_sums, d_scores), begin)

        def more(tiles, lefts, dk, dv):
            plgpu.wgmma(dk, wg.as_left(lefts[0], rooms, interpret), tiles["q"])
            plgpu.wgmma(dv, wg.as_left(lefts[1], rooms, interpret), tiles["d_out"])

        below = walk.start + TILE // ROWS
        parts = [(None, below, dict(masked=True)), (below, None, {})]
        start = [_zeros((ROWS, depth))] * 2
        carry = _narrow(), first_of(walk.start) if gated else ()
        (dk, dv), carry = walk.gather(products, [shape] * 2, use, more, start, carry, parts)
        own["k"][...] = (dk * scale).astype(k.dtype)
        own["v"][...] = dv.astype(v.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["k"], outputs[0].at[at.b, at.tokens, at.h])
        plgpu.copy_smem_to_gmem(own["v"], outputs[1].at[at.b, at.tokens, at.h])
        if gated:
            outputs[2].at[at.b, at.h, at.tokens][...] = -jnp.sum(carry[0], axis=1)
        plgpu.wait_smem_to_gmem(0)

    by_head = (batch, k.shape[1], heads, depth)
    outputs = [jax.ShapeDtypeStruct(by_head, k.dtype), jax.ShapeDtypeStruct(by_head, v.dtype)]
    if gated:
        outputs.append(jax.ShapeDtypeStruct((batch, heads, k.shape[1]), _F32))
    run = {} if rows.run is None else dict(run=rows.at_queries(rows.run, length))
    dk, dv, *d_sums = launch(
        compute,
        outputs,
        own=dict(k=k, v=v),
        streamed=dict(q=q, d_out=d_out, sums=sums, delta=delta) | run,
        plan=plan,
        begin=bounds.begin,
        end=bounds.last,
        far=far,
        interpret=interpret,
        of_keys=True,
    )
    return dk, dv, d_sums[0] if gated else None


def _of_queries(rows: Rows, length: int) -> dict[str, jax.Array]:
    """What the scores' rows need: documents, and the sum of gates at the first of each warpgroup's."""
    given = {} if rows.run is None else {"run": rows.at_queries(rows.run, length)}
    if rows.gates is None:
        return given
    high, low = (rows.at_queries(x, length) for x in rows.gates)
    return given | {"first high": high[..., ::ROWS], "first low": low[..., ::ROWS]}


def _zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)


def _column(value):
    return plgpu.layout_cast(jnp.full((ROWS,), value, _F32), wg.LAYOUT.reduce(1))


def _columns(ref):
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(0))


def _far_rows(ref):
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(1), optimized=False)


def _narrow():
    return _zeros((ROWS, 8))


def _add_columns(sums, x):
    """`sums` [ROWS, 8] plus the columns of x by eight, each thread its own; their own sum is taken at the end."""
    for i in range(0, x.shape[1], 8):
        sums += x[:, i : i + 8]
    return sums


def _falls(rows: Rows, queries: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What the scores' columns need, near and far: documents, and in binary logarithms F at the tile's last key less that of a key,
    and, of the keys in the tile of a warpgroup's queries, F at its first query less that of a key; and F at each tile's last."""
    near = {} if rows.run is None else {"run": rows.run}
    if rows.gates is None:
        return near, {}
    batch, heads, length = rows.gates[0].shape
    tiles = lambda x: x.reshape(batch, -1, x.shape[-1] // TILE, TILE)  # noqa: E731
    own = lambda x: tiles(rows.at_queries(x, queries))  # noqa: E731
    last = [tiles(x)[..., -1] for x in rows.gates]
    fall: Any = sum(tiles(x)[..., -1:] - tiles(x) for x in rows.gates)
    diagonal: Any = sum(own(x)[..., ::ROWS, None] - own(x)[..., None, :] for x in rows.gates)
    if rows.written is not None:
        fall = jnp.where(tiles(rows.written), fall, wg.NEVER)
        diagonal = jnp.where(own(rows.written)[..., None, :], diagonal, wg.NEVER)
    near["fall"] = (fall * _LOG2E).reshape(batch, heads, length)
    diagonal = (diagonal * _LOG2E).reshape(batch, heads, queries // ROWS, TILE)
    return near, {"diagonal": diagonal, "last high": last[0], "last low": last[1]}


class _Biases:
    """Of scores whose rows are a warpgroup's queries: of a column, and of all of a tile's."""

    def __init__(self, refs, at: Place, size: int, start):
        self.refs, self.place, self.size = refs, at, size
        self.first: Any = None
        self.begin: Any = ()
        if "first high" in refs:
            block = lax.div(at.first, ROWS)
            self.first = tuple(refs[f"first {x}"][at.b, at.h, block] for x in ("high", "low"))
            self.begin = self.last_of(start)

    def last_of(self, n):
        """F at the end of the tile of step n: a scalar from far, to be asked for a step ahead."""
        at, ref = self.place, self.refs["last high"]
        n = jnp.minimum(lax.div(n, TILE // self.size), ref.shape[2] - 1)
        return tuple(self.refs[f"last {x}"][at.b, at.h, n] for x in ("high", "low"))

    def at(self, n, tiles, last, masked):
        """The bias of each column, [ROWS, size] or None, what all have beside, and F at the end of the next step's tile."""
        if self.first is None:
            return None, 0.0, ()
        at, size, following = self.place, self.size, self.last_of(n + 1)
        if masked:
            place = pl.ds(lax.rem(n, TILE // size) * size, size)
            ref = self.refs["diagonal"].at[at.b, at.h, lax.div(at.first, ROWS), place]
            bias = plgpu.load(ref, layout=wg.LAYOUT.reduce(0), optimized=False)
            return wg.spread_columns(bias, (ROWS, size)), 0.0, following
        shift = ((self.first[0] - last[0]) + (self.first[1] - last[1])) * _LOG2E
        return wg.spread_columns(_columns(tiles["fall"]), (ROWS, size)), shift, following


def _biased(scores, scale, bias):
    scores = scores * (scale * _LOG2E)
    return scores if bias is None else scores + bias


def _hide(scores, first_query, first_key, tiles, refs, at, masked, window, turned=False):
    """Scores of keys that a query does not see become `NEVER`; `turned`: keys are the rows."""
    shape = scores.shape
    if not (masked or window is not None or "run" in tiles):
        return scores

    def places(axis, first):
        layout = wg.LAYOUT.reduce(1 - axis)
        return first + plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)

    row, column = (first_key, first_query) if turned else (first_query, first_key)
    row, column = places(0, row), wg.spread_columns(places(1, column), shape)
    wide = lambda x: wg.spread_rows(x, shape)  # noqa: E731
    seen = wide(row) <= column if turned else wide(row) >= column
    if window is not None:  # added to rows, of which a thread has two
        seen &= wide(row + window) > column if turned else wide(row - window) < column
    if "run" in tiles:
        of_row = _far_rows(refs["run"].at[at.b, at.tokens])
        seen &= wg.spread_rows(of_row, shape) == wg.spread_columns(_columns(tiles["run"]), shape)
    return jnp.where(seen, scores, wg.NEVER)
