"""A short causal convolution with the SiLU and the normalisation of heads that follow it, by the Triton kernels in `bodies`, on NVIDIA
cards of compute capability 8.0 or more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.triton import launch

__all__ = ["MULTIPLE", "REQUIREMENTS", "backward", "forward", "unsupported"]

_F32 = jnp.float32
MULTIPLE = 1
"""The number of tokens must be a multiple of this."""
_DTYPES = ("bfloat16", "float16", "float32")
_HEADS = (32, 64, 128, 256)  # numbers of channels of a head that is normalised
_FORWARD, _BACKWARD = 2048, 1024  # entries of a program's tile
_REPEAT = 8  # tiles of a program of the backward kernel


def _columns(channels: int, head_dim: int | None) -> int | None:
    """Return the number of channels of a program's tile, or None if no number is possible."""
    if head_dim is not None:
        return head_dim if head_dim in _HEADS and channels % head_dim == 0 else None
    return next((size for size in (128, 64) if channels % size == 0), None)


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
        lambda c: _columns(c.x.shape[2], c.head_dim) is not None,
        lambda c: f"{c.x.shape[2]}" + ("" if c.head_dim is None else f" in heads of {c.head_dim}"),
    ),
    launch.INSTALLED,
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Triton kernels that a call of `short_convolution` does not meet, or None if they support it."""
    return first_unmet(REQUIREMENTS, call)


def _constants(x, weight, bias, run, head_dim: int | None, silu: bool, tile: int) -> dict[str, Any]:
    """Return the constants of a kernel whose programs compute tiles of `tile` entries."""
    columns = _columns(x.shape[2], head_dim)
    assert columns is not None
    return dict(
        D=x.shape[2],
        W=weight.shape[0],
        BT=tile // columns,
        BD=columns,
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
    batch, length, channels = x.shape
    constants = _constants(x, weight, bias, run, head_dim, silu, _FORWARD)
    blocks = -(-length // constants["BT"])
    return launch.call(
        bodies.convolution_forward,
        (x, weight, bias, tail, order, run, length),
        dict(y=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        programs=batch * blocks * (channels // constants["BD"]),
        warps=4,
        stages=1,
        **constants,
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
    constants = _constants(x, weight, bias, run, head_dim, silu, _BACKWARD)
    blocks = -(-(length + width - 1) // (constants["BT"] * _REPEAT))
    results = launch.call(
        bodies.convolution_backward,
        (x, weight, bias, tail, order, run, dy, length),
        dict(
            dx=jax.ShapeDtypeStruct(x.shape, x.dtype),
            d_weight=jax.ShapeDtypeStruct((batch, blocks, width + 1, channels), _F32),
            d_tail=jax.ShapeDtypeStruct(tail.shape, tail.dtype),
        ),
        programs=batch * blocks * (channels // constants["BD"]),
        warps=4,
        stages=1,
        REPEAT=_REPEAT,
        **constants,
    )
    rows = jnp.sum(results["d_weight"], axis=(0, 1))
    d_bias = None if bias is None else rows[width].astype(bias.dtype)
    return results["dx"], rows[:width].astype(weight.dtype), d_bias, results["d_tail"]
