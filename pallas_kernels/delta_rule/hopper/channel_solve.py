"""The inverses of the triangular systems of all chunks, for the delta rule with a decay per key channel, on Mosaic GPU (Hopper)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import row_and_head
from pallas_kernels.hopper.halving import CHUNK, SQUARE, load_by_row
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.unit_inverse import unit_inverse

_BF16 = jnp.bfloat16


def solve_chunks(upper, rows, *, interpret: Any = False) -> jax.Array:
    """Return the transpose of `(I + diag(rows) upper)⁻¹` [C, C] of every chunk of C tokens, stored as [B, h, T, C] bfloat16.

    This is the inverse of the triangular system by which the delta rule computes all tokens of a chunk at once.

    Args:
        upper: [B, h, T, C] float32, each chunk's transposed products of keys with keys under their decay, 0 on and below the
            diagonal.
        rows: [B, h, T] float32, beta of each token.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, heads, length, _ = upper.shape

    def kernel(refs):
        b, h = row_and_head(heads)
        tokens = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)

        def body(right, buffer, *left):
            i = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=wg.LAYOUT)
            j = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=wg.LAYOUT)
            strict = wg.load_global(refs["upper"].at[b, h, tokens])
            strict *= wg.spread_rows(load_by_row(refs["rows"].at[b, h, tokens]), SQUARE)
            inverse = unit_inverse(
                strict, i ^ j, right, left, interpret, upper=True, method="blocks"
            )
            buffer.transpose((1, 0))[...] = inverse.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, refs["inverse"].at[b, h, tokens])
            plgpu.wait_smem_to_gmem(0)

        tile = plgpu.SMEM(SQUARE, dtype=_BF16, transforms=wg.TILED)
        pl.run_scoped(body, *[tile] * (4 if interpret else 2))

    return launch(
        kernel,
        inputs=dict(upper=upper, rows=rows),
        outputs=dict(inverse=jax.ShapeDtypeStruct(upper.shape, _BF16)),
        grid=dict(row=batch * heads, chunk=length // CHUNK),
        name="delta_solve_chunks",
        interpret=interpret,
    )["inverse"]
