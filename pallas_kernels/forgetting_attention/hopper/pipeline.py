"""The structure that all three kernels share: two warpgroups compute while they traverse the sequence, which a third one loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import launch as hopper_launch
from pallas_kernels.hopper import warpgroups as wg

TILE = 128  # queries or keys of a thread block
ROWS = 64  # queries or keys of one warpgroup


class Position(NamedTuple):
    """What a warpgroup computes.

    Attributes:
        b: row of the batch.
        h: head.
        tile: tile of queries or keys.
        first: its first query or key, counted among those given.
        tokens: the slice of its queries or keys.
        row: its first query or key, counted in the row.
    """

    b: Any
    h: Any
    tile: Any
    first: Any
    tokens: Any
    row: Any


class Schedule(NamedTuple):
    """How a kernel traverses the sequence.

    Attributes:
        size: tokens of a step.
        late: the products that a step adds to the sums run during the next step's exponentials; until then its tiles stay in smem.
        stages: steps whose tiles are being loaded or are in use.
        turns: the two warpgroups take turns: one uses the tensor cores while the other computes exponentials.
    """

    size: int
    late: bool
    stages: int
    turns: bool


class Products(NamedTuple):
    """The computation of one step of a traversal.

    Attributes:
        scores: `scores(tiles, *refs)` adds products to references to zeros of `shapes`.
        shapes: of these.
        use: `use(n, tiles, values, carry, **options)` returns operands [ROWS, size], a factor for the rows of the sums (or None) and the
            next carry.
        add: `add(tiles, operands, *refs)` adds one product to each of the sums.
    """

    scores: Callable
    shapes: list
    use: Callable
    add: Callable


class Traversal(NamedTuple):
    """The steps of a warpgroup, from `start` to before `stop`.

    Attributes:
        group: 0 or 1.
        start: first step.
        stop: the step after the last.
        schedule: as the kernel's.
        streamed: buffers of the streamed inputs by name, one for each stage.
        full: barriers that a step's tiles pass when they have been loaded.
        empty: barriers that they pass when they may be replaced.
        meet: waits for the other warpgroup, where they take turns; one function for all calls, so that they share a jaxpr.
        interpret: parameters of the interpreter, or False.
    """

    group: Any
    start: Any
    stop: Any
    schedule: Schedule
    streamed: dict[str, Any]
    full: Any
    empty: Any
    meet: Callable[[], None]
    interpret: Any

    def stage(self, n):
        """The stage of step n."""
        return lax.rem(n - self.start, self.schedule.stages)

    def tiles(self, n) -> dict[str, Any]:
        """References to the tiles of step n."""
        stage = self.stage(n)
        return {name: buffer.at[stage] for name, buffer in self.streamed.items()}

    def wait_tiles(self, n) -> None:
        """Wait until the tiles of step n have been loaded."""
        plgpu.barrier_wait(self.full.at[self.stage(n)])

    def release_tiles(self, n) -> None:
        """Let the tiles of step n be replaced."""
        plgpu.barrier_arrive(self.empty.at[self.stage(n)])

    def accumulate(self, products: Products, sums, carry, parts) -> Any:
        """Return the sums of products over all steps, and the last carry.

        Args:
            products: what a step computes.
            sums: initial values, one for each operand.
            carry: the first step's.
            parts: consecutive parts of the traversal, (from, to, options of `use`); None is its start or its stop.
        """
        late = self.schedule.late
        shape = (ROWS, self.schedule.size)
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.bfloat16), wg.LAYOUT)
        state = sums, carry, [zero] * len(sums) if late else []
        pl.when(self.group == 1)(self.meet)  # half a step behind
        if late:
            self.wait_tiles(self.start)
        for since, until, options in parts:
            since = self.start if since is None else since
            until = self.stop if until is None else until
            step = self._late_step if late else self._step
            state = lax.fori_loop(since, until, functools.partial(step, products, options), state)
        sums, carry, operands = state
        if late:
            sums = self._add(products, self.stop - 1, operands, sums)
            self.release_tiles(self.stop - 1)
        pl.when(self.group == 0)(self.meet)
        return sums, carry

    def _step(self, products: Products, options, n, state):
        """Compute step n and add its products to the sums."""
        sums, carry, _ = state
        tiles = self.tiles(n)
        self.wait_tiles(n)

        def scores(*refs):
            products.scores(tiles, *refs)
            self.meet()

        values = wg.products_from_zero(scores, *products.shapes)
        operands, factor, carry = products.use(n, tiles, tuple(values), carry, **options)
        sums, operands = _scaled(sums, factor), _bfloat16(operands)
        self.meet()
        sums = self._add(products, n, operands, sums)
        self.release_tiles(n)
        return sums, carry, []

    def _late_step(self, products: Products, options, n, state):
        """Compute step n while the products of the step before are added to the sums."""
        sums, carry, operands = state
        tiles = self.tiles(n)
        scores = functools.partial(products.scores, tiles)

        def use(*values):
            results = products.use(n, tiles, values, carry, **options)
            # Waited for here: the compiler does not move exponentials past a branch, but it does past the end of products.
            pl.when(n + 1 < self.stop)(lambda: self.wait_tiles(n + 1))
            return results

        # The first step adds zero times its own tile.
        before = self.tiles(jnp.maximum(n - 1, self.start))
        add = functools.partial(products.add, before, operands)
        sums, results = wg.overlap(
            scores, products.shapes, add, sums, use, interpret=self.interpret
        )
        operands, factor, carry = results
        sums, operands = _scaled(sums, factor), _bfloat16(operands)
        pl.when(n > self.start)(lambda: self.release_tiles(n - 1))
        return sums, carry, operands

    def _add(self, products: Products, n, operands, sums):
        add = functools.partial(products.add, self.tiles(n), operands)
        return wg.accumulate(add, *sums, interpret=self.interpret)


def _scaled(sums, factor):
    return sums if factor is None else [x * wg.spread_rows(factor, x.shape) for x in sums]


def _bfloat16(operands):
    return [x.astype(jnp.bfloat16) for x in operands]


class Warpgroup(NamedTuple):
    """What the computation of a warpgroup works with.

    Attributes:
        at: its position.
        resident: references to its tokens of the resident inputs in shared memory, by name.
        left: a buffer for the left operand of a product, in the interpreter only.
        traversal: its steps.
        refs: references to global memory, by the names of the inputs that are read there and of the outputs.
    """

    at: Position
    resident: dict[str, Any]
    left: Any
    traversal: Traversal
    refs: dict[str, Any]


class Pipeline(NamedTuple):
    """A kernel in which two warpgroups with `ROWS` tokens each traverse the sequence, which a third one loads.

    Attributes:
        resident: by name, arrays [B, T, *, D], of which each warpgroup has its tokens in shared memory.
        streamed: by name, arrays [B, T, *, D], [B, H, T] or [B, T] that are loaded step by step.
        in_global: by name, arrays that are read from global memory.
        schedule: how the sequence is traversed.
        begin: [B, H, T / 128], the first tile of the traversal; None is the one with the number of the resident tile.
        end: [B, H, T / 128], the last tile; None is the one with the number of the resident tile.
        over_queries: the resident tokens are keys, and the traversal is over queries, from those of the same tokens on; else it is over
            keys, up to those of the same tokens, in tile `end`.
    """

    resident: Mapping[str, jax.Array]
    streamed: Mapping[str, jax.Array]
    in_global: Mapping[str, jax.Array]
    schedule: Schedule
    begin: jax.Array | None
    end: jax.Array | None
    over_queries: bool = False

    @property
    def heads(self) -> int:
        """Query heads."""
        arrays = (*self.resident.values(), *self.streamed.values())
        return max(x.shape[2] for x in arrays if x.ndim == 4)

    @property
    def num_tiles(self) -> int:
        """Resident tiles of a row."""
        return next(iter(self.resident.values())).shape[1] // TILE

    def launch(
        self,
        compute: Callable[[Warpgroup], None],
        outputs: dict[str, jax.ShapeDtypeStruct],
        *,
        name: str,
        interpret: Any,
    ) -> dict[str, jax.Array]:
        """Run the kernel and return its outputs by name.

        Args:
            compute: what each of the two warpgroups does.
            outputs: shapes and dtypes.
            name: the kernel's name in profiles.
            interpret: parameters of the interpreter, or False.
        """
        inputs: dict[str, Any] = {f"resident {n}": x for n, x in self.resident.items()}
        inputs |= {f"streamed {n}": x for n, x in self.streamed.items()}
        inputs |= {f"global {n}": x for n, x in self.in_global.items()}
        batch = next(iter(self.resident.values())).shape[0]
        return hopper_launch.launch(
            lambda refs: self._kernel(refs, compute, outputs, interpret),
            inputs=inputs | dict(begin=self.begin, end=self.end),
            outputs=outputs,
            grid=dict(row=batch * self.heads, tile=self.num_tiles),
            num_threads=3,
            name=name,
            interpret=interpret,
        )

    def _kernel(self, refs, compute, outputs, interpret) -> None:
        row, group = lax.axis_index("row"), lax.axis_index("group")
        at, start, stop = self._position(refs, row, group)

        def body(smem):
            def meet():
                for barrier in smem["turn"]:
                    plgpu.barrier_arrive(barrier)
                    plgpu.barrier_wait(barrier)

            traversal = Traversal(
                group, start, stop, self.schedule, smem["streamed"], smem["full"], smem["empty"],
                meet, interpret,
            )  # fmt: skip

            @pl.when(group < 2)
            def _():
                plgpu.set_max_registers(232, action="increase")
                resident = {name: buffer.at[group] for name, buffer in smem["resident"].items()}
                for name, buffer in resident.items():
                    source = self._tokens_of(refs[f"resident {name}"], at, at.tokens)
                    plgpu.copy_gmem_to_smem(source, buffer, smem["loaded"].at[group])
                plgpu.barrier_wait(smem["loaded"].at[group])
                left = smem["left"] and smem["left"][0].at[group]
                named = {name: refs[f"global {name}"] for name in self.in_global}
                named |= {name: refs[name] for name in outputs}
                compute(Warpgroup(at, resident, left, traversal, named))

            @pl.when(group == 2)
            def _():
                plgpu.set_max_registers(40, action="decrease")
                self._load(refs, at, traversal)

        hopper_launch.with_smem(body, self._smem(interpret))

    def _position(self, refs, row, group) -> tuple[Position, Any, Any]:
        """A warpgroup's position, and the first step of its traversal and the one after the last."""
        per_tile = TILE // self.schedule.size
        b, h = lax.div(row, self.heads), lax.rem(row, self.heads)
        # The longest traversals first.
        tile = lax.axis_index("tile")
        tile = tile if self.over_queries else self.num_tiles - 1 - tile
        first = tile * TILE + group * ROWS
        begin, end = self.begin is not None, self.end is not None
        start = (refs["begin"][b, h, tile] if begin else tile) * per_tile
        stop = (refs["end"][b, h, tile] if end else tile) * per_tile + per_tile
        same = self.over_queries or not end
        in_row = first if same else refs["end"][b, h, tile] * TILE + group * ROWS
        return Position(b, h, tile, first, pl.ds(first, ROWS), in_row), start, stop

    def _tokens_of(self, ref, at: Position, tokens) -> Any:
        """Tokens of an input in global memory."""
        if len(ref.shape) == 4:
            return ref.at[at.b, tokens, lax.div(at.h * ref.shape[2], self.heads)]
        return ref.at[at.b, at.h, tokens] if len(ref.shape) == 3 else ref.at[at.b, tokens]

    def _load(self, refs, at: Position, traversal: Traversal) -> None:
        """Load the tiles of all steps, and wait until the last ones have been used."""
        size, stages = self.schedule.size, self.schedule.stages
        start, stop = traversal.start, traversal.stop

        def load(n, _):
            stage = traversal.stage(n)

            @pl.when(n - start >= stages)
            def _():
                plgpu.barrier_wait(traversal.empty.at[stage])

            for name, buffer in traversal.streamed.items():
                source = self._tokens_of(refs[f"streamed {name}"], at, pl.ds(n * size, size))
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], traversal.full.at[stage])

        def wait(n, _):
            plgpu.barrier_wait(traversal.empty.at[traversal.stage(n)])

        lax.fori_loop(start, stop, load, None)
        lax.fori_loop(jnp.maximum(stop - stages, start), stop, wait, None)

    def _smem(self, interpret) -> dict[str, Any]:
        """Buffers in shared memory and barriers of a block."""
        size, stages = self.schedule.size, self.schedule.stages

        def buffer(x, *shape):
            if x.ndim == 4:
                return plgpu.SMEM((*shape, x.shape[-1]), x.dtype, transforms=wg.TILED)
            return plgpu.SMEM(shape, x.dtype)

        left: Any = [plgpu.SMEM((2, ROWS, size), jnp.bfloat16, transforms=wg.TILED)]
        return dict(
            resident={name: buffer(x, 2, ROWS) for name, x in self.resident.items()},
            streamed={name: buffer(x, stages, size) for name, x in self.streamed.items()},
            left=left if interpret else [],
            loaded=plgpu.Barrier(num_arrivals=len(self.resident), num_barriers=2),
            full=plgpu.Barrier(num_arrivals=len(self.streamed), num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            turn=[plgpu.Barrier(num_arrivals=2)] if self.schedule.turns else [],
        )
