"""Forget-gated softmax attention on Mosaic TPU: one kernel forward, two backward; the scores are those of `hopper`.

Forward and the gradient of q: a program has a tile of queries and one of keys, and a row of programs walks from the first tile of
keys that one of the queries sees (`Bounds`, read ahead of the row) to the queries' own. Gradients of k, v and F_j: a row of
programs walks over the queries of all heads that share a tile of keys, whose gradients stay in VMEM. A program beyond the walk's
end loads and computes nothing.

Heads of 128 or 256 are column blocks of [B, T, heads * D], so that nothing is transposed; others lie as [B, heads, T, D].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.forgetting_attention.bounds import NEVER, Bounds, Rows, of_keys
from pallas_kernels.tiles.scalar_decay import LANES, dot

_TILES = (128, 256, 512)
_F32 = jnp.float32
_LOG2E = math.log2(math.e)


def reason(q, k, v) -> str | None:
    """Why this backend does not serve these arguments (arrays or their shapes), or None."""
    dtypes = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"q, k and v all in bfloat16 or all in float32, not {', '.join(sorted(dtypes))}"
    for name, size in dict(D=q.shape[-1], V=v.shape[-1]).items():
        if size % 8 or not 0 < size <= 256:
            return f"{name} a multiple of 8 up to 256, not {size}"
    return None


def tile(length: int) -> int:
    """Queries or keys of a program, for T tokens."""
    return next((size for size in _TILES if length <= size), _TILES[-1])


class _Place(NamedTuple):
    """What a program works on: row of the batch, head of q, head of k, tile of queries, tile of keys."""

    b: Any
    h: Any
    g: Any
    query: Any
    key: Any


class _Step(NamedTuple):
    """A program's part in the walk.

    Attributes:
        at: its place.
        refs: by name, its tiles of arrays and outputs, and its scratch.
        scalar: reads one of the scalars a head and tile, given its name and the tile.
        runs: whether it has anything to do.
        first: whether it is the first of its row.
        last: whether it is the last.
        first_head: whether its head of q is the first of its head of k, where the walk is over queries.
        last_head: whether it is the last.
    """

    at: _Place
    refs: dict[str, Any]
    scalar: Callable[..., Any]
    runs: Any
    first: Any
    last: Any
    first_head: Any = True
    last_head: Any = True


class _Call:
    """The arrays of one call as the kernels take them, and what of each a program sees."""

    def __init__(self, q, k, v, rows: Rows, bounds: Bounds, scale: float, window: int | None):
        (self.batch, self.length, self.heads, _), self.groups = q.shape, v.shape[2]
        self.rows, self.bounds = rows, bounds
        self.count = bounds.first.shape[-1]
        self.tile = self.length // self.count
        self.scale, self.window = scale * _LOG2E, window
        # A walk's longest: all tiles, or those that a window reaches.
        reach = self.length if window is None else window
        self.steps = min(self.count, (reach + self.tile - 2) // self.tile + 1)
        self.scalars = {"first": bounds.first, "settled": bounds.settled, "last": bounds.last}
        if rows.gates is not None:  # the sum of gates at a tile's first query
            self.scalars["high"], self.scalars["low"] = (x[..., :: self.tile] for x in rows.gates)

    def tokens(self, x, side: str):
        """Tiles of [B, T, heads, D] (an array or its shape) on the side of queries or keys: array, block, index."""
        head = (lambda p: p.h) if side == "query" else (lambda p: p.g)
        if x.shape[3] % LANES == 0:
            shape = (*x.shape[:2], x.shape[2] * x.shape[3])
            block = (None, self.tile, x.shape[3])
            index = lambda p: (p.b, getattr(p, side), head(p))  # noqa: E731
        else:
            shape = (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
            block = (None, None, self.tile, x.shape[3])
            index = lambda p: (p.b, head(p), getattr(p, side), 0)  # noqa: E731
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype), block, index
        x = x.reshape(shape) if x.shape[3] % LANES == 0 else jnp.moveaxis(x, 2, 1)
        return x, block, index

    def line(self, x, side: str):
        """Parts of [B, H, T] or [B, T] (an array or its shape), one number a token."""
        shape = (self.batch, -1 if x.ndim == 3 else 1, 1, self.length)
        head = (lambda p: p.h) if x.ndim == 3 else (lambda p: 0)
        index = lambda p: (p.b, head(p), 0, getattr(p, side))  # noqa: E731
        block = (None, None, 1, self.tile)
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = (self.batch, self.heads, 1, self.length)
            return jax.ShapeDtypeStruct(shape, x.dtype), block, index
        return x.reshape(shape), block, index

    def marks(self) -> dict[str, Any]:
        """Runs of queries and keys, and the keys' sums of gates."""
        given = {f"key {name}": self.line(x, "key") for name, x in of_keys(self.rows).items()}
        if self.rows.run is not None:
            given["query run"] = self.line(self.rows.run, "query")
        return given

    def launch(self, kernel, given: dict, outs: dict, scratch: dict, *, over: str, interpret):
        """Run `kernel(step)` over the tiles; the walk is over the tiles of "key"s or of "query"s."""
        names = (*self.scalars, *given, *outs, *scratch)
        shared = self.heads // self.groups
        by_query = over == "query"
        grid = (self.batch, self.groups, self.count, shared, self.steps)
        if not by_query:  # the heads side by side
            grid = (self.batch, self.groups, shared, self.count, self.steps)

        def place(b, g, x, y, j, *scalars):
            """The program's place, and whether it is in the walk."""
            r, own = (y, x) if by_query else (x, y)
            h = g * shared + r
            bound = dict(zip(self.scalars, scalars, strict=True))
            read = lambda name, tile: bound[name][(b * self.heads + h) * self.count + tile]  # noqa: E731
            if by_query:
                last = read("last", own)
                return _Place(b, h, g, jnp.minimum(own + j, last), own), own + j <= last, read
            other = read("first", own) + j
            return _Place(b, h, g, own, jnp.minimum(other, own)), other <= own, read

        def body(*refs):
            where = [pl.program_id(axis) for axis in range(5)]
            count = len(self.scalars)
            at, runs, read = place(*where, *refs[:count])
            named = dict(zip(names[count:], refs[count:], strict=True))
            j, r = where[4], where[3]
            kernel(_Step(
                at, named, read, runs, j == 0, j == self.steps - 1,
                *((r == 0, r == shared - 1) if by_query else ()),
            ))  # fmt: skip

        def spec(entry):
            _, block, index = entry
            return pl.BlockSpec(block, lambda *args: index(place(*args)[0]))

        kinds = (
            ("parallel",) * 3 + ("arbitrary",) * 2
            if by_query
            else ("parallel",) * 4 + ("arbitrary",)
        )
        results = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=grid,
                in_specs=[spec(x) for x in given.values()],
                out_specs=[spec(x) for x in outs.values()],
                scratch_shapes=[pltpu.VMEM(shape, _F32) for shape in scratch.values()],
            ),
            out_shape=[x for x, _, _ in outs.values()],
            compiler_params=pltpu.CompilerParams(dimension_semantics=kinds),
            interpret=interpret,
        )(*(x.reshape(-1) for x in self.scalars.values()), *(x for x, _, _ in given.values()))
        return dict(zip(outs, results, strict=True))

    def scores(self, step: _Step, masked: bool, turned: bool = False):
        """Binary logarithms of the weights, up to a constant of the row: [queries, keys], or `turned`."""
        refs, at = step.refs, step.at
        q, k = refs["q"][...], refs["k"][...]
        scores = (dot(k, q, "nt") if turned else dot(q, k, "nt")) * self.scale
        if "key high" in refs:
            key = [refs[f"key {x}"][...] for x in ("high", "low")]
            key = [x.T for x in key] if turned else key
            own = [step.scalar(x, at.query) for x in ("high", "low")]
            scores += ((own[0] - key[0]) + (own[1] - key[1])) * _LOG2E
        if not masked:
            return scores
        rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
        distance = (columns - rows if turned else rows - columns) + (at.query - at.key) * self.tile
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if "query run" in refs:
            query, key = refs["query run"][...], refs["key run"][...]
            seen &= (query == key.T) if turned else (query.T == key)
        if "of row" in refs:
            seen &= refs["of row"][...].T <= at.key
        return jnp.where(seen, scores, NEVER)

    def each(self, step: _Step, add: Callable[[bool], None]):
        """`add(masked)` where the program runs, without masks where all its queries see all its keys."""
        at = step.at
        if "query run" in step.refs:
            pl.when(step.runs)(functools.partial(add, True))
            return
        whole = at.key < at.query
        if self.window is not None:
            whole &= (at.query - at.key + 1) * self.tile <= self.window
        if "of row" in step.refs:
            whole &= at.key >= step.scalar("settled", at.query)
        pl.when(step.runs & whole)(functools.partial(add, False))
        pl.when(step.runs & jnp.logical_not(whole))(functools.partial(add, True))

    def from_tokens(self, x, like):
        """What `tokens` made of an array of `like`'s shape, back in that shape."""
        return x.reshape(like.shape) if like.shape[3] % LANES == 0 else jnp.moveaxis(x, 1, 2)


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """The output [B, T, H, V], 0 where a token sees none, and the binary logarithm of each row's sum, [B, H, T] float32.

    T is a multiple of the bounds' tile. The sum's bias is that of the row's tile.
    """
    call = _Call(q, k, v, rows, bounds, scale, window)

    def kernel(step: _Step):
        refs = step.refs

        @pl.when(step.first)
        def _():
            refs["sum"][...] = jnp.zeros_like(refs["sum"])
            refs["top"][...] = jnp.full_like(refs["top"], NEVER)
            refs["total"][...] = jnp.zeros_like(refs["total"])

        def add(masked):
            scores, v = call.scores(step, masked), refs["v"][...]
            top = refs["top"][...]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - new_top)
            refs["top"][...] = new_top
            refs["total"][...] = refs["total"][...] * fade + jnp.sum(weights, 1, keepdims=True)
            refs["sum"][...] = refs["sum"][...] * fade + dot(weights.astype(v.dtype), v)

        call.each(step, add)

        @pl.when(step.last)
        def _():
            top, total = refs["top"][...], refs["total"][...]
            blind = top < 0.5 * NEVER
            share = jnp.where(blind, 0.0, 1 / total)
            refs["out"][...] = (refs["sum"][...] * share).astype(refs["out"].dtype)
            refs["sums"][...] = jnp.where(blind, -NEVER, top + jnp.log(total) * _LOG2E).T

    given = dict(q=call.tokens(q, "query"), k=call.tokens(k, "key"), v=call.tokens(v, "key"))
    given |= call.marks()
    if bounds.of_row is not None:
        given["of row"] = call.line(bounds.of_row, "query")
    struct = jax.ShapeDtypeStruct
    out = struct((*q.shape[:3], v.shape[3]), v.dtype)
    sums = struct((*q.shape[:1], q.shape[2], q.shape[1]), _F32)
    outs = dict(out=call.tokens(out, "query"), sums=call.line(sums, "query"))
    column = (call.tile, 1)
    scratch = dict(sum=(call.tile, v.shape[3]), top=column, total=column)
    result = call.launch(kernel, given, outs, scratch, over="key", interpret=interpret)
    return call.from_tokens(result["out"], out), result["sums"].reshape(sums.shape)


