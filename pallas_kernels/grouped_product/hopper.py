"""The Hopper kernels (Mosaic GPU) of products in which each group of rows is multiplied by its own matrix,
and of the gradient of these matrices. Groups begin at multiples of `ROWS`, or of 64.

Both kernels run one thread block on each processor, which computes output tiles one after another
(`pallas_kernels.grouped_product.pipeline`). All rows of a block belong to one group, so that no masks are required.
Rows that belong to no group are skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.grouped_product.pipeline import (
    DEPTH,
    HALF,
    ROWS,
    SLOTS,
    Loop,
    Tile,
    depth_of,
    store_columns,
)
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

REQUIREMENTS = (
    Requirement(
        "x and kernels in bfloat16",
        lambda c: c.x.dtype == c.kernels.dtype == jnp.bfloat16,
        lambda c: f"{jnp.dtype(c.x.dtype).name} and {jnp.dtype(c.kernels.dtype).name}",
    ),
    Requirement(
        f"kernels of a multiple of {ROWS} rows and a multiple of {DEPTH} columns",
        lambda c: c.kernels.shape[-2] % ROWS == 0 and c.kernels.shape[-1] % DEPTH == 0,
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


def product(
    x: jax.Array,
    kernels: jax.Array,
    groups: jax.Array,
    count: jax.Array,
    *parts: jax.Array,
    transposed: bool = False,
    scale: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Return the products [N, F] of each block of rows of x with the matrix of its group; the arguments are
    those of `api.grouped_product`.
    """
    rows, depth = x.shape
    step = depth_of(x)
    size = kernels.shape[1 if transposed else 2]
    across = width(size)
    tiles = size // across

    def multiply(totals, half, a, b):
        plgpu.wgmma(totals[0], a.at[half], b.transpose((1, 0)) if transposed else b)

    def kernel(refs, smem):
        factor = None if scale is None else refs["scale"][0]

        def tile(index) -> Tile:
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            columns = pl.ds(column * across, across)
            matrix = refs["kernels"].at[refs["groups"][block]]
            begin, computes = block * ROWS, None
            if parts:
                first, last = refs["first"][block], refs["last"][block]
                # Both halves of a tile must be inside the array.
                low = jnp.minimum(first, rows // HALF - 2)

                def computes(half):
                    return (low + half >= first) & (low + half < last)

                begin = low * HALF

            def operands(k):
                at = pl.ds(k * step, step)
                right = matrix.at[columns, at] if transposed else matrix.at[at, columns]
                return refs["x"].at[pl.ds(begin, ROWS), at], right

            def store(group, totals, _):
                out = refs["out"].at[pl.ds(begin + group * HALF, HALF), columns]
                totals = totals if factor is None else [total * factor for total in totals]
                _store(totals, out, smem["out"].at[group], computes and computes(group))

            return Tile(depth // step, operands, store)

        loop.run(tile, refs["count"][0] * tiles, smem)

    right = (across, step) if transposed else (step, across)
    loop = Loop(multiply, ((ROWS, step), right), (across,), (x.dtype, kernels.dtype))
    first, last = parts or (None, None)
    inputs = dict(groups=groups, count=count, first=first, last=last)
    inputs |= dict(scale=scale, x=x, kernels=kernels)
    dtype = x.dtype if scale is None else jnp.bfloat16
    return _launch(kernel, loop, inputs, (rows, size), dtype, interpret)


def sums(
    x: jax.Array, dy: jax.Array, starts: jax.Array, blocks: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Return for each of E groups the sum of the outer products of its rows of x and dy, [E, D, F]; the
    arguments are those of `api.grouped_sums`.
    """
    depth, size, total = x.shape[1], dy.shape[1], starts.shape[0]
    across = width(size)
    tiles, down = size // across, depth // ROWS

    def multiply(totals, half, a, b):
        plgpu.wgmma(totals[0], a.at[:, half].transpose((1, 0)), b)

    def kernel(refs, smem):
        def tile(index) -> Tile:
            place, in_group = lax.div(index, tiles * down), lax.rem(index, tiles * down)
            group = refs["order"][place]
            row, column = lax.div(in_group, tiles), lax.rem(in_group, tiles)
            channels, columns = pl.ds(row * ROWS, ROWS), pl.ds(column * across, across)
            start = pl.multiple_of(refs["starts"][group], DEPTH)

            def operands(k):
                rows = pl.ds(start + k * DEPTH, DEPTH)
                return refs["x"].at[rows, channels], refs["dy"].at[rows, columns]

            def store(warpgroup, totals, _):
                channels = pl.ds(row * ROWS + warpgroup * HALF, HALF)
                out = refs["out"].at[group, channels, columns]
                _store(totals, out, smem["out"].at[warpgroup])

            return Tile(refs["blocks"][group], operands, store)

        loop.run(tile, total * tiles * down, smem)

    loop = Loop(multiply, ((DEPTH, ROWS), (DEPTH, across)), (across,), (x.dtype, dy.dtype))
    inputs = dict(order=_longest_first(blocks), starts=starts, blocks=blocks, x=x, dy=dy)
    return _launch(kernel, loop, inputs, (total, depth, size), x.dtype, interpret)


def _longest_first(blocks: jax.Array) -> jax.Array:
    """Return the indices of groups [E], those with most blocks first."""
    index = jnp.arange(len(blocks), dtype=jnp.int32)
    longer = blocks[None] > blocks[:, None]
    before = longer | ((blocks[None] == blocks[:, None]) & (index[None] < index[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None] == index[:, None], index[None], 0), axis=1)  # no sort


def _store(totals, out, buffers, stored: Any = None) -> None:
    """Store a warpgroup's rows of an output tile unless `stored` is False; None is True."""
    y = totals[0].astype(out.dtype)
    if stored is None:
        store_columns(y, out, buffers)
    else:
        pl.when(stored)(lambda: store_columns(y, out, buffers))


def _launch(kernel, loop: Loop, inputs, shape: tuple[int, ...], dtype: Any, interpret: Any):
    out: Any = plgpu.SMEM((2, SLOTS, HALF, HALF), dtype=dtype, transforms=wg.TILED)
    return launch(
        kernel,
        inputs=inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(shape, dtype)),
        grid=dict(processor=PROCESSORS),
        num_threads=3,
        scratch=loop.scratch() | dict(out=out),
        approx_math=False,
        name="grouped_product" if len(shape) == 2 else "grouped_sums",
        interpret=interpret,
    )["out"]
