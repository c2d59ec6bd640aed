"""Slices of stacked parameters for layers that are compiled one after the other; their gradients are written into the stack in place."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

LEAST_SIZE = 2**16
"""The smallest slice whose gradient is written in place. Gradients of smaller ones are concatenated: one launch for all slices of a stack."""


def unstack(stacks: Any, count: int) -> list[Any]:
    """Return the `count` slices along the leading axis of a pytree of stacked parameters.

    The gradient of each slice is written into the gradient of its stack when it is known, while the next products are computed. XLA
    concatenates those of a scan that is unrolled, when all are known.

    Args:
        stacks: a pytree of arrays [count, ...].
        count: the number of slices.

    Raises:
        ValueError: an array has another number of slices.
    """
    leaves, structure = jax.tree.flatten(stacks)
    if wrong := {x.shape[0] for x in leaves} - {count}:
        raise ValueError(f"count={count}: a stack has {wrong.pop()} slices")
    slices = [_unstack_p.bind(x, count=count) for x in leaves]
    return [structure.unflatten(each) for each in zip(*slices, strict=True)]


def _slices(x: jax.Array, *, count: int) -> list[jax.Array]:
    return [jax.lax.index_in_dim(x, i, keepdims=False) for i in range(count)]


def slices_by_one_kernel(x: jax.Array, *, count: int) -> list[jax.Array]:
    """Return the `count` slices of x [count, ...], which XLA cuts by one kernel on a GPU if they are small and floats.

    A slice that a kernel reads is otherwise a copy of its own, a launch for each of the `count`. Here it is the result of an operation, the
    bitwise OR with a zero whose value XLA does not know, so that XLA joins the slices of a stack; the bits stay, also of NaN and -0.
    """
    if math.prod(x.shape[1:]) >= LEAST_SIZE or not jnp.issubdtype(x.dtype, jnp.floating):
        return _slices(x, count=count)
    kind = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    zero = jax.lax.optimization_barrier(jnp.zeros((), kind))
    bits = jax.lax.bitcast_convert_type(x, kind) | zero
    return _slices(jax.lax.bitcast_convert_type(bits, x.dtype), count=count)


# A primitive, since a function with `jax.custom_vjp` has no derivative in forward mode.
_unstack_p = jex.core.Primitive("unstack")
_unstack_p.multiple_results = True
_unstack_p.def_impl(_slices)
_unstack_p.def_abstract_eval(lambda x, *, count: [x.update(shape=x.shape[1:])] * count)
mlir.register_lowering(_unstack_p, mlir.lower_fun(_slices, multiple_results=True))
mlir.register_lowering(
    _unstack_p, mlir.lower_fun(slices_by_one_kernel, multiple_results=True), platform="cuda"
)


def _jvp(primals, tangents, *, count):
    (x,), (d_x,) = primals, tangents
    return _unstack_p.bind(x, count=count), _unstack_p.bind(ad.instantiate_zeros(d_x), count=count)


def _transposed(gradients, x, *, count):
    gradients = [ad.instantiate_zeros(g) for g in gradients]
    if math.prod(x.aval.shape[1:]) < LEAST_SIZE:
        return [jnp.stack(gradients)]
    stack = jax.lax.empty(x.aval.shape, x.aval.dtype)
    for i in reversed(range(count)):  # in the order in which the backward pass computes them
        stack = jax.lax.dynamic_update_slice_in_dim(stack, gradients[i][None], i, axis=0)
    return [stack]


def _batched(arguments, axes, *, count):
    (x,), (axis,) = arguments, axes
    results = _unstack_p.bind(jnp.moveaxis(x, axis, 1), count=count)
    return results, [0] * count


ad.primitive_jvps[_unstack_p] = _jvp
ad.primitive_transposes[_unstack_p] = _transposed
batching.primitive_batchers[_unstack_p] = _batched