def backward(
    q, k, v, rows: Rows, bounds: Bounds, sums, d_out, delta, *, scale: float, window: int | None,
    interpret: Any = False,
):  # fmt: skip
    """Gradients of q [B, T, H, D], of k [B, T, G, D] and v, and of the sums of gates ([B, H, T]; None without).

    Args:
        q: queries, and k, v.
        k: keys.
        v: values.
        rows: as in `forward`.
        bounds: as in `forward`.
        sums: what `forward` returned second.
        d_out: [B, T, H, V].
        delta: [B, H, T] float32, inner products of the output and its gradient.
        scale: of the scores.
        window: or None.
        interpret: False, True or `pltpu.InterpretParams`.
    """
    call = _Call(q, k, v, rows, bounds, scale, window)
    given = dict(q=call.tokens(q, "query"), k=call.tokens(k, "key"), v=call.tokens(v, "key"))
    given |= call.marks() | dict(d_out=call.tokens(d_out, "query"), sums=call.line(sums, "query"))
    dq, rest = _backward_of_queries(call, q, given, delta, scale, interpret)
    # The output was rounded, so `delta` is a little off the mean it stands for. A gate's gradient sums that up over all later
    # tokens, where all else cancels.
    return dq, *_backward_of_keys(call, k, v, given, delta + rest, scale, interpret)


