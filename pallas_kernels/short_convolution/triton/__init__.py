"""A short causal convolution with the SiLU and the normalisation of heads that follow it, by the Triton kernels in `bodies`, on NVIDIA
cards of compute capability 8.0 or more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.triton import launch

__all__ = [
    "COMPUTES_IN_PLACE",
    "MULTIPLE",
    "REQUIREMENTS",
    "TILINGS",
    "Tiling",
    "backward",
    "forward",
    "unaccepted_tiling",
    "unsupported",
]

_F32 = jnp.float32
MULTIPLE = 1
"""The number of tokens must be a multiple of this."""
COMPUTES_IN_PLACE = False
"""Whether the kernels can compute documents in the order of x, if no padding is inside documents."""
_DTYPES = ("bfloat16", "float16", "float32")
_HEADS = (32, 64, 128, 256)  # numbers of channels of a head that is normalised


class Tiling(NamedTuple):
    """The size of the blocks that a program of one kernel computes, and how it is compiled.

    Attributes:
        tokens: number of tokens of a block, a multiple of `unroll`.
        channels: number of channels of a block; more if a head that is normalised has more, fewer if they do not divide those of the call.
        warps: number of warps of a program.
        unroll: number of tokens that are loaded together, before those that precede them are computed.
    """

    tokens: int
    channels: int
    warps: int
    unroll: int


TILINGS = {
    "convolution_forward": Tiling(64, 128, 1, 4),
    "convolution_backward": Tiling(64, 128, 1, 4),
    "normalised_backward": Tiling(64, 128, 1, 2),
}
"""The tilings, by kernel; "normalised_backward" is `convolution_backward` of normalised heads, whose tokens have more registers."""


def unaccepted_tiling(tokens: int, channels: int, warps: int, unroll: int) -> str | None:
    """Return what a tiling must be if the fields of one, as in `Tiling`, are not accepted, or None if they are."""
    if unroll < 1 or tokens < 1 or tokens % unroll:
        return f"accepted are tokens that are a multiple of unroll, not {tokens} and {unroll}"
    if any(n < 1 or n & (n - 1) for n in (channels, warps)):
        return f"accepted are powers of two as channels and warps, not {channels} and {warps}"
    return None


def _block_channels(channels: int, head_dim: int | None, most: int) -> int | None:
    """Return the number of channels of a block, or None if no number is possible: normalised heads, or 64 channels, doubled while they divide
    the channels of the call and are at most `most`.
    """
    size = 64 if head_dim is None else head_dim
    if channels % size or head_dim is not None and head_dim not in _HEADS:
        return None
    while 2 * size <= most and channels % (2 * size) == 0:
        size *= 2
    return size


REQUIREMENTS = (
    Requirement(
        f"x in {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}",
        lambda c: jnp.dtype(c.x.dtype).name in _DTYPES,
        lambda c: jnp.dtype(c.x.dtype).name,
    ),
    Requirement(
        "a weight of 2 to 4 rows",
        lambda c: 2 <= c.weight.shape[0] <= 4,
        lambda c: str(c.weight.shape[0]),
    ),
    Requirement(
        f"a multiple of 64 channels, or heads of {', '.join(map(str, _HEADS[:-1]))} or {_HEADS[-1]} that are normalised",
        lambda c: _block_channels(c.x.shape[2], c.head_dim, 0) is not None,
        lambda c: f"{c.x.shape[2]}" + ("" if c.head_dim is None else f" in heads of {c.head_dim}"),
    ),
    launch.INSTALLED,
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Triton kernels that a call of `short_convolution` does not meet, or None if they support it."""
    return first_unmet(REQUIREMENTS, call)


def _launch(name: str, x, weight, bias, run, head_dim: int | None, silu: bool, extra: int = 0) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Return the number of blocks of a row of x with `extra` tokens before it, and the keyword arguments of `launch.call` for a kernel."""
    (batch, length, channels), tiling = x.shape, TILINGS[name]
    size = _block_channels(channels, head_dim, tiling.channels)
    assert size is not None
    unroll = tiling.unroll
    if size > tiling.channels and unroll % 2 == 0:
        unroll //= 2  # a wide head has more registers for each token
    blocks = -(-(length + extra) // tiling.tokens)
    return blocks, dict(
        programs=batch * blocks * (channels // size),
        warps=max(1, tiling.warps * min(size, tiling.channels) // tiling.channels),
        stages=1,
        D=channels,
        W=weight.shape[0],
        BLOCK=tiling.tokens,
        HEADS=1 if head_dim is None else size // head_dim,
        DIM=size if head_dim is None else head_dim,
        UNROLL=unroll,
        BIAS=bias is not None,
        SILU=silu,
        NORMALIZE=head_dim is not None,
        DOCUMENTS=run is not None,
    )


def forward(
    x, weight, bias, tail, order, run, *, head_dim: int | None, silu: bool, interpret: Any = False
) -> jax.Array:
    """Compute a short convolution of each document's tokens, with SiLU and normalised heads if asked; return the output, [B, T, D] in x's
    dtype. `interpret` has no effect.

    Args:
        x: [B, T, D], the tokens.
        weight: [W, D], the convolution's weight.
        bias: [D], added to the convolution, or None.
        tail: [B, W - 1, D], the tokens before the first, oldest first.
        order: [B, T] int32, the index in x of each token in the order of processing, padding last; None is the order of x.
        run: [B, T] int32, the index of each token's document in the order of processing, -1 for padding; None is one document.
        head_dim: the number of channels of a head that is normalised, or None.
        silu: whether SiLU is applied.
        interpret: not used.
    """
    from pallas_kernels.short_convolution.triton import bodies

    del interpret
    _, options = _launch("convolution_forward", x, weight, bias, run, head_dim, silu)
    return launch.call(
        bodies.convolution_forward,
        (x, weight, bias, tail, order, run, x.shape[1]),
        dict(y=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        **options,
    )["y"]


def backward(
    x, weight, bias, tail, order, run, dy, *, head_dim: int | None, silu: bool, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:  # fmt: skip
    """Return the gradients of a short convolution's tokens x [B, T, D], weight [W, D], bias ([D], None without one) and tail [B, W - 1, D], the
    tokens before the first. The arguments are those of `forward`, and dy [B, T, D], the gradient of the output.
    """
    from pallas_kernels.short_convolution.triton import bodies

    del interpret
    (batch, length, channels), width = x.shape, weight.shape[0]
    kernel = "convolution_backward" if head_dim is None else "normalised_backward"
    blocks, options = _launch(kernel, x, weight, bias, run, head_dim, silu, extra=width - 1)
    results = launch.call(
        bodies.convolution_backward,
        (x, weight, bias, tail, order, run, dy, length),
        dict(
            dx=jax.ShapeDtypeStruct(x.shape, x.dtype),
            d_weight=jax.ShapeDtypeStruct((batch, blocks, width + 1, channels), _F32),
            d_tail=jax.ShapeDtypeStruct(tail.shape, tail.dtype),
        ),
        **options,
    )
    rows = jnp.sum(results["d_weight"], axis=(0, 1))
    d_bias = None if bias is None else rows[width].astype(bias.dtype)
    return results["dx"], rows[:width].astype(weight.dtype), d_bias, results["d_tail"]
