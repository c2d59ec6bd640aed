"""Says which arrays rematerialisation saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.residuals import KEPT

CONVOLVED = "short_convolutions"
"""The name of all results of short convolutions, of RWKV7's gates by their kernel, and of the tokens that RWKV7 mixes, for
`jax.checkpoint`, which `remat="dots_and_convolutions"` saves."""

INPUTS = "inputs_of_products"
"""The name of the elementwise results that products with weights read: norms of the residual stream and the hidden layer of SwiGLU and
GeGLU; `remat="dots_and_inputs"` saves them besides `CONVOLVED`."""


_SAVES_MEMORIES: ContextVar[bool] = ContextVar("saves_memories", default=False)


@contextlib.contextmanager
def memories_saved(saved: bool = True) -> Iterator[None]:
    """Return a context manager, also a decorator, for the tracing of a layer: whether the kernels of memories that are called in it
    store the memories before all chunks for their backward pass, which otherwise computes them again (`remat="dots_and_states"`).

    An op reads it where it is called (`static_of`) and carries it on as one of its static options, so that no program which was
    traced for one choice is used for the other. The memories are residuals of kernels, of the name `KEPT`.
    """
    token = _SAVES_MEMORIES.set(saved)
    try:
        yield
    finally:
        _SAVES_MEMORIES.reset(token)


def saves_memories() -> bool:
    """Return whether ops that are called now store the memories before all chunks (`memories_saved`)."""
    return _SAVES_MEMORIES.get()


def saved(x: jax.Array) -> jax.Array:
    """Return x, which a layer's backward pass does not compute again where it does not run kernels again (`remat="dots"`)."""
    return checkpoint_name(x, KEPT)


def row_major(x: jax.Array) -> jax.Array:
    """Return x, which XLA stores with its last axis contiguous, as well as its gradient.

    `jax.export` requires `DisabledSafetyCheck.custom_call("LayoutConstraint")` for it.
    """
    # Imported here, since it imports Pallas.
    from pallas_kernels.compat import row_major

    return row_major(x)


@jax.custom_jvp
def stored_gradient(x: jax.Array) -> jax.Array:
    """Return x, whose gradient XLA stores as one array, instead of in parts or in each kernel that reads it."""
    return x


@stored_gradient.defjvp
def _stored_tangent(primals, tangents):
    # The transpose has the barrier too. A rule for the backward pass alone would exclude forward-mode derivatives.
    return primals[0], jax.lax.optimization_barrier(tangents[0])


def is_saved_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a primitive is cuDNN's attention: a policy of `jax.checkpoint` that saves its output and logarithms of sums.

    JAX gives the arrays no name, so that the policy knows them by their primitive.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


def convolved(x: jax.Array) -> jax.Array:
    """Return x, the result of a short convolution or another array of `CONVOLVED`, which a layer's backward pass does not compute again with
    `remat="dots_and_convolutions"`.
    """
    return checkpoint_name(x, CONVOLVED)


def product_input(x: jax.Array) -> jax.Array:
    """Return x, an array of `INPUTS`, which a layer's backward pass does not compute again with `remat="dots_and_inputs"`."""
    return checkpoint_name(x, INPUTS)
