"""Logarithms of gates whose derivatives are computed from their inputs.

JAX's derivatives of `softplus` and `log_sigmoid` are computed from their outputs. Where the backward pass computes a gate again, XLA then
stores the output of `softplus` in float32 beside the gate, and loads it for the derivative.
"""

from __future__ import annotations

import jax


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x), with the derivative sigmoid(x)."""
    return jax.nn.softplus(x)


@jax.custom_jvp
def log_sigmoid(x: jax.Array) -> jax.Array:
    """Return log sigmoid(x) = -log(1 + e^-x), with the derivative sigmoid(-x)."""
    return jax.nn.log_sigmoid(x)


@softplus.defjvp
def _softplus_derivative(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softplus(x), jax.nn.sigmoid(x) * dx


@log_sigmoid.defjvp
def _log_sigmoid_derivative(primals, tangents):
    (x,), (dx,) = primals, tangents
    return log_sigmoid(x), jax.nn.sigmoid(-x) * dx
