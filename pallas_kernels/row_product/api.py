"""Products of a few tokens with one matrix by a kernel that reads the matrix once: `f(x) W (+ r)`, with f a norm, a gated norm of
heads, or nothing, and perhaps a gate behind it.

XLA computes a root-mean-square norm of one token by two kernels and the product by another, whose time is that of their launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.row_product import hopper


class Norm(NamedTuple):
    """The product's tokens are `scale ⊙ x / sqrt(mean(x²) + eps)`, in x's dtype.

    Attributes:
        scale: [I].
        eps: added to the mean square.
    """

    scale: Float[Array, " I"]
    eps: float


class GatedNorm(NamedTuple):
    """The product's tokens are the heads of x normalised each, times silu(gate), in x's dtype.

    Attributes:
        gate: [B, I], before its activation.
        scale: [V], that of each head's norm.
        eps: added to the mean square of a head.
    """

    gate: Float[Array, "B I"]
    scale: Float[Array, " V"]
    eps: float


class Call(NamedTuple):
    """A call of `row_product`, as its requirements see it: its arrays (or their shapes and dtypes), the widths of the parts of
    the matrix, and the number of channels of a head.
    """

    x: Any
    matrix: Any
    widths: tuple[int, ...]
    head: int


def _call(x, matrix, first, widths) -> Call:
    head = first.scale.shape[0] if isinstance(first, GatedNorm) else x.shape[1]
    return Call(x, matrix, tuple(widths) or (matrix.shape[0],), head)


def unsupported(
    x, matrix, first: Norm | GatedNorm | None = None, widths: tuple[int, ...] = ()
) -> str | None:
    """Return the first requirement that a call of `row_product` with these arrays (or their shapes and dtypes) does not meet, or None if the
    kernel supports it.
    """
    return hopper.unsupported(_call(x, matrix, first, widths))


def row_product(
    x: Float[Array, "B I"],
    matrix: Float[Array, "F I"],
    first: Norm | GatedNorm | None = None,
    *,
    added: Float[Array, "B F"] | None = None,
    widths: tuple[int, ...] = (),
    swiglu: bool = False,
    dtype: DTypeLike | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B _"], ...]:
    """Return the product of tokens with a matrix, in parts. It has no derivative.

    What stands in front of the product is computed in float32 and rounded to x's dtype; sums of products are float32.

    Args:
        x: [B, I], one token of each of a few rows; `hopper.REQUIREMENTS` lists what the kernel requires.
        matrix: [F, I], the matrix with the weights of each result side by side, the transpose of a dense layer's kernel.
        first: what is computed of x in front of the product; None is x itself.
        added: [B, F], in x's dtype, added to the product after it is rounded to this dtype; None adds nothing.
        widths: the number of results of each part; empty for one part.
        swiglu: whether the product is a gate followed by as many values, both rounded to x's dtype, and the result silu(gate) ⊙ values;
            with one part and without `added`.
        dtype: of the results; None is x's.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Returns:
        For each part an array [B, its width].

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
        ValueError: `added` or `swiglu` is given with several parts or together, or the widths do not add up to F.
    """
    widths = tuple(widths) or (matrix.shape[0],)
    if (
        sum(widths) != matrix.shape[0]
        or (len(widths) > 1 and (swiglu or added is not None))
        or (swiglu and added is not None)
    ):
        raise ValueError(
            f"row_product: widths={widths}; accepted are widths whose sum is {matrix.shape[0]}, and one width with either `added` or `swiglu`"
        )
    if swiglu:
        widths = (matrix.shape[0] // 2,) * 2
    if (requirement := unsupported(x, matrix, first, widths)) is not None:
        raise NotImplementedError(f"row_product: the kernel requires {requirement}")
    arrays: dict[str, jax.Array] = {}
    if first is not None:
        arrays = {n: a for n, a in first._asdict().items() if n != "eps"}
    eps = getattr(first, "eps", 0.0)
    kind = type(first).__name__ if first is not None else ""
    return hopper.products(
        kind, eps, interpret, x, matrix, arrays, added, widths, swiglu, jnp.dtype(dtype or x.dtype)
    )  # fmt: skip
