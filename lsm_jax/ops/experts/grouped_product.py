"""Products of groups of rows with one matrix each: jax's own on CPU and TPU, and fused kernels on Hopper."""

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

_ROWS, _STEP = 128, 64
_PIECES = 32  # parts that segments are cut to for their sums, where there are fewer segments


def grouped_product(
    x: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    multiple: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """Each group of rows times its own matrix, accumulated in float32.

    Args:
        x: [N, D], the rows of group 0 first, then those of group 1, and so on.
        kernels: [E, D, F], in x's dtype.
        sizes: int32 [E], rows of each group; 0 is accepted.
        multiple: what all `sizes`, and N, are multiples of; kernels serve multiples of 128 (`row_multiple`).
        implementation: None, "xla" (`jax.lax.ragged_dot`, which multiplies every row with every matrix on NVIDIA) or
            "mosaic_gpu" (on Hopper, in bfloat16).

    Returns:
        [N, F] in x's dtype; rows beyond the last group hold anything, and their gradient may be anything.

    Raises:
        NotImplementedError: a kernel asked for by name that does not serve these arrays.
    """
    op = "grouped_product"
    check_implementation(op, implementation)
    if len(x) % multiple:
        raise ValueError(
            f"{op}: x has {len(x)} rows; accepted are multiples of multiple={multiple}"
        )
    arguments = dict(x=x, kernels=kernels, sizes=sizes)
    selection = select(Call(op, _Options(multiple), arguments, implementation))
    if selection.only("xla"):  # which differentiates it
        return _xla_product(x, kernels, sizes)
    return _product(selection, x, kernels, sizes)


def supports_segments(x: jax.Array, kernels: jax.Array) -> bool:
    """Whether a kernel may compute `segment_product`; without one, products of all rows with every matrix are faster."""
    call = Call("segment_product", _Options(), dict(x=x, kernels=kernels))
    return not select(call).only("xla")


def segment_product(x: jax.Array, kernels: jax.Array, ends: jax.Array) -> jax.Array:
    """Segments of rows times a matrix each, in turn; for arrays that `supports_segments` accepts.

    Args:
        x: [N, D], segments of whole blocks of 64 rows one after another.
        kernels: [E, D, F], in x's dtype; segment s takes number s modulo E.
        ends: int32 [S], the block before which each segment ends, up to N / 64; S is a multiple of E.

    Returns:
        [N, F] in x's dtype.
    """
    arguments = dict(x=x, kernels=kernels)
    return _product(select(Call("segment_product", _Options(), arguments)), x, kernels, ends)


def row_multiple(x: jax.Array) -> int:
    """The number that `multiple`, and all other widths, should be multiples of in products with x [..., D].

    128 if a kernel may compute them, else 1.
    """
    matrix = jax.ShapeDtypeStruct((1, x.shape[-1], _ROWS), x.dtype)
    call = Call("segment_product", _Options(), dict(x=x, kernels=matrix))
    return 1 if first_unmet(_REQUIREMENTS, call) else _ROWS


class _Options(NamedTuple):
    """Static options of both products. Attributes: multiple: as `grouped_product`'s argument."""

    multiple: int = _ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductBackend(Backend):
    """A backend of a product.

    Attributes:
        product: (x, kernels, sizes or ends) -> the output.
        gradients: (x, kernels, sizes or ends, the output's gradient) -> gradients of x and kernels.
    """

    product: Callable[..., jax.Array]
    gradients: Callable[..., tuple[jax.Array, jax.Array]]
    run: Callable[[Call], jax.Array] = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "run", lambda call: self.product(**call.arguments))


def _bfloat16(call: Call) -> bool:
    return {call.arguments[n].dtype for n in ("x", "kernels")} == {jnp.dtype(jnp.bfloat16)}


def _matrix(call: Call) -> tuple[int, int]:
    return call.arguments["kernels"].shape[1:]


def _for_hopper(call: Call) -> bool:
    """Whether the program is for a card of NVIDIA Hopper.

    Without a card rows would be padded for nothing: a program that is lowered without a mesh for another machine uses no kernel.
    """
    del call
    try:
        platform = mesh_platform() or jax.local_devices(backend="cuda") and "cuda"
    except RuntimeError:
        platform = None
    return platform == "cuda" and compute_capabilities() <= {"9.0"}


_REQUIREMENTS = (
    Requirement(
        "x and kernels in bfloat16",
        _bfloat16,
        lambda call: " and ".join(str(call.arguments[n].dtype) for n in ("x", "kernels")),
    ),
    Requirement(
        f"matrices of multiples of {_ROWS} x {_STEP}",
        lambda call: _matrix(call)[0] % _ROWS == _matrix(call)[1] % _STEP == 0,
        lambda call: str(_matrix(call)),
    ),
    *PALLAS,
    Requirement("NVIDIA Hopper", _for_hopper),
)


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
    return _kernel_product(dy, kernels, sizes, transposed=True), _kernel_sums(x, dy, sizes)


