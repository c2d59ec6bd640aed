"""Functions of a warpgroup in a Mosaic GPU kernel for Hopper: loads, tiles in registers, and matrix products that add to registers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu

LAYOUT = plgpu.Layout.WGMMA
# Transforms of tiles in shared memory: of 8-bit, 16-bit and 32-bit numbers.
TILED_NARROW = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILED_WIDE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
NEVER = -1e30  # its exponential is 0


def smem_transforms(dtype):
    """Return the transforms (tiling and swizzle) that a tile of numbers of `dtype` has in shared memory, as matrix products require them."""
    return {1: TILED_NARROW, 4: TILED_WIDE}.get(jnp.dtype(dtype).itemsize, TILED)


def load_rows(ref):
    """Load a vector from shared memory into registers, in the layout of one value for each row of a tile."""
    return plgpu.load(ref, layout=LAYOUT.reduce(1))


def spread_rows(x, shape):
    """Return a tile of `shape` [rows, columns] in registers with x_i in every column of row i, from a vector
    x [rows].
    """
    return lax.broadcast_in_dim(x, shape, [0])


def spread_columns(x, shape):
    """Return a tile of `shape` [rows, columns] in registers with x_j in every row of column j, from a vector
    x [columns].
    """
    return lax.broadcast_in_dim(x, shape, [1])


def row_differences(ref, shape, columns=None):
    """Return a tile of `shape` in registers with the differences `x_i - y_j` (row i, column j) of the entries of a vector x, `ref`, and a
    vector y, `columns`, in shared memory; None is x.
    """
    columns = ref if columns is None else columns
    of_column = lax.broadcast_in_dim(plgpu.load(columns, layout=LAYOUT.reduce(0)), shape, [1])
    return spread_rows(load_rows(ref), shape) - of_column


def load_global(ref, layout: Any = LAYOUT):
    """Load a tile or a vector from a reference to global memory into registers of the given layout; each thread loads its own values."""
    return plgpu.load(ref, layout=layout, optimized=False)


def chunks_of_row(chunk_bounds, row, count: int, reverse: bool):
    """Return which chunks of which row update a memory of a scan, where a row may have several memories.

    Args:
        chunk_bounds: [B, S + 1] in global memory, the chunks at which a row's S memories begin and end; None is one memory per row.
        row: index of the memory, b * S + s.
        count: the number of chunks in a row.
        reverse: whether the chunks are computed from the last to the first.

    Returns:
        The row b of tokens, the number of the memory's chunks, and a function that returns the index in the row of the n-th of them.
    """
    b, first, steps = row, 0, count
    if chunk_bounds is not None:
        runs = chunk_bounds.shape[1] - 1
        b, run = lax.div(row, runs), lax.rem(row, runs)
        first = chunk_bounds.at[b][run]
        steps = chunk_bounds.at[b][run + 1] - first
    return b, steps, lambda n: first + (steps - 1 - n if reverse else n)


def upper_half(x):
    """Return the float32 tile x with the lower 16 of each number's bits set to 0: numbers of bfloat16, from which x differs by less than
    2^-7 of each.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(-0x10000), jnp.float32)


def split_terms(x, count: int) -> tuple[Any, ...]:
    """Return `count` numbers of bfloat16 for each of the float32 tile x, whose sum differs from it by at most 2^(-8 count) of it: x rounded, the
    rounded rest, and so on. All but the last are rounded by their bits, since a compiler may leave out conversions there and back.
    """
    terms = []
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(x, jnp.int32) + jnp.int32(0x8000)
        high = lax.bitcast_convert_type(bits & jnp.int32(-0x10000), jnp.float32)
        terms.append(high.astype(jnp.bfloat16))
        x = x - high
    return *terms, x.astype(jnp.bfloat16)


def as_left(x, buffer, interpret: Any):
    """Return the tile x in bfloat16 as the left operand of a matrix product: in registers, or in `buffer` in shared memory for the
    interpreter, which requires it there.
    """
    x = x.astype(jnp.bfloat16)
    if not interpret:
        return x
    buffer[...] = x
    plgpu.commit_smem()
    return buffer


