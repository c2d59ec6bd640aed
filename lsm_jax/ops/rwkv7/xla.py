"""Compute `token_mixes`, `rwkv7_gates` and `rwkv7_output` by XLA, as they are defined."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.convolution.backends import l2_normalize


class RWKV7Gates(NamedTuple):
    """The results of `rwkv7_gates`, [B, T, H, K].

    Attributes:
        r: the receptance, unchanged. A memory that reads it from here has its gradient added in the pass of the others.
        k: the keys that are added to the memory.
        a: the first vector of the memory's rank-one removal `aᵀ b`: minus the key that is removed, which has unit length.
        b: the second: the removed key times the fraction of it that is removed.
        log_decay: the logarithm of the decay of each key channel, between -exp(-1/2) and 0.
        current: the token's value times the weighted product of its receptance and its key.
    """

    r: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    a: Float[Array, "B T H K"]
    b: Float[Array, "B T H K"]
    log_decay: Float[Array, "B T H K"]
    current: Float[Array, "B T H K"]


def token_before(x: jax.Array) -> jax.Array:
    """Return the token before each token of x [B, T, D] in its row, zeros before the first."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def mixes(
    x: jax.Array, before: jax.Array | None, shares: jax.Array, twice: tuple[int, ...] = ()
) -> tuple[jax.Array, ...]:
    """Return the results of `token_mixes`, whose arguments are the same."""
    step_back = (token_before(x) if before is None else before) - x
    results = [x + step_back * share for share in shares.astype(x.dtype)]
    return *results, *(results[i] for i in twice)


def gates(
    r, k, v, rate, decay, removal, rate_of_key, bonus, rate_bias=None, decay_bias=None
) -> RWKV7Gates:
    """Return the results of `rwkv7_gates`, whose arguments are the same."""
    wide, receptance = rate.dtype, r
    rate = rate if rate_bias is None else rate + rate_bias
    decay = decay if decay_bias is None else decay + decay_bias
    rate, k = jax.nn.sigmoid(rate), k.astype(wide)
    removed = l2_normalize(k * removal)
    k = (k * (1 + (rate - 1) * rate_of_key)).astype(v.dtype)
    r, k_wide, v_wide = (part.astype(wide) for part in (r, k, v))
    # The barrier keeps the sum, a number for each head, out of the pass of the output, which would read its arrays again.
    share = jax.lax.optimization_barrier(jnp.sum(r * k_wide * bonus, axis=-1, keepdims=True))
    return RWKV7Gates(
        r=receptance,
        k=k,
        a=-removed.astype(v.dtype),
        b=(removed * rate).astype(v.dtype),
        log_decay=-math.exp(-0.5) * jax.nn.sigmoid(decay),
        current=(share * v_wide).astype(v.dtype),
    )


def output(o, current, gate, scale, bias, *, eps: float) -> jax.Array:
    """Return the result of `rwkv7_output`, whose arguments are the same."""

    def norm(o, scale, bias):
        wide = o.astype(jnp.promote_types(o.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + eps) * scale + bias).astype(o.dtype)

    return (jax.checkpoint(norm, prevent_cse=False)(o, scale, bias) + current) * gate


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mixes_in_two_passes(
    twice: tuple[int, ...], x: jax.Array, before: jax.Array, shares: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the results of `token_mixes` for given tokens before, differentiated by a pass over the gradients of the results for the
    tokens and one for the shares.

    Left to itself XLA joins the sums over tokens with the passes that share an array with them, and computes the joint pass in the
    order of the sums, at half the bandwidth or less.
    """
    return mixes(x, before, shares, twice)


def _backward(twice, saved, gradients):
    x, before, shares = saved
    wide = jnp.promote_types(x.dtype, jnp.float32)
    count = shares.shape[0]
    gradients, more = list(gradients[:count]), gradients[count:]
    for i, gradient in zip(twice, more, strict=True):
        gradients[i] = gradients[i] + gradient
    total = d_before = jnp.zeros((), wide)
    for gradient, share in zip(gradients, shares.astype(x.dtype).astype(wide), strict=True):
        total = total + gradient.astype(wide)
        d_before = d_before + gradient.astype(wide) * share
    d_x = (total - d_before).astype(x.dtype)
    step_back, gradients = jax.lax.optimization_barrier((before - x, gradients))
    d_shares = [jnp.sum(g.astype(wide) * step_back.astype(wide), axis=(0, 1)) for g in gradients]
    return d_x, d_before.astype(x.dtype), jnp.stack(d_shares).astype(shares.dtype)


def _forward(twice, x, before, shares):
    return mixes(x, before, shares, twice), (x, before, shares)


mixes_in_two_passes.defvjp(_forward, _backward)
