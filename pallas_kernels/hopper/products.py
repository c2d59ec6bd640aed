"""Products of [C, C] tiles in registers, for the inverse of a chunk's system."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import SQUARE

_F32, _BF16 = jnp.float32, jnp.bfloat16


def tile_products(right, left, interpret: Any):
    """What `tiles.unit_inverse` takes: products of [C, C] in registers, through buffer for a right operand and, to interpret, two left."""

    def product(*pairs):
        """The sum of a b over the pairs, which share the b of the first."""
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
