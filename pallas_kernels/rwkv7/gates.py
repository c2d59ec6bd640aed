"""`rwkv7_gates` and its gradients by one Hopper kernel each."""

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
_BIASES = ("rate_bias", "decay_bias")  # each is left out where it is not given
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


def forward(arguments: Mapping[str, jax.Array], interpret: Any = False) -> dict[str, jax.Array]:
    """Return the results of `rwkv7_gates`, whose arguments are given by name, by name: k, a, b and current in bfloat16, log_decay in
    float32. `interpret` are parameters of Mosaic GPU's interpreter, to run on a CPU.
    """

    def compute(given, weights, total):
        rate = _sigmoid(_biased(given, weights, "rate"))
        removed, _ = _unit(given["k"] * weights["removal"], total)
        written = _written(given["k"], rate, weights["rate_of_key"])
        share = total(given["r"] * weights["bonus"] * written)
        return dict(
            k=written,
            a=-removed,
            b=removed * rate,
            log_decay=_LOWEST * _sigmoid(_biased(given, weights, "decay")),
            current=share * given["v"],
        ), {}

    shape = arguments["k"].shape
    results = tokens.run(
        compute,
        arrays={n: arguments[n].reshape(-1, *shape[2:]) for n in _ARRAYS},
        weights=_weights(arguments),
        outputs=dict.fromkeys(("k", "a", "b", "current"), jnp.bfloat16) | dict(log_decay=jnp.float32),
        ahead=1,
        name="rwkv7_gates",
        interpret=interpret,
    )  # fmt: skip
    return {n: x.reshape(shape) for n, x in results.items()}


def _weights(arguments: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {n: arguments[n] for n in (*_WEIGHTS, *_BIASES) if n in arguments}


def _biased(given, weights, name: str):
    """Return the rate or the decay before its sigmoid, with its bias where there is one."""
    bias = weights.get(f"{name}_bias")
    return given[name] if bias is None else given[name] + bias


def _sigmoid(x):
    root = lax.rsqrt(1.0 + jnp.exp(-x))  # without a division
    return root * root


def _unit(u, total):
    """Return each head of u divided by its length, and the inverse of the length."""
    inverse = lax.rsqrt(total(u * u) + _EPS)
    return u * inverse, inverse


def _written(k, rate, rate_of_key):
    """Return the keys that are added to the memory, rounded as they are stored."""
    return (k * (1.0 + (rate - 1.0) * rate_of_key)).astype(jnp.bfloat16).astype(jnp.float32)


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
        gradients: of its results r, k, a, b, log_decay and current.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.
    """

    def compute(given, weights, total):
        removal, rate_of_key, bonus = (weights[n] for n in _WEIGHTS)
        r, k, d_a, d_b, d_current = (given[n] for n in ("r", "k", "d_a", "d_b", "d_current"))
        rate = _sigmoid(_biased(given, weights, "rate"))
        removed, inverse = _unit(k * removal, total)
        d_removed = d_b * rate - d_a
        d_u = inverse * (d_removed - removed * total(d_removed * removed))
        written = _written(k, rate, rate_of_key)
        # The token's value, times the share Σ r k̃ bonus, goes into the output.
        d_share = total(d_current * given["v"])
        share = total(r * bonus * written)
        d_written = given["d_k"] + d_share * (r * bonus)
        d_rate = d_b * removed + d_written * (k * rate_of_key)
        log_decay = given["log_decay"]
        # With s the sigmoid, log_decay = LOWEST s: its derivative LOWEST s (1 - s) requires no other array.
        d_decay = given["d_log_decay"] * (log_decay - log_decay * log_decay * (1 / _LOWEST))
        d_rate = d_rate * (rate * (1.0 - rate))
        outputs = dict(
            r=given["d_r"] + d_share * written * bonus,
            k=d_u * removal + d_written * (1.0 + (rate - 1.0) * rate_of_key),
            v=d_current * share,
            rate=d_rate,
            decay=d_decay,
        )
        return outputs, dict(
            removal=d_u * k,
            rate_of_key=d_written * (k * (rate - 1.0)),
            bonus=d_share * written * r,
            rate_bias=d_rate,
            decay_bias=d_decay,
        )

    shape = arguments["k"].shape
    weights = _weights(arguments)
    arrays = {n: arguments[n] for n in ("r", "k", "v", "rate")} | dict(log_decay=log_decay)
    arrays |= {f"d_{n}": gradients[n] for n in ("r", "k", "a", "b", "log_decay", "current")}
    results = tokens.run(
        compute,
        arrays={n: x.reshape(-1, *shape[2:]) for n, x in arrays.items()},
        weights=weights,
        outputs=dict.fromkeys(_ARRAYS, jnp.bfloat16),
        sums=weights,
        ahead=1,
        name="rwkv7_gates_backward",
        shared_sums=weights,
        interpret=interpret,
    )
    return results | {n: results[n].reshape(shape) for n in _ARRAYS}
