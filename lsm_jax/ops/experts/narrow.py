"""Products of groups of rows in 8-bit floats (FP8), each group with its own matrix, and SwiGLU layers of such groups.

The forward pass multiplies float8_e4m3 numbers, rows and matrices, and the backward pass multiplies the output's gradient in float8_e5m2
with the matrices in float8_e4m3 for the gradient of the rows. Rows and gradients have one scale for a call, and the matrices of all
groups one, powers of two by the present maximum (`lsm_jax.ops.core.narrow`). The gradient of the matrices is a product of rows and
gradients that are not rounded: Hopper's tensor cores multiply 8-bit floats only if both operands are contiguous along the sum, which
is over rows here. So rounded numbers would have to be widened again, and nothing would be gained.

Hopper's tensor cores add products of 8-bit floats with fewer bits than float32 has, about 14 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2);
the kernels do not add them apart. Elsewhere XLA multiplies the same numbers widened, on a CPU in float32 and on other devices in bfloat16: the same values, and no speed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lsm_jax.ops.backends.registry import Backend, Call, check_implementation, register
from lsm_jax.ops.backends.select import select
from lsm_jax.ops.core.checks import matmul_precision
from lsm_jax.ops.core.narrow import BACKWARD, FORWARD, quantize, rounded, scale_for
from lsm_jax.ops.core.platforms import for_platform
from lsm_jax.ops.experts.grouped_product import (
    REQUIREMENTS,
    Options,
    blocks_of_rows,
    check_multiple,
    kernel_sums,
)
from lsm_jax.ops.experts.grouped_swiglu import check_shapes, weighted_swiglu
from pallas_kernels.requirements import Requirement
from pallas_kernels.residuals import name_residuals

_ACROSS = 128  # the kernels' tiles, in rows and columns


class Scaled(NamedTuple):
    """An array in 8-bit floats, and the float32 scalar that multiplies it."""

    narrow: jax.Array
    scale: jax.Array


def grouped_product_fp8(
    x: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    multiple: int = 1,
    save_matrices: bool = True,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Multiply each group of consecutive rows of x by the group's own matrix, in 8-bit floats.

    Args:
        x: [N, D], the rows of group 0, followed by those of group 1, and so on.
        kernels: [E, D, F], in x's dtype.
        sizes: int32 [E], the number of rows of each group; may be 0.
        multiple: a number that divides N and all `sizes`; the kernels require a multiple of 128.
        save_matrices: whether rematerialisation saves the 8-bit matrices for the backward pass, as it saves results of kernels.
        implementation: None (the first automatic backend that supports the call), "xla" or "mosaic_gpu", or a tuple of names in order
            of preference.

    Returns:
        [N, F] in x's dtype. The values of rows after the last group, and their gradients, are undefined.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the requirement.
        ValueError: `multiple` does not divide N, or the implementation is not accepted.
    """
    options = multiple, save_matrices, implementation
    return _call("grouped_product_fp8", options, (x, kernels, sizes))


