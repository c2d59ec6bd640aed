"""Feature maps φ of linear attention: replacements of the exponential of softmax attention's scores."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers.layers import matmul_precision, parameter

_DPFP_ORDER = 4
_SUM_EPS = 1e-4


def _dpfp(x: jax.Array) -> jax.Array:
    both = jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)
    products = [both * jnp.roll(both, shift, axis=-1) for shift in range(1, _DPFP_ORDER + 1)]
    return jnp.concatenate(products, axis=-1)


FIXED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "elu": lambda x: jax.nn.elu(x) + 1,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "dpfp": _dpfp,
}
LEARNED = {"t2r": 1, "hedgehog": 1, "elementwise_product": 2}
"""Maps with parameters, and how many matrices a head has."""

NON_NEGATIVE = ("elu", "relu", "dpfp", "t2r", "hedgehog")
"""Maps whose sums cannot vanish by cancelling."""


def num_features(name: str, size: int) -> int:
    """Return the number of features that the feature map called `name` computes for a head of `size` channels."""
    return size * {"dpfp": 2 * _DPFP_ORDER, "hedgehog": 2}.get(name, 1)


def normalize_sum(x: jax.Array) -> jax.Array:
    """Divide queries or keys by their sum over the last axis, `x / (sum(x) + 1e-4)`, in float32; return them in x's
    dtype.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide / (jnp.sum(wide, axis=-1, keepdims=True) + _SUM_EPS)).astype(x.dtype)


class HeadDense(nnx.Module):
    """A dense layer for each head, `y = x W (+ b)`: heads [B, T, H, K] to [B, T, H, F], where each head has its own
    matrix W [K, F], or all heads have the same if `kernel` is [1, K, F].
    """

    def __init__(self, kernel: jax.Array, *, bias: bool):
        axis = None if len(kernel) == 1 else "heads"
        self.kernel = parameter(kernel, (axis, None, None), weight_decay=True)
        zeros = jnp.zeros(kernel.shape[::2], jnp.float32)
        self.bias = parameter(zeros, (axis, None), weight_decay=False) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiply each head of x [B, T, H, K] by its matrix, add its bias if there is one, and return [B, T, H, F] in x's
        dtype.
        """
        kernel, precision = self.kernel[...].astype(x.dtype), matmul_precision(x.dtype)
        kernel = jnp.broadcast_to(kernel, (x.shape[2], *kernel.shape[1:]))
        y = jnp.einsum("bthk,hkf->bthf", x, kernel, precision=precision)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class FeatureMap(nnx.Module):
    """A feature map of linear attention, applied to the heads of queries or of keys; a learned one has matrices for
    each head.

    "t2r" is relu(x W) (arXiv 2103.13076). "hedgehog" is softmax([2y, -2y]) over the 2K features of y = x W +
    b, W starting as the identity (arXiv 2402.04347, and flash-linear-attention's code for the 2).
    "elementwise_product" is (x W + b) ⊙ (x W' + b'). "dpfp" multiplies [relu(x), relu(-x)] by itself rolled
    by 1, 2, 3 and 4 channels (arXiv 2102.11174).

    Args:
        name: a name in `FIXED` or `LEARNED`.
        num_heads: number of matrices: H, or 1 if all heads have the same.
        size: channels of a head, K.
        init_std: standard deviation of the initial W, except that of "hedgehog".
    """

    def __init__(self, name: str, num_heads: int, size: int, *, rngs: nnx.Rngs, init_std: float):
        self.name = name
        shape = (num_heads, size, size)

        def dense() -> HeadDense:
            kernel = init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
            if name == "hedgehog":
                kernel = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), shape)
            return HeadDense(kernel, bias=name != "t2r")

        self.first = dense() if LEARNED.get(name, 0) > 0 else None
        self.second = dense() if LEARNED.get(name, 0) > 1 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the feature map to each head of queries or keys x [B, T, H, K]; return the features [B, T, H, features]
        in x's dtype.
        """
        if self.first is None:
            return FIXED[self.name](x)
        y = self.first(x)
        if self.second is not None:
            return y * self.second(x)
        if self.name == "t2r":
            return jax.nn.relu(y)
        y = 2 * y.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jax.nn.softmax(jnp.concatenate([y, -y], axis=-1), axis=-1).astype(x.dtype)