# Jitted, so that layers which are not scanned trace and lower a kernel once.


@functools.partial(jax.jit, static_argnames="transposed")
def _kernel_product(x, kernels, sizes, transposed=False):
    """x [N, D] times kernels [E, D, F], or [E, F, D] where `transposed`."""
    from pallas_kernels.grouped_product import hopper

    ends = jnp.cumsum(sizes // _ROWS)
    block = jnp.arange(len(x) // _ROWS)[:, None]
    groups = jnp.minimum(jnp.sum(block >= ends, axis=1, dtype=jnp.int32), len(sizes) - 1)
    return hopper.product(x, kernels, groups, ends[-1:], transposed=transposed)


@jax.jit
def _kernel_sums(x, dy, sizes):
    """The sum over each group's rows of x [N, D] times dy [N, F]: [E, D, F]."""
    from pallas_kernels.grouped_product import hopper

    return hopper.sums(x, dy, jnp.cumsum(sizes) - sizes, sizes // _STEP)


def _xla_segment_gradients(x, kernels, ends, dy):
    return jax.vjp(lambda x, w: _xla_segments(x, w, ends), x, kernels)[1](dy)


def _kernel_segment_gradients(x, kernels, ends, dy):
    of_x = _kernel_segments(dy, kernels, ends, transposed=True)
    return of_x, _kernel_segment_sums(x, kernels, ends, dy)


def _xla_segments(x, kernels, ends):
    blocks = x.reshape(-1, _STEP, x.shape[1])
    segment = jnp.sum(ends <= jnp.arange(len(blocks))[:, None], axis=1)
    own = kernels[segment % len(kernels)]
    return jnp.matmul(blocks, own, precision=matmul_precision(x, kernels)).reshape(len(x), -1)


@functools.partial(jax.jit, static_argnames="transposed")
def _kernel_segments(x, kernels, ends, transposed=False):
    """Two blocks of 64 rows at a time; a segment of an odd number ends with one."""
    from pallas_kernels.grouped_product import hopper

    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    visits = -(-(ends - begins) // 2)
    after = jnp.cumsum(visits)
    visit = jnp.arange((len(x) // _STEP + len(ends)) // 2)
    segment = jnp.sum(after <= visit[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, len(ends) - 1)
    first = begins[segment] + 2 * (visit - (after - visits)[segment])
    last = jnp.minimum(first + 2, ends[segment])
    parts = (part.astype(jnp.int32) for part in (first, last))
    groups = segment % len(kernels)
    return hopper.product(x, kernels, groups, after[-1:], *parts, transposed=transposed)


@jax.jit
def _kernel_segment_sums(x, kernels, ends, dy):
    """Few segments in pieces, since some may be much longer than others."""
    from pallas_kernels.grouped_product import hopper

    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    pieces = max(1, _PIECES // len(ends))
    size = -(-(ends - begins) // pieces)[:, None]
    first = jnp.minimum(begins[:, None] + size * jnp.arange(pieces, dtype=jnp.int32), ends[:, None])
    blocks = jnp.minimum(size, ends[:, None] - first)
    found = hopper.sums(x, dy, (first * _STEP).reshape(-1), blocks.reshape(-1))
    found = found.reshape(-1, len(kernels), pieces, *kernels.shape[1:]).astype(jnp.float32)
    return jnp.sum(found, axis=(0, 2)).astype(kernels.dtype)


register(
    "grouped_product",
    ProductBackend(
        name="mosaic_gpu",
        product=_kernel_product,
        gradients=_kernel_gradients,
        requirements=(
            *_REQUIREMENTS,
            Requirement(
                f"rows, and groups of multiples of {_ROWS}",
                lambda call: call.options.multiple % _ROWS == 0 and len(call.arguments["x"]) > 0,
                lambda call: f"{len(call.arguments['x'])} and multiple={call.options.multiple}",
            ),
        ),
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
            *_REQUIREMENTS,
            Requirement(
                f"rows of multiples of {_STEP}, from {_ROWS} on",
                lambda call: (
                    len(call.arguments["x"]) % _STEP == 0 and len(call.arguments["x"]) >= _ROWS
                ),
                lambda call: str(len(call.arguments["x"])),
            ),
        ),
        platforms=("cuda",),
    ),
    ProductBackend(name="xla", product=_xla_segments, gradients=_xla_segment_gradients),
)
