"""SwiGLU's hidden layer and the product behind it: one op, whose backward pass computes the hidden layer where it computes its gradient.

The gradient of the product's weights requires the hidden layer. Rematerialisation that does not save it would compute it in a pass of its
own. On Hopper the kernel of its gradient stores it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import PALLAS, Call
from lsm_jax.ops.core.platforms import by_platform
from pallas_kernels.requirements import first_unmet


def unsupported(x: jax.Array, channels: int) -> str | None:
    """Return the first requirement of Hopper's kernel that `swiglu_product` does not meet for tokens x [B, T, D], of which gate and up of
    this number of channels each are computed; None if the kernel supports it.
    """
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels import swiglu

    gate_up = jax.ShapeDtypeStruct((*x.shape[:2], 2 * channels), x.dtype)
    call = Call("swiglu", None, dict(x=x))
    return first_unmet(PALLAS, call) or swiglu.unsupported(gate_up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu_product(
    scale: float, gate_up: Float[Array, "B T 2F"], kernel: Float[Array, "F D"]
) -> Float[Array, "B T D"]:
    """Return `(silu(scale gate) ⊙ up) W` for gate and up side by side in one array and a kernel W, both of one dtype. It has reverse-mode
    derivatives only. `unsupported` says for which arrays it is by the kernel.
    """
    return _product(_hidden(scale, gate_up), kernel)


def _hidden(scale: float, gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate if scale == 1 else scale * gate) * up


def _product(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(hidden, kernel, precision=jax.lax.Precision.DEFAULT)


def _forward(scale, gate_up, kernel):
    return swiglu_product(scale, gate_up, kernel), (gate_up, kernel)


def _backward(scale, inputs, d_output):
    gate_up, kernel = inputs
    shape = (*gate_up.shape[:2], kernel.shape[0])
    like = jax.ShapeDtypeStruct(shape, gate_up.dtype)
    (d_hidden,) = jax.linear_transpose(lambda hidden: _product(hidden, kernel), like)(d_output)
    d_gate_up, hidden = by_platform(
        gate_up, d_hidden, cuda=functools.partial(_by_kernel, scale), default=functools.partial(_by_xla, scale)
    )  # fmt: skip
    (d_kernel,) = jax.linear_transpose(lambda kernel: _product(hidden, kernel), kernel)(d_output)
    return d_gate_up, d_kernel


def _by_kernel(scale: float, gate_up, d_hidden):
    from pallas_kernels.swiglu import swiglu_gradients

    return swiglu_gradients(gate_up, d_hidden, scale=scale)


def _by_xla(scale: float, gate_up, d_hidden):
    hidden, pull = jax.vjp(functools.partial(_hidden, scale), gate_up)
    return *pull(d_hidden), hidden


swiglu_product.defvjp(_forward, _backward)
