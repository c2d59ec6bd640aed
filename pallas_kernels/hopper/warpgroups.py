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


def smem_transforms(dtype):
    """How a tile of `dtype` lies in shared memory."""
    return TILED_WIDE if jnp.dtype(dtype).itemsize == 4 else TILED


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


def chunks_of_row(chunk_bounds, row, count: int, reverse: bool):
    """The row of tokens that a row of memories belongs to, how many chunks are walked over for it, and which is the n-th.

    `chunk_bounds` in global memory, [B, S + 1], are where the chunks of a row's S memories begin and end; None gives it all `count`.
    """
    b, first, steps = row, 0, count
    if chunk_bounds is not None:
        runs = chunk_bounds.shape[1] - 1
        b, run = lax.div(row, runs), lax.rem(row, runs)
        first = chunk_bounds.at[b][run]
        steps = chunk_bounds.at[b][run + 1] - first
    return b, steps, lambda n: first + (steps - 1 - n if reverse else n)


def as_left(x, buffer, interpret: Any):
    """x as the left operand of a product, in bfloat16: in registers, or in `buffer` for the interpreter, which knows no other."""
    x = x.astype(jnp.bfloat16)
    if not interpret:
        return x
    buffer[...] = x
    plgpu.commit_smem()
    return buffer


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


class Accumulator:
    """What products are added to, in registers.

    Attributes:
        ref: for `plgpu.wgmma`.
    """

    def __init__(self, ref, added=None):
        self.ref, self._added = ref, added

    def read(self, pending: int | None = 0):
        """Its value, once at most `pending` of all products begun are on their way; None where it was waited for already."""
        value = plgpu.wgmma_accumulator_load(self.ref, wait_n=pending)
        return value if self._added is None else value + self._added


def with_accumulators(use, *starts: Any, interpret: Any) -> Any:
    """What `use` makes of an `Accumulator` for each of `starts`, a value or a shape (of zeros).

    What it does between the beginning of a product and its reading passes while the product is on its way. It cannot return
    what `as_left` makes.
    """
    given = [None if isinstance(x, tuple) else x for x in starts]

    def run(*refs):
        if interpret:  # the interpreter cannot begin with anything but zeros
            return use(*(Accumulator(ref, x) for ref, x in zip(refs, given, strict=True)))
        for ref, x in zip(refs, given, strict=True):
            if x is not None:
                ref[...] = plgpu.layout_cast(x, LAYOUT)
        return use(*map(Accumulator, refs))

    shapes = (x if isinstance(x, tuple) else x.shape for x in starts)
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def products_from_zero(products, *shapes):
    """Matrix products that `products` adds to references to zeros."""

    def run(*refs):
        products(*refs)
        return [ref[...] for ref in refs]

    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def overlap(products, shapes, more, starts, use, *, interpret: Any) -> Any:
    """`starts` plus the products that `more` adds to references to them, one each, and `use` of those that `products` adds to
    references to zeros of `shapes`, which runs while the others are on their way. It may not make operands of products."""

    def run(*refs):
        zeros, sums = refs[: len(shapes)], refs[len(shapes) :]
        if not interpret:  # the interpreter cannot begin with anything else
            for ref, x in zip(sums, starts, strict=True):
                ref[...] = x
        products(*zeros)
        more(*sums)
        values = [plgpu.wgmma_accumulator_load(zeros[0], wait_n=len(starts))]
        values += [plgpu.wgmma_accumulator_load(ref, wait_n=None) for ref in zeros[1:]]
        found = use(*values)
        return [ref[...] for ref in sums], found

    buffers = (*shapes, *(x.shape for x in starts))
    sums, found = pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in buffers))
    if interpret:
        sums = [x + y for x, y in zip(starts, sums, strict=True)]
    return sums, found
