"""Products of groups of rows with one matrix each, on Hopper by Mosaic GPU. Groups begin at multiples of `ROWS`.

Both kernels keep one thread block a processor, which walks over output tiles: two warpgroups with half of a tile's rows each, and
one that loads. A block of rows then has one matrix, so neither masks, and rows that no group has are not visited.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import warpgroups as wg

ROWS = 128
"""What a group's first row is a multiple of."""
_DEPTH, _HALF, _STAGES, _SLOTS = 64, 64, 4, 2


def width(size: int) -> int:
    """Columns of a tile over `size` of them, a multiple of 64."""
    return next(n for n in (256, 192, 128, 64) if size % n == 0)


def product(
    x: jax.Array,
    kernels: jax.Array,
    groups: jax.Array,
    count: jax.Array,
    *parts: jax.Array,
    transposed: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Rows times their group's matrix.

    Args:
        x: bfloat16 [N, D]; N is a multiple of `ROWS`, or with `parts` of 64, and at least `ROWS`; D is a multiple of 64.
        kernels: bfloat16 [E, D, F], or [E, F, D] where `transposed`; F is a multiple of 64.
        groups: int32 [N / ROWS], the matrix of each block of rows; with `parts` [V], of each part.
        count: int32 [1], blocks (parts) from the first on that are computed.
        parts: two int32 [V], where a part begins and ends, in 64 rows; it has one or two times as many.
        interpret: see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [N, F]; the rows of the blocks beyond `count` hold anything.
    """
    rows, depth = x.shape
    size = kernels.shape[1 if transposed else 2]
    across = width(size)
    tiles = size // across

    def kernel(groups_ref, count_ref, *refs):
        *parts_ref, x_ref, kernels_ref, out_ref = refs

        def tile(index):
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            own = pl.ds(column * across, across)
            matrix = kernels_ref.at[groups_ref[block]]
            source = matrix.at[own] if transposed else matrix.at[:, own]
            begin, kept = block * ROWS, None
            if parts_ref:
                first, last = (ref[block] for ref in parts_ref)
                low = jnp.minimum(first, rows // _HALF - 2)  # within the array

                def kept(half):
                    return (low + half >= first) & (low + half < last)

                begin = low * _HALF
            of_rows, out = x_ref.at[pl.ds(begin, ROWS)], out_ref.at[pl.ds(begin, ROWS), own]
            return (of_rows, source), depth // _DEPTH, out, kept

        if transposed:
            right = plgpu.BlockSpec((across, _DEPTH), lambda k: (0, k), transforms=wg.TILED)
        else:
            right = plgpu.BlockSpec((_DEPTH, across), lambda k: (k, 0), transforms=wg.TILED)
        left = plgpu.BlockSpec((ROWS, _DEPTH), lambda k: (0, k), transforms=wg.TILED)

        def multiply(total, half, a, b):
            plgpu.wgmma(total, a.at[half], b.transpose((1, 0)) if transposed else b)

        _walk(
            tile, multiply, (left, right), across, count_ref[0] * tiles, depth // _DEPTH,
            (x_ref.at[pl.ds(0, ROWS)], kernels_ref.at[0]), out_ref.dtype,
        )  # fmt: skip

    return _kernel(kernel, (rows, size), x.dtype, interpret)(groups, count, *parts, x, kernels)


def sums(
    x: jax.Array, dy: jax.Array, starts: jax.Array, blocks: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Each group's sum over its rows of the outer products of x and dy.

    Args:
        x: bfloat16 [N, D]; N is a multiple of 64, D of 128.
        dy: bfloat16 [N, F]; F is a multiple of 64. Rows between a group's last and the next 64 are 0 in one of the two.
        starts: int32 [E], each group's first row, a multiple of 64.
        blocks: int32 [E], blocks of 64 rows that each group takes.
        interpret: see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [E, D, F].
    """
    depth, size, total = x.shape[1], dy.shape[1], starts.shape[0]
    across = width(size)
    tiles, down = size // across, depth // ROWS

    def kernel(starts_ref, blocks_ref, x_ref, dy_ref, out_ref):
        def tile(index):
            group, place = lax.div(index, tiles * down), lax.rem(index, tiles * down)
            row, column = lax.div(place, tiles), lax.rem(place, tiles)
            own, cut = pl.ds(row * ROWS, ROWS), pl.ds(column * across, across)
            start = pl.multiple_of(starts_ref[group], _DEPTH)
            rows = pl.ds(start, x.shape[0])  # what lies beyond the array is not asked for
            sources = x_ref.at[rows, own], dy_ref.at[rows, cut]
            return sources, blocks_ref[group], out_ref.at[group, own, cut], None

        left = plgpu.BlockSpec((_DEPTH, ROWS), lambda k: (k, 0), transforms=wg.TILED)
        right = plgpu.BlockSpec((_DEPTH, across), lambda k: (k, 0), transforms=wg.TILED)

        def multiply(total, half, a, b):
            plgpu.wgmma(total, a.at[:, half].transpose((1, 0)), b)

        _walk(
            tile, multiply, (left, right), across, total * tiles * down, x.shape[0] // _DEPTH,
            (x_ref.at[:, pl.ds(0, ROWS)], dy_ref.at[:, pl.ds(0, across)]), out_ref.dtype,
        )  # fmt: skip

    return _kernel(kernel, (total, depth, size), x.dtype, interpret)(starts, blocks, x, dy)


def _kernel(body: Any, shape: tuple[int, ...], dtype: Any, interpret: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(PROCESSORS,),
        grid_names=("processor",),
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )


def _walk(tile, multiply, specs, across, count, most, examples, dtype) -> None:
    """Compute output tiles [ROWS, across] number `processor`, `processor + processors`, ... below `count`.

    `tile(index)` gives the arrays that a tile is summed over, in how many steps, where it goes, and which halves do (None for both);
    `multiply(total, half, a, b)` adds a step's product for the rows `half` of the tile. `most` are the most steps of any; `examples` are arrays of the two shapes.
    """
    stages = min(_STAGES, most)

    def pipeline(steps, body, context):
        return plgpu.emit_pipeline_warp_specialized(
            body, grid=(steps,), in_specs=list(specs), max_concurrent_steps=stages,
            num_compute_wgs=2, memory_registers=40, wg_axis="group", compute_context=context,
        )  # fmt: skip

    def nothing(*_):
        return None

    def scoped(allocations, room):
        group = lax.axis_index("group")
        half = pl.ds(group * _HALF, _HALF)

        @plgpu.nd_loop((count,), collective_axes="processor")
        def _(info):
            sources, steps, out, kept = tile(info.index[0])
            totals = []

            def body(indices, a, b, carry):
                multiply(totals[-1], half, a, b)
                plgpu.wgmma_wait(0)
                return carry

            def compute(run):
                def sum_up(total):
                    totals.append(total)
                    run(None)
                    return total[...]

                y = pl.run_scoped(sum_up, plgpu.ACC((_HALF, across), jnp.float32)).astype(dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                def store():
                    for i in range(across // _HALF):
                        place, columns = room.at[group, i % _SLOTS], pl.ds(i * _HALF, _HALF)
                        plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
                        place[...] = y[:, i * _HALF : (i + 1) * _HALF]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(place, out.at[half, columns])

                if kept is None:
                    store()
                else:
                    pl.when(kept(group))(store)

            pipeline(steps, body, compute)(*sources, allocations=allocations)

    smem: Any = plgpu.SMEM
    pl.run_scoped(
        scoped,
        pipeline(most, nothing, nothing).get_allocations(*examples),
        smem((2, _SLOTS, _HALF, _HALF), dtype=dtype, transforms=wg.TILED),
        collective_axes="group",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
