"""The layers of mixers that remember the last tokens of a document from call to call: short convolutions and token
shifts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers.context import Context
from lsm_jax.mixers.layers import parameter
from lsm_jax.ops.convolution.backends import l2_normalize


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel with the few tokens before it in its document, followed by SiLU unless
    `silu=False`.

    `MixerState.tails[name]` contains its last inputs. Initial weights are uniform in ±1/sqrt(width), as is
    customary for depthwise convolutions. They have no weight decay.
    """

    def __init__(
        self,
        name: str,
        channels: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        axis: str,
        bias: bool = False,
        silu: bool = True,
    ):
        self.silu = silu
        self.name, self.channels, self.remembered = name, channels, width - 1
        bound = width**-0.5

        def draw(*shape):
            return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)

        self.weight = parameter(draw(width, channels), (None, axis), weight_decay=False)
        self.bias = parameter(draw(channels), (axis,), weight_decay=False) if bias else None

    def __call__(
        self, x: jax.Array, context: Context, head_dim: int | None = None
    ) -> tuple[jax.Array, Context]:
        """Convolve each channel of x [B, T, channels] over a token and the few tokens before it in its
        document; with `head_dim`, each `head_dim` channels of the result have unit length.

        Returns:
            The result in the shape and dtype of x, and the context with the new tail.
        """
        y, tail = ops.short_convolution(
            x,
            self.weight[...].astype(x.dtype),
            None if self.bias is None else self.bias[...].astype(x.dtype),
            silu=self.silu,
            head_dim=head_dim,
            initial_state=context.tails.get(self.name),
            segment_ids=context.segment_ids,
            update_mask=context.update_mask,
            contiguous=context.contiguous,
        )
        return y, context.add(tails={self.name: tail})


class Pointwise(nnx.Module):
    """The layer of `short_convolution` for width 1: SiLU and the normalisation of heads, without a
    convolution, parameters or a state.
    """

    def __init__(self, *, silu: bool):
        self.silu = silu

    def __call__(
        self, x: jax.Array, context: Context, head_dim: int | None = None
    ) -> tuple[jax.Array, Context]:
        """Return x [B, T, channels] after SiLU, if any, with heads of unit length if `head_dim` is given; and the context."""
        y = jax.nn.silu(x) if self.silu else x
        return (y if head_dim is None else l2_normalize(y, head_dim)), context


def short_convolution(
    name: str,
    channels: int,
    width: int,
    *,
    rngs: nnx.Rngs,
    axis: str,
    bias: bool = False,
    silu: bool = True,
) -> ShortConvolution | Pointwise:
    """Return a `ShortConvolution` of these arguments, or for width 1 a `Pointwise`, without parameters and without a state."""
    if width == 1:
        return Pointwise(silu=silu)
    return ShortConvolution(name, channels, width, rngs=rngs, axis=axis, bias=bias, silu=silu)


class TokenShift(nnx.Module):
    """Return the token before each token of a document (RWKV's time shift).

    `MixerState.tails[name]` contains the last token of the call before. With `in_finish=False` the shift is promised to be
    used in `read` and `write` only; Mixture-of-Memories then has no state for it along the row.
    """

    def __init__(self, name: str, channels: int, *, in_finish: bool = True):
        self.name, self.channels, self.remembered = name, channels, 1
        self.in_finish = in_finish

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return, for each token of x [B, T, channels], the token before it in its document, 0 before the first, and
        the context with the new tail.
        """
        y, tail = ops.token_shift(
            x,
            initial_state=context.tails.get(self.name),
            segment_ids=context.segment_ids,
            update_mask=context.update_mask,
            contiguous=context.contiguous,
        )
        return y, context.add(tails={self.name: tail})
