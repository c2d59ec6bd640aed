"""The inverse of the triangular system that a delta rule solves in a chunk: a [64, 64] tile in the registers of a warpgroup."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.block_inverse import block_inverse
from pallas_kernels.hopper.halving import SQUARE
from pallas_kernels.tiles import delta as tiles

METHOD: str | None = None
"""How all systems are inverted: "doubled", by 13 products of whole tiles, one after another; "blocks", by products of blocks [16, 16] that single
warps compute (`block_inverse`); None is what the caller of `unit_inverse` asks for.
"""
_F32, _BF16 = jnp.float32, jnp.bfloat16


def unit_inverse(
    strict, apart, right, left, interpret: Any, *, upper: bool = False, method: str = "doubled"
):
    """Return the inverse `(I + strict)⁻¹` of a chunk's triangular system, a tile [64, 64] in registers.

    Args:
        strict: the strictly lower triangular tile [64, 64], 0 on and above its diagonal.
        apart: [64, 64] integers, i ^ j of each entry's row index i and column index j.
        right: [64, 64] bfloat16, a buffer in shared memory for the right operands of products.
        left: two such buffers for left operands, which only the interpreter requires.
        interpret: parameters of the interpreter, or False.
        upper: whether `strict` is upper triangular instead.
        method: "doubled", as `tiles.delta.unit_inverse`, or "blocks"; `METHOD` replaces it.
    """
    if (METHOD or method) == "blocks":
        return block_inverse(strict, right, interpret, upper=upper)

    def product(b, *lefts):
        """Return Σ_a a b, the sum of the matrix products of all tiles a [64, 64] in `lefts` with the tile b
        [64, 64], in float32. The operands are rounded to bfloat16.
        """
        right[...] = b.astype(_BF16)
        lefts = [wg.as_left(a, left and left[n], interpret) for n, a in enumerate(lefts)]
        plgpu.commit_smem()

        def add(out):
            for a in lefts:
                plgpu.wgmma(out, a, right)

        return wg.accumulate(add, jnp.zeros(SQUARE, _F32), interpret=interpret)[0]

    def exact(a, b):
        rest = a - a.astype(_BF16).astype(_F32)
        return b.astype(_BF16).astype(_F32), product(b, a, rest)

    return tiles.unit_inverse(strict, apart, lambda a, b: product(b, a), exact)
