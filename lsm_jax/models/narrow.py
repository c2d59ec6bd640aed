"""Casts of parameters to 16 bits in advance, for those of which a computation uses nothing else: before the layers of a training step, and
before the loop over decoded tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

_CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr"}
# Primitives that only move values, which may as well be cast before.
_MOVES = "gather", "transpose", "reshape", "squeeze", "slice"

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


def cast_in_advance(params: Any, dtype: Any, function: Callable[[Any], Any]) -> Any:
    """Return a pytree of parameters in which those that `function(params)` casts to `dtype`, a narrower one, and uses in no other way, have that
    dtype.

    What the function returns does not change; repeated in a loop, it would cast them each time.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    traced = jax.make_jaxpr(lambda *each: function(structure.unflatten(each)))(*shapes)
    casts = _casts(traced.jaxpr, jnp.dtype(dtype), _MOVES)

    def narrows(x):
        return jnp.dtype(dtype).itemsize < x.dtype.itemsize

    return structure.unflatten(
        [
            x.astype(dtype) if narrows(x) and 0 < casts.get(var, 0) < math.inf else x
            for x, var in zip(leaves, traced.jaxpr.invars, strict=True)
        ]
    )


def is_large(x: Any) -> bool:
    """Return whether a stack is one of matrices of `LEAST_SIZE` parameters or more, in float32."""
    one = x.shape[1:]
    return x.dtype == jnp.float32 and len(one) >= 2 and math.prod(one) >= LEAST_SIZE


def _casts(
    jaxpr: Any, dtype: Any, moves: tuple[str, ...] = (), results: list[float] | None = None
) -> dict[Any, float]:
    """Return for each variable of a jaxpr how often it is cast to `dtype`: infinitely often if it is used in another way.

    A result of a primitive of `moves` stands for the primitive's first operand. `results` says how often the jaxpr's results are cast
    afterwards; None is infinitely often.
    """
    casts: dict[Any, float] = {}

    def add(var: Any, count: float) -> None:
        if not isinstance(var, jex.core.Literal):
            casts[var] = casts.get(var, 0) + count

    for place, var in enumerate(jaxpr.outvars):
        add(var, math.inf if results is None else results[place])
    for eqn in reversed(jaxpr.eqns):  # so that all uses of its results are known
        name = eqn.primitive.name
        if name == "convert_element_type" and eqn.params["new_dtype"] == dtype:
            add(eqn.invars[0], 1)
        elif name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            inner = getattr(inner, "jaxpr", inner)
            results = [casts.get(var, 0) for var in eqn.outvars] if moves else None
            found = _casts(inner, dtype, moves, results)
            for var, inside in zip(eqn.invars, inner.invars, strict=True):
                add(var, found.get(inside, 0))
        else:
            for place, var in enumerate(eqn.invars):
                moved = name in moves and place == 0
                add(var, casts.get(eqn.outvars[0], 0) if moved else math.inf)
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
