"""`rwkv7_output` and its gradients by one Hopper kernel each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.requirements import first_unmet
from pallas_kernels.rwkv7 import tokens

_AHEAD = 2
_ARRAYS = ("o", "current", "gate")
_WEIGHTS = ("scale", "bias")

REQUIREMENTS = (
    tokens.in_dtype("o current gate", jnp.bfloat16),
    *tokens.whole_heads("o"),
    tokens.divided("o", _AHEAD),
)


def unsupported(call: Mapping[str, Any]) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `rwkv7_output`, its arrays (or their shapes and dtypes) by name,
    does not meet, or None if it supports it.
    """
    return first_unmet(REQUIREMENTS, call)


def forward(arguments: Mapping[str, jax.Array], eps: float, interpret: Any = False) -> jax.Array:
    """Return the result of `rwkv7_output`, whose arguments are given by name, [B, T, H, V] bfloat16.

    Args:
        arguments: those of `rwkv7_output`.
        eps: added to the variance.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.
    """
    shape = arguments["o"].shape
    part = 1 / shape[3]

    def compute(given, weights, total):
        normed = _normed(given["o"], total, part, eps)[0] * weights["scale"] + weights["bias"]
        return dict(y=(normed + given["current"]) * given["gate"]), {}

    results = tokens.run(
        compute,
        arrays={n: arguments[n].reshape(-1, *shape[2:]) for n in _ARRAYS},
        weights={n: arguments[n] for n in _WEIGHTS},
        outputs=dict(y=jnp.bfloat16),
        ahead=_AHEAD,
        name="rwkv7_output",
        interpret=interpret,
    )
    return results["y"].reshape(shape)


def _normed(o, total, part: float, eps: float):
    """Return the norm of heads o without its weights, and the factor that divides by the deviation."""
    centred = o - total(o) * part
    root = lax.rsqrt(total(centred * centred) * part + eps)
    return centred * root, root


def backward(
    arguments: Mapping[str, jax.Array], dy: jax.Array, eps: float, interpret: Any = False
) -> dict[str, jax.Array]:
    """Return the gradients of the arguments of `rwkv7_output` by name.

    With c the channels of a head minus their mean, n = c r, r = 1 / sqrt(mean(c²) + eps) and dn the gradient of n, that of the head is
    `r (dn - mean(dn) - n mean(dn n))`.

    Args:
        arguments: those of `rwkv7_output`.
        dy: the gradient of its result, [B, T, H, V] bfloat16.
        eps: added to the variance.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.
    """
    shape = arguments["o"].shape
    part = 1 / shape[3]

    def compute(given, weights, total):
        normed, root = _normed(given["o"], total, part, eps)
        d_sum = given["dy"] * given["gate"]
        d_normed = d_sum * weights["scale"]
        along = total(d_normed * normed) * part
        outputs = dict(
            o=root * (d_normed - total(d_normed) * part - normed * along),
            current=d_sum,
            gate=given["dy"] * (normed * weights["scale"] + weights["bias"] + given["current"]),
        )
        return outputs, dict(scale=d_sum * normed, bias=d_sum)

    arrays = {n: arguments[n] for n in _ARRAYS} | dict(dy=dy)
    results = tokens.run(
        compute,
        arrays={n: x.reshape(-1, *shape[2:]) for n, x in arrays.items()},
        weights={n: arguments[n] for n in _WEIGHTS},
        outputs=dict.fromkeys(_ARRAYS, jnp.bfloat16),
        sums=_WEIGHTS,
        ahead=_AHEAD,
        name="rwkv7_output_backward",
        interpret=interpret,
    )
    return results | {n: results[n].reshape(shape) for n in _ARRAYS}
