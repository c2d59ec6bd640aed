"""The gradient of a residual stream x from which both the stream's next value and layers that read `scale ⊙ x / sqrt(mean(x²) + eps)`
continue, by a fused kernel that reads and writes every array once; and the sum that x is, with its norm, by another.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.residual_norm import forward, hopper


def unsupported(x, d_norms) -> str | None:
    """Return the first requirement that a call of `residual_norm_gradients` with these arrays (or their shapes and dtypes) does not
    meet, or None if the kernel supports it.
    """
    return hopper.unsupported(hopper.Call(x, tuple(d_norms)))


def residual_norm_gradients(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    d_stream: Float[Array, "B T D"] | None,
    d_norms: tuple[Float[Array, "B T D"], ...],
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Float[Array, " D"]]:
    """Return the gradients of x and scale.

    With the norm n = x r, r = 1 / sqrt(mean(x²) + eps), the sum g of `d_norms` and dn = g ⊙ scale, that of x is
    `d_stream + r (dn - n mean(dn ⊙ n))`, and that of scale the sum of `g ⊙ n` over all tokens. All is computed in float32.

    Args:
        x: [B, T, D], the residual stream; `hopper.REQUIREMENTS` lists what the kernel requires.
        scale: [D], of the norm.
        d_stream: [B, T, D], the gradient of x without that of its norms; None is zero.
        d_norms: the gradients of the norms, each [B, T, D]: one for each product that reads it, which are not added before.
        eps: added to the mean square.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
    """
    if (requirement := unsupported(x, d_norms)) is not None:
        raise NotImplementedError(f"residual_norm_gradients: the kernel requires {requirement}")
    return hopper.gradients(eps, interpret, x, scale, d_stream, d_norms)


def unsupported_forward(x, y) -> str | None:
    """Return the first requirement that a call of `residual_norm_forward` with these arrays (or their shapes and dtypes) does not meet, or
    None if the kernel supports it.
    """
    return forward.unsupported(forward.Call(x, y))


def residual_norm_forward(
    x: Float[Array, "B T D"],
    y: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Float[Array, "B T"]]:
    """Return the sum s = x + y of a residual stream x and what a layer adds, its norm `scale ⊙ s r`, and r = 1 / sqrt(mean(s²) + eps). It
    has no derivative.

    The sum is rounded to x's dtype before it is normalised; the norm is computed in float32 and rounded once.

    Args:
        x: [B, T, D], the residual stream; `forward.REQUIREMENTS` lists what the kernel requires.
        y: [B, T, D], what is added.
        scale: [D], of the norm.
        eps: added to the mean square.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Returns:
        The sum and its norm, [B, T, D] in x's dtype, and r, [B, T] in float32.

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
    """
    if (requirement := unsupported_forward(x, y)) is not None:
        raise NotImplementedError(f"residual_norm_forward: the kernel requires {requirement}")
    return forward.forward(eps, interpret, x, y, scale)
