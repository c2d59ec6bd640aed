"""Products of groups of rows with one matrix each, and the gradient of the matrices. Neither is
differentiable.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_product import hopper

_BACKENDS = {"mosaic_gpu": hopper}


class Call(NamedTuple):
    """The arguments on which the requirements depend: arrays, or their shapes and dtypes; as in
    `grouped_product`.
    """

    x: Any
    kernels: Any


def unsupported(x, kernels) -> str | None:
    """Return the first requirement that a product and its gradients with these arrays (or their shapes) do
    not meet, or None.
    """
    return hopper.unsupported(Call(x, kernels))


def grouped_product(
    x: Float[Array, "N D"],
    kernels: Float[Array, "E D F"] | Float[Array, "E F D"],
    groups: Int[Array, " V"],
    count: Int[Array, " 1"],
    *parts: Int[Array, " V"],
    transposed: bool = False,
    implementation: str = "mosaic_gpu",
    interpret: Any = None,
) -> Float[Array, "N F"]:
    """Multiply each block of rows by the matrix of its group.

    Args:
        x: bfloat16 [N, D]; N is a multiple of 128, or of 64 with `parts`, and at least 128; D is a multiple
            of 64.
        kernels: bfloat16 [E, D, F], or [E, F, D] where `transposed`; F is a multiple of 64.
        groups: int32 [N / 128], the group of each block of 128 rows; with `parts` [V], the group of each
            part.
        count: int32 [1]; the first `count` blocks (or parts) are computed.
        parts: two arrays int32 [V], the indices of the first and of the last + 1 block of 64 rows of each
            part; a part has one or two blocks.
        transposed: whether the matrices are transposed.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the interpreter, see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [N, F]; the rows of blocks that are not computed are undefined.

    Raises:
        ValueError: `implementation` is not known.
    """
    backend = _backend("grouped_product", implementation)
    return backend.product(
        x, kernels, groups, count, *parts, transposed=transposed, interpret=interpret
    )


def grouped_sums(
    x: Float[Array, "N D"],
    dy: Float[Array, "N F"],
    starts: Int[Array, " E"],
    blocks: Int[Array, " E"],
    *,
    implementation: str = "mosaic_gpu",
    interpret: Any = None,
) -> Float[Array, "E D F"]:
    """Return each group's sum over its rows of the outer products of x and dy: the gradient of its matrix.

    Args:
        x: bfloat16 [N, D]; N is a multiple of 64, D of 128.
        dy: bfloat16 [N, F]; F is a multiple of 64. In the rows after a group's last one up to the next
            multiple of 64, x or dy is 0.
        starts: int32 [E], each group's first row, a multiple of 64.
        blocks: int32 [E], the number of blocks of 64 rows of each group.
        implementation: "mosaic_gpu" (Hopper).
        interpret: parameters of the interpreter, see `compat.gpu_interpreter`.

    Returns:
        bfloat16 [E, D, F].

    Raises:
        ValueError: `implementation` is not known.
    """
    return _backend("grouped_sums", implementation).sums(x, dy, starts, blocks, interpret=interpret)


def _backend(op: str, implementation: str) -> Any:
    if implementation not in _BACKENDS:
        accepted = tuple(_BACKENDS)
        raise ValueError(f"{op}: implementation={implementation!r}; accepted are {accepted}")
    return _BACKENDS[implementation]