def _backward_of_queries(call: _Call, q, given, delta, scale, interpret):
    """The gradient of q, and the sums of its scores' gradients, 0 but for rounding."""

    def kernel(step: _Step):
        refs = step.refs

        @pl.when(step.first)
        def _():
            refs["sum"][...] = jnp.zeros_like(refs["sum"])
            refs["left"][...] = jnp.zeros_like(refs["left"])

        def add(masked):
            k = refs["k"][...]
            weights = jnp.exp2(call.scores(step, masked) - refs["sums"][...].T)
            d_weights = dot(refs["d_out"][...], refs["v"][...], "nt")
            d_scores = weights * (d_weights - refs["delta"][...].T)
            refs["sum"][...] += dot(d_scores.astype(k.dtype), k)
            refs["left"][...] += jnp.sum(d_scores, axis=1, keepdims=True)

        call.each(step, add)

        @pl.when(step.last)
        def _():
            refs["dq"][...] = (refs["sum"][...] * scale).astype(refs["dq"].dtype)
            refs["rest"][...] = refs["left"][...].T

    dq, rest = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, delta))
    result = call.launch(
        kernel,
        given | dict(delta=call.line(delta, "query")),
        dict(dq=call.tokens(dq, "query"), rest=call.line(rest, "query")),
        dict(sum=(call.tile, q.shape[3]), left=(call.tile, 1)),
        over="key",
        interpret=interpret,
    )
    return call.from_tokens(result["dq"], dq), result["rest"].reshape(rest.shape)


