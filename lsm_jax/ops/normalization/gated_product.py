"""The product behind a gated norm, together with the norm: one op, whose backward pass computes the norm once.

The gradient of the product's weights requires the norm's output, which rematerialisation would compute again in a pass of its own. On
Hopper the kernel of the norm's gradient stores it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import PALLAS, Call
from lsm_jax.ops.core.platforms import by_platform, compute_capabilities
from lsm_jax.ops.normalization.backends import MIN_TOKENS
from lsm_jax.ops.normalization.xla import NormOptions, in_few_passes
from pallas_kernels.requirements import first_unmet

_OP = "gated_rms_norm"


class Product(NamedTuple):
    """A product of tokens y [B, T, I] with a kernel [I, D], and its gradients, given that of the output, d [B, T, D].

    Attributes:
        output: of y and the kernel, [B, T, D].
        tokens_gradient: of d and the kernel, [B, T, I].
        kernel_gradient: of y, d and the kernel, [I, D].
    """

    output: Callable[[jax.Array, jax.Array], jax.Array]
    tokens_gradient: Callable[[jax.Array, jax.Array], jax.Array]
    kernel_gradient: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _multiply(y: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(y, kernel, precision=jax.lax.Precision.DEFAULT)


def _tokens_gradient(d: jax.Array, kernel: jax.Array) -> jax.Array:
    like = jax.ShapeDtypeStruct((*d.shape[:-1], kernel.shape[0]), d.dtype)
    return jax.linear_transpose(lambda y: _multiply(y, kernel), like)(d)[0]


def _kernel_gradient(y: jax.Array, d: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.linear_transpose(lambda kernel: _multiply(y, kernel), kernel)(d)[0]


PLAIN = Product(_multiply, _tokens_gradient, _kernel_gradient)
"""The product in the dtype of its operands."""


def fuses_product(x: jax.Array, gate: jax.Array, group: int) -> bool:
    """Return whether `gated_norm_product` serves the gated norm of x [B, T, H, V] in groups of `group` heads: on one Hopper GPU, for what
    the kernel supports.
    """
    from pallas_kernels.gated_norm import unsupported

    one = all(n == 1 for n in jax.sharding.get_abstract_mesh().shape.values())
    if not one or compute_capabilities() != {"9.0"} or x.shape[1] < MIN_TOKENS:
        return False
    call = Call(_OP, None, dict(x=x, gate=gate))
    return first_unmet(PALLAS, call) is None and unsupported(x, gate, None, group) is None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_norm_product(
    options: NormOptions,
    product: Product,
    x: Float[Array, "B T H V"],
    gate: Float[Array, "B T H V"],
    scale: Float[Array, "H V"],
    kernel: Float[Array, "I D"],
    bias: Float[Array, "H V"] | None = None,
) -> Float[Array, "B T D"]:
    """Return `gated_rms_norm(x, gate + bias, scale)`, with the heads side by side (H V = I channels), times a kernel of x's dtype by
    `product`. It has reverse-mode derivatives only. `fuses_product` says for which calls it is.

    The kernel rounds the gradient of a float32 gate to x's dtype, as the product that computed the gate does.
    """
    y = by_platform(
        x, gate, scale, bias, cuda=functools.partial(_by_kernel, options), default=functools.partial(_by_xla, options)
    )  # fmt: skip
    return product.output(y.reshape(*x.shape[:2], -1), kernel)


def _by_kernel(options: NormOptions, x, gate, scale, bias) -> jax.Array:
    from pallas_kernels.gated_norm import gated_rms_norm

    return gated_rms_norm(x, gate, scale, bias=bias, **options._asdict())


def _by_xla(options: NormOptions, x, gate, scale, bias) -> jax.Array:
    return in_few_passes(options, x, gate if bias is None else gate + bias, scale)


def _forward(options, product, *inputs):
    return gated_norm_product(options, product, *inputs), inputs


def _backward(options, product, inputs, d_output):
    x, gate, scale, kernel, bias = inputs
    dy = product.tokens_gradient(d_output, kernel)
    d_x, d_gate, d_scale, *d_bias, y = by_platform(
        x, gate, scale, bias, dy.reshape(x.shape),
        cuda=functools.partial(_gradients_by_kernel, options), default=functools.partial(_gradients_by_xla, options),
    )  # fmt: skip
    d_kernel = product.kernel_gradient(y.reshape(dy.shape), d_output, kernel)
    return d_x, d_gate, d_scale, d_kernel, *(d_bias or [None])


def _gradients_by_kernel(options: NormOptions, x, gate, scale, bias, dy):
    from pallas_kernels.gated_norm import gated_rms_norm_gradients

    results = gated_rms_norm_gradients(x, gate, scale, dy, bias, **options._asdict())
    d_x, d_gate, *others = results
    return d_x, d_gate.astype(gate.dtype), *others


def _gradients_by_xla(options: NormOptions, x, gate, scale, bias, dy):
    y, pull = jax.vjp(functools.partial(_by_xla, options), x, gate, scale, bias)
    d_x, d_gate, d_scale, d_bias = pull(dy)
    return d_x, d_gate, d_scale, *([] if bias is None else [d_bias]), y


gated_norm_product.defvjp(_forward, _backward)
