"""The gradients of `rwkv7_gates` by one Hopper kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.requirements import first_unmet
from pallas_kernels.rwkv7 import tokens

_LOWEST = -math.exp(-0.5)  # the log decay is this times a sigmoid
_EPS = 1e-6  # of the keys' norm
_WEIGHTS = ("removal", "rate_of_key", "bonus")
_ARRAYS = ("r", "k", "v", "rate", "decay")

REQUIREMENTS = (
    tokens.in_dtype("r k v", jnp.bfloat16),
    tokens.in_dtype("rate decay", jnp.float32),
    *tokens.whole_heads("v"),
)


def unsupported(call: Mapping[str, Any]) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `rwkv7_gates`, its arrays (or their shapes and dtypes) by name,
    does not meet, or None if it supports it.
    """
    return first_unmet(REQUIREMENTS, call)


def backward(
    arguments: Mapping[str, jax.Array],
    log_decay: jax.Array,
    gradients: Mapping[str, jax.Array],
    interpret: Any = False,
) -> dict[str, jax.Array]:
    """Return the gradients of the arguments of `rwkv7_gates` by name, those of rate and decay rounded to bfloat16.

    With σ the sigmoid of the rate, u = k ⊙ removal, n = u / sqrt(Σ u² + eps) and dn the gradient of n, that of u is
    `(dn - n Σ dn n) / sqrt(Σ u² + eps)`; sums are over the channels of a head.

    Args:
        arguments: those of `rwkv7_gates`.
        log_decay: the log decay that it returned.
        gradients: of its results k, a, b, log_decay and current.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.
    """

    def compute(given, weights, total):
        removal, rate_of_key, bonus = (weights[n] for n in _WEIGHTS)
        r, k, d_a, d_b, d_current = (given[n] for n in ("r", "k", "d_a", "d_b", "d_current"))
        root = lax.rsqrt(1.0 + jnp.exp(-given["rate"]))  # the sigmoid without a division
        rate = root * root
        u = k * removal
        inverse = lax.rsqrt(total(u * u) + _EPS)
        removed = u * inverse
        d_removed = d_b * rate - d_a
        d_u = inverse * (d_removed - removed * total(d_removed * removed))
        factor = 1.0 + (rate - 1.0) * rate_of_key
        written = (k * factor).astype(jnp.bfloat16).astype(jnp.float32)
        # The token's value, times the share Σ r k̃ bonus, goes into the output.
        d_share = total(d_current * given["v"])
        share = total(r * bonus * written)
        d_written = given["d_k"] + d_share * (r * bonus)
        d_rate = d_b * removed + d_written * (k * rate_of_key)
        log_decay = given["log_decay"]
        outputs = dict(
            r=d_share * written * bonus,
            k=d_u * removal + d_written * factor,
            v=d_current * share,
            rate=d_rate * (rate * (1.0 - rate)),
            # With s the sigmoid, log_decay = LOWEST s: its derivative LOWEST s (1 - s) requires no other array.
            decay=given["d_log_decay"] * (log_decay - log_decay * log_decay * (1 / _LOWEST)),
        )
        return outputs, dict(
            removal=d_u * k,
            rate_of_key=d_written * (k * (rate - 1.0)),
            bonus=d_share * written * r,
        )

    shape = arguments["k"].shape
    arrays = {n: arguments[n] for n in ("r", "k", "v", "rate")} | dict(log_decay=log_decay)
    arrays |= {f"d_{n}": gradients[n] for n in ("k", "a", "b", "log_decay", "current")}
    results = tokens.run(
        compute,
        arrays={n: x.reshape(-1, *shape[2:]) for n, x in arrays.items()},
        weights={n: arguments[n] for n in _WEIGHTS},
        outputs=_ARRAYS,
        sums=_WEIGHTS,
        ahead=1,
        name="rwkv7_gates_backward",
        interpret=interpret,
    )
    return results | {n: results[n].reshape(shape) for n in _ARRAYS}
