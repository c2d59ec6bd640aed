"""Logarithms of gates whose derivatives are computed from one array: from their inputs, or from their outputs.

JAX's derivatives of `softplus` and `log_sigmoid` are computed from their outputs. Where the backward pass computes a gate again, XLA then
stores the output of `softplus` in float32 beside the gate, and loads it for the derivative. Log decays of key channels are saved for the
kernels' backward passes instead of the float32 product before them (`saved`), and their derivatives are computed from them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from lsm_jax.ops.core.saved import saved


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


@jax.custom_jvp
def softplus_decay(gate: jax.Array, bias: jax.Array, a_log: jax.Array) -> jax.Array:
    """Return the log decay g = -A softplus(f + δ) of the gate f [..., G, K], the bias δ [G, K] and log A `a_log` [G], saved where kernels'
    results are.
    """
    return -jnp.exp(a_log)[:, None] * softplus(gate + bias)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def sigmoid_decay(gate: jax.Array, temperature: float) -> jax.Array:
    """Return the log decay g = log sigmoid(f) / τ of the gate f with the temperature τ, saved where kernels' results are."""
    return log_sigmoid(gate) / temperature


@softplus_decay.defjvp
def _softplus_decay_derivative(primals, tangents):
    (_, _, a_log), (d_gate, d_bias, d_a_log) = primals, tangents
    decay = saved(softplus_decay(*primals))
    rate = jnp.exp(a_log)[:, None]
    # By token and channel: XLA would sum over the channels in a pass of its own.
    d_bias, d_a_log = jax.lax.optimization_barrier(
        (d_bias, jnp.broadcast_to(d_a_log[:, None], d_bias.shape))
    )
    return decay, decay * d_a_log + rate * jnp.expm1(decay / rate) * (d_gate + d_bias)


@sigmoid_decay.defjvp
def _sigmoid_decay_derivative(temperature, primals, tangents):
    decay = saved(sigmoid_decay(*primals, temperature))
    return decay, -jnp.expm1(temperature * decay) / temperature * tangents[0]
