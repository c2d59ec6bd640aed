"""Rotations of pairs of key channels by angles of each token, and their gradient (Mamba-3, arXiv 2603.15569)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def partners(x: jax.Array, halves: bool) -> jax.Array:
    """Return x [..., N] turned by a right angle: for each channel the other one of its pair, negative for the first of a pair.

    A pair is the channels 2 i and 2 i + 1, or with `halves` i and i + N / 2.
    """
    pairs = x.reshape(*x.shape[:-1], *((2, -1) if halves else (-1, 2)))
    sign = jnp.expand_dims(jnp.array([-1, 1], x.dtype), -1 if halves else 0)
    return (sign * jnp.flip(pairs, -2 if halves else -1)).reshape(x.shape)


def _waves(angle: jax.Array, size: int, halves: bool) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine for each of `size` channels, [..., N], of the angles [..., S] of the first S pairs."""
    rest = [(0, 0)] * (angle.ndim - 1) + [(0, size // 2 - angle.shape[-1])]
    cos, sin = jnp.pad(jnp.cos(angle), rest, constant_values=1), jnp.pad(jnp.sin(angle), rest)
    if halves:
        return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1)
    return jnp.repeat(cos, 2, axis=-1), jnp.repeat(sin, 2, axis=-1)


def turn(x: jax.Array, angle: jax.Array, *, halves: bool) -> jax.Array:
    """Turn pairs of channels of x [..., N] by `angle` [..., S], in radians; the channels beyond 2 S are not turned. `halves` says
    which channels are pairs, as in `partners`.
    """
    cos, sin = _waves(angle, x.shape[-1], halves)
    return x * cos + partners(x, halves) * sin


def of_heads(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Return x [B, T, R, G, N] for each of the H heads of its groups, with the heads' bias [R, H, N]."""
    return jnp.repeat(x, bias.shape[1] // x.shape[3], axis=3) + bias.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def turned_heads(x: jax.Array, bias: jax.Array, angle: jax.Array, halves: bool) -> jax.Array:
    """Return x [B, T, R, G, N] with the bias [R, H, N] of each head, turned by the angles [B, T, H, S], in their dtype.

    Every array of all heads' channels is read or written once: partners are those of x and bias, and the gradient of the angles has
    no arrays for sines and cosines.
    """
    cos, sin = (w[:, :, None] for w in _waves(angle, x.shape[-1], halves))
    partner = of_heads(partners(x, halves), partners(bias, halves))
    return of_heads(x, bias).astype(angle.dtype) * cos + partner.astype(angle.dtype) * sin


def _turned_heads_forward(x, bias, angle, halves):
    return turned_heads(x, bias, angle, halves), (x, bias, angle)


def _turned_heads_backward(halves, saved, d_turned):
    """Return the gradients of x, bias and angles."""
    x, bias, angle = saved
    (batch, length, ranks, groups, size), heads = x.shape, bias.shape[1]
    cos, sin = (w[:, :, None] for w in _waves(angle, size, halves))
    partner = of_heads(partners(x, halves), partners(bias, halves)).astype(angle.dtype)
    d_angle = d_turned * (partner * cos - of_heads(x, bias).astype(angle.dtype) * sin)
    d_angle = d_angle.reshape(batch, length, ranks, heads, *((2, -1) if halves else (-1, 2)))
    pairs = slice(angle.shape[-1])
    d_angle = d_angle[..., pairs] if halves else d_angle[..., pairs, :]
    d_angle = jnp.sum(d_angle, axis=(2, -2 if halves else -1))
    d_heads = d_turned * cos - partners(d_turned, halves) * sin
    d_groups = jnp.sum(d_heads.reshape(batch, length, ranks, groups, -1, size), axis=4)
    return d_groups.astype(x.dtype), jnp.sum(d_heads, axis=(0, 1)).astype(bias.dtype), d_angle


turned_heads.defvjp(_turned_heads_forward, _turned_heads_backward)
