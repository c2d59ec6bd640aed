"""The gradients of `token_mixes` by one Hopper kernel."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.rwkv7 import tokens

_AHEAD = 2
_WIDTH = 128  # channels of a row of the tiles, which have no heads

REQUIREMENTS = (
    tokens.in_dtype("x before", jnp.bfloat16),
    Requirement("at most 8 mixes", lambda c: len(c["shares"]) <= 8, lambda c: str(len(c["shares"]))),
    Requirement(
        f"a multiple of {tokens.CHANNELS} channels",
        lambda c: c["x"].shape[2] % tokens.CHANNELS == 0,
        lambda c: str(c["x"].shape[2]),
    ),
    tokens.divided("x", _AHEAD),
)  # fmt: skip


def unsupported(call: Mapping[str, Any]) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `token_mixes`, its arrays (or their shapes and dtypes) by name,
    does not meet, or None if it supports it.
    """
    return first_unmet(REQUIREMENTS, call)


def backward(
    step_back: jax.Array, shares: jax.Array, gradients: Sequence[jax.Array], interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of the tokens and of the tokens before them, [B, T, D] in bfloat16, and of the shares, [N, D] in float32.

    Args:
        step_back: the tokens before minus the tokens, [B, T, D] bfloat16.
        shares: [N, D] in float32, as they multiply.
        gradients: of the N mixes, [B, T, D] bfloat16.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.
    """
    numbers = [str(i) for i in range(len(gradients))]

    def compute(given, weights, total):
        before = functools.reduce(operator.add, (given[n] * weights[n] for n in numbers))
        whole = functools.reduce(operator.add, (given[n] for n in numbers))
        outputs = dict(x=whole - before, before=before)
        return outputs, {n: given[n] * given["step_back"] for n in numbers}

    shape = step_back.shape

    def rows(x):
        return x.reshape(*(-1,) * (x.ndim == 3), shape[2] // _WIDTH, _WIDTH)

    arrays = dict(zip(numbers, gradients, strict=True)) | dict(step_back=step_back)
    results = tokens.run(
        compute,
        arrays={n: rows(x) for n, x in arrays.items()},
        weights={n: rows(x) for n, x in zip(numbers, shares, strict=True)},
        outputs=("x", "before"),
        sums=numbers,
        ahead=_AHEAD,
        name="token_mixes_backward",
        interpret=interpret,
    )
    d_shares = jnp.stack([results[n].reshape(shape[2]) for n in numbers])
    return results["x"].reshape(shape), results["before"].reshape(shape), d_shares
