"""SwiGLU layers of groups of rows, each group with its own matrices: by two grouped products with SwiGLU between them, and by
fused kernels for Hopper, which compute SwiGLU and its gradient at the end of a product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import Backend, Call, check_implementation, register
from lsm_jax.ops.backends.select import select
from lsm_jax.ops.core.saved import saved
from lsm_jax.ops.experts.grouped_product import (
    REQUIREMENTS,
    Options,
    blocks_of_rows,
    check_multiple,
    grouped_product,
    kernel_product,
    kernel_sums,
)
from pallas_kernels.requirements import Requirement
from pallas_kernels.residuals import name_residuals

_ACROSS = 128  # columns of gate, and of up, that a kernel computes at a time


def grouped_swiglu(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    sizes: jax.Array,
    row_weight: jax.Array | None = None,
    *,
    multiple: int = 1,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Apply to each group of consecutive rows of x the SwiGLU layer of the group, `(w silu(x G) ⊙ x U) D` (arXiv 2002.05202),
    accumulating in float32.

    Args:
        x: [N, D], the rows of group 0, followed by those of group 1, and so on.
        gate_up: [E, D, 2 F], in x's dtype: the matrices G [D, F] and U [D, F] of each group.
        down: [E, F, D], in x's dtype: the matrix D of each group.
        sizes: int32 [E], the number of rows of each group; may be 0.
        row_weight: float32 [N, 1], the weight w of each row; None is 1.
        multiple: a number that divides N and all `sizes`; the kernels require a multiple of 128.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a backend's name, or a
            tuple of names in order of preference. "mosaic_gpu" computes SwiGLU at the end of the product with `gate_up`, and
            its gradient at the end of the product with `down`; "xla" between two calls of `grouped_product`.

    Returns:
        [N, D] in x's dtype. The values of rows after the last group, and their gradients, are undefined.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the requirement.
        ValueError: `multiple` does not divide N, a shape or dtype does not fit, or the implementation is not accepted.
    """
    op = "grouped_swiglu"
    check_implementation(op, implementation)
    check_multiple(op, x, multiple)
    check_shapes(op, x, gate_up, down, row_weight)
    # `down` has the name by which the requirements of grouped products know it.
    arguments = dict(x=x, gate_up=gate_up, kernels=down, sizes=sizes, row_weight=row_weight)
    selection = select(Call(op, Options(multiple), arguments, implementation))
    if selection.only("xla"):  # differentiated by jax
        return _by_products(*arguments.values(), multiple=multiple)
    with jax.named_scope(op):
        return _swiglu(selection, *arguments.values())


def check_shapes(op, x, gate_up, down, row_weight) -> None:
    """Raise ValueError unless the shapes and dtypes of the arrays of a grouped SwiGLU layer fit."""
    if gate_up.shape[2] != 2 * down.shape[1]:
        raise ValueError(
            f"{op}: gate_up has {gate_up.shape[2]} columns; accepted are {2 * down.shape[1]}, twice the rows of down"
        )
    shape = len(down), x.shape[1]
    if gate_up.shape[:2] != shape or down.shape[2] != x.shape[1]:
        raise ValueError(
            f"{op}: gate_up {gate_up.shape} and down {down.shape}; accepted are [E, D, 2 F] and [E, F, D] with x's D={x.shape[1]}"
        )
    if gate_up.dtype != x.dtype or down.dtype != x.dtype:
        raise ValueError(
            f"{op}: gate_up is {gate_up.dtype} and down {down.dtype}; accepted is x's {x.dtype}"
        )
    if row_weight is not None and row_weight.shape != (len(x), 1):
        raise ValueError(f"{op}: row_weight {row_weight.shape}; accepted is {(len(x), 1)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLUBackend(Backend):
    """A backend of grouped SwiGLU layers: functions for the output and for the gradients.

    Attributes:
        output: a function of the arguments x, gate_up, down, sizes and row_weight that returns the output.
        forward: a function of the same arguments that returns the output and the products [N, 2 F] of x and `gate_up`.
        gradients: a function of the same arguments, the products and the output's gradient that returns the gradients of x,
            gate_up, down and row_weight.
    """

    output: Callable[..., jax.Array]
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    gradients: Callable[..., tuple[Any, ...]]
    run: Callable[[Call], jax.Array] = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "run", lambda call: self.output(*call.arguments.values()))


@jax.custom_vjp
def weighted_swiglu(gate_up: jax.Array, row_weight: jax.Array | None) -> jax.Array:
    """Return `silu(gate) ⊙ up` [M, F], the inner values of SwiGLU experts, from their two halves `gate_up`
    [M, 2 F], times `row_weight` [M, 1] unless it is None.

    Since the weight is applied here, its gradient is computed in the same pass over memory as that of
    `gate_up`.
    """
    gate, up = jnp.split(_wide(gate_up), 2, axis=-1)
    y = jax.nn.silu(gate) * up
    return (y if row_weight is None else y * row_weight).astype(gate_up.dtype)


