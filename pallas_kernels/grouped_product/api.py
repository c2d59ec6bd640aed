"""Products in which each group of consecutive rows (such as the tokens of one expert) is multiplied by its
own matrix, the gradient of these matrices, and the same products joined with SwiGLU. JAX cannot differentiate these functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_product import gated, hopper

_BACKENDS = {"mosaic_gpu": hopper}


class Call(NamedTuple):
    """The arguments of a call of `grouped_product` by which the backend decides whether it supports the call:
    the rows x and the groups' matrices `kernels` (arrays, or their shapes and dtypes).
    """

    x: Any
    kernels: Any


def unsupported(x, kernels) -> str | None:
    """Return the first requirement that `grouped_product` of rows x with the matrices `kernels` (arrays, or
    their shapes and dtypes), or one of its gradients, does not meet, or None if the backend supports them.
    """
    return hopper.unsupported(Call(x, kernels))


def grouped_product(
    x: Float[Array, "N D"],
    kernels: Float[Array, "E D F"] | Float[Array, "E F D"],
    groups: Int[Array, " V"],
    count: Int[Array, " 1"],
    *parts: Int[Array, " V"],
    transposed: bool = False,
    scale: Float[Array, " 1"] | None = None,
    implementation: str = "mosaic_gpu",
    interpret: Any = None,
) -> Float[Array, "N F"]:
    """Multiply each block of rows of x by the matrix of the group to which it belongs; return the products,
    [N, F].

    Args:
        x: bfloat16 [N, D], the rows; N is a multiple of 128, or of 64 with `parts`, and at least 128; D is a
            multiple of 64.
        kernels: bfloat16 [E, D, F], the matrices of the E groups, or [E, F, D] where `transposed`; F is a
            multiple of 64.
        groups: int32 [N / 128], the group of each block of 128 rows; with `parts` [V], the group of each
            part.
        count: int32 [1]; the first `count` blocks (or parts) are computed.
        parts: two arrays int32 [V] that divide the rows into V parts, of one or two consecutive blocks of 64
            rows each: the index of each part's first block, and the index of its last block + 1.
        transposed: whether `kernels` contains the transposes [F, D] of the matrices.
        scale: float32 [1], multiplies the products; for x in float8_e4m3fn or float8_e5m2 and `kernels` in one of them, with `transposed`
            and D a multiple of 128. None is 1, for bfloat16.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the interpreter, see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [N, F], the products; the rows of blocks that are not computed are undefined.

    Raises:
        ValueError: `implementation` is not the name of a backend of `grouped_product`.
    """
    backend = _backend("grouped_product", implementation)
    options = dict(transposed=transposed, scale=scale, interpret=interpret)
    return backend.product(x, kernels, groups, count, *parts, **options)


def grouped_sums(
    x: Float[Array, "N D"],
    dy: Float[Array, "N F"],
    starts: Int[Array, " E"],
    blocks: Int[Array, " E"],
    *,
    implementation: str = "mosaic_gpu",
    interpret: Any = None,
) -> Float[Array, "E D F"]:
    """Return for each of E groups the sum over its rows of the outer products of x and dy, [E, D, F]: the
    gradient of its matrix.

    Args:
        x: bfloat16 [N, D], the rows that were multiplied; N is a multiple of 64, D of 128.
        dy: bfloat16 [N, F], the gradient of the products; F is a multiple of 64. In the rows after a group's
            last one up to the next multiple of 64, x or dy is 0.
        starts: int32 [E], each group's first row, a multiple of 64.
        blocks: int32 [E], the number of blocks of 64 rows of each group.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the interpreter, see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [E, D, F], the sums.

    Raises:
        ValueError: `implementation` is not the name of a backend of `grouped_sums`.
    """
    return _backend("grouped_sums", implementation).sums(x, dy, starts, blocks, interpret=interpret)


def gated_product(
    x: Float[Array, "N D"],
    kernels: Float[Array, "E D 2*F"],
    groups: Int[Array, " N/128"],
    count: Int[Array, " 1"],
    row_weight: Float[Array, " N"] | None = None,
    *,
    with_products: bool = True,
    scale: Float[Array, " 1"] | None = None,
    implementation: str = "mosaic_gpu",
    interpret: Any = None,
) -> tuple[Float[Array, ...] | None, ...]:
    """Multiply each block of rows of x by the gate matrix G and the up matrix U of its group, and return the inner values
    `w silu(x G) ⊙ x U` of SwiGLU (arXiv 2002.05202).

    Args:
        x: bfloat16 [N, D], the rows; N is a multiple of 128, D of 64.
        kernels: bfloat16 [E, D, 2 F], the matrices G and U of the E groups, side by side; F is a multiple of 128.
        groups: int32 [N / 128], the group of each block of 128 rows.
        count: int32 [1]; the first `count` blocks are computed.
        row_weight: float32 [N], the weight w of each row; None is 1.
        with_products: whether the products are returned.
        scale: float32 [1], multiplies the products of x and `kernels` in 8-bit floats, where `kernels` are [E, 2 F, D] and D is a multiple
            of 128; None is 1, for bfloat16.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the interpreter, see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [N, F], the inner values; and bfloat16 [N, 2 F], the products x G and x U, or None. With `scale` also float32
        [F / 128, N], the largest absolute inner values of each row in 128 columns. The rows of blocks that are not computed are undefined.

    Raises:
        ValueError: `implementation` is not the name of a backend.
    """
    _backend("gated_product", implementation)
    options = dict(with_products=with_products, scale=scale, interpret=interpret)
    return gated.gated_product(x, kernels, groups, count, row_weight, **options)


def gated_gradients(
    dy: Float[Array, "N D"],
    down: Float[Array, "E F D"],
    groups: Int[Array, " N/128"],
    count: Int[Array, " 1"],
    products: Float[Array, "N 2*F"],
    row_weight: Float[Array, " N"] | None = None,
    *,
    scale: Float[Array, " 1"] | None = None,
    implementation: str = "mosaic_gpu",
    interpret: Any = None,
) -> tuple[Float[Array, ...] | None, ...]:
    """Return the gradients of what `gated_product` computes, from the gradient dy of its inner values' product with the down
    matrix of each group.

    Args:
        dy: bfloat16 [N, D], the gradient of the output.
        down: bfloat16 [E, F, D], the down matrices of the E groups; D is a multiple of 64, F of 128.
        groups: int32 [N / 128], the group of each block of 128 rows.
        count: int32 [1]; the first `count` blocks are computed.
        products: bfloat16 [N, 2 F], the products that `gated_product` returned.
        row_weight: float32 [N], the weight of each row; None is 1.
        scale: float32 [1], multiplies the product of dy and `down` in 8-bit floats, where D is a multiple of 128; None is 1, for bfloat16.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the interpreter, see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [N, F], the inner values again; bfloat16 [N, 2 F], the gradient of the products; and float32 [F / 128, N],
        the gradient of `row_weight` in parts that are to be added, or None. With `scale` also float32 [F / 128, N], the largest
        absolute gradients of the products of each row in 128 columns of gate and up. The rows of blocks that are not computed are
        undefined.

    Raises:
        ValueError: `implementation` is not the name of a backend.
    """
    _backend("gated_gradients", implementation)
    options = dict(scale=scale, interpret=interpret)
    return gated.gated_gradients(dy, down, groups, count, products, row_weight, **options)


def _backend(op: str, implementation: str) -> Any:
    if implementation not in _BACKENDS:
        accepted = tuple(_BACKENDS)
        raise ValueError(f"{op}: implementation={implementation!r}; accepted are {accepted}")
    return _BACKENDS[implementation]
