"""Code that the TPU kernels of attention with forget gates share: the tiles of queries and keys that one program
computes, their scores, and the launch of a kernel.
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
from pallas_kernels.tiles.scalar_decay import LANES, dot

_F32 = jnp.float32
LOG2E = math.log2(math.e)


class Position(NamedTuple):
    """The row, the heads, and the tiles of queries and keys that one program of a TPU attention kernel
    computes.

    Attributes:
        b: the index of the row in the batch.
        h: the index of the head of q.
        g: the index of the head of k and v.
        query: the index, in the row, of the tile of queries.
        key: the index, in the row, of the tile of keys.
    """

    b: Any
    h: Any
    g: Any
    query: Any
    key: Any


class Step(NamedTuple):
    """One program of a TPU attention kernel, which computes one tile of queries with one tile of keys: a step
    of a loop over tiles of keys or of queries.

    Attributes:
        at: the program's row, heads and tiles of queries and keys.
        refs: references to the program's tiles of inputs and outputs in VMEM, and to its buffers for sums, by
            name.
        scalar: `scalar(name, tile)` loads an entry of `Call.scalars` for the program's row and head.
        runs: whether any query of the program's tile may see any key of its tile; else it computes nothing.
        first: whether the program is the first step of its loop over tiles.
        last: whether the program is the last step of its loop over tiles.
        first_head: in a loop over queries: whether its query head is the first of those that share the key
            head.
        last_head: in a loop over queries: whether its query head is the last of those that share the key
            head.
    """

    at: Position
    refs: dict[str, Any]
    scalar: Callable[..., Any]
    runs: Any
    first: Any
    last: Any
    first_head: Any = True
    last_head: Any = True


class Call:
    """The arrays of one call of attention with forget gates in the shapes that the TPU kernels read, the
    blocks of them that each program loads, and the computation of the scores.

    Attributes:
        batch: B, the number of rows.
        length: T, the number of tokens of a row.
        heads: H, the number of query heads.
        groups: G, the number of key and value heads.
        count: N, the number of tiles of a row.
        tile: the number of tokens of a tile.
        steps: the number of consecutive programs that form a loop over tiles, the longest possible.
        scalars: arrays [B, H, N] that are loaded before the programs run, by name: those of `Bounds`, and F
            (high and low part) at the first query of each tile.
    """

    def __init__(self, q, k, v, rows: Rows, bounds: Bounds, scale: float, window: int | None):
        (self.batch, self.length, self.heads, _), self.groups = q.shape, v.shape[2]
        self.rows, self.bounds = rows, bounds
        self.count = bounds.first.shape[-1]
        self.tile = self.length // self.count
        self.scale, self.window = scale * LOG2E, window
        # The longest loop is over all tiles, or over those inside the window.
        visible = self.length if window is None else window
        self.steps = min(self.count, (visible + self.tile - 2) // self.tile + 1)
        self.scalars = {
            "first": bounds.first,
            "first common": bounds.first_common,
            "last": bounds.last,
        }
        if rows.gates is not None:
            self.scalars["high"], self.scalars["low"] = (x[..., :: self.tile] for x in rows.gates)

    def tokens(self, x, side: str):
        """Return what a kernel requires of x [B, T, heads, D], such as queries or keys, as (array, block,
        index): x in the shape that the kernels read, the shape of the block of it that a program loads,
        and a function from the program's `Position` to the block's index. If x is a
        `jax.ShapeDtypeStruct`, so is the first result.

        `side` is "query" or "key": which of the program's two tiles the block covers.
        """
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
        """Return what a kernel requires of x [B, H, T] or [B, T], with one number per token, such as F, the
        running sum of the log forget gates, as (array, block, index): x in the shape that the kernels
        read, the shape of the block of it that a program loads, and a function from the program's
        `Position` to the block's index. If x is a `jax.ShapeDtypeStruct`, so is the first result.

        `side` is "query" or "key": which of the program's two tiles the block covers.
        """
        shape = (self.batch, -1 if x.ndim == 3 else 1, 1, self.length)
        head = (lambda p: p.h) if x.ndim == 3 else (lambda p: 0)
        index = lambda p: (p.b, head(p), 0, getattr(p, side))  # noqa: E731
        block = (None, None, 1, self.tile)
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = (self.batch, self.heads, 1, self.length)
            return jax.ShapeDtypeStruct(shape, x.dtype), block, index
        return x.reshape(shape), block, index

    def masks(self) -> dict[str, Any]:
        """Return the kernel inputs, as (array, block, index) by name, from which the scores' biases and masks
        are computed: the documents of queries and of keys, and F, the running sum of the log forget gates, at
        the keys.
        """
        entries = {f"key {name}": self.line(x, "key") for name, x in key_arrays(self.rows).items()}
        if self.rows.run is not None:
            entries["query run"] = self.line(self.rows.run, "query")
        return entries

    def launch(self, kernel, inputs: dict, outputs: dict, scratch: dict, *, over: str, interpret):
        """Run a TPU attention kernel, one program per row, head, tile of queries and tile of keys; return its
        output arrays by name.

        Args:
            kernel: a function that is called once per program, with the program's `Step`.
            inputs: the inputs by name, each as (array, block, index): an array, the shape of the block of it
                that a program loads, and a function from the program's `Position` to the block's index.
            outputs: the outputs by name, each as (shape and dtype, block, index).
            scratch: the shapes of float32 buffers in VMEM, by name.
            over: "key" or "query": the kind of tiles over which consecutive programs loop.
            interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.
        """
        names = (*self.scalars, *inputs, *outputs, *scratch)
        shared = self.heads // self.groups
        by_query = over == "query"
        grid = (self.batch, self.groups, self.count, shared, self.steps)
        if not by_query:  # the loop over tiles is inside that over heads
            grid = (self.batch, self.groups, shared, self.count, self.steps)

        def body(*refs):
            index = [pl.program_id(axis) for axis in range(5)]
            count = len(self.scalars)
            at, runs, scalar = self._position(by_query, *index, *refs[:count])
            named = dict(zip(names[count:], refs[count:], strict=True))
            head, j = index[3:]
            step = Step(at, named, scalar, runs, j == 0, j == self.steps - 1)
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
        """Return a program's `Position`, whether its queries may see any of its keys, and the function
        `scalar(name, tile)` that loads an entry of the program's row and head from `scalars`, references
        to the prefetched arrays.

        The program's indices in the grid are b (row), g (key head), x, y and j (step of the loop over tiles).
        If `by_query`, x is the tile of keys and y the query head among those that share the key head; else x
        is the query head and y the tile of queries.
        """
        shared = self.heads // self.groups
        r, tile = (y, x) if by_query else (x, y)
        h = g * shared + r
        values = dict(zip(self.scalars, scalars, strict=True))

        def scalar(name, tile):
            return values[name][(b * self.heads + h) * self.count + tile]

        if by_query:
            last = scalar("last", tile)
            at = Position(b, h, g, jnp.minimum(tile + j, last), tile)
            return at, tile + j <= last, scalar
        key = scalar("first", tile) + j
        return Position(b, h, g, tile, jnp.minimum(key, tile)), key <= tile, scalar

    def scores(self, step: Step, masked: bool, keys_in_rows: bool = False):
        """Return the base-2 logarithms of the attention weights of one tile of queries with one tile of keys,
        up to a constant for each query; `NEVER` where a query does not see a key.

        Args:
            step: the program that computes the tile.
            masked: whether some queries of the tile may not see some of its keys.
            keys_in_rows: whether the result has a row per key, [keys, queries], instead of a row per query,
                [queries, keys].
        """
        refs, at = step.refs, step.at
        q, k = refs["q"][...], refs["k"][...]
        scores = (dot(k, q, "nt") if keys_in_rows else dot(q, k, "nt")) * self.scale
        if "key high" in refs:
            key = [refs[f"key {x}"][...] for x in ("high", "low")]
            key = [x.T for x in key] if keys_in_rows else key
            query = [step.scalar(x, at.query) for x in ("high", "low")]
            scores += ((query[0] - key[0]) + (query[1] - key[1])) * LOG2E
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
        if "first of query" in refs:
            seen &= refs["first of query"][...].T <= at.key
        return jnp.where(seen, scores, NEVER)

    def run(self, step: Step, add: Callable[[bool], None]):
        """Call `add(masked)`, which computes the program's tile of queries and keys, if any of these queries
        sees any of the keys; masked is False if all queries of the tile see all its keys, so that no mask is
        required.
        """
        at = step.at
        if "query run" in step.refs:
            pl.when(step.runs)(functools.partial(add, True))
            return
        all_seen = at.key < at.query
        if self.window is not None:
            all_seen &= (at.query - at.key + 1) * self.tile <= self.window
        if "first of query" in step.refs:
            all_seen &= at.key >= step.scalar("first common", at.query)
        pl.when(step.runs & all_seen)(functools.partial(add, False))
        pl.when(step.runs & jnp.logical_not(all_seen))(functools.partial(add, True))

    def from_tokens(self, x, like):
        """Return a kernel's output x, [B, T, heads * D] or [B, heads, T, D] as `tokens` has chosen, in the
        shape of `like`, [B, T, heads, D].
        """
        return x.reshape(like.shape) if like.shape[3] % LANES == 0 else jnp.moveaxis(x, 1, 2)
