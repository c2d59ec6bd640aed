"""What a Mosaic GPU kernel for Hopper does with a warpgroup's registers and tiles in shared memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu

LAYOUT = plgpu.Layout.WGMMA
TILED = (
    plgpu.TilingTransform((8, 64)),
    plgpu.SwizzleTransform(128),
)  # of 16-bit tiles in shared memory
TILED_WIDE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # of 32-bit ones
NEVER = -1e30  # exp of it is 0


def load_rows(ref):
    """A vector in shared memory, one value for each row of a tile."""
    return plgpu.load(ref, layout=LAYOUT.reduce(1))


def spread_rows(x, shape):
    """One value a row -> `shape`."""
    return lax.broadcast_in_dim(x, shape, [0])


def spread_columns(x, shape):
    """One value a column -> `shape`."""
    return lax.broadcast_in_dim(x, shape, [1])


def row_differences(ref, shape):
    """`x_i - x_j` of a vector in shared memory."""
    of_column = lax.broadcast_in_dim(plgpu.load(ref, layout=LAYOUT.reduce(0)), shape, [1])
    return spread_rows(load_rows(ref), shape) - of_column


def load_global(ref, layout: Any = LAYOUT):
    """A tile (or a vector) straight from global memory, each thread its own values."""
    return plgpu.load(ref, layout=layout, optimized=False)


def as_left(x, room, interpret: Any):
    """x as the left operand of a product, in bfloat16: in registers, or in `room` for the interpreter, which knows no other."""
    x = x.astype(jnp.bfloat16)
    if not interpret:
        return x
    room[...] = x
    plgpu.commit_smem()
    return room


def accumulate(products, *starts: Any, interpret: Any) -> Any:
    """`starts` plus the matrix products that `products` adds to references to them."""
    if not interpret:
        begin = [plgpu.ACC.init(plgpu.layout_cast(x, LAYOUT)) for x in starts]
        return pl.run_state(lambda refs: products(*refs))(begin)

    def from_zero(*refs):  # the interpreter cannot begin with anything else
        products(*refs)
        return [ref[...] for ref in refs]

    added = pl.run_scoped(from_zero, *(plgpu.ACC(x.shape, jnp.float32) for x in starts))
    return [x + y for x, y in zip(starts, added, strict=True)]
