"""Rounding of arrays to 8-bit floats, with one scale for an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return x divided by a scale, in the 8-bit float `dtype`, and the scale, a float32 scalar (`scale_for`)."""
    scale = scale_for(jnp.max(jnp.abs(x)), dtype)
    return rounded(x, scale, dtype), scale


def rounded(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return x divided by `scale`, a scalar, in the 8-bit float `dtype`."""
    return (x.astype(jnp.float32) / scale).astype(dtype)


def scale_for(most: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the scale of an array whose largest absolute value is `most`, a scalar: the smallest power of two, in float32, with which no
    number of the array exceeds the largest of the 8-bit float `dtype`. The scale of zeros is 1; if `most` is not finite, the scale
    is not."""
    largest, most = float(jnp.finfo(dtype).max), most.astype(jnp.float32)
    mantissa, exponent = jnp.frexp(most / largest)  # the mantissa is at least 0.5 and less than 1
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    # Not below the smallest number that is not subnormal, which processors may take for 0.
    scale = jnp.maximum(jnp.ldexp(jnp.float32(1), exponent), jnp.finfo(jnp.float32).tiny)
    return jnp.where(jnp.isfinite(most), jnp.where(most == 0, 1.0, scale), most)
