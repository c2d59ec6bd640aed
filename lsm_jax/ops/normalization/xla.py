"""Compute `gated_rms_norm` by XLA: as its definition, and with a derivative of its own that reads and writes less.

XLA stores an array in float32 wherever two of its passes use one value. Hence each pass computes everything again from
the arguments, behind an optimization barrier, and only sums over the channels of a group go from one pass to the next.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.core.saved import saved


class NormOptions(NamedTuple):
    """The options of `gated_rms_norm` that are constant when a program is compiled.

    Attributes:
        eps: added to the mean square.
        group: consecutive heads that are normalised together.
        activation: of the gate: "silu" or "sigmoid".
        gate_first: whether the gate multiplies before the norm.
    """

    eps: float
    group: int
    activation: str
    gate_first: bool


ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def reference(options: NormOptions, x, gate, scale, skip=None, skip_input=None) -> jax.Array:
    """Return the gated norm [B, T, H, V] as it is defined: the skip, the gate before or after, the norm and the scale.

    The arguments are those of `gated_rms_norm`, with a scale [V] or [H, V].
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(wide)
    if skip is not None and skip_input is not None:
        y = y + skip[:, None].astype(wide) * skip_input.astype(wide)
    factor = ACTIVATIONS[options.activation](gate.astype(wide))
    y = y * factor if options.gate_first else y
    grouped = y.reshape(*x.shape[:2], -1, options.group * x.shape[3])
    mean_square = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
    y = (grouped * jax.lax.rsqrt(mean_square + options.eps)).reshape(x.shape) * scale
    return (y if options.gate_first else y * factor).astype(x.dtype)


def in_few_passes(options: NormOptions, x, gate, scale, skip=None, skip_input=None) -> jax.Array:
    """Return the gated norm [B, T, H, V] with the arguments of `reference`: two passes over the arrays forward and two
    backward, which save the arguments and the mean squares.
    """
    heads, channels = x.shape[2:]

    def grouped(a):  # channels of a group on the last axis
        return a.reshape(*x.shape[:2], heads // options.group, options.group * channels)

    def by_channel(a):
        return jnp.broadcast_to(a, (heads, channels)).reshape(-1, options.group * channels)

    wide = [by_channel(scale), None if skip is None else by_channel(skip[:, None])]
    inputs = [None if a is None else grouped(a) for a in (x, gate, skip_input)]
    return _normalize(options, *inputs, *wide).reshape(x.shape)


class _Values(NamedTuple):
    """The values of one pass, [B, T, G, C] in float32: before the gate, gate, its activation, and what is normalised."""

    y: Any
    gate: Any
    factor: Any
    normed: Any


def _values(options: NormOptions, arrays, skip) -> _Values:
    x, gate, skip_input = arrays
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y, gate = x.astype(wide), gate.astype(wide)
    if skip is not None:
        y = y + skip.astype(wide) * skip_input.astype(wide)
    factor = ACTIVATIONS[options.activation](gate)
    return _Values(y, gate, factor, y * factor if options.gate_first else y)


def _own_pass(arrays: Any) -> Any:
    """Return the arrays for a pass of its own: XLA shares no value between this pass and others, which it would store in
    float32.
    """
    return jax.lax.optimization_barrier(arrays)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(options: NormOptions, x, gate, skip_input, scale, skip):
    """Return the gated norm of x [B, T, G, C], whose last axis has the channels of a group; scale and skip are [G, C]."""
    return _forward(options, x, gate, skip_input, scale, skip)[0]


def _forward(options: NormOptions, x, gate, skip_input, scale, skip):
    arrays = x, gate, skip_input
    normed = _values(options, _own_pass(arrays), skip).normed
    # A few numbers for each token: rematerialisation saves them, and computes the output in a pass of the derivative.
    square = saved(_mean(normed * normed))
    values = _values(options, arrays, skip)
    y = values.normed * jax.lax.rsqrt(square + options.eps) * scale
    y = (y if options.gate_first else y * values.factor).astype(x.dtype)
    return y, (square, *arrays, scale, skip)


class _Gradients(NamedTuple):
    """The gradients in one pass, [B, T, G, C] in float32: of y, of the gate, and each token's part of the scale's."""

    y: Any
    gate: Any
    scale: Any


def _gradients(options: NormOptions, arrays, scale, skip, dy, square, product) -> _Gradients:
    """Return the gradients of `_normalize`. With n = t r, r = 1 / sqrt(mean(t²) + eps) and dn the gradient of n, that of t is
    `r (dn - n mean(dn n))`; `square` is mean(t²), and `product` mean(dn t).
    """
    values = _values(options, arrays, skip)
    root = jax.lax.rsqrt(square + options.eps)
    normed = values.normed * root
    d_normed = _gradient_of_norm(options, values, scale, dy)
    d_values = root * (d_normed - normed * (root * product))
    if options.gate_first:
        d_scale, d_y, d_factor = dy * normed, d_values * values.factor, d_values * values.y
    else:
        d_scale, d_y, d_factor = dy * values.factor * normed, d_values, dy * scale * normed
    _, d_gate = jax.jvp(ACTIVATIONS[options.activation], (values.gate,), (d_factor,))
    return _Gradients(d_y, d_gate, d_scale)


def _backward(options: NormOptions, saved, dy):
    """Return the gradients of `_normalize` in two passes: sums over channels; and the gradients, those of gate and scale apart from
    the others, because XLA stores less if not all of them share values, and joins the two in one pass.
    """
    square, x, gate, skip_input, scale, skip = saved
    arrays, wide = (x, gate, skip_input), square.dtype

    *first, d_first = _own_pass((*arrays, dy))
    values = _values(options, first, skip)
    d_normed = _gradient_of_norm(options, values, scale, d_first.astype(wide))
    product = _mean(d_normed * values.normed)

    of_input = _gradients(options, arrays, scale, skip, dy.astype(wide), square, product)
    # A barrier behind the first one: XLA joins two barriers before the same arrays.
    *last, d_last = _own_pass((*first, d_first))
    of_gate = _gradients(options, last, scale, skip, d_last.astype(wide), square, product)

    d_x, d_gate = of_input.y.astype(x.dtype), of_gate.gate.astype(gate.dtype)
    d_scale = jnp.sum(of_gate.scale, axis=(0, 1)).astype(scale.dtype)
    if skip is None:
        return d_x, d_gate, None, d_scale, None
    # The gradients of the skip are computed from that of x as it is stored, not from one in float32 beside it.
    d_x = _own_pass(d_x)
    stored = d_x.astype(wide)
    d_skip = jnp.sum(stored * skip_input.astype(wide), axis=(0, 1)).astype(skip.dtype)
    return d_x, d_gate, (skip * stored).astype(skip_input.dtype), d_scale, d_skip


def _gradient_of_norm(options: NormOptions, values: _Values, scale, dy):
    """Return the gradient of the normalised values, before the scale, from that of the output."""
    return dy * scale if options.gate_first else dy * (scale * values.factor)


_normalize.defvjp(_forward, _backward)
