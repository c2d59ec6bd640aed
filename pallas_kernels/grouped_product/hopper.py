"""The Hopper kernels (Mosaic GPU) of products in which each group of rows is multiplied by its own matrix,
and of the gradient of these matrices. Groups begin at multiples of `ROWS`, or of 64.

Both kernels run one thread block on each processor. It computes output tiles one after another: each of two
warpgroups computes half of a tile's rows, and a third one loads the operands. All rows of a block belong to
one group, so that no masks are required. Rows that belong to no group are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

ROWS = 128
"""A group's first row must be a multiple of this."""
_DEPTH = 64  # size of the summed axis in one step
_HALF = 64  # rows of a warpgroup
_STAGES = 4  # steps whose operands are being loaded or are in use
_SLOTS = 2  # buffers of a warpgroup for 64 columns of the output

REQUIREMENTS = (
    Requirement(
        "x and kernels in bfloat16",
        lambda c: c.x.dtype == c.kernels.dtype == jnp.bfloat16,
        lambda c: f"{jnp.dtype(c.x.dtype).name} and {jnp.dtype(c.kernels.dtype).name}",
    ),
    Requirement(
        f"kernels of a multiple of {ROWS} rows and a multiple of {_DEPTH} columns",
        lambda c: c.kernels.shape[-2] % ROWS == 0 and c.kernels.shape[-1] % _DEPTH == 0,
        lambda c: f"{c.kernels.shape[-2]} and {c.kernels.shape[-1]}",
    ),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernels that a call of `grouped_product` does not meet, or
    None if they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def width(size: int) -> int:
    """Return the number of columns of a tile of the output that a thread block computes at a time, for an
    output of `size` columns, a multiple of 64.
    """
    return next(n for n in (256, 192, 128, 64) if size % n == 0)


class _Tile(NamedTuple):
    """One tile of a grouped product's output, [128, columns], and where its operands are: it is a sum of
    matrix products over steps.

    Attributes:
        sources: references to the two arrays whose products are summed.
        steps: the number of steps of the sum, each over 64 rows or columns of the sources.
        out: a reference to the tile in the output array.
        computes: `computes(half)` returns whether the half 0 or 1 of the tile's rows is stored; None stores
            both.
    """

    sources: tuple[Any, Any]
    steps: Any
    out: Any
    computes: Callable | None = None


def product(
    x: jax.Array,
    kernels: jax.Array,
    groups: jax.Array,
    count: jax.Array,
    *parts: jax.Array,
    transposed: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Return the products [N, F] of each block of rows of x with the matrix of its group; the arguments are
    those of `api.grouped_product`.
    """
    rows, depth = x.shape
    size = kernels.shape[1 if transposed else 2]
    across = width(size)
    tiles = size // across

    def kernel(refs):
        def tile(index) -> _Tile:
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            columns = pl.ds(column * across, across)
            matrix = refs["kernels"].at[refs["groups"][block]]
            source = matrix.at[columns] if transposed else matrix.at[:, columns]
            begin, computes = block * ROWS, None
            if parts:
                first, last = refs["first"][block], refs["last"][block]
                # Both halves of a tile must be inside the array.
                low = jnp.minimum(first, rows // _HALF - 2)

                def computes(half):
                    return (low + half >= first) & (low + half < last)

                begin = low * _HALF
            tokens = pl.ds(begin, ROWS)
            out = refs["out"].at[tokens, columns]
            return _Tile((refs["x"].at[tokens], source), depth // _DEPTH, out, computes)

        if transposed:
            right = plgpu.BlockSpec((across, _DEPTH), lambda k: (0, k), transforms=wg.TILED)
        else:
            right = plgpu.BlockSpec((_DEPTH, across), lambda k: (k, 0), transforms=wg.TILED)
        left = plgpu.BlockSpec((ROWS, _DEPTH), lambda k: (0, k), transforms=wg.TILED)

        def multiply(total, half, a, b):
            plgpu.wgmma(total, a.at[half], b.transpose((1, 0)) if transposed else b)

        examples = (refs["x"].at[pl.ds(0, ROWS)], refs["kernels"].at[0])
        tiled = _Tiled(tile, multiply, (left, right), across, depth // _DEPTH, x.dtype)
        tiled.compute(refs["count"][0] * tiles, examples)

    first, last = parts or (None, None)
    inputs = dict(groups=groups, count=count, first=first, last=last, x=x, kernels=kernels)
    return _launch(kernel, inputs, (rows, size), x.dtype, interpret)


def sums(
    x: jax.Array, dy: jax.Array, starts: jax.Array, blocks: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Return for each of E groups the sum of the outer products of its rows of x and dy, [E, D, F]; the
    arguments are those of `api.grouped_sums`.
    """
    depth, size, total = x.shape[1], dy.shape[1], starts.shape[0]
    across = width(size)
    tiles, down = size // across, depth // ROWS

    def kernel(refs):
        def tile(index) -> _Tile:
            group, in_group = lax.div(index, tiles * down), lax.rem(index, tiles * down)
            row, column = lax.div(in_group, tiles), lax.rem(in_group, tiles)
            channels, columns = pl.ds(row * ROWS, ROWS), pl.ds(column * across, across)
            start = pl.multiple_of(refs["starts"][group], _DEPTH)
            rows = pl.ds(start, x.shape[0])  # rows beyond the array are not loaded
            sources = refs["x"].at[rows, channels], refs["dy"].at[rows, columns]
            return _Tile(sources, refs["blocks"][group], refs["out"].at[group, channels, columns])

        left = plgpu.BlockSpec((_DEPTH, ROWS), lambda k: (k, 0), transforms=wg.TILED)
        right = plgpu.BlockSpec((_DEPTH, across), lambda k: (k, 0), transforms=wg.TILED)

        def multiply(total, half, a, b):
            plgpu.wgmma(total, a.at[:, half].transpose((1, 0)), b)

        examples = (refs["x"].at[:, pl.ds(0, ROWS)], refs["dy"].at[:, pl.ds(0, across)])
        tiled = _Tiled(tile, multiply, (left, right), across, x.shape[0] // _DEPTH, x.dtype)
        tiled.compute(total * tiles * down, examples)

    inputs = dict(starts=starts, blocks=blocks, x=x, dy=dy)
    return _launch(kernel, inputs, (total, depth, size), x.dtype, interpret)


def _launch(kernel, inputs, shape: tuple[int, ...], dtype: Any, interpret: Any) -> jax.Array:
    return launch(
        kernel,
        inputs=inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(shape, dtype)),
        grid=dict(processor=PROCESSORS),
        num_threads=3,
        approx_math=False,
        name="grouped_product" if len(shape) == 2 else "grouped_sums",
        interpret=interpret,
    )["out"]


class _Tiled(NamedTuple):
    """A kernel that computes tiles [128, across] of a grouped product's output, each a sum of matrix products
    over steps.

    Attributes:
        tile: `tile(index)` returns the output tile with that index, as `_Tile`.
        multiply: `multiply(total, half, a, b)` adds to the accumulator `total` the product of one step's
            blocks a and b of the two sources, for the rows `half` of the tile.
        specs: the `BlockSpec`s of the blocks of a tile's two sources that one step loads.
        across: the number of columns of a tile.
        max_steps: the largest number of steps of a tile.
        dtype: the output's dtype.
    """

    tile: Callable[[Any], _Tile]
    multiply: Callable
    specs: tuple[Any, Any]
    across: int
    max_steps: int
    dtype: Any

    def compute(self, count, examples) -> None:
        """Compute and store the output tiles 0 to `count` - 1 of a grouped product, divided among the GPU's
        processors.

        Args:
            count: the number of output tiles.
            examples: references with the shapes and dtypes of the two sources, for which buffers are
                allocated.
        """
        smem: Any = plgpu.SMEM
        pl.run_scoped(
            lambda allocations, buffers: self._compute_tiles(count, allocations, buffers),
            self._pipeline(self.max_steps, _nothing, _nothing).get_allocations(*examples),
            smem((2, _SLOTS, _HALF, _HALF), dtype=self.dtype, transforms=wg.TILED),
            collective_axes="group",
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _pipeline(self, steps, body, context):
        """Return a function that computes one output tile in `steps` steps. In each step one warpgroup loads
        a block of each of the two sources, and two warpgroups call `body` with references to these blocks.
        Each of the two first calls `context`, with a function that runs all steps.
        """
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(steps,),
            in_specs=list(self.specs),
            max_concurrent_steps=min(_STAGES, self.max_steps),
            num_compute_wgs=2,
            memory_registers=40,
            wg_axis="group",
            compute_context=context,
        )

    def _compute_tiles(self, count, allocations, buffers) -> None:
        """Compute and store those of the `count` output tiles that this processor computes, with buffers in
        shared memory for the two sources (`allocations`) and for the output (`buffers`).
        """
        group = lax.axis_index("group")
        half = pl.ds(group * _HALF, _HALF)

        @plgpu.nd_loop((count,), collective_axes="processor")
        def _(info):
            tile = self.tile(info.index[0])
            totals = []

            def body(indices, a, b, carry):
                self.multiply(totals[-1], half, a, b)
                plgpu.wgmma_wait(0)
                return carry

            def compute(run):
                def sum_steps(total):
                    totals.append(total)
                    run(None)
                    return total[...]

                total = plgpu.ACC((_HALF, self.across), jnp.float32)
                y = pl.run_scoped(sum_steps, total).astype(self.dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store = functools.partial(self._store, y, tile.out, half, buffers, group)
                if tile.computes is None:
                    store()
                else:
                    pl.when(tile.computes(group))(store)

            self._pipeline(tile.steps, body, compute)(*tile.sources, allocations=allocations)

    def _store(self, y, out, half, buffers, group) -> None:
        """Copy y, the 64 rows of an output tile that warpgroup `group` has computed, to the rows `half` of
        the tile `out` in global memory, by way of the warpgroup's `buffers` in shared memory.
        """
        for i in range(self.across // _HALF):
            buffer, columns = buffers.at[group, i % _SLOTS], pl.ds(i * _HALF, _HALF)
            plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
            buffer[...] = y[:, i * _HALF : (i + 1) * _HALF]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[half, columns])


def _nothing(*_):
    return None
