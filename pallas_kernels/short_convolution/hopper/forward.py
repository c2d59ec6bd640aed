"""The forward kernel of short convolutions on Mosaic GPU (Hopper): the convolution of each channel over a
document's last W tokens, with SiLU and the normalisation of heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.launch import launch
from pallas_kernels.short_convolution.hopper import tilings
from pallas_kernels.short_convolution.hopper.block import (
    EPSILON,
    Block,
    Layout,
    convolve,
    sigmoid,
    struct_like,
)
from pallas_kernels.short_convolution.hopper.loads import Loads
from pallas_kernels.short_convolution.hopper.tilings import AHEAD

_F32 = jnp.float32


def forward(
    x, weight, bias, tail, order, run, *, head_dim: int | None, silu: bool, interpret: Any = False
) -> jax.Array:
    """Compute a short convolution of each document's tokens, with SiLU and normalised heads if asked, on a
    Hopper GPU; return the output, [B, T, D] bfloat16.

    Args:
        x: [B, T, D] bfloat16, the tokens, T a multiple of `MULTIPLE`.
        weight: [W, D], the convolution's weight.
        bias: [D], added to the convolution, or None.
        tail: [B, W - 1, D], the tokens before the first, oldest first.
        order: [B, T] int32, the index in x of each token in the order of processing, padding last; None is
            the order of x, with padding between documents only.
        run: [B, T] int32, the index of each token's document in the order of processing, -1 for padding; None
            is one document.
        head_dim: the number of channels of a head that is normalised, or None.
        silu: whether SiLU is applied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    tiling = tilings.tiling("forward", head_dim, order, run, bias)
    layout = Layout.of(x, weight, head_dim, order, tiling, ("x",))

    def compute(block, smem):
        loads = Loads(block, layout, smem)
        loads.begin()
        weights, bias = block.weights(), block.bias()

        def step(index, carry):
            ahead, before = carry
            loads.wait(index)
            for part in range(layout.step // AHEAD):
                four, ahead = loads.take(index, part, ahead)
                first = block.start + index * layout.step + part * AHEAD
                for i, ((raw,), seen) in enumerate(zip(four.rows, four.seen, strict=True)):
                    row, taps, _ = block.mask(raw.astype(_F32), before, seen)
                    y = convolve(weights, bias, [row, *taps])
                    if silu:
                        y = y * sigmoid(y)
                    if head_dim is not None:
                        y = y * lax.rsqrt(block.sum_heads(y * y) + EPSILON)
                    if seen is not None:
                        y = jnp.where(block.at_least(seen, 0), y, 0.0)
                    if order is None:
                        block.store(y, "y", part * AHEAD + i, block.start + index * layout.step)
                    else:
                        block.store(y, "y", block.position(first + i))
                    before = [row, *before[:-1]]
            loads.release(index)
            return ahead, before

        lax.fori_loop(0, loads.steps, step, (loads.first(), block.before()))

    def kernel(refs, smem=None):
        block = Block(refs, layout)
        block.run(lambda: compute(block, smem))

    inputs = layout.inputs(x, weight, bias, tail, order, run)
    outputs = dict(y=struct_like(inputs["x"]))
    name = "short_convolution_forward"
    results = launch(
        kernel, inputs=inputs, outputs=outputs, grid=layout.grid, name=name, interpret=interpret,
        scratch=layout.scratch(), auto_barriers=False, num_threads=layout.groups if layout.groups > 1 else None,
    )  # fmt: skip
    return results["y"].reshape(x.shape)
