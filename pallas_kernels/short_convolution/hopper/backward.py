"""The backward kernel of short convolutions on Mosaic GPU (Hopper).

With z the output of the convolution, s = silu(z) (or z) and y = s / sqrt(Σ s² + ε) over a head, the gradient
of s is `n (dy - s n² Σ dy s)` with `n = 1 / sqrt(Σ s² + ε)`. From dz, the gradient of z, the gradient of x_t
is `Σ_d weight[W - 1 - d] dz_{t+d}`: it is complete W - 1 tokens later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl
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


class _Pending(NamedTuple):
    """The values that the loop over a block's tokens in the backward kernel of short convolutions carries from token
    to token. A row is one token's tile (see `Block`).

    Attributes:
        before: the rows of x of the W - 1 tokens before the next one, the nearest first.
        gradients: the partial sums of the gradients of these rows of x.
        sums: the partial sums of the gradients of the weight's rows by distance, and then of the bias if
            there is one.
    """

    before: list[Any]
    gradients: list[Any]
    sums: list[Any]


class _Gradient(NamedTuple):
    """The gradients of a short convolution for one block of tokens and channels, computed by a warpgroup
    token by token.

    Attributes:
        block: the tokens and channels, with their loads and stores.
        weights: the rows of the weight, a tile each, by distance: the first multiplies the current
            token.
        bias: the bias as a tile, or None.
        silu: whether SiLU is applied.
        normalized: whether heads are normalised.
    """

    block: Block
    weights: list[Any]
    bias: Any
    silu: bool
    normalized: bool

    def token(self, rows, seen, pending: _Pending, inside: Any = None) -> tuple[Any, _Pending]:
        """Add what one token contributes to the gradients of x at this token and at the W - 1 tokens before
        it, and to those of weight and bias.

        Args:
            rows: the token's tiles of x and dy.
            seen: how many tokens before it the token sees, -1 for padding, or None where each row of the batch is one document.
            pending: the sums and values that are carried, before this token.
            inside: of a token after the block, whether it is in the row, and not after its end; its contributions to the
                gradients of weight and bias are those of another block. None for the block's own tokens.

        Returns:
            The gradient of x at the oldest of these tokens, which is complete, as a tile, and the carried
            sums and values after this token.
        """
        block = self.block
        raw, dy = (r.astype(_F32) for r in rows)
        row, taps, summed = block.mask(raw, pending.before, seen)
        taps = [row, *taps]
        y = convolve(self.weights, self.bias, taps)
        if inside is not None:
            dy = jnp.where(inside, dy, 0.0)
        if seen is not None:
            dy = jnp.where(block.at_least(seen, 0), dy, 0.0)
        gate: Any = sigmoid(y) if self.silu else None
        value = y * gate if self.silu else y
        if self.normalized:
            norm = lax.rsqrt(block.sum_heads(value * value) + EPSILON)
            dy = norm * (dy - value * (norm * norm * block.sum_heads(dy * value)))
        if self.silu:
            dy = dy * (gate + value * (1.0 - gate))
        sums = pending.sums
        if inside is None:
            factors = [*taps, 1.0][: len(sums)]
            sums = [s + dy * x for s, x in zip(sums, factors, strict=True)]
        gradients = [self.weights[0] * dy]
        for d, gradient in enumerate(pending.gradients, start=1):
            part = dy if seen is None else jnp.where(summed[d - 1], dy, 0.0)
            gradients.append(gradient + self.weights[d] * part)
        before = [row, *pending.before[:-1]]
        return gradients[-1], _Pending(before, gradients[:-1], sums)


def backward(
    x, weight, bias, tail, order, run, dy, *, head_dim: int | None, silu: bool, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:  # fmt: skip
    """Return the gradients of a short convolution's tokens x [B, T, D], weight [W, D], bias ([D], None
    without one) and tail [B, W - 1, D], the tokens before the first.

    Args:
        x: [B, T, D] bfloat16, the tokens, T a multiple of `MULTIPLE`.
        weight: [W, D], the convolution's weight.
        bias: [D], added to the convolution, or None.
        tail: [B, W - 1, D], the tokens before the first, oldest first.
        order: [B, T] int32, the index in x of each token in the order of processing, padding last; None is the order of x,
            with padding between documents only.
        run: [B, T] int32, the index of each token's document in the order of processing, -1 for padding; None is one document.
        dy: [B, T, D] bfloat16, the gradient of the output.
        head_dim: the number of channels of a head that is normalised, or None.
        silu: whether SiLU was applied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    tiling = tilings.tiling("backward", head_dim, order, run, bias)
    width = weight.shape[0]
    tiles = width + (bias is not None)
    layout = Layout.of(x, weight, head_dim, order, tiling, ("x", "dy"), tiles)

    def compute(block, smem):
        loads = Loads(block, layout, smem)
        loads.begin()
        weights, bias = block.weights(), block.bias()
        gradient = _Gradient(block, weights, bias, silu, head_dim is not None)
        zero = weights[0] * 0.0
        sums = [zero] * (width + (bias is not None))
        pending = _Pending(block.before(), [zero] * (width - 1), sums)

        def step(index, carry, begins=False):
            ahead, pending = carry
            loads.wait(index)
            for part in range(layout.step // AHEAD):
                four, ahead = loads.take(index, part, ahead)
                first = block.start + index * layout.step + part * AHEAD
                for i, (rows, seen) in enumerate(zip(four.rows, four.seen, strict=True)):
                    oldest, pending = gradient.token(rows, seen, pending)
                    if not begins or part or i >= width - 1:
                        block.store(oldest, "dx", block.position(first + i - (width - 1)))
                        continue

                    # The W - 1 tokens before this block: the block before it stores their gradients, of the first block's they are
                    # those of the tail.
                    @pl.when(block.block == 0)
                    def _(oldest=oldest, i=i):
                        block.store(oldest, "d_tail", i)

            loads.release(index)
            return ahead, pending

        carry = step(0, (loads.first(), pending), begins=True)
        ahead, pending = lax.fori_loop(1, loads.steps, step, carry)
        # The gradients of the last W - 1 tokens are complete after as many tokens of the next block.
        after = loads.after(width - 1, ahead)
        for i, (rows, seen) in enumerate(zip(after.rows, after.seen, strict=True)):
            token = block.start + layout.tokens + i
            oldest, pending = gradient.token(rows, seen, pending, token < block.length)
            block.store(oldest, "dx", block.position(token - (width - 1)))
        rows = pending.sums[width - 1 :: -1] + pending.sums[width:]
        block.store_sums(rows, "d_weight", smem)

    def kernel(refs, smem=None):
        block = Block(refs, layout)
        block.run(lambda: compute(block, smem))

    inputs = layout.inputs(x, weight, bias, tail, order, run, dy)
    sums = (*layout.blocks, tiles)
    outputs = dict(
        dx=struct_like(inputs["x"]),
        d_weight=jax.ShapeDtypeStruct((*sums, layout.total // layout.dim, layout.dim), _F32),
        d_tail=struct_like(inputs["tail"]),
    )
    name = "short_convolution_backward"
    results = launch(
        kernel, inputs=inputs, outputs=outputs, grid=layout.grid, name=name, interpret=interpret,
        scratch=layout.scratch(), auto_barriers=False, num_threads=layout.groups if layout.groups > 1 else None,
    )  # fmt: skip
    rows = jnp.sum(results["d_weight"], axis=(0, 1)).reshape(sums[2], -1)
    d_weight = rows[:width].astype(weight.dtype)
    d_bias = None if bias is None else rows[width].astype(bias.dtype)
    d_tails = results["d_tail"].reshape(layout.batch, -1, layout.total)
    dx, d_tail = layout.add_tails(results["dx"].reshape(x.shape), d_tails)
    return dx, d_weight, d_bias, d_tail
