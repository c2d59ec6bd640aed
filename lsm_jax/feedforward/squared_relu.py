"""The squared ReLU between two products, differentiated from its result."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lsm_jax.mixers.layers import recomputed
from lsm_jax.ops.core.saved import saved


@jax.custom_jvp
def squared_relu(x: jax.Array) -> jax.Array:
    """Return `relu(x)²`, in x's dtype: bfloat16, float32 or float64, since in float16 squares of small numbers, and their derivative,
    are 0.

    Its derivative `2 relu(x)` is computed from the result, as `2 sqrt(relu(x)²)`: the product behind it requires the result for its
    gradient, so that one array is saved for both, and none is computed again.
    """
    return jnp.square(jax.nn.relu(x))


@squared_relu.defjvp
def _tangent(primals, tangents):
    y = saved(squared_relu(*primals))
    return y, _product_with_derivative(y, *tangents)


@recomputed
def _product_with_derivative(y: jax.Array, d_x: jax.Array) -> jax.Array:
    """Return the tangent of `y = relu(x)²` for that of x, `2 sqrt(y) d_x`."""
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    positive = wide > 0
    # Where y is 0 it takes the root of 1, whose derivative is finite: second derivatives multiply it by 0.
    root = jnp.where(positive, jnp.sqrt(jnp.where(positive, wide, 1)), 0)
    return (2 * root * d_x.astype(wide.dtype)).astype(y.dtype)
