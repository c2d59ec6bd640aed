"""Inverses of the triangular systems that delta rules solve in each chunk, on TPU, and the residuals of these rules' kernels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import scalar_decay as decays
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu.row_layout import CHUNK

_F32 = jnp.float32
HEADS = 8  # of one program
_TILE = 16  # rows of a tile of 16-bit numbers in registers
_SUBLANES = 8


class Residuals(NamedTuple):
    """The residuals that the forward pass of a delta rule saves for the backward pass, for N heads and chunks of C tokens.

    Attributes:
        states: [B, N, T / C, K, V], the memory before each chunk.
        inverse: [B, N, T, C], the inverse of each chunk's triangular system.
    """

    states: jax.Array
    inverse: jax.Array


def length_multiple(q, k, v) -> int:
    """Return the number that the row length T must be a multiple of, the tokens in a chunk; q, k and v are ignored."""
    del q, k, v
    return CHUNK


def invert(systems: list[jax.Array], dtype) -> list[jax.Array]:
    """Return the inverses (I + N)⁻¹ of the triangular systems of several chunks, each from its strictly lower triangular N [C, C] float32,
    computed by products in `dtype` and returned in it.

    This is `tiles.delta.unit_inverse` from blocks of 16 rows on, which are inverted in float32. The blocks of a level are side by side,
    [half, C], so that left operands have only the rows of one block. Each step is computed for all systems before the next one, so that no
    system waits for its last product.
    """
    size = len(systems[0])
    i, j = indices(size)
    unit = jnp.where(i == j, 1.0, 0.0)

    def product(a, b):
        return dot(a.astype(dtype), b.astype(dtype))

    inverses, half = _invert_blocks(systems), _TILE
    while half < size:
        first = lax.broadcasted_iota(jnp.int32, (1, size), 1) & half == 0
        between = [jnp.where(lax.div(i ^ j, half) == 1, n, 0.0) for n in systems]
        blocks = [jnp.concatenate([x] * (size // half)) for x in inverses]
        blocks = [jnp.where(i ^ j < half, x, 0.0) for x in blocks]
        later = [product(x, n) for x, n in zip(inverses, between, strict=True)]
        later = [product(x, n) for x, n in zip(later, blocks, strict=True)]
        inverses = [
            jnp.concatenate([jnp.where(first, x, 0.0), jnp.where(first, -y, x)])
            for x, y in zip(inverses, later, strict=True)
        ]
        half *= 2

    units = [unit + n for n in systems]
    parts = [[x] for x in units]
    if dtype != _F32:
        parts = [[x, x - x.astype(dtype).astype(_F32)] for x in units]
    left = [product(jnp.concatenate(part), x) for part, x in zip(parts, inverses, strict=True)]
    left = [2 * unit - sum(x[n : n + size] for n in range(0, len(x), size)) for x in left]
    return [product(x, y).astype(dtype) for x, y in zip(inverses, left, strict=True)]


def _invert_blocks(systems: list[jax.Array]) -> list[jax.Array]:
    """Return, for each strictly lower triangular N [C, C] in `systems`, the inverses of the blocks of 16 rows on the diagonal of
    the matrix I + N, side by side, [16, C] float32; they are computed row by row.
    """
    size = len(systems[0])
    lane = lax.broadcasted_iota(jnp.int32, (_SUBLANES, size), 1)
    row = lax.broadcasted_iota(jnp.int32, (_SUBLANES, size), 0)
    tiles = range(0, _TILE, _SUBLANES)
    split, inverses = [], []
    for x in systems:
        blocks = [x[n : n + _TILE] for n in range(0, size, _TILE)]
        blocks = decays.side_by_side(blocks, size)
        split.append([blocks[n : n + _SUBLANES] for n in tiles])
        inverses.append([jnp.where(lane % _TILE == row + n, 1.0, 0.0) for n in tiles])
    for k in range(_TILE - 1):
        column = lane - lane % _TILE + k
        at, k = divmod(k, _SUBLANES)
        for x, inverse in zip(split, inverses, strict=True):
            solved = inverse[at][k : k + 1]
            for n in range(at, len(tiles)):
                inverse[n] -= jnp.take_along_axis(x[n], column, axis=1) * solved
    return [jnp.concatenate(x) for x in inverses]


def indices(size: int):
    """Return two tiles [size, size] int32, for masks over pairs of tokens: the row index of each entry, and the column index of each
    entry.
    """
    return (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
