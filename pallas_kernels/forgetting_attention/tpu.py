"""Forget-gated softmax attention on Mosaic TPU: one kernel forward, two backward; the scores are those of `hopper`.

Forward and the gradient of q: a program has a tile of queries and a tile of keys, and consecutive programs traverse the keys from
the first tile that one of the queries sees (`Bounds`, loaded before the programs run) to the tile of the queries' own tokens.
Gradients of k, v and F_j: consecutive programs traverse the queries of all heads that share a tile of keys, whose gradients stay in
VMEM. A program beyond the end of the traversal loads and computes nothing.

Heads of 128 or 256 channels are column blocks of [B, T, heads * D], so that nothing is transposed; others lie as [B, heads, T, D].
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
from pallas_kernels.forgetting_attention.bounds import NEVER, Bounds, Rows, key_arrays
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.tiles.scalar_decay import LANES, dot

_TILES = (128, 256, 512)
_F32 = jnp.float32
_LOG2E = math.log2(math.e)


REQUIREMENTS = (
    Requirement("as many queries as keys", lambda c: c.q.shape[1] == c.k.shape[1]),
    Requirement(
        "q, k and v all in bfloat16 or all in float32",
        lambda c: (
            len({jnp.dtype(x.dtype) for x in c}) == 1 and c.q.dtype in (jnp.bfloat16, jnp.float32)
        ),
        lambda c: ", ".join(sorted({jnp.dtype(x.dtype).name for x in c})),
    ),
    Requirement("K a multiple of 8 up to 256", lambda c: _fits(c.q), lambda c: str(c.q.shape[-1])),
    Requirement("V a multiple of 8 up to 256", lambda c: _fits(c.v), lambda c: str(c.v.shape[-1])),
)


def _fits(x) -> bool:
    return x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= 256


def unsupported(call) -> str | None:
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


def tile(length: int) -> int:
    """Queries or keys of a program, for rows of `length` tokens."""
    return next((size for size in _TILES if length <= size), _TILES[-1])


class _Position(NamedTuple):
    """What a program computes: row of the batch, head of q, head of k, tile of queries, tile of keys."""

    b: Any
    h: Any
    g: Any
    query: Any
    key: Any


class _Step(NamedTuple):
    """One program of a traversal.

    Attributes:
        at: its position.
        refs: by name, its tiles of arrays and outputs, and its scratch.
        scalar: `scalar(name, tile)` reads a scalar of the program's head.
        runs: whether it has anything to compute.
        first: whether it is the first of its traversal.
        last: whether it is the last.
        first_head: whether its query head is the first of its key head, where the traversal is over queries.
        last_head: whether it is the last.
    """

    at: _Position
    refs: dict[str, Any]
    scalar: Callable[..., Any]
    runs: Any
    first: Any
    last: Any
    first_head: Any = True
    last_head: Any = True


class _Call:
    """The arrays of one call in the shapes that the kernels read, and the blocks of them that each program sees."""

    def __init__(self, q, k, v, rows: Rows, bounds: Bounds, scale: float, window: int | None):
        (self.batch, self.length, self.heads, _), self.groups = q.shape, v.shape[2]
        self.rows, self.bounds = rows, bounds
        self.count = bounds.first.shape[-1]
        self.tile = self.length // self.count
        self.scale, self.window = scale * _LOG2E, window
        # The longest traversal: all tiles, or those inside the window.
        visible = self.length if window is None else window
        self.steps = min(self.count, (visible + self.tile - 2) // self.tile + 1)
        self.scalars = {"first": bounds.first, "settled": bounds.settled, "last": bounds.last}
        if rows.gates is not None:  # the sum of gates at a tile's first query
            self.scalars["high"], self.scalars["low"] = (x[..., :: self.tile] for x in rows.gates)

    def tokens(self, x, side: str):
        """Return (array, block, index) for tiles of [B, T, heads, D] (an array or its shape); `side` is "query" or "key"."""
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
        """Return (array, block, index) for [B, H, T] or [B, T] (an array or its shape), one number for each token."""
        shape = (self.batch, -1 if x.ndim == 3 else 1, 1, self.length)
        head = (lambda p: p.h) if x.ndim == 3 else (lambda p: 0)
        index = lambda p: (p.b, head(p), 0, getattr(p, side))  # noqa: E731
        block = (None, None, 1, self.tile)
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = (self.batch, self.heads, 1, self.length)
            return jax.ShapeDtypeStruct(shape, x.dtype), block, index
        return x.reshape(shape), block, index

    def masks(self) -> dict[str, Any]:
        """Documents of queries and keys, and the keys' sums of gates."""
        entries = {f"key {name}": self.line(x, "key") for name, x in key_arrays(self.rows).items()}
        if self.rows.run is not None:
            entries["query run"] = self.line(self.rows.run, "query")
        return entries

    def launch(self, kernel, inputs: dict, outputs: dict, scratch: dict, *, over: str, interpret):
        """Run `kernel(step)` over the tiles, and return its outputs by name.

        Args:
            kernel: called with a `_Step`.
            inputs: (array, block, index) by name, also outputs.
            outputs: those with shapes and dtypes.
            scratch: shapes of float32 buffers in VMEM by name.
            over: what a traversal is over: "key" or "query" tiles.
            interpret: False, True or `pltpu.InterpretParams`.
        """
        names = (*self.scalars, *inputs, *outputs, *scratch)
        shared = self.heads // self.groups
        by_query = over == "query"
        grid = (self.batch, self.groups, self.count, shared, self.steps)
        if not by_query:  # one program for each head, next to each other
            grid = (self.batch, self.groups, shared, self.count, self.steps)

        def body(*refs):
            index = [pl.program_id(axis) for axis in range(5)]
            count = len(self.scalars)
            at, runs, scalar = self._position(by_query, *index, *refs[:count])
            named = dict(zip(names[count:], refs[count:], strict=True))
            head, j = index[3:]
            step = _Step(at, named, scalar, runs, j == 0, j == self.steps - 1)
            if by_query:
                step = step._replace(first_head=head == 0, last_head=head == shared - 1)
            kernel(step)

        def spec(entry):
            _, block, index = entry
            return pl.BlockSpec(block, lambda *args: index(self._position(by_query, *args)[0]))

        kinds = ("parallel",) * 3 + ("arbitrary",) * 2
        if not by_query:
            kinds = ("parallel",) * 4 + ("arbitrary",)
        results = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=grid,
                in_specs=[spec(x) for x in inputs.values()],
                out_specs=[spec(x) for x in outputs.values()],
                scratch_shapes=[pltpu.VMEM(shape, _F32) for shape in scratch.values()],
            ),
            out_shape=[x for x, _, _ in outputs.values()],
            compiler_params=pltpu.CompilerParams(dimension_semantics=kinds),
            interpret=interpret,
        )(*(x.reshape(-1) for x in self.scalars.values()), *(x for x, _, _ in inputs.values()))
        return dict(zip(outputs, results, strict=True))

    def _position(self, by_query: bool, b, g, x, y, j, *scalars):
        """A program's position, whether it has anything to compute, and how it reads scalars."""
        shared = self.heads // self.groups
        r, tile = (y, x) if by_query else (x, y)
        h = g * shared + r
        values = dict(zip(self.scalars, scalars, strict=True))

        def scalar(name, tile):
            return values[name][(b * self.heads + h) * self.count + tile]

        if by_query:
            last = scalar("last", tile)
            at = _Position(b, h, g, jnp.minimum(tile + j, last), tile)
            return at, tile + j <= last, scalar
        key = scalar("first", tile) + j
        return _Position(b, h, g, tile, jnp.minimum(key, tile)), key <= tile, scalar

    def scores(self, step: _Step, masked: bool, keys_in_rows: bool = False):
        """Binary logarithms of the weights, up to a constant of the query: [queries, keys], or [keys, queries] where `keys_in_rows`."""
        refs, at = step.refs, step.at
        q, k = refs["q"][...], refs["k"][...]
        scores = (dot(k, q, "nt") if keys_in_rows else dot(q, k, "nt")) * self.scale
        if "key high" in refs:
            key = [refs[f"key {x}"][...] for x in ("high", "low")]
            key = [x.T for x in key] if keys_in_rows else key
            query = [step.scalar(x, at.query) for x in ("high", "low")]
            scores += ((query[0] - key[0]) + (query[1] - key[1])) * _LOG2E
        if not masked:
            return scores
        rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
        distance = (columns - rows if keys_in_rows else rows - columns) + (
            at.query - at.key
        ) * self.tile
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if "query run" in refs:
            query, key = refs["query run"][...], refs["key run"][...]
            seen &= (query == key.T) if keys_in_rows else (query.T == key)
        if "of row" in refs:
            seen &= refs["of row"][...].T <= at.key
        return jnp.where(seen, scores, NEVER)

    def each(self, step: _Step, add: Callable[[bool], None]):
        """Call `add(masked)` where the program has anything to compute, without masks where all its queries see all its keys."""
        at = step.at
        if "query run" in step.refs:
            pl.when(step.runs)(functools.partial(add, True))
            return
        all_seen = at.key < at.query
        if self.window is not None:
            all_seen &= (at.query - at.key + 1) * self.tile <= self.window
        if "of row" in step.refs:
            all_seen &= at.key >= step.scalar("settled", at.query)
        pl.when(step.runs & all_seen)(functools.partial(add, False))
        pl.when(step.runs & jnp.logical_not(all_seen))(functools.partial(add, True))

    def from_tokens(self, x, like):
        """Undo `tokens` for an array of the shape of `like`."""
        return x.reshape(like.shape) if like.shape[3] % LANES == 0 else jnp.moveaxis(x, 1, 2)


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, H, V], 0 where a query sees no key, and the binary logarithm of each query's sum of weights,
    [B, H, T] float32.

    T is a multiple of the bounds' tile. The bias of the weights is that of the query's tile.
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
            factor = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - new_top)
            refs["top"][...] = new_top
            refs["total"][...] = refs["total"][...] * factor + jnp.sum(weights, 1, keepdims=True)
            refs["sum"][...] = refs["sum"][...] * factor + dot(weights.astype(v.dtype), v)

        call.each(step, add)

        @pl.when(step.last)
        def _():
            top, total = refs["top"][...], refs["total"][...]
            sees_none = top < 0.5 * NEVER
            inverse = jnp.where(sees_none, 0.0, 1 / total)
            refs["out"][...] = (refs["sum"][...] * inverse).astype(refs["out"].dtype)
            refs["sums"][...] = jnp.where(sees_none, -NEVER, top + jnp.log(total) * _LOG2E).T

    inputs = dict(q=call.tokens(q, "query"), k=call.tokens(k, "key"), v=call.tokens(v, "key"))
    inputs |= call.masks()
    if bounds.of_row is not None:
        inputs["of row"] = call.line(bounds.of_row, "query")
    struct = jax.ShapeDtypeStruct
    out = struct((*q.shape[:3], v.shape[3]), v.dtype)
    sums = struct((*q.shape[:1], q.shape[2], q.shape[1]), _F32)
    outputs = dict(out=call.tokens(out, "query"), sums=call.line(sums, "query"))
    column = (call.tile, 1)
    scratch = dict(sum=(call.tile, v.shape[3]), top=column, total=column)
    result = call.launch(kernel, inputs, outputs, scratch, over="key", interpret=interpret)
    return call.from_tokens(result["out"], out), result["sums"].reshape(sums.shape)


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
    """Return the gradients of q [B, T, H, D], of k [B, T, G, D] and v, and of the sums of gates ([B, H, T]; None without).

    Args:
        q: queries, and k, v.
        k: keys.
        v: values.
        rows: as in `forward`.
        bounds: as in `forward`.
        sums: the second result of `forward`.
        d_out: [B, T, H, V].
        delta: [B, H, T] float32, inner products of the output and its gradient.
        scale: multiplies the scores.
        window: tokens that a query sees, or None.
        interpret: False, True or `pltpu.InterpretParams`.
    """
    call = _Call(q, k, v, rows, bounds, scale, window)
    inputs = dict(q=call.tokens(q, "query"), k=call.tokens(k, "key"), v=call.tokens(v, "key"))
    inputs |= call.masks() | dict(d_out=call.tokens(d_out, "query"), sums=call.line(sums, "query"))
    dq, rest = _backward_of_queries(call, q, inputs, delta, scale, interpret)
    # The output was rounded, so `delta` differs a little from the exact inner product. A gate's gradient sums these differences over
    # all later tokens, where nearly all else cancels.
    return dq, *_backward_of_keys(call, k, v, inputs, delta + rest, scale, interpret)


