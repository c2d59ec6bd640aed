"""A cast of the layers' stacked parameters to 16 bits before the layers, for those of which the layers use nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

_CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr"}

LEAST_SIZE = 2**12
"""The smallest number of parameters of one layer's matrix that is cast before the layers: a low-rank gate's is, by one launch for all layers."""


def cast_stacks(stacks: Any, dtype: Any, layers: Callable[[Any], Any]) -> Any:
    """Return a pytree of stacked parameters in which those that layers cast to `dtype` anyway, once, have that dtype.

    Layers that are compiled one after the other cast slices of the stacks, in the forward pass and in the backward pass again, from
    copies in float32; and the optimizer loads the gradients of the slices instead of those of a stack. Values and gradients are the
    same: a parameter that layers use in any other way, or more than once, is not changed.

    Args:
        stacks: parameters with a leading axis over the repetitions of layers.
        dtype: the dtype of activations, of 16 bits.
        layers: a function of the parameters of one repetition, without that axis.
    """
    leaves, structure = jax.tree.flatten(stacks)
    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
    traced = jax.make_jaxpr(lambda *each: layers(structure.unflatten(each)))(*one)
    casts = _casts(traced.jaxpr, jnp.dtype(dtype))
    return structure.unflatten(
        [
            _cast(x, jnp.dtype(dtype)) if is_large(x) and casts.get(var) == 1 else x
            for x, var in zip(leaves, traced.jaxpr.invars, strict=True)
        ]
    )


def is_large(x: Any) -> bool:
    """Return whether a stack is one of matrices of `LEAST_SIZE` parameters or more, in float32."""
    one = x.shape[1:]
    return x.dtype == jnp.float32 and len(one) >= 2 and math.prod(one) >= LEAST_SIZE


def _casts(jaxpr: Any, dtype: Any) -> dict[Any, float]:
    """Return for each variable of a jaxpr how often it is cast to `dtype`: infinitely often if it is used in another way."""
    casts: dict[Any, float] = {}

    def add(var: Any, count: float) -> None:
        if not isinstance(var, jex.core.Literal):
            casts[var] = casts.get(var, 0) + count

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == dtype:
            add(eqn.invars[0], 1)
        elif eqn.primitive.name in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive.name]]
            inner = getattr(inner, "jaxpr", inner)
            found = _casts(inner, dtype)
            for var, inside in zip(eqn.invars, inner.invars, strict=True):
                add(var, found.get(inside, 0))
        else:
            for var in eqn.invars:
                add(var, float("inf"))
    for var in jaxpr.outvars:
        add(var, float("inf"))
    return casts


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x in `dtype`; its gradient is stored in `dtype` before it is cast, rather than recomputed from its parts by all that
    use it."""
    return x.astype(dtype)


@_cast.defjvp
def _cast_tangent(dtype, primals, tangents):
    # The transpose has the barrier before the cast. A rule for the backward pass alone would exclude forward-mode derivatives.
    return primals[0].astype(dtype), jax.lax.optimization_barrier(tangents[0].astype(dtype))