def _weighted_swiglu_backward(residuals, dy):
    gate_up, row_weight = residuals
    gate, up = jnp.split(_wide(gate_up), 2, axis=-1)
    sigmoid = jax.nn.sigmoid(gate)
    silu, dy = gate * sigmoid, _wide(dy)
    d_weight = None if row_weight is None else jnp.sum(dy * silu * up, axis=-1, keepdims=True)
    dy = dy if row_weight is None else dy * row_weight
    d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
    return jnp.concatenate([d_gate, dy * silu], axis=-1).astype(gate_up.dtype), d_weight


weighted_swiglu.defvjp(
    lambda gate_up, row_weight: (weighted_swiglu(gate_up, row_weight), (gate_up, row_weight)),
    _weighted_swiglu_backward,
)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _by_products(x, gate_up, down, sizes, row_weight, multiple=1, implementation=None):
    product = functools.partial(grouped_product, multiple=multiple, implementation=implementation)
    inner = weighted_swiglu(saved(product(x, gate_up, sizes)), row_weight)
    return product(inner, down, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(selection, *arguments):
    return selection.function(lambda backend: backend.output)(*arguments)


def _forward(selection, *arguments):
    y, products = selection.function(lambda backend: backend.forward)(*arguments)
    return y, (*arguments, name_residuals(products))


def _backward(selection, residuals, dy):
    gradients = selection.function(lambda backend: backend.gradients)(*residuals, dy)
    *others, d_weight = gradients
    return *others, None, d_weight


_swiglu.defvjp(_forward, _backward)

_xla_product = functools.partial(grouped_product, implementation="xla")


def _xla_output(*arguments):
    return _by_products(*arguments, implementation="xla")


def _xla_forward(x, gate_up, down, sizes, row_weight):
    products = _xla_product(x, gate_up, sizes)
    return _xla_product(weighted_swiglu(products, row_weight), down, sizes), products


def _xla_gradients(x, gate_up, down, sizes, row_weight, products, dy):
    inner, pull = jax.vjp(weighted_swiglu, products, row_weight)
    d_inner, d_down = jax.vjp(lambda x, w: _xla_product(x, w, sizes), inner, down)[1](dy)
    d_products, d_weight = pull(d_inner)
    dx, d_gate_up = jax.vjp(lambda x, w: _xla_product(x, w, sizes), x, gate_up)[1](d_products)
    return dx, d_gate_up, d_down, d_weight


# The functions below are jitted, so that a kernel is traced and lowered once for all layers that are not
# scanned.


@functools.partial(jax.jit, static_argnames="with_products")
def _kernel_forward(x, gate_up, down, sizes, row_weight, with_products=True):
    """Return the output [N, D] and, if `with_products`, the products [N, 2 F] of x and `gate_up`, else None."""
    from pallas_kernels.grouped_product import gated

    weight = None if row_weight is None else row_weight[:, 0]
    blocks = blocks_of_rows(len(x), sizes)
    inner, products = gated.gated_product(x, gate_up, *blocks, weight, with_products=with_products)
    return kernel_product(inner, down, sizes), products


def _kernel_output(*arguments):
    return _kernel_forward(*arguments, with_products=False)[0]


@jax.jit
def _kernel_gradients(x, gate_up, down, sizes, row_weight, products, dy):
    from pallas_kernels.grouped_product import gated

    weight = None if row_weight is None else row_weight[:, 0]
    blocks = blocks_of_rows(len(x), sizes)
    inner, d_products, d_weight = gated.gated_gradients(dy, down, *blocks, products, weight)
    dx = kernel_product(d_products, gate_up, sizes, transposed=True)
    d_weight = None if d_weight is None else jnp.sum(d_weight, axis=0)[:, None]
    return dx, kernel_sums(x, d_products, sizes), kernel_sums(inner, dy, sizes), d_weight


register(
    "grouped_swiglu",
    SwiGLUBackend(
        name="mosaic_gpu",
        output=_kernel_output,
        forward=_kernel_forward,
        gradients=_kernel_gradients,
        requirements=(
            *REQUIREMENTS,
            Requirement(
                f"an inner width and a width of multiples of {_ACROSS}",
                lambda call: all(n % _ACROSS == 0 for n in call.arguments["kernels"].shape[1:]),
                lambda call: " and ".join(map(str, call.arguments["kernels"].shape[1:])),
            ),
        ),
        platforms=("cuda",),
    ),
    SwiGLUBackend(name="xla", output=_xla_output, forward=_xla_forward, gradients=_xla_gradients),
)
