"""Products of many rows' tokens by tiles (`pallas_kernels.row_product.tile_product`), as `lsm_jax.models.token_step` composes them.

The norms of a layer divide by the roots of their tokens' mean squares. The kernel that writes the stream adds up the squares of what it
writes, so that the products behind a norm need not read the tokens once more for them; so does the kernel of the memory, which also applies
the gate of its output, for the norm of the heads, by whose roots the product behind it multiplies each head's sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.token_kernels import row_products

TILINGS: dict[str, tuple[int, ...]] = dict(
    into=(64, 64, 7, 1, 1), out=(32, 64, 7, 1, 1), gate_up=(64, 64, 6, 2, 2), down=(32, 128, 5, 1, 4)
)  # fmt: skip
"""`pallas_kernels.row_product.Tiling` of each product, by the names of `token_step`'s matrices, as timed for 256 rows of GLA 340M; products that it
does not divide have the kernel's own. Empty: XLA computes all four."""
COLUMNS = 64
"""The number of which the width of a mixer's input is made a multiple, by zeros."""


class Stream(NamedTuple):
    """The stream of many rows.

    Attributes:
        x: [B, 1, D].
        squares: [B, P] float32, whose sums over P are those of the squares of each token's channels, or None where no kernel wrote the stream.
    """

    x: jax.Array
    squares: jax.Array | None = None


def supported(batch: int, into: int, size: int, heads: int, values: int, inner: int) -> bool:
    """Return whether the four products of a layer are computed by tiles.

    Args:
        batch: the number of rows.
        into: the width of the mixer's input.
        size: D, the width of the stream.
        heads: the number of the memory's heads.
        values: the value channels of all heads.
        inner: the width of the feedforward.
    """
    if not TILINGS:
        return False
    shapes = (size, into + -into % COLUMNS, False), (values, size, False), (size, 2 * inner, True), (inner, size, False)  # fmt: skip
    if values // heads % 64:  # the channels of the kernel's own steps
        return False
    here, unsupported = jax.ShapeDtypeStruct, row_products().tile_unsupported
    return all(
        unsupported(
            here((batch, channels), jnp.bfloat16),
            here((results, channels), jnp.bfloat16),
            swiglu=swiglu,
        )
        is None
        for channels, results, swiglu in shapes
    )


def product(name: str, x: jax.Array, matrix: jax.Array, *, swiglu: bool = False, **options) -> Any:
    """Return what `tile_product` returns for tokens x [B, I] and one of a layer's matrices [F, I], by the tiling of `TILINGS`.

    Args:
        name: the matrix's name in `TILINGS`.
        x: the tokens.
        matrix: the matrix.
        swiglu: whether the product is a gate followed by as many values.
        options: the other arguments of `tile_product`.
    """
    squares = options.get("squares")
    heads = 1 if squares is None or squares.ndim == 2 else squares.shape[0]
    tiling = _tiling(name, x.shape, matrix.shape[0] // (1 + swiglu), heads)
    return row_products().tile_product(x, matrix, swiglu=swiglu, tiling=tiling, **options)


def _tiling(name: str, shape: tuple[int, ...], results: int, heads: int):
    """Return the tiling of a product of tokens of this shape, with heads of their own norms, with so many results, or None if that of `TILINGS`
    does not divide it.
    """
    tiling, (rows, channels) = row_products().Tiling(*TILINGS[name]), shape
    if rows % (128 * tiling.row_peers):
        tiling = tiling._replace(row_peers=1)
    divides = tiling.divides(rows, channels // heads, results)
    return tiling if divides else None
