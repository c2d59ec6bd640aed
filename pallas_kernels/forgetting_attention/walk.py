"""The shape of all three kernels: two warpgroups walk over the sequence, which a third loads."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import warpgroups as wg
from pallas_kernels.compat import pl, plgpu

TILE = 128  # queries or keys of a thread block
ROWS = 64  # of one warpgroup


class Place(NamedTuple):
    """Where a warpgroup works: row of the batch, head, tile, its first token and its tokens."""

    b: Any
    h: Any
    tile: Any
    first: Any
    tokens: Any


def launch(compute, outputs, *, own, streamed, size, begin, end, far, interpret, stages=2) -> Any:
    """A kernel in which two warpgroups with `ROWS` tokens each walk over the sequence, which a third loads.

    Args:
        compute: what one does, given its place, own tiles, room for a left operand (interpreter only), `walk(step, carry, start,
            stop)`, and references to `far` and to the outputs.
        outputs: shapes.
        own: by name, arrays [B, T, *, D], of which each warpgroup has its tokens in shared memory.
        streamed: by name, arrays [B, T, *, D], [B, H, T] or [B, T] that the walk brings, `size` tokens a step.
        size: tokens a step.
        begin: [B, H, T / 128], the first tile of the walk; None is the warpgroups' own.
        end: [B, H, T / 128], the last tile; None is their own.
        far: by name, arrays left in global memory.
        interpret: parameters of the interpreter, or False.
        stages: steps on their way or in use.
    """
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
        tile = tile if begin is None else count - 1 - tile
        first = tile * TILE + group * ROWS
        at = Place(b, h, tile, first, pl.ds(first, ROWS))
        start = (refs["begin"][b, h, tile] if begin is not None else tile) * per_tile
        stop = (refs["end"][b, h, tile] if end is not None else tile) * per_tile + per_tile

        def source(kind, name, tokens):
            ref = refs[f"{kind} {name}"]
            if len(ref.shape) == 4:
                return ref.at[b, tokens, lax.div(h * ref.shape[2], heads)]
            return ref.at[b, h, tokens] if len(ref.shape) == 3 else ref.at[b, tokens]

        def scoped(own_rooms, walk_rooms, left_room, loaded, full, empty):
            @pl.when(group < 2)
            def _():
                plgpu.set_max_registers(232, action="increase")
                mine = {name: room.at[group] for name, room in own_rooms.items()}
                for name, ref in mine.items():
                    plgpu.copy_gmem_to_smem(source("own", name, at.tokens), ref, loaded.at[group])
                plgpu.barrier_wait(loaded.at[group])

                def walk(step, carry, since, until):
                    def one(n, carry):
                        slot = lax.rem(n - start, stages)
                        plgpu.barrier_wait(full.at[slot])
                        carry = step(n, {m: room.at[slot] for m, room in walk_rooms.items()}, carry)
                        plgpu.barrier_arrive(empty.at[slot])
                        return carry

                    since = start if since is None else since
                    return lax.fori_loop(since, stop if until is None else until, one, carry)

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