def accumulate(products, *starts: Any, interpret: Any) -> Any:
    """Return each of the tiles `starts` plus matrix products, in float32: `products` is called with references to the tiles, to which it
    adds the products.
    """
    if not interpret:
        begin = [plgpu.ACC.init(plgpu.layout_cast(x, LAYOUT)) for x in starts]
        return pl.run_state(lambda refs: products(*refs))(begin)

    def from_zero(*refs):  # the interpreter supports no other initial value
        products(*refs)
        return [ref[...] for ref in refs]

    added = pl.run_scoped(from_zero, *(plgpu.ACC(x.shape, jnp.float32) for x in starts))
    return [x + y for x, y in zip(starts, added, strict=True)]


class Accumulator:
    """A float32 tile in registers to which the matrix products of a warpgroup are added while it computes other things.

    Attributes:
        ref: the reference that `plgpu.wgmma` adds to.
    """

    def __init__(self, ref, start=None):
        """Store the reference to a float32 tile in registers to which `plgpu.wgmma` adds matrix products.

        Args:
            ref: the reference; without `start`, it has the initial tile itself.
            start: an initial tile, which `read` adds. Then `ref` has zeros: the interpreter supports no other
                initial value.
        """
        self.ref, self._start = ref, start

    def read(self, pending: int | None = 0):
        """Return the tile with the products that were added to it, after waiting until at most `pending` of the warpgroup's products that
        have begun are still running (None does not wait).
        """
        value = plgpu.wgmma_accumulator_load(self.ref, wait_n=pending)
        return value if self._start is None else value + self._start


def with_accumulators(use, *starts: Any, interpret: Any) -> Any:
    """Call the function `use` with accumulators for matrix products, one `Accumulator` for each of `starts`,
    and return its result. Each of `starts` is an initial tile, or the shape of a tile of zeros.

    `use` can compute other things between the start of a product and `Accumulator.read`, while the product is
    running. It cannot return a result of `as_left`.
    """
    values = [None if isinstance(x, tuple) else x for x in starts]

    def run(*refs):
        if interpret:  # the interpreter supports only zeros as initial value
            return use(*(Accumulator(ref, x) for ref, x in zip(refs, values, strict=True)))
        for ref, x in zip(refs, values, strict=True):
            if x is not None:
                ref[...] = plgpu.layout_cast(x, LAYOUT)
        return use(*map(Accumulator, refs))

    shapes = (x if isinstance(x, tuple) else x.shape for x in starts)
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def products_from_zero(products, *shapes):
    """Return tiles of sums of matrix products, in float32: `products` is called with a reference to zeros of each of `shapes`, to which it
    adds products.
    """

    def run(*refs):
        products(*refs)
        return [ref[...] for ref in refs]

    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def overlap(products, shapes, more, starts, use, *, interpret: Any) -> Any:
    """Compute some matrix products, and call the function `use` with their results while other matrix
    products are still running.

    Args:
        products: function that adds the first products to references to tiles of zeros.
        shapes: the shapes of these tiles.
        more: function that adds one product to each of the references that it receives, whose tiles begin as
            `starts`.
        starts: the initial tiles to which the other products are added.
        use: function of the results of `products`, called while the products of `more` are running; it cannot
            make operands of products.
        interpret: parameters of the interpreter, or False.

    Returns:
        The tiles `starts` plus the products of `more`, and the result of `use`.
    """

    def run(*refs):
        zeros, sums = refs[: len(shapes)], refs[len(shapes) :]
        if not interpret:  # the interpreter supports only zeros as initial value
            for ref, x in zip(sums, starts, strict=True):
                ref[...] = x
        products(*zeros)
        more(*sums)
        values = [plgpu.wgmma_accumulator_load(zeros[0], wait_n=len(starts))]
        values += [plgpu.wgmma_accumulator_load(ref, wait_n=None) for ref in zeros[1:]]
        result = use(*values)
        return [ref[...] for ref in sums], result

    buffers = (*shapes, *(x.shape for x in starts))
    sums, result = pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in buffers))
    if interpret:
        sums = [x + y for x, y in zip(starts, sums, strict=True)]
    return sums, result
