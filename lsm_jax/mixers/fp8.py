"""Products of dense layers and of the head in 8-bit floats (FP8 training).

The forward pass multiplies float8_e4m3 numbers, and the backward pass multiplies them with gradients in float8_e5m2, each
tensor scaled by its largest absolute value (current scaling; Micikevicius et al., arXiv 2209.05433). Sums are float32, and
parameters and the optimizer remain float32. Kernels and their gradients pass through the dtype of activations, as without FP8.

A tensor's scale depends on all of its tokens. So a token's output depends on later tokens, by rounding only. Models are
therefore evaluated and sampled without FP8 (`ModelConfig.for_inference`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lsm_jax.mixers.layers import Dense
from lsm_jax.ops.core.narrow import BACKWARD, FORWARD, quantize
from lsm_jax.ops.normalization.gated_product import Product

Scaled = tuple[jax.Array, jax.Array]  # 8-bit floats and what multiplies them, a float32 scalar

# Smaller products do not gain from FP8, and tensor cores require multiples of 16.
LEAST_SIZE, MULTIPLE = 128, 16


def use_fp8(module: nnx.Module) -> list[str]:
    """Let the dense layers of a module multiply in FP8, and return their paths.

    Layers with fewer than 128 inputs or outputs, or whose inputs or outputs are not a multiple of 16, are not changed;
    nor are adapters, and products that are not dense layers: those of memories, attention, convolutions and experts (these
    have an option of their own, `MoEConfig.matmul`).
    """
    changed = []
    for path, layer in nnx.iter_graph(module):
        if not isinstance(layer, Dense):
            continue
        if fits(*layer.kernel.shape[-2:]):
            layer.product = project
            changed.append(".".join(map(str, path)))
    return sorted(changed)


def fits(*sizes: int) -> bool:
    """Return whether matrices of these sizes are multiplied in FP8: at least `LEAST_SIZE`, and multiples of `MULTIPLE`."""
    return min(sizes) >= LEAST_SIZE and not any(size % MULTIPLE for size in sizes)


def project(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return a dense layer's output by a product in FP8: x [..., D] times kernel [D, F] plus bias [F], in `dtype` (None
    is x's). The same arguments as `lsm_jax.mixers.layers.project`."""
    # The kernel is cast as by the other products, so that unrolled layers cast its stack once, in 16 bits.
    y = _product(x, kernel.astype(x.dtype)).astype(x.dtype if dtype is None else dtype)
    return y if bias is None else y + bias.astype(y.dtype)


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return x [..., D] times kernel [D, F], of one dtype, by a product in FP8, [..., F] in that dtype."""
    return _forward(x, kernel)[0]


def _forward(x, kernel):
    narrow_x, narrow_kernel = (quantize(z, FORWARD) for z in (x, kernel))
    y = scaled_product(narrow_x, narrow_kernel, (x.ndim - 1, 0), x.dtype)
    return y, (narrow_x, narrow_kernel)


def _backward(saved, grad):
    narrow_x, narrow_kernel = saved
    narrow = quantize(grad, BACKWARD)
    x_grad = scaled_product(narrow, narrow_kernel, (grad.ndim - 1, 1), grad.dtype)
    return x_grad, _kernel_gradient(narrow_x, narrow, grad.dtype)


_product.defvjp(_forward, _backward)


def _kernel_gradient(x: Scaled, grad: Scaled, dtype: DTypeLike) -> jax.Array:
    """Return the gradient [D, F] of a kernel, in `dtype`, from tokens x [..., D] and the gradient [..., F] of the output."""
    (narrow_x, x_scale), (narrow, scale) = x, grad
    rows, grads = (z.reshape(-1, z.shape[-1]) for z in (narrow_x, narrow))
    return scaled_product((rows, x_scale), (grads, scale), (0, 0), jnp.float32).astype(dtype)


PRODUCT = Product(
    output=lambda y, kernel: _forward(y, kernel)[0],
    tokens_gradient=lambda d, kernel: scaled_product(
        quantize(d, BACKWARD), quantize(kernel, FORWARD), (d.ndim - 1, 1), d.dtype
    ),
    kernel_gradient=lambda y, d, kernel: _kernel_gradient(
        quantize(y, FORWARD), quantize(d, BACKWARD), kernel.dtype
    ),
)
"""The product in FP8 behind a gated norm (`lsm_jax.ops.normalization.gated_product`)."""


def scaled_product(x: Scaled, y: Scaled, axes: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """Return the product of x and the matrix y, both 8-bit floats with their scales, over the axis of each that `axes` names; sums are
    float32, and the result has `dtype`.

    A CPU, which has no such product, multiplies the same numbers in float32. On a GPU XLA replaces a product of 8-bit floats that are
    widened and scaled by cuBLAS's of the 8-bit floats, which scales its sums: a scale after the product would be another pass over
    the result where that is saved.
    """
    dimensions = (((axes[0],), (axes[1],)), ((), ()))

    def widened(*operands: Scaled) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST
        left, right = (narrow.astype(jnp.float32) * scale for narrow, scale in operands)
        return jax.lax.dot_general(left, right, dimensions, precision=precision).astype(dtype)

    def narrow(*operands: Scaled) -> jax.Array:
        left, right = (x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for x, scale in operands)
        return jax.lax.dot_general(left, right, dimensions, preferred_element_type=dtype)

    return jax.lax.platform_dependent(x, y, cpu=widened, default=narrow)
