"""Forget-gated softmax attention on Mosaic GPU (Hopper): one kernel forward, two backward.

With F the sum of log forget gates, query i gives key j <= i the score `scale q_i . k_j + F_i - F_j` (FoX, arXiv 2503.02130,
Eq. 3). F_i is the same for all keys of a query and drops out of its softmax, so within a block of queries whose first is i0 a bias
of the key alone is added, `F_i0 - F_j`: it is small where it matters, and exact because F is a pair of numbers. For the keys of an
earlier tile, whose last is n, it is `(F_i0 - F_n) + (F_n - F_j)`, neither positive: one number for each tile and one for each key.

Forward and the gradient of q: two warpgroups have 64 queries each and traverse the keys, which a third one loads. Gradients of k, v
and F_j: two have 64 keys each and traverse the queries. The gradient of F_i through its own row is zero. Tiles that no query sees (a
later document, before the window, or pruned by gates) are skipped: `Bounds`. The warpgroups of the forward kernel take turns between
tensor cores and exponentials (`Schedule.turns`); in the gradients, what a step adds to the sums runs on the tensor cores during the
next step's exponentials (`Schedule.late`), where registers and shared memory allow.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.forgetting_attention.bounds import Bounds, Rows, key_arrays
from pallas_kernels.forgetting_attention.hopper.pipeline import (
    ROWS,
    TILE,
    Pipeline,
    Position,
    Products,
    Schedule,
    Warpgroup,
)
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_LOG2E = math.log2(math.e)
# By the channels of a head. An output of 256 channels leaves registers for 64 scores of each query.
_TURNS = Schedule(128, late=False, stages=2, turns=True)
_FORWARD = {64: _TURNS, 128: _TURNS, 256: Schedule(64, late=False, stages=2, turns=False)}
_LATE = Schedule(64, late=True, stages=4, turns=False)
_QUERY_GRADIENT = {64: _LATE, 128: _LATE}
_KEY_GRADIENT = {64: _LATE, 128: Schedule(64, late=False, stages=2, turns=False)}


REQUIREMENTS = (
    Requirement(
        f"q, k and v of the same tokens, or halves of the queries, and keys, in multiples of {TILE} tokens",
        lambda c: (
            c.q.shape[1] == c.k.shape[1]
            or (c.q.shape[1] % (2 * TILE) == 0 and c.k.shape[1] % TILE == 0)
        ),
        lambda c: f"{c.q.shape[1] / 2:g} and {c.k.shape[1]}",
    ),
    Requirement(
        "q, k and v in bfloat16",
        lambda c: all(x.dtype == jnp.bfloat16 for x in c),
        lambda c: ", ".join(sorted({jnp.dtype(x.dtype).name for x in c} - {"bfloat16"})),
    ),
    Requirement(
        "heads of 64, 128 or 256 channels, with values of the same size",
        lambda c: c.q.shape[-1] in (64, 128, 256) and c.v.shape[-1] == c.q.shape[-1],
        lambda c: f"{c.q.shape[-1]} and {c.v.shape[-1]}",
    ),
)


def unsupported(call) -> str | None:
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """Tokens of a tile of `Bounds`, for any T."""
    del length
    return TILE


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, H, D], 0 where a query sees no key, and the binary logarithm of each query's sum of weights,
    [B, H, T] float32.

    T is a multiple of `TILE`. The bias of the weights is that of the query's warpgroup.
    """
    batch, length, heads, depth = q.shape
    schedule = _FORWARD[depth]
    size, per_tile = schedule.size, TILE // schedule.size
    shape = (ROWS, size)

    def compute(group: Warpgroup):
        at, resident, left, traversal, refs = group
        biases = _Biases(refs, at, size, traversal.start)
        of_row: Any = None
        settled: Any = None
        if bounds.of_row is not None:
            of_row = _load_rows(refs["of row"].at[at.b, at.h, at.tokens])
            settled = refs["settled"][at.b, at.h, at.tile] * per_tile

        def scores(tiles, out):
            plgpu.wgmma(out, resident["q"], tiles["k"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False, pruned=False):
            top, total, ends = carry
            bias, shift, ends = biases.at(n, tiles, ends, masked)
            x = _biased(values[0], scale, bias)
            x = _hide(x, at.row, n * size, tiles, refs, at, masked, window)
            if pruned:
                seen = wg.spread_rows(of_row * per_tile, shape) <= n
                x = jnp.where(seen, x, wg.NEVER)
            new_top = jnp.maximum(top, jnp.max(x, axis=1) + shift)
            factor = jnp.exp2(top - new_top)
            weights = jnp.exp2(x - wg.spread_rows(new_top - shift, shape))
            total = _add_columns(total * wg.spread_rows(factor, total.shape), weights)
            return [weights], factor, (new_top, total, ends)

        def add(tiles, operands, out):
            plgpu.wgmma(out, wg.as_left(operands[0], left, interpret), tiles["v"])

        diagonal = traversal.stop - per_tile
        parts = [(settled, diagonal, {}), (diagonal, None, dict(masked=True))]
        if settled is not None:
            parts.insert(0, (None, settled, dict(pruned=True)))
        carry = _column(wg.NEVER), _narrow(), biases.begin
        products = Products(scores, [shape], use, add)
        (out,), carry = traversal.accumulate(products, [_zeros((ROWS, depth))], carry, parts)
        top, total = carry[0], jnp.sum(carry[1], axis=1)
        sees_none = top < 0.5 * wg.NEVER
        inverse = jnp.where(sees_none, 0.0, 1 / total)
        resident["q"][...] = (out * wg.spread_rows(inverse, out.shape)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(resident["q"], refs["output"].at[at.b, at.tokens, at.h])
        sums = jnp.where(sees_none, -wg.NEVER, top + jnp.log(total) * _LOG2E)
        refs["sums"].at[at.b, at.h, at.tokens][...] = sums
        plgpu.wait_smem_to_gmem(0)

    pruning = {} if bounds.of_row is None else {"of row": bounds.of_row, "settled": bounds.settled}
    streamed, in_global = _key_biases(rows, length)
    pipeline = Pipeline(
        resident=dict(q=q),
        streamed=dict(k=k, v=v) | streamed,
        in_global=_query_arrays(rows, length) | in_global | pruning,
        schedule=schedule,
        begin=bounds.first,
        end=bounds.diagonal,
    )
    struct = jax.ShapeDtypeStruct
    outputs = dict(output=struct(q.shape, q.dtype), sums=struct((batch, heads, length), _F32))
    name = "forgetting_attention_forward"
    results = pipeline.launch(compute, outputs, name=name, interpret=interpret)
    return results["output"], results["sums"]


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
    """Return the gradients of q, of k and v ([B, T, H, D], one for each query head) and of the sums of gates ([B, H, T]; None without).

    Heads of 256 channels are not supported: the gradients of k and v of 64 keys would need all registers.

    Args:
        q: queries, and k, v.
        k: keys.
        v: values.
        rows: as in `forward`.
        bounds: as in `forward`.
        sums: the second result of `forward`.
        d_out: [B, T, H, D].
        delta: [B, H, T] float32, inner products of the output and its gradient.
        scale: multiplies the scores.
        window: tokens that a query sees, or None.
        interpret: parameters of the interpreter, or False.
    """
    if q.shape[-1] > 128:
        raise NotImplementedError(
            "forgetting_attention: the gradient with implementation='mosaic_gpu' requires "
            f"heads of 64 or 128 channels, not {q.shape[-1]}"
        )
    shared = dict(scale=scale, window=window, interpret=interpret)
    dq, rest = _backward_of_queries(q, k, v, rows, bounds, sums, d_out, delta, **shared)
    # The output was rounded, so `delta` differs a little from the exact inner product. A gate's gradient sums these differences over
    # all later tokens, where nearly all else cancels.
    delta += rest
    return dq, *_backward_of_keys(q, k, v, rows, bounds, sums, d_out, delta, **shared)


def _backward_of_queries(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of q, and the sum of each query's score gradients, which is 0 except for rounding."""
    schedule, shape = _QUERY_GRADIENT[q.shape[-1]], (ROWS, ROWS)

    def compute(group: Warpgroup):
        at, resident, left, traversal, refs = group
        biases = _Biases(refs, at, ROWS, traversal.start)
        row_sums, row_delta = (
            _load_rows(refs[name].at[at.b, at.h, at.tokens]) for name in ("sums", "delta")
        )

        def scores(tiles, out, d_weights):
            plgpu.wgmma(out, resident["q"], tiles["k"].transpose((1, 0)))
            plgpu.wgmma(d_weights, resident["d_out"], tiles["v"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False):
            rest, ends = carry
            x, d_weights = values
            bias, shift, ends = biases.at(n, tiles, ends, masked)
            x = _biased(x, scale, bias)
            x = _hide(x, at.row, n * ROWS, tiles, refs, at, masked, window)
            weights = jnp.exp2(x - wg.spread_rows(row_sums - shift, shape))
            d_scores = weights * (d_weights - wg.spread_rows(row_delta, shape))
            return [d_scores], None, (_add_columns(rest, d_scores), ends)

        def add(tiles, operands, dq):
            plgpu.wgmma(dq, wg.as_left(operands[0], left, interpret), tiles["k"])

        diagonal = traversal.stop - TILE // ROWS
        parts = [(None, diagonal, {}), (diagonal, None, dict(masked=True))]
        start = [_zeros((ROWS, q.shape[-1]))]
        carry = _narrow(), biases.begin
        products = Products(scores, [shape] * 2, use, add)
        (dq,), (rest, _) = traversal.accumulate(products, start, carry, parts)
        refs["rest"].at[at.b, at.h, at.tokens][...] = jnp.sum(rest, axis=1)
        resident["q"][...] = (dq * scale).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(resident["q"], refs["dq"].at[at.b, at.tokens, at.h])
        plgpu.wait_smem_to_gmem(0)

    streamed, in_global = _key_biases(rows, q.shape[1])
    pipeline = Pipeline(
        resident=dict(q=q, d_out=d_out),
        streamed=dict(k=k, v=v) | streamed,
        in_global=_query_arrays(rows, q.shape[1]) | in_global | dict(sums=sums, delta=delta),
        schedule=schedule,
        begin=bounds.first,
        end=bounds.diagonal,
    )
    struct = jax.ShapeDtypeStruct
    outputs = dict(dq=struct(q.shape, q.dtype), rest=struct(delta.shape, _F32))
    name = "forgetting_attention_query_gradient"
    results = pipeline.launch(compute, outputs, name=name, interpret=interpret)
    return results["dq"], results["rest"]


def _backward_of_keys(
    q, k, v, rows, bounds, sums, d_out, delta, *, scale, window, interpret
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of k and v, one for each query head, and of F_j (None without gates)."""
    batch, length, heads, depth = q.shape
    in_global = _query_arrays(rows, length) | key_arrays(rows)
    if rows.places is not None:
        in_global["places"] = rows.places
    gated = "high" in in_global
    schedule, shape = _KEY_GRADIENT[depth], (ROWS, ROWS)

    def compute(group: Warpgroup):
        at, resident, left, traversal, refs = group
        if gated:
            high, low = (_load_rows(refs[n].at[at.b, at.h, at.tokens]) for n in ("high", "low"))

        def first_of(n):  # a scalar in global memory is loaded a step ahead
            n = jnp.minimum(n, length // ROWS - 1)
            return refs["first high"][at.b, at.h, n], refs["first low"][at.b, at.h, n]

        places = [refs["places"][i] for i in range(2)] if "places" in refs else []

        def in_row(n):  # the first query of a step
            if not places:
                return n * ROWS
            half = length // 2
            return n * ROWS + jnp.where(n * ROWS < half, places[0], places[1] - half)

        def scores(tiles, out, d_weights):
            plgpu.wgmma(out, resident["k"], tiles["q"].transpose((1, 0)))
            plgpu.wgmma(d_weights, resident["v"], tiles["d_out"].transpose((1, 0)))

        def use(n, tiles, values, carry, masked=False):
            d_sums, begin = carry
            x, d_weights = values
            bias = None
            if gated:
                bias = ((begin[0] - high) + (begin[1] - low)) * _LOG2E
                bias = wg.spread_rows(bias, shape)
                begin = first_of(n + 1)
            x = _biased(x, scale, bias)
            x -= wg.spread_columns(_load_columns(tiles["sums"]), shape)
            x = _hide(x, in_row(n), at.row, tiles, refs, at, masked, window, keys_in_rows=True)
            weights = jnp.exp2(x)
            d_scores = weights * (
                d_weights - wg.spread_columns(_load_columns(tiles["delta"]), shape)
            )
            return [d_scores, weights], None, (_add_columns(d_sums, d_scores), begin)

        def add(tiles, operands, dk, dv):
            plgpu.wgmma(dk, wg.as_left(operands[0], left, interpret), tiles["q"])
            plgpu.wgmma(dv, wg.as_left(operands[1], left, interpret), tiles["d_out"])

        below = traversal.start + TILE // ROWS
        parts = [(None, below, dict(masked=True)), (below, None, {})]
        start = [_zeros((ROWS, depth))] * 2
        carry = _narrow(), first_of(traversal.start) if gated else ()
        products = Products(scores, [shape] * 2, use, add)
        (dk, dv), carry = traversal.accumulate(products, start, carry, parts)
        resident["k"][...] = (dk * scale).astype(k.dtype)
        resident["v"][...] = dv.astype(v.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(resident["k"], refs["dk"].at[at.b, at.tokens, at.h])
        plgpu.copy_smem_to_gmem(resident["v"], refs["dv"].at[at.b, at.tokens, at.h])
        if gated:
            refs["d_sums"].at[at.b, at.h, at.tokens][...] = -jnp.sum(carry[0], axis=1)
        plgpu.wait_smem_to_gmem(0)

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


def _query_arrays(rows: Rows, length: int) -> dict[str, jax.Array]:
    """Return the arrays that the scores need for each query: documents, and the sum of gates at each warpgroup's first query."""
    arrays = {} if rows.run is None else {"run": rows.at_queries(rows.run, length)}
    if rows.gates is None:
        return arrays
    high, low = (rows.at_queries(x, length) for x in rows.gates)
    return arrays | {"first high": high[..., ::ROWS], "first low": low[..., ::ROWS]}


def _zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)


def _column(value):
    return plgpu.layout_cast(jnp.full((ROWS,), value, _F32), wg.LAYOUT.reduce(1))


def _load_columns(ref):
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(0))


def _load_rows(ref):
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(1), optimized=False)


def _narrow():
    return _zeros((ROWS, 8))


def _add_columns(sums, x):
    """Add the columns of x to `sums` [ROWS, 8], eight at a time, so that no thread needs another's; `sums` is summed at the end."""
    for i in range(0, x.shape[1], 8):
        sums += x[:, i : i + 8]
    return sums


def _key_biases(rows: Rows, queries: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the arrays that the scores need for each key: those that are streamed, and those read from global memory.

    Streamed: documents ("run") and, in binary logarithms, F at the tile's last key minus F at each key ("fall"). In global memory: for
    the keys in the tile of a warpgroup's queries, F at its first query minus F at each key ("diagonal"); and F at each tile's last key.
    """
    streamed = {} if rows.run is None else {"run": rows.run}
    if rows.gates is None:
        return streamed, {}
    batch, heads, length = rows.gates[0].shape
    tiles = lambda x: x.reshape(batch, -1, x.shape[-1] // TILE, TILE)  # noqa: E731
    of_queries = lambda x: tiles(rows.at_queries(x, queries))  # noqa: E731
    last = [tiles(x)[..., -1] for x in rows.gates]
    fall: Any = sum(tiles(x)[..., -1:] - tiles(x) for x in rows.gates)
    diagonal: Any = sum(
        of_queries(x)[..., ::ROWS, None] - of_queries(x)[..., None, :] for x in rows.gates
    )
    if rows.written is not None:
        fall = jnp.where(tiles(rows.written), fall, wg.NEVER)
        diagonal = jnp.where(of_queries(rows.written)[..., None, :], diagonal, wg.NEVER)
    streamed["fall"] = (fall * _LOG2E).reshape(batch, heads, length)
    diagonal = (diagonal * _LOG2E).reshape(batch, heads, queries // ROWS, TILE)
    return streamed, {"diagonal": diagonal, "last high": last[0], "last low": last[1]}


class _Biases:
    """Biases of scores whose rows are a warpgroup's queries: one for each key, and one for all keys of a tile."""

    def __init__(self, refs, at: Position, size: int, start):
        self.refs, self.position, self.size = refs, at, size
        self.first: Any = None
        self.begin: Any = ()
        if "first high" in refs:
            block = lax.div(at.first, ROWS)
            self.first = tuple(refs[f"first {x}"][at.b, at.h, block] for x in ("high", "low"))
            self.begin = self.last_of(start)

    def last_of(self, n):
        """F at the last key of the tile of step n: a scalar in global memory, loaded a step ahead."""
        at, ref = self.position, self.refs["last high"]
        n = jnp.minimum(lax.div(n, TILE // self.size), ref.shape[2] - 1)
        return tuple(self.refs[f"last {x}"][at.b, at.h, n] for x in ("high", "low"))

    def at(self, n, tiles, last, masked):
        """The bias of each key, [ROWS, size] or None, the bias that all keys have in addition, and F at the end of the next step's tile."""
        if self.first is None:
            return None, 0.0, ()
        at, size, following = self.position, self.size, self.last_of(n + 1)
        if masked:
            place = pl.ds(lax.rem(n, TILE // size) * size, size)
            ref = self.refs["diagonal"].at[at.b, at.h, lax.div(at.first, ROWS), place]
            bias = plgpu.load(ref, layout=wg.LAYOUT.reduce(0), optimized=False)
            return wg.spread_columns(bias, (ROWS, size)), 0.0, following
        shift = ((self.first[0] - last[0]) + (self.first[1] - last[1])) * _LOG2E
        return wg.spread_columns(_load_columns(tiles["fall"]), (ROWS, size)), shift, following


def _biased(scores, scale, bias):
    scores = scores * (scale * _LOG2E)
    return scores if bias is None else scores + bias


def _hide(scores, first_query, first_key, tiles, refs, at, masked, window, keys_in_rows=False):
    """Set the scores of keys that a query does not see to `NEVER`; rows are queries, or keys where `keys_in_rows`."""
    shape = scores.shape
    if not (masked or window is not None or "run" in tiles):
        return scores

    def places(axis, first):
        layout = wg.LAYOUT.reduce(1 - axis)
        return first + plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)

    row, column = (first_key, first_query) if keys_in_rows else (first_query, first_key)
    row, column = places(0, row), wg.spread_columns(places(1, column), shape)
    wide = lambda x: wg.spread_rows(x, shape)  # noqa: E731
    seen = wide(row) <= column if keys_in_rows else wide(row) >= column
    if window is not None:  # added to the rows, of which a thread has only two
        seen &= wide(row + window) > column if keys_in_rows else wide(row - window) < column
    if "run" in tiles:
        of_row = _load_rows(refs["run"].at[at.b, at.tokens])
        seen &= wg.spread_rows(of_row, shape) == wg.spread_columns(
            _load_columns(tiles["run"]), shape
        )
    return jnp.where(seen, scores, wg.NEVER)
