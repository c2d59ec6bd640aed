"""Products of dense layers in 8-bit floats (FP8 training).

The forward pass multiplies float8_e4m3 numbers, and the backward pass multiplies them with gradients in float8_e5m2, each
tensor scaled by its largest absolute value (current scaling; Micikevicius et al., arXiv 2209.05433). Sums are float32, and
parameters, gradients of kernels and the optimizer remain float32.

A tensor's scale depends on all of its tokens. So a token's output depends on later tokens, by rounding only. Models are
therefore evaluated and sampled without FP8 (`ModelConfig.for_inference`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lsm_jax.mixers.layers import Dense

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
# Smaller products do not gain from FP8, and tensor cores require multiples of 16.
LEAST_SIZE, MULTIPLE = 128, 16


def use_fp8(module: nnx.Module) -> list[str]:
    """Let the dense layers of a module multiply in FP8, and return their paths.

    Layers with fewer than 128 inputs or outputs, or whose inputs or outputs are not a multiple of 16, are not changed;
    nor are adapters, and products that are not dense layers: those of memories, attention, convolutions and experts.
    """
    changed = []
    for path, layer in nnx.iter_graph(module):
        if not isinstance(layer, Dense):
            continue
        sizes = layer.kernel.shape[-2:]
        if min(sizes) >= LEAST_SIZE and not any(size % MULTIPLE for size in sizes):
            layer.product = project
            changed.append(".".join(map(str, path)))
    return sorted(changed)


def project(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return a dense layer's output by a product in FP8: x [..., D] times kernel [D, F] plus bias [F], in `dtype` (None
    is x's). The same arguments as `lsm_jax.mixers.layers.project`."""
    y = _product(x, kernel).astype(x.dtype if dtype is None else dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return x divided by a scale, in the 8-bit float `dtype`, and the scale, a float32 scalar: the largest absolute value
    of x is the largest number of `dtype`. The scale of zeros is 1; if a number is not finite, the scale is not."""
    largest = float(jnp.finfo(dtype).max)
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(most == 0, 1.0, most / largest)
    scaled = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest)  # a cast does not saturate
    return scaled.astype(dtype), scale


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return x [..., D] times kernel [D, F] by a product in FP8, [..., F] in x's dtype."""
    return _forward(x, kernel)[0]


def _forward(x, kernel):
    (narrow_x, x_scale), (narrow_kernel, kernel_scale) = (quantize(z, FORWARD) for z in (x, kernel))
    y = _dot(narrow_x, narrow_kernel, (x.ndim - 1, 0), x.dtype)
    like = jnp.zeros((), kernel.dtype)  # of which only the dtype is used
    y *= (x_scale * kernel_scale).astype(x.dtype)
    return y, (narrow_x, narrow_kernel, x_scale, kernel_scale, like)


def _backward(saved, grad):
    x, kernel, x_scale, kernel_scale, like = saved
    narrow, scale = quantize(grad, BACKWARD)
    x_grad = _dot(narrow, kernel, (narrow.ndim - 1, 1), grad.dtype)
    rows, grads = (z.reshape(-1, z.shape[-1]) for z in (x, narrow))
    kernel_grad = _dot(rows, grads, (0, 0), jnp.float32) * (scale * x_scale)
    return x_grad * (scale * kernel_scale).astype(grad.dtype), kernel_grad.astype(like.dtype)


_product.defvjp(_forward, _backward)


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """Return the product of x and the matrix y, both 8-bit floats, over the axis of each that `axes` names; sums are
    float32, and the result has `dtype`. A CPU, which has no such product, multiplies the same numbers in float32."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))

    def widened(x: jax.Array, y: jax.Array) -> jax.Array:
        wide_x, wide_y = x.astype(jnp.float32), y.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(wide_x, wide_y, dimensions, precision=precision).astype(dtype)

    def narrow(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, dimensions, preferred_element_type=dtype)

    return jax.lax.platform_dependent(x, y, cpu=widened, default=narrow)