def _backward_of_keys(call: _Call, k, v, given, delta, scale, interpret):
    gated = "key high" in given

    def kernel(step: _Step):
        refs = step.refs

        @pl.when(step.first & step.first_head)
        def _():
            refs["dk sum"][...] = jnp.zeros_like(refs["dk sum"])
            refs["dv sum"][...] = jnp.zeros_like(refs["dv sum"])

        if gated:

            @pl.when(step.first)
            def _():
                refs["d sum"][...] = jnp.zeros_like(refs["d sum"])

        def add(masked):
            q, d_out = refs["q"][...], refs["d_out"][...]
            weights = jnp.exp2(call.scores(step, masked, turned=True) - refs["sums"][...])
            refs["dv sum"][...] += dot(weights.astype(d_out.dtype), d_out)
            d_weights = dot(refs["v"][...], d_out, "nt")
            d_scores = weights * (d_weights - refs["delta"][...])
            refs["dk sum"][...] += dot(d_scores.astype(q.dtype), q)
            if gated:
                refs["d sum"][...] -= jnp.sum(d_scores, axis=1, keepdims=True)

        call.each(step, add)

        @pl.when(step.last & step.last_head)
        def _():
            refs["dk"][...] = (refs["dk sum"][...] * scale).astype(refs["dk"].dtype)
            refs["dv"][...] = refs["dv sum"][...].astype(refs["dv"].dtype)

        if gated:

            @pl.when(step.last)
            def _():
                refs["d high"][...] = refs["d sum"][...].T

    dk, dv, d_high = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v, delta))
    outs = dict(dk=call.tokens(dk, "key"), dv=call.tokens(dv, "key"))
    scratch = {"dk sum": (call.tile, k.shape[3]), "dv sum": (call.tile, v.shape[3])}
    if gated:
        outs["d high"] = call.line(d_high, "key")
        scratch["d sum"] = (call.tile, 1)
    given = given | dict(delta=call.line(delta, "query"))
    result = call.launch(kernel, given, outs, scratch, over="query", interpret=interpret)
    dk, dv = call.from_tokens(result["dk"], dk), call.from_tokens(result["dv"], dv)
    return dk, dv, result["d high"].reshape(d_high.shape) if gated else None