def grouped_swiglu_fp8(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    sizes: jax.Array,
    row_weight: jax.Array | None = None,
    *,
    multiple: int = 1,
    save_matrices: bool = True,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Apply to each group of consecutive rows of x the SwiGLU layer of the group, `(w silu(x G) ⊙ x U) D` (arXiv 2002.05202), with
    products in 8-bit floats. `gate_up` has one scale, and so have the inner values.

    Args:
        x: [N, D], the rows of group 0, followed by those of group 1, and so on.
        gate_up: [E, D, 2 F], in x's dtype: the matrices G [D, F] and U [D, F] of each group.
        down: [E, F, D], in x's dtype: the matrix D of each group.
        sizes: int32 [E], the number of rows of each group; may be 0.
        row_weight: float32 [N, 1], the weight w of each row; None is 1.
        multiple: a number that divides N and all `sizes`; the kernels require a multiple of 128.
        save_matrices: as that of `grouped_product_fp8`.
        implementation: as that of `grouped_product_fp8`. "mosaic_gpu" computes SwiGLU at the end of the product with `gate_up`, and its
            gradient at the end of the product with `down`.

    Returns:
        [N, D] in x's dtype. The values of rows after the last group, and their gradients, are undefined.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the requirement.
        ValueError: `multiple` does not divide N, a shape or dtype does not fit, or the implementation is not accepted.
    """
    op = "grouped_swiglu_fp8"
    check_shapes(op, x, gate_up, down, row_weight)
    options = multiple, save_matrices, implementation
    return _call(op, options, (x, gate_up, down, sizes, row_weight))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowBackend(Backend):
    """A backend of products of grouped rows in 8-bit floats: functions for the output and for the gradients.

    Attributes:
        forward: a function of the op's arrays that returns the output, the 8-bit matrices (a tuple of `Scaled`), and the products before
            SwiGLU, or None.
        gradients: a function of the op's arrays without matrices, of the 8-bit matrices, of the products and of the output's gradient,
            that returns the gradients of the op's arrays but `sizes`.
    """

    forward: Callable[..., tuple[jax.Array, tuple[Scaled, ...], Any]]
    gradients: Callable[..., tuple[Any, ...]]
    run: Callable[[Call], jax.Array] = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "run", lambda call: self.forward(*call.arguments.values())[0])


def _call(op, options, arrays):
    multiple, save_matrices, implementation = options
    check_implementation(op, implementation)
    check_multiple(op, arrays[0], multiple)
    names = ("x", "kernels", "sizes")
    if len(arrays) > 3:  # `down` has the name by which the requirements of grouped products know it
        names = ("x", "gate_up", "kernels", "sizes", "row_weight")
    arguments = dict(zip(names, arrays, strict=True))
    selection = select(Call(op, Options(multiple), arguments, implementation))
    with jax.named_scope(op):
        return _run(selection, save_matrices, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(selection, save_matrices, *arrays):
    return _forward(selection, save_matrices, *arrays)[0]


def _forward(selection, save_matrices, x, *arrays):
    y, narrow, products = selection.function(lambda backend: backend.forward)(x, *arrays)
    narrow = name_residuals(narrow) if save_matrices else narrow
    others = arrays[len(narrow) :]
    return y, (x, *others, narrow, name_residuals(products))


def _backward(selection, save_matrices, residuals, dy):
    gradients = selection.function(lambda backend: backend.gradients)(*residuals, dy)
    if len(gradients) == 2:
        return *gradients, None
    *others, d_weight = gradients
    return *others, None, d_weight


_run.defvjp(_forward, _backward)


def _narrow(x: jax.Array, dtype: DTypeLike, sizes: jax.Array, most: Any = None) -> Scaled:
    """Return rows x [N, D] in 8-bit floats; those after the last group are 0. `most` are largest absolute values of each row [..., N] if they
    are known.
    """
    used = jnp.arange(len(x)) < jnp.sum(sizes)
    x = jnp.where(used[:, None], x, 0)
    if most is None:
        return Scaled(*quantize(x, dtype))
    scale = scale_for(jnp.max(jnp.where(used, most, 0)), dtype)
    return Scaled(rounded(x, scale, dtype), scale)


def _product(x: Scaled, kernels: Scaled, sizes: jax.Array, dtype: DTypeLike, transposed=False):
    """Return the products of groups of rows x [N, D] with matrices [E, D, F], or [E, F, D] if `transposed`, [N, F] in `dtype`."""

    def multiply(wide, *arrays):
        # Without a barrier XLA joins both conversions on a GPU, and multiplies numbers that were not rounded.
        arrays = jax.lax.optimization_barrier(arrays)
        x, kernels = (a.astype(wide) * s.astype(wide) for a, s in zip(*arrays, strict=True))
        kernels = jnp.swapaxes(kernels, 1, 2) if transposed else kernels
        y = jax.lax.ragged_dot(
            x, kernels, sizes, precision=matmul_precision(x, kernels), preferred_element_type=jnp.float32
        )  # fmt: skip
        return y.astype(dtype)

    cpu, default = (functools.partial(multiply, w) for w in (jnp.float32, jnp.bfloat16))
    arrays = (x.narrow, kernels.narrow), (x.scale, kernels.scale)
    return for_platform(default, cpu=cpu)(*arrays)


def _sums(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the gradient of each group's matrix [E, D, F] in x's dtype."""
    kernels = jax.ShapeDtypeStruct((len(sizes), x.shape[1], dy.shape[1]), x.dtype)
    precision = matmul_precision(x, dy)
    product = functools.partial(jax.lax.ragged_dot, precision=precision)
    return jax.linear_transpose(lambda w: product(x, w, sizes), kernels)(dy)[0]


def _xla_product(x, kernels, sizes):
    narrow = Scaled(*quantize(kernels, FORWARD))
    return _product(_narrow(x, FORWARD, sizes), narrow, sizes, x.dtype), (narrow,), None


def _xla_product_gradients(x, sizes, matrices, _, dy):
    (kernels,) = matrices
    dx = _product(_narrow(dy, BACKWARD, sizes), kernels, sizes, x.dtype, transposed=True)
    return dx, _sums(x, dy, sizes)


def _xla_swiglu(x, gate_up, down, sizes, row_weight):
    products, gate_up, _ = _xla_product(x, gate_up, sizes)
    y, down, _ = _xla_product(weighted_swiglu(products, row_weight), down, sizes)
    return y, (*gate_up, *down), products


def _xla_swiglu_gradients(x, sizes, row_weight, matrices, products, dy):
    gate_up, down = matrices
    inner, pull = jax.vjp(weighted_swiglu, products, row_weight)
    d_inner, d_down = _xla_product_gradients(inner, sizes, (down,), None, dy)
    d_products, d_weight = pull(d_inner)
    dx, d_gate_up = _xla_product_gradients(x, sizes, (gate_up,), None, d_products)
    return dx, d_gate_up, d_down, d_weight


# The functions below are jitted, so that a kernel is traced and lowered once for all layers that are not scanned.


@functools.partial(jax.jit, static_argnames="transposed")
def _kernel_product(x, kernels, sizes, transposed=False):
    """Return what `_product` returns, in bfloat16, by the kernel, which multiplies by matrices [E, F, D]."""
    from pallas_kernels.grouped_product import hopper

    matrices = kernels.narrow if transposed else jnp.swapaxes(kernels.narrow, 1, 2)
    blocks = blocks_of_rows(len(x.narrow), sizes)
    scale = (x.scale * kernels.scale)[None]
    return hopper.product(x.narrow, matrices, *blocks, transposed=True, scale=scale)


@jax.jit
def _kernel_forward(x, kernels, sizes):
    narrow = Scaled(*quantize(kernels, FORWARD))
    return _kernel_product(_narrow(x, FORWARD, sizes), narrow, sizes), (narrow,), None


@jax.jit
def _kernel_gradients(x, sizes, matrices, _, dy):
    (kernels,) = matrices
    dx = _kernel_product(_narrow(dy, BACKWARD, sizes), kernels, sizes, transposed=True)
    return dx, kernel_sums(x, dy, sizes)


@jax.jit
def _kernel_swiglu(x, gate_up, down, sizes, row_weight):
    from pallas_kernels.grouped_product import gated

    rows, gate_up = _narrow(x, FORWARD, sizes), Scaled(*quantize(gate_up, FORWARD))
    weight = None if row_weight is None else row_weight[:, 0]
    inner, products, most = gated.gated_product(
        rows.narrow,
        jnp.swapaxes(gate_up.narrow, 1, 2),
        *blocks_of_rows(len(x), sizes),
        weight,
        scale=(rows.scale * gate_up.scale)[None],
    )
    down = Scaled(*quantize(down, FORWARD))
    y = _kernel_product(_narrow(inner, FORWARD, sizes, most), down, sizes)
    return y, (gate_up, down), products


@jax.jit
def _kernel_swiglu_gradients(x, sizes, row_weight, matrices, products, dy):
    from pallas_kernels.grouped_product import gated

    gate_up, down = matrices
    narrow = _narrow(dy, BACKWARD, sizes)
    weight = None if row_weight is None else row_weight[:, 0]
    inner, d_products, d_weight, most = gated.gated_gradients(
        narrow.narrow,
        down.narrow,
        *blocks_of_rows(len(x), sizes),
        products,
        weight,
        scale=(narrow.scale * down.scale)[None],
    )
    rows = _narrow(d_products, BACKWARD, sizes, most)
    dx = _kernel_product(rows, gate_up, sizes, transposed=True)
    d_weight = None if d_weight is None else jnp.sum(d_weight, axis=0)[:, None]
    return dx, kernel_sums(x, d_products, sizes), kernel_sums(inner, dy, sizes), d_weight


_NARROW_REQUIREMENTS = (
    *REQUIREMENTS,
    Requirement(
        f"widths of multiples of {_ACROSS}",
        lambda call: all(n % _ACROSS == 0 for n in call.arguments["kernels"].shape[1:]),
        lambda call: " and ".join(map(str, call.arguments["kernels"].shape[1:])),
    ),
)
_HOPPER: Any = dict(name="mosaic_gpu", requirements=_NARROW_REQUIREMENTS, platforms=("cuda",))
register(
    "grouped_product_fp8",
    NarrowBackend(forward=_kernel_forward, gradients=_kernel_gradients, **_HOPPER),
    NarrowBackend(name="xla", forward=_xla_product, gradients=_xla_product_gradients),
)
register(
    "grouped_swiglu_fp8",
    NarrowBackend(forward=_kernel_swiglu, gradients=_kernel_swiglu_gradients, **_HOPPER),
    NarrowBackend(name="xla", forward=_xla_swiglu, gradients=_xla_swiglu_gradients),
)
