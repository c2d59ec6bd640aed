"""The shape of all three kernels: two warpgroups walk over the sequence, which a third loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg

TILE = 128  # queries or keys of a thread block
ROWS = 64  # of one warpgroup


class Place(NamedTuple):
    """Where a warpgroup works: row of the batch, head, tile, its first token and its tokens among those given; `row`: in the row."""

    b: Any
    h: Any
    tile: Any
    first: Any
    tokens: Any
    row: Any


class Plan(NamedTuple):
    """How a kernel walks.

    Attributes:
        size: tokens a step.
        late: what a step's operands add to sums is on its way during the next step, while that makes its own; the tile stays.
        stages: steps on their way or in use.
        turns: the two warpgroups take turns: one has the tensor cores while the other makes exponentials.
    """

    size: int
    late: bool
    stages: int
    turns: bool


class Walk(NamedTuple):
    """A warpgroup's walk from step `start` to before `stop`.

    Attributes:
        group: 0 or 1.
        start: first step.
        stop: the step after the last.
        plan: how it goes.
        tiles: by step, references to what has been loaded for it.
        arrived: waits for a step's tiles.
        free: gives them back.
        meet: waits for the other warpgroup, where they take turns.
        interpret: parameters of the interpreter, or False.
    """

    group: Any
    start: Any
    stop: Any
    plan: Plan
    tiles: Callable
    arrived: Callable
    free: Callable
    meet: Callable
    interpret: Any

    def gather(self, products, shapes, use, more, sums, carry, parts) -> Any:
        """The sums of products over the walk, and what it carries.

        Args:
            products: `products(tiles, *refs)` adds products to zeros of `shapes`.
            shapes: of those.
            use: `use(n, tiles, values, carry, **options)` makes of them operands [ROWS, size], a factor for the rows of `sums` (or
                None) and what is carried on.
            more: `more(tiles, operands, *refs)` adds one product to each of `sums`.
            sums: at the start, one for each operand.
            carry: at the start.
            parts: of the walk, (from, to, options); None is where it starts and stops.
        """
        late, size = self.plan.late, self.plan.size

        def added(n, operands, sums):
            run = functools.partial(more, self.tiles(n), operands)
            return wg.accumulate(run, *sums, interpret=self.interpret)

        def step(n, state, options):
            sums, carry, operands = state
            tiles = self.tiles(n)
            run = functools.partial(products, tiles)

            def finish(*values):
                found = use(n, tiles, values, carry, **options)
                if late:
                    # Waited for here: exponentials are not moved past a branch, but they are past the end of products.
                    pl.when(n + 1 < self.stop)(lambda: self.arrived(n + 1))
                return found

            if late:
                # The first step's are zero times its own tile.
                rest = functools.partial(more, self.tiles(jnp.maximum(n - 1, self.start)), operands)
                sums, found = wg.overlap(run, shapes, rest, sums, finish, interpret=self.interpret)
            else:
                self.arrived(n)

                def begun(*refs):
                    run(*refs)
                    self.meet()

                found = finish(*wg.fresh(begun, *shapes))
            operands, factor, carry = found
            if factor is not None:
                sums = [x * wg.spread_rows(factor, x.shape) for x in sums]
            operands = [x.astype(jnp.bfloat16) for x in operands]
            if late:
                pl.when(n > self.start)(lambda: self.free(n - 1))
                return sums, carry, operands
            self.meet()
            sums = added(n, operands, sums)
            self.free(n)
            return sums, carry, []

        none = plgpu.layout_cast(jnp.zeros((ROWS, size), jnp.bfloat16), wg.LAYOUT)
        state = sums, carry, [none] * len(sums) if late else []
        pl.when(self.group == 1)(self.meet)  # half a step behind
        if late:
            self.arrived(self.start)
        for since, until, options in parts:
            since, until = (
                self.start if since is None else since,
                self.stop if until is None else until,
            )
            state = lax.fori_loop(since, until, functools.partial(step, options=options), state)
        sums, carry, operands = state
        if late:
            sums = added(self.stop - 1, operands, sums)
            self.free(self.stop - 1)
        pl.when(self.group == 0)(self.meet)
        return sums, carry


def launch(
    compute,
    outputs,
    *,
    own,
    streamed,
    plan: Plan,
    begin,
    end,
    far,
    interpret,
    of_keys: bool = False,
) -> Any:
    """A kernel in which two warpgroups with `ROWS` tokens each walk over the sequence, which a third loads.

    Args:
        compute: what one does, given its place, own tiles, room for a left operand (interpreter only), a `Walk`, and
            references to `far` and to the outputs.
        outputs: shapes.
        own: by name, arrays [B, T, *, D], of which each warpgroup has its tokens in shared memory.
        streamed: by name, arrays [B, T, *, D], [B, H, T] or [B, T] that the walk brings.
        plan: how it goes.
        begin: [B, H, T / 128], the first tile of the walk; None is the one of the warpgroups' number.
        end: [B, H, T / 128], the last tile; None is the one of their number.
        far: by name, arrays left in global memory.
        interpret: parameters of the interpreter, or False.
        of_keys: `own` are keys, and the walk is over queries from theirs on; else over keys up to theirs, which `end` is.
    """
    size, stages = plan.size, plan.stages
    some = next(iter(own.values()))
    batch, length = some.shape[:2]
    heads = max(x.shape[2] for x in (*own.values(), *streamed.values()) if x.ndim == 4)
    count, per_tile = length // TILE, TILE // size
    inputs = {f"own {n}": x for n, x in own.items()}
    inputs |= {f"walk {n}": x for n, x in streamed.items()} | {
        f"far {n}": x for n, x in far.items()
    }
    inputs |= {n: x for n, x in dict(begin=begin, end=end).items() if x is not None}

    def room(x, *shape):
        if x.ndim == 4:
            return plgpu.SMEM((*shape, x.shape[-1]), x.dtype, transforms=wg.TILED)
        return plgpu.SMEM(shape, x.dtype)

    def kernel(*refs):
        refs = dict(zip([*inputs, *range(len(outputs))], refs, strict=True))
        row, group = lax.axis_index("row"), lax.axis_index("group")
        b, h = lax.div(row, heads), lax.rem(row, heads)
        # The longest walks first.
        tile = lax.axis_index("tile")
        tile = tile if of_keys else count - 1 - tile
        first = tile * TILE + group * ROWS
        start = (refs["begin"][b, h, tile] if begin is not None else tile) * per_tile
        stop = (refs["end"][b, h, tile] if end is not None else tile) * per_tile + per_tile
        row = first if of_keys or end is None else refs["end"][b, h, tile] * TILE + group * ROWS
        at = Place(b, h, tile, first, pl.ds(first, ROWS), row)

        def source(kind, name, tokens):
            ref = refs[f"{kind} {name}"]
            if len(ref.shape) == 4:
                return ref.at[b, tokens, lax.div(h * ref.shape[2], heads)]
            return ref.at[b, h, tokens] if len(ref.shape) == 3 else ref.at[b, tokens]

        def scoped(own_rooms, walk_rooms, left_room, loaded, full, empty, turn):
            @pl.when(group < 2)
            def _():
                plgpu.set_max_registers(232, action="increase")
                mine = {name: room.at[group] for name, room in own_rooms.items()}
                for name, ref in mine.items():
                    plgpu.copy_gmem_to_smem(source("own", name, at.tokens), ref, loaded.at[group])
                plgpu.barrier_wait(loaded.at[group])

                def tiles(n):
                    slot = lax.rem(n - start, stages)
                    return {m: room.at[slot] for m, room in walk_rooms.items()}

                arrived = lambda n: plgpu.barrier_wait(full.at[lax.rem(n - start, stages)])  # noqa: E731
                free = lambda n: plgpu.barrier_arrive(empty.at[lax.rem(n - start, stages)])  # noqa: E731

                def meet():
                    for barrier in turn:
                        plgpu.barrier_arrive(barrier)
                        plgpu.barrier_wait(barrier)

                walk = Walk(group, start, stop, plan, tiles, arrived, free, meet, interpret)
                own_left = left_room and left_room[0].at[group]
                named: Any = {n: refs[f"far {n}"] for n in far}
                compute(at, mine, own_left, walk, named, [refs[i] for i in range(len(outputs))])

            @pl.when(group == 2)
            def _():
                plgpu.set_max_registers(40, action="decrease")

                def load(n, _):
                    slot = lax.rem(n - start, stages)

                    @pl.when(n - start >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for name, ref in walk_rooms.items():
                        tokens = pl.ds(n * size, size)
                        plgpu.copy_gmem_to_smem(
                            source("walk", name, tokens), ref.at[slot], full.at[slot]
                        )

                lax.fori_loop(start, stop, load, None)
                wait = lambda n, _: plgpu.barrier_wait(empty.at[lax.rem(n - start, stages)])  # noqa: E731
                lax.fori_loop(jnp.maximum(stop - stages, start), stop, wait, None)

        left_room: Any = [plgpu.SMEM((2, ROWS, size), jnp.bfloat16, transforms=wg.TILED)]
        pl.run_scoped(
            scoped,
            {name: room(x, 2, ROWS) for name, x in own.items()},
            {name: room(x, stages, size) for name, x in streamed.items()},
            left_room if interpret else [],
            plgpu.Barrier(num_arrivals=len(own), num_barriers=2),
            plgpu.Barrier(num_arrivals=len(streamed), num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            [plgpu.Barrier(num_arrivals=2)] if plan.turns else [],
            collective_axes="group",
        )

    return plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(batch * heads, count),
        grid_names=("row", "tile"),
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*inputs.values())
