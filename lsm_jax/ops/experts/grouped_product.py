"""Products of groups of rows, each group with its own matrix: by XLA and by fused kernels for Hopper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, check_implementation, register
from lsm_jax.ops.backends.select import select
from lsm_jax.ops.core.checks import matmul_precision
from lsm_jax.ops.core.platforms import compute_capabilities, mesh_platform
from pallas_kernels.requirements import Requirement, first_unmet

_ROWS, _BLOCK = 128, 64  # rows in a kernel's tile, and in a block of a segment
_MIN_SUMS = 32  # a kernel computes at least this many sums at a time: fewer segments are split


def grouped_product(
    x: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    multiple: int = 1,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Multiply each group of consecutive rows of x by the group's own matrix, accumulating in float32.

    Args:
        x: [N, D], the rows of group 0, followed by those of group 1, and so on.
        kernels: [E, D, F], in x's dtype.
        sizes: int32 [E], the number of rows of each group; may be 0.
        multiple: a number that divides N and all `sizes`; the kernel requires a multiple of 128
            (`row_multiple`).
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference. "xla" is
            `jax.lax.ragged_dot`, which multiplies every row with every matrix on NVIDIA.

    Returns:
        [N, F] in x's dtype. The values of rows after the last group, and their gradients, are undefined.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: `multiple` does not divide N, or the implementation is not accepted.
    """
    op = "grouped_product"
    check_implementation(op, implementation)
    check_multiple(op, x, multiple)
    arguments = dict(x=x, kernels=kernels, sizes=sizes)
    selection = select(Call(op, Options(multiple), arguments, implementation))
    if selection.only("xla"):  # differentiated by jax
        return _xla_product(x, kernels, sizes)
    with jax.named_scope(op):
        return _product(selection, x, kernels, sizes)


def check_multiple(op: str, x: jax.Array, multiple: int) -> None:
    """Raise ValueError unless `multiple` divides the number of rows of x."""
    if len(x) % multiple:
        raise ValueError(
            f"{op}: x has {len(x)} rows; accepted are multiples of multiple={multiple}"
        )


def supports_segments(x: jax.Array, kernels: jax.Array) -> bool:
    """Return whether a kernel may compute `segment_product`, the products of segments of rows with a matrix each; if
    not, multiplying all rows by every matrix is faster.
    """
    call = Call("segment_product", Options(), dict(x=x, kernels=kernels))
    return not select(call).only("xla")


def segment_product(x: jax.Array, kernels: jax.Array, ends: jax.Array) -> jax.Array:
    """Multiply segments of rows by one matrix each; for arrays for which `supports_segments` is True.

    Args:
        x: [N, D], the segments one after another; each consists of blocks of 64 rows.
        kernels: [E, D, F], in x's dtype; segment s is multiplied by matrix s modulo E.
        ends: int32 [S], the index of the first block after each segment, at most N / 64; S is a multiple of
            E.

    Returns:
        [N, F] in x's dtype.
    """
    selection = select(Call("segment_product", Options(), dict(x=x, kernels=kernels)))
    with jax.named_scope("segment_product"):
        return _product(selection, x, kernels, ends)


def row_multiple(x: jax.Array) -> int:
    """Return the number that should divide the number of rows in each group, and all widths, in products of
    grouped rows x [..., D] with matrices: 128 if a fused kernel may compute the products, else 1.
    """
    matrix = jax.ShapeDtypeStruct((1, x.shape[-1], _ROWS), x.dtype)
    call = Call("segment_product", Options(), dict(x=x, kernels=matrix))
    return 1 if first_unmet(_COMMON, call) else _ROWS


class Options(NamedTuple):
    """The options of the products of grouped rows that are constant when a program is compiled.

    Attributes:
        multiple: a number that divides the number of rows in each group.
    """

    multiple: int = _ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductBackend(Backend):
    """A backend of a product of grouped rows: functions for the output and for the gradients.

    Attributes:
        product: a function of the rows x, the groups' matrices `kernels` and the groups' sizes (or the
            segments' ends) that returns the output.
        gradients: a function of the same arguments and the output's gradient that returns the gradients of x
            and of `kernels`.
    """

    product: Callable[..., jax.Array]
    gradients: Callable[..., tuple[jax.Array, jax.Array]]
    run: Callable[[Call], jax.Array] = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "run", lambda call: self.product(**call.arguments))


