"""Sums of a scalar log decay over the tokens of a chunk, on Mosaic GPU (Hopper): products with triangular matrices of ones.

XLA's masked sums add up 64 numbers for each token and side, in a reduction across the threads of a warp. Here a number is the sum of three
that bfloat16 represents exactly, so that tensor cores add them in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK

ROWS = 64
"""Chunks of a thread block; the number of chunks must be a multiple of it."""
_TERMS = 3
_F32, _BF16 = jnp.float32, jnp.bfloat16


def decay_sums(x: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """Return, for each token, the sum of x up to it, and the exponential of the sum after it, of its chunk. A chunk with a NaN has NaN at all
    of its tokens.

    Args:
        x: [R, 64] float32, the log decays of R chunks, R a multiple of 64.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        Two arrays [R, 64] float32.
    """
    square = (ROWS, CHUNK)
    tiles = lambda *shape: plgpu.SMEM(shape, dtype=_BF16, transforms=wg.TILED)  # noqa: E731
    smem = dict(ones=tiles(CHUNK, 2 * CHUNK), left=tiles(_TERMS, *square) if interpret else None)

    def kernel(refs):
        def body(buffers):
            rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
            rest = wg.load_global(refs["x"].at[rows])
            # Column i of the first matrix has ones in the rows j <= i, of the second one in the rows j > i.
            j, i = (
                plgpu.broadcasted_iota(jnp.int32, square, axis, layout=wg.LAYOUT) for axis in (0, 1)
            )
            for side, ones in enumerate((j <= i, j > i)):
                half = buffers["ones"].at[:, pl.ds(side * CHUNK, CHUNK)]
                half[...] = jnp.where(ones, 1.0, 0.0).astype(_BF16)
            plgpu.commit_smem()
            terms = []
            for n in range(_TERMS):
                term = rest.astype(_BF16)
                rest = rest - term.astype(_F32)
                left = buffers["left"].at[n] if interpret else None
                terms.append(wg.as_left(term, left, interpret))

            def products(sums):
                for term in terms:
                    plgpu.wgmma(sums, term, buffers["ones"])

            (sums,) = wg.products_from_zero(products, (ROWS, 2 * CHUNK))
            refs["cum"].at[rows][...] = sums[:, :CHUNK]
            refs["after"].at[rows][...] = jnp.exp(sums[:, CHUNK:])

        with_smem(body, smem)

    shape = jax.ShapeDtypeStruct(x.shape, _F32)
    results = launch(
        kernel,
        inputs=dict(x=x),
        outputs=dict(cum=shape, after=shape),
        grid=dict(tile=x.shape[0] // ROWS),
        num_threads=1,
        name="linear_attention_decay_sums",
        interpret=interpret,
    )
    return results["cum"], results["after"]
