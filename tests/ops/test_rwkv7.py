"""Tests of `token_mixes`, `rwkv7_gates` and `rwkv7_output` on a CPU: values as in numpy, gradients as JAX differentiates the definition, and
bad arguments named.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.ops.rwkv7 import xla


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def gates_arguments() -> dict[str, Any]:
    names = (
        "r", "k", "v", "rate", "decay", "removal", "rate_of_key", "bonus", "rate_bias", "decay_bias"
    )  # fmt: skip
    return {n: normal(*((2, 5, 3, 8) if i < 5 else (3, 8)), seed=i) for i, n in enumerate(names)}


def output_arguments() -> dict[str, Any]:
    names = ("o", "current", "gate", "scale", "bias")
    return {n: normal(*((2, 5, 3, 8) if i < 3 else (3, 8)), seed=i) for i, n in enumerate(names)}


def test_gates_equal_numpy():
    given = {n: np.asarray(x, np.float64) for n, x in gates_arguments().items()}

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    rate = sigmoid(given["rate"] + given["rate_bias"])
    removed = given["k"] * given["removal"]
    removed = removed / np.sqrt(np.sum(removed**2, axis=-1, keepdims=True) + 1e-6)
    k = given["k"] * (1 + (rate - 1) * given["rate_of_key"])
    share = np.sum(given["r"] * k * given["bonus"], axis=-1, keepdims=True)
    wanted = dict(
        r=given["r"], k=k, a=-removed, b=removed * rate, log_decay=-np.exp(-0.5) * sigmoid(given["decay"] + given["decay_bias"]),
        current=share * given["v"],
    )  # fmt: skip
    got = ops.rwkv7_gates(**gates_arguments())._asdict()
    for name, x in wanted.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


def test_output_equals_numpy():
    given = {n: np.asarray(x, np.float64) for n, x in output_arguments().items()}
    o = given["o"] - given["o"].mean(axis=-1, keepdims=True)
    o = o / np.sqrt(np.mean(o**2, axis=-1, keepdims=True) + 1e-3)
    wanted = (o * given["scale"] + given["bias"] + given["current"]) * given["gate"]
    got = ops.rwkv7_output(**output_arguments(), eps=1e-3)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mixes_and_their_gradients_equal_the_definition(dtype):
    """The values are those of the definition to the bit; the gradients are those that JAX derives in float32, to rounding."""
    arrays = dict(x=normal(2, 5, 8, dtype=dtype), before=normal(2, 5, 8, dtype=dtype, seed=1))
    arrays["shares"] = normal(3, 8)
    gradients = tuple(normal(2, 5, 8, dtype=dtype, seed=i) for i in range(2, 6))
    got, pull = jax.vjp(lambda a: ops.token_mixes(**a, twice=(1,)), arrays)
    first, second, third = xla.mixes(**arrays)
    for a, b in zip(got, (first, second, third, second), strict=True):
        np.testing.assert_array_equal(a, b)
    rounded = arrays | dict(shares=arrays["shares"].astype(dtype))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (rounded, gradients))
    wanted = jax.vjp(lambda a: xla.mixes(**a, twice=(1,)), wide[0])[1](wide[1])[0]
    for name, x in pull(gradients)[0].items():
        assert x.dtype == arrays[name].dtype
        tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
        a, b = np.asarray(x, np.float64), np.asarray(wanted[name], np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


def test_mixes_without_tokens_before_are_those_of_the_row():
    """With `before=None` values and gradients are those with the shifted rows, zeros before the first token."""
    x, shares = normal(2, 5, 8), normal(3, 8)

    def given(x, shares):
        before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
        return ops.token_mixes(x, before, shares)

    got, pull = jax.vjp(lambda x, shares: ops.token_mixes(x, None, shares), x, shares)
    wanted, pull_wanted = jax.vjp(given, x, shares)
    gradients = tuple(normal(2, 5, 8, seed=i) for i in range(3))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(pull(gradients), pull_wanted(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_names_what_is_not_accepted():
    gates, output = gates_arguments(), output_arguments() | dict(eps=1e-5)
    mixes: dict[str, Any] = dict(x=normal(2, 5, 8), before=normal(2, 5, 8), shares=normal(3, 8))
    for op, arguments, changed, message in (
        (ops.token_mixes, mixes, dict(before=normal(2, 4, 8)), "before has shape"),
        (ops.token_mixes, mixes, dict(before=normal(2, 5, 8, dtype=jnp.bfloat16)), "before has dtype bfloat16"),
        (ops.token_mixes, mixes, dict(shares=normal(3, 7)), "shares has shape"),
        (ops.token_mixes, mixes, dict(twice=(3,)), "twice=.*0 to 2"),
        (ops.token_mixes, mixes, dict(twice=(1.0,)), "twice=.*0 to 2"),
        (ops.token_mixes, mixes, dict(twice=(1, 1)), "twice=.*a tuple of different indices"),
        (ops.token_mixes, mixes, dict(twice=1), "twice=1; accepted is a tuple"),
        (ops.token_mixes, mixes, dict(implementation="cutile"), "implementation='cutile'"),
        (ops.rwkv7_gates, gates, dict(k=normal(2, 5, 24)), "k has shape"),
        (ops.rwkv7_gates, gates, dict(rate=normal(2, 5, 3, 7)), "rate has shape"),
        (ops.rwkv7_gates, gates, dict(bonus=normal(24)), "bonus has shape"),
        (ops.rwkv7_gates, gates, dict(decay_bias=normal(24)), "decay_bias has shape"),
        (ops.rwkv7_gates, gates, dict(rate=normal(2, 5, 3, 8, dtype=jnp.bfloat16)), "rate has dtype bfloat16; accepted are float32"),
        (ops.rwkv7_gates, gates, dict(decay=normal(2, 5, 3, 8, dtype=jnp.bfloat16)), "decay has dtype bfloat16; accepted is rate's"),
        (ops.rwkv7_output, output, dict(current=normal(2, 5, 3, 8, dtype=jnp.bfloat16)), "current has dtype bfloat16; accepted is o's"),
        (ops.rwkv7_output, output, dict(gate=normal(2, 5, 3, 8, dtype=jnp.bfloat16)), "gate has dtype bfloat16; accepted is o's"),
        (ops.rwkv7_output, output, dict(o=normal(2, 5, 24)), "o has shape"),
        (ops.rwkv7_output, output, dict(gate=normal(2, 5, 3, 7)), "gate has shape"),
        (ops.rwkv7_output, output, dict(bias=normal(24)), "bias has shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            op(**arguments | changed)
