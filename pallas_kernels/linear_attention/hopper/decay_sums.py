"""Sums of a scalar log decay over the tokens of a chunk, on Mosaic GPU (Hopper): products with triangular matrices of ones, in a kernel of
their own, or masked sums of one chunk, in a kernel that reads the decays.

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

HEADS = 8
"""Consecutive heads whose log decays `load_log_decays` loads together: 32 bytes of each token, the least that memory delivers."""
LEAST = -128.0
"""The least log decay that is added: e^-104 is 0 in float32, and larger sums would cost the others their precision."""
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


def load_log_decays(log_decay, b, tokens, h):
    """Load the log decays of a chunk and of the `HEADS` heads of which head h is one into registers, [64, 8].

    Args:
        log_decay: reference to [B, T, G] float32 in global memory, G a multiple of `HEADS`.
        b: index of the row.
        tokens: slice of the chunk's tokens.
        h: index of the head.
    """
    return wg.load_global(log_decay.at[b, tokens, pl.ds(lax.div(h, HEADS) * HEADS, HEADS)])


def sums_of_chunk(tile, h, buffer):
    """Return, for each token of a chunk, the sum of head h's log decays up to it, and the exponential of the sum after it: two vectors [64]
    in registers, one value for each row of a tile.

    Args:
        tile: what `load_log_decays` has loaded.
        h: index of the head.
        buffer: [64] float32 in shared memory, which only this warpgroup uses.
    """
    of_head = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1, layout=wg.LAYOUT) == lax.rem(
        h, HEADS
    )
    decays = jnp.sum(jnp.where(of_head, jnp.maximum(tile, LEAST), 0.0), axis=1)
    buffer[...] = decays
    plgpu.commit_smem()
    square = (CHUNK, CHUNK)
    decays = wg.spread_columns(plgpu.load(buffer, layout=wg.LAYOUT.reduce(0)), square)
    i, j = (plgpu.broadcasted_iota(jnp.int32, square, axis, layout=wg.LAYOUT) for axis in (0, 1))
    cum, after = (jnp.sum(jnp.where(added, decays, 0.0), axis=1) for added in (j <= i, j > i))
    return cum, jnp.exp(after)