def _backward_of_queries(call: _Call, q, inputs, delta, scale, interpret):
    """Return the gradient of q, and the sum of each query's score gradients, which is 0 except for rounding."""

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
        inputs | dict(delta=call.line(delta, "query")),
        dict(dq=call.tokens(dq, "query"), rest=call.line(rest, "query")),
        dict(sum=(call.tile, q.shape[3]), left=(call.tile, 1)),
        over="key",
        interpret=interpret,
    )
    return call.from_tokens(result["dq"], dq), result["rest"].reshape(rest.shape)


def _backward_of_keys(call: _Call, k, v, inputs, delta, scale, interpret):
    """Return the gradients of k, v and F_j (None without gates)."""
    gated = "key high" in inputs

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
            weights = jnp.exp2(call.scores(step, masked, keys_in_rows=True) - refs["sums"][...])
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
    outputs = dict(dk=call.tokens(dk, "key"), dv=call.tokens(dv, "key"))
    scratch = {"dk sum": (call.tile, k.shape[3]), "dv sum": (call.tile, v.shape[3])}
    if gated:
        outputs["d high"] = call.line(d_high, "key")
        scratch["d sum"] = (call.tile, 1)
    inputs = inputs | dict(delta=call.line(delta, "query"))
    result = call.launch(kernel, inputs, outputs, scratch, over="query", interpret=interpret)
    dk, dv = call.from_tokens(result["dk"], dk), call.from_tokens(result["dv"], dv)
    return dk, dv, result["d high"].reshape(d_high.shape) if gated else None
