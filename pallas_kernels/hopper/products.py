"""Products of [64, 64] tiles in registers, for the inverse of a chunk's system."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import SQUARE

_F32, _BF16 = jnp.float32, jnp.bfloat16


def tile_products(right, left, interpret: Any):
    """Return the functions `product` and `exact` that `tiles.delta.unit_inverse` requires, for tiles in registers.

    Args:
        right: [64, 64] bfloat16 in shared memory, for right operands.
        left: two such buffers for left operands, which only the interpreter requires.
        interpret: parameters of the interpreter, or False.
    """

    def product(*pairs):
        """The sum of a b over the pairs (a, b), whose b is that of the first pair."""
        right[...] = pairs[0][1].astype(_BF16)
        lefts = [wg.as_left(a, left and left[n], interpret) for n, (a, _) in enumerate(pairs)]
        plgpu.commit_smem()

        def add(out):
            for a in lefts:
                plgpu.wgmma(out, a, right)

        return wg.accumulate(add, jnp.zeros(SQUARE, _F32), interpret=interpret)[0]

    def exact(a, b):
        rest = a - a.astype(_BF16).astype(_F32)
        return b.astype(_BF16).astype(_F32), product((a, b), (rest, b))

    return product, exact