def _in_bfloat16(call: Call) -> bool:
    return {call.arguments[n].dtype for n in ("x", "kernels")} == {jnp.dtype(jnp.bfloat16)}


def _matrix_shape(call: Call) -> tuple[int, int]:
    return call.arguments["kernels"].shape[1:]


def _for_hopper(call: Call) -> bool:
    """Return whether the program is compiled for NVIDIA Hopper cards, which the kernels of grouped products require.

    This is decided here, before the program is lowered, since the kernel requires padding. A program that
    is lowered for another machine without a mesh uses no kernel.
    """
    del call
    try:
        platform = mesh_platform() or jax.local_devices(backend="cuda") and "cuda"
    except RuntimeError:
        platform = None
    return platform == "cuda" and compute_capabilities() <= {"9.0"}


_COMMON = (
    Requirement(
        "x and kernels in bfloat16",
        _in_bfloat16,
        lambda call: " and ".join(str(call.arguments[n].dtype) for n in ("x", "kernels")),
    ),
    Requirement(
        f"matrices of multiples of {_ROWS} x {_BLOCK}",
        lambda call: _matrix_shape(call)[0] % _ROWS == _matrix_shape(call)[1] % _BLOCK == 0,
        lambda call: str(_matrix_shape(call)),
    ),
    *PALLAS,
    Requirement("NVIDIA Hopper", _for_hopper),
)

REQUIREMENTS = (
    *_COMMON,
    Requirement(
        f"at least one row, and groups of multiples of {_ROWS} rows",
        lambda call: call.options.multiple % _ROWS == 0 and len(call.arguments["x"]) > 0,
        lambda call: f"{len(call.arguments['x'])} rows and multiple={call.options.multiple}",
    ),
)
"""The requirements of the kernels for a call with the arguments x and `kernels`, and with `Options`."""


def _xla_product(x, kernels, sizes):
    return jax.lax.ragged_dot(x, kernels, sizes, precision=matmul_precision(x, kernels))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(selection, x, kernels, sizes):
    return selection.function(lambda backend: backend.product)(x, kernels, sizes)


def _forward(selection, x, kernels, sizes):
    return _product(selection, x, kernels, sizes), (x, kernels, sizes)


def _backward(selection, saved, dy):
    return *selection.function(lambda backend: backend.gradients)(*saved, dy), None


_product.defvjp(_forward, _backward)


def _xla_gradients(x, kernels, sizes, dy):
    return jax.vjp(lambda x, w: _xla_product(x, w, sizes), x, kernels)[1](dy)


def _kernel_gradients(x, kernels, sizes, dy):
    return kernel_product(dy, kernels, sizes, transposed=True), kernel_sums(x, dy, sizes)


