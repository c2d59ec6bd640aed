"""The gated root-mean-square norm `scale ⊙ norm(y) ⊙ a` or `scale ⊙ norm(y ⊙ a)` of y = x + skip ⊙ skip_input, with the
activation a of a gate, by a fused kernel that reads every array once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_norm import hopper
from pallas_kernels.residuals import behind_barrier


class Call(NamedTuple):
    """The arrays of a call of `gated_rms_norm` (or their shapes and dtypes) by which the kernel decides whether it supports the
    call, and the number of consecutive heads that are normalised together.
    """

    x: Any
    gate: Any
    skip_input: Any
    group: int


class Options(NamedTuple):
    """The arguments of a call of `gated_rms_norm` that are not arrays."""

    eps: float
    group: int
    activation: str
    gate_first: bool
    interpret: Any


def unsupported(x, gate, skip_input, group: int) -> str | None:
    """Return the first requirement that a call of `gated_rms_norm` with these arrays (or their shapes and dtypes; `skip_input` may
    be None) and groups of `group` heads does not meet, or None if the kernel supports it.
    """
    return hopper.unsupported(Call(x, gate, skip_input, group))


def gated_rms_norm(
    x: Float[Array, "B T H V"],
    gate: Float[Array, "B T H V"],
    scale: Float[Array, ...],
    *,
    skip: Float[Array, " H"] | None = None,
    skip_input: Float[Array, "B T H V"] | None = None,
    bias: Float[Array, "H V"] | None = None,
    eps: float,
    group: int = 1,
    activation: str = "silu",
    gate_first: bool = False,
    interpret: Any = False,
) -> Float[Array, "B T H V"]:
    """Normalise groups of heads of x + skip ⊙ skip_input and multiply them by the activation of a gate; return the result, [B, T, H,
    V]. Differentiable once, in reverse mode.

    Args:
        x: [B, T, H, V]; `hopper.REQUIREMENTS` lists what the kernel requires.
        gate: [B, T, H, V], before its activation.
        scale: [V] or [H, V].
        skip: [H], or None.
        skip_input: [B, T, H, V], or None.
        bias: [H, V], added to the gate in float32, before its activation; or None.
        eps: added to the mean square.
        group: consecutive heads that are normalised together.
        activation: "silu" or "sigmoid".
        gate_first: whether the gate multiplies before the norm.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
    """
    arguments = _arguments(
        x,
        gate,
        scale,
        skip,
        skip_input,
        bias,
        Options(eps, group, activation, gate_first, interpret),
    )
    return _normalize(*arguments)


def gated_rms_norm_gradients(
    x: Float[Array, "B T H V"],
    gate: Float[Array, "B T H V"],
    scale: Float[Array, "H V"],
    dy: Float[Array, "B T H V"],
    bias: Float[Array, "H V"] | None = None,
    *,
    eps: float,
    group: int = 1,
    activation: str = "silu",
    gate_first: bool = False,
    interpret: Any = False,
) -> tuple[Any, ...]:
    """Return the gradients of x, gate, scale and, if it is not None, bias of `gated_rms_norm` without a skip, from that of the output,
    dy; and, last, the output, which the kernel has anyway: to compute it again for the weights of the product behind it would load x and
    gate once more. The gradient of the gate has x's dtype.

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
    """
    options, *inputs = _arguments(
        x, gate, scale, None, None, bias, Options(eps, group, activation, gate_first, interpret)
    )
    results: Any = hopper.backward(options, *inputs, dy=dy, again=True)
    d_x, d_gate, _, d_scale, _, d_bias, y = results
    d_biases = [] if bias is None else [d_bias.astype(bias.dtype)]
    return d_x, d_gate, d_scale.astype(scale.dtype), *d_biases, y


def _arguments(x, gate, scale, skip, skip_input, bias, options: Options) -> tuple[Any, ...]:
    """Return the arguments of `_normalize`."""
    if (requirement := unsupported(x, gate, skip_input, options.group)) is not None:
        raise NotImplementedError(f"gated_rms_norm: the kernel requires {requirement}")
    heads = x.shape[2:]
    wide = jnp.broadcast_to(scale.astype(jnp.float32), heads)
    if skip is not None:
        skip = jnp.broadcast_to(skip.astype(jnp.float32)[:, None], heads)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(jnp.float32), heads)
    return options, x, gate, skip_input, wide, skip, bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(options: Options, *inputs):
    return hopper.forward(options, *inputs)


def _forward(options, *inputs):
    return behind_barrier(_normalize(options, *inputs)), inputs


def _backward(options, inputs, dy):
    return hopper.backward(options, *inputs, dy=dy)[:6]


_normalize.defvjp(_forward, _backward)
