"""The gradient of a scalar log decay from inner products, on Mosaic GPU (Hopper), in one kernel: for rows so short that launches cost more than
sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.decay_sums import HEADS

_GROUPS = 4  # warpgroups of a thread block, each with HEADS / 4 heads
_F32 = jnp.float32


def decay_gradient(
    q_dots: jax.Array, k_dots: jax.Array, products: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """Return the gradient of the scalar log decay [B, T, G] of rows with one document and one memory, whose last memories have a gradient of 0.

    An interval is a few chunks. The gradient is the sum of `q_dots - k_dots` from each token to the end of its interval, plus the inner
    product of the memory with its gradient there.

    Args:
        q_dots: [B, G, S, T], each token's inner product of its query with the query's gradient, as S terms; G is a multiple of `HEADS`.
        k_dots: [B, G, S, T], the same of keys.
        products: [B, G, S, intervals, D], the inner product of the memory with its gradient before each interval, as S * D terms, D a
            multiple of 64.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, heads, terms, length = q_dots.shape
    intervals, depth = products.shape[3:]
    count = length // CHUNK
    size = count // intervals  # chunks of an interval
    square, columns = (CHUNK, CHUNK), wg.LAYOUT.reduce(0)

    def kernel(refs, smem):
        b, n, first = (lax.axis_index(x) for x in ("row", "chunk", "heads"))
        group, first = lax.axis_index("group"), first * HEADS
        interval = lax.div(n, size)

        def dots(h, chunk):
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            found = [
                wg.load_global(refs[x].at[b, h, s, tokens], columns)
                for s in range(terms)
                for x in ("q_dots", "k_dots")
            ]
            return sum(found[::2]) - sum(found[1::2])

        def gradient(h):
            own, rest = dots(h, n), jnp.zeros((), _F32)
            for later in range(1, size):
                inside = lax.div(n + later, size) == interval
                rest += jnp.where(inside, dots(h, jnp.minimum(n + later, count - 1)), 0.0)
            following = jnp.minimum(interval + 1, intervals - 1)
            for s in range(terms):
                for part in range(0, depth, CHUNK):
                    source = refs["products"].at[b, h, s, following, pl.ds(part, CHUNK)]
                    terms_at_end = wg.load_global(source, columns)
                    rest += jnp.where(interval + 1 < intervals, terms_at_end, 0.0)
            i, j = (plgpu.broadcasted_iota(jnp.int32, square, x, layout=wg.LAYOUT) for x in (0, 1))
            tile = jnp.where(j >= i, wg.spread_columns(own, square), 0.0)
            return jnp.sum(tile + wg.spread_columns(rest, square), axis=1)

        for x in range(HEADS // _GROUPS):
            h = group * (HEADS // _GROUPS) + x
            smem["sums"].at[h][...] = gradient(first + h)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["ready"])
        plgpu.barrier_wait(smem["ready"])

        def store():
            shape = CHUNK, HEADS
            h = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=wg.LAYOUT)
            tile = plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)
            for x in range(HEADS):
                of_head = wg.spread_rows(wg.load_rows(smem["sums"].at[x]), shape)
                tile = jnp.where(h == x, of_head, tile)
            refs["out"].at[b, pl.ds(n * CHUNK, CHUNK), pl.ds(first, HEADS)][...] = tile

        pl.when(group == 0)(store)

    return launch(
        kernel,
        inputs=dict(q_dots=q_dots, k_dots=k_dots, products=products),
        outputs=dict(out=jax.ShapeDtypeStruct((batch, length, heads), _F32)),
        grid=dict(row=batch, chunk=count, heads=heads // HEADS),
        num_threads=_GROUPS,
        scratch=dict(
            sums=plgpu.SMEM((HEADS, CHUNK), _F32), ready=plgpu.Barrier(num_arrivals=_GROUPS)
        ),
        reduction_scratch_bytes=0,
        name="linear_attention_decay_gradient",
        interpret=interpret,
    )["out"]