def blocks_of_rows(rows: int, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the group of each block of 128 rows, int32 [rows / 128], and the number of blocks that belong to groups, int32
    [1], for groups of `sizes` rows, multiples of 128.
    """
    ends = jnp.cumsum(sizes // _ROWS)
    block = jnp.arange(rows // _ROWS)[:, None]
    groups = jnp.minimum(jnp.sum(block >= ends, axis=1, dtype=jnp.int32), len(sizes) - 1)
    return groups, ends[-1:]


# The functions below are jitted, so that a kernel is traced and lowered once for all layers that are not
# scanned.


@functools.partial(jax.jit, static_argnames="transposed")
def kernel_product(x, kernels, sizes, transposed=False):
    """Multiply each group of consecutive rows of x [N, D] by the group's own matrix in `kernels`, [E, D, F], or [E, F,
    D] if `transposed`: [N, F].
    """
    from pallas_kernels.grouped_product import hopper

    blocks = blocks_of_rows(len(x), sizes)
    return hopper.product(x, kernels, *blocks, transposed=transposed)


@jax.jit
def kernel_sums(x, dy, sizes):
    """Return the gradient of each group's matrix, [E, D, F]: the sum over the group's rows of the outer products of x
    [N, D] and dy [N, F].
    """
    from pallas_kernels.grouped_product import hopper

    return hopper.sums(x, dy, jnp.cumsum(sizes) - sizes, sizes // _BLOCK)


def _xla_segment_gradients(x, kernels, ends, dy):
    return jax.vjp(lambda x, w: _xla_segments(x, w, ends), x, kernels)[1](dy)


def _kernel_segment_gradients(x, kernels, ends, dy):
    dx = _kernel_segments(dy, kernels, ends, transposed=True)
    return dx, _kernel_segment_sums(x, kernels, ends, dy)


def _xla_segments(x, kernels, ends):
    blocks = x.reshape(-1, _BLOCK, x.shape[1])
    segment = jnp.sum(ends <= jnp.arange(len(blocks))[:, None], axis=1)
    matrices = kernels[segment % len(kernels)]
    return jnp.matmul(blocks, matrices, precision=matmul_precision(x, kernels)).reshape(len(x), -1)


@functools.partial(jax.jit, static_argnames="transposed")
def _kernel_segments(x, kernels, ends, transposed=False):
    """Return the products of segments of rows of x with a matrix for each, computed by the fused kernel in
    tiles of two blocks of 64 rows; a segment with an odd number of blocks ends with half a tile.
    """
    from pallas_kernels.grouped_product import hopper

    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tiles = -(-(ends - begins) // 2)  # of each segment
    tiles_end = jnp.cumsum(tiles)
    tile = jnp.arange((len(x) // _BLOCK + len(ends)) // 2)
    segment = jnp.sum(tiles_end <= tile[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, len(ends) - 1)
    first = begins[segment] + 2 * (tile - (tiles_end - tiles)[segment])
    end = jnp.minimum(first + 2, ends[segment])
    blocks = (block.astype(jnp.int32) for block in (first, end))
    groups = segment % len(kernels)
    return hopper.product(x, kernels, groups, tiles_end[-1:], *blocks, transposed=transposed)


@jax.jit
def _kernel_segment_sums(x, kernels, ends, dy):
    """Return the gradient of the matrices [E, D, F] with which segments of rows are multiplied. If there are
    few segments, the sum over each is computed in several parts at once, since some segments may be much
    longer than others.
    """
    from pallas_kernels.grouped_product import hopper

    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    parts = max(1, _MIN_SUMS // len(ends))
    size = -(-(ends - begins) // parts)[:, None]
    first = jnp.minimum(begins[:, None] + size * jnp.arange(parts, dtype=jnp.int32), ends[:, None])
    blocks = jnp.minimum(size, ends[:, None] - first)
    sums = hopper.sums(x, dy, (first * _BLOCK).reshape(-1), blocks.reshape(-1))
    sums = sums.reshape(-1, len(kernels), parts, *kernels.shape[1:]).astype(jnp.float32)
    return jnp.sum(sums, axis=(0, 2)).astype(kernels.dtype)


register(
    "grouped_product",
    ProductBackend(
        name="mosaic_gpu",
        product=kernel_product,
        gradients=_kernel_gradients,
        requirements=REQUIREMENTS,
        platforms=("cuda",),
    ),
    ProductBackend(name="xla", product=_xla_product, gradients=_xla_gradients),
)
register(
    "segment_product",
    ProductBackend(
        name="mosaic_gpu",
        product=_kernel_segments,
        gradients=_kernel_segment_gradients,
        requirements=(
            *_COMMON,
            Requirement(
                f"a multiple of {_BLOCK} rows, at least {_ROWS}",
                lambda call: (
                    len(call.arguments["x"]) % _BLOCK == 0 and len(call.arguments["x"]) >= _ROWS
                ),
                lambda call: str(len(call.arguments["x"])),
            ),
        ),
        platforms=("cuda",),
    ),
    ProductBackend(name="xla", product=_xla_segments, gradients=_xla_segment_gradients),
)
