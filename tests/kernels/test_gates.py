"""Tests of the kernels with extreme gates, in the interpreters: log decays whose exponential is 0 in float32,
and decays of 1; values and gradients are compared with the recurrence.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter
from pallas_kernels.delta_rule import delta_rule
from pallas_kernels.linear_attention import linear_attention
from tests.kernels import test_delta_rule_gpu as of_delta
from tests.kernels import test_linear_attention_gpu as of_linear
from tests.kernels.test_linear_attention_gpu import error
from tests.marks import slow_after

LENGTH = 128
# Log decays of single tokens: the first and the last token of a chunk, and two consecutive tokens.
STRONG = {5: -1e3, 20: -1e9, 21: -1e3, 63: -1e9, 64: -1e9, 100: -3e38, 127: -1e3}
OPS: dict[str, Any] = {
    "scalar": (of_linear, linear_attention, True),
    "channel": (of_linear, linear_attention, "channel"),
    "gated delta rule": (of_delta, delta_rule, True),
    "KDA": (of_delta, delta_rule, "channel"),
}


@pytest.mark.parametrize("gates", slow_after(1, ["strong", "none"]))
@pytest.mark.parametrize("op", slow_after(1, list(OPS)))
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_tpu"])
def test_gates_of_any_strength_are_finite_and_right(implementation, op, gates):
    """With log decays of any strength, the values and all gradients of an op's kernel are finite and equal
    those of the recurrence.
    """
    module, kernel, decay = OPS[op]
    x = module.make(LENGTH, 1, 1, 1, 64, 64, documents=False, decay=decay)
    x = {name: a for name, a in x.items() if name != "run"}
    if gates == "none":
        x["log_decay"] = jnp.zeros_like(x["log_decay"])
    else:
        for at, by in STRONG.items():  # for every other channel, or memory
            x["log_decay"] = x["log_decay"].at[:, at, ..., ::2].set(by)
    if "beta" in x:  # a negative beta makes a memory grow without limit if nothing decays
        x["beta"] = jnp.abs(x["beta"])
    interpret = gpu_interpreter() if implementation == "mosaic_gpu" else True

    def fused(x):
        return kernel(
            **x, run=None, scale=module.SCALE, implementation=implementation, interpret=interpret
        )

    values, pull = jax.vjp(fused, x)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), x)
    expected, expected_pull = jax.vjp(lambda x: module.by_token(**x, run=None), wide)
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in values)
    (gradients,) = pull(cotangents)
    (wanted,) = expected_pull(tuple(a.astype(jnp.float32) for a in cotangents))
    for got, want in zip(values, expected, strict=True):
        assert np.isfinite(np.asarray(got, np.float32)).all()
        assert error(got, want) < 5e-3
    for name, got in gradients.items():
        if got is not None:
            assert np.isfinite(np.asarray(got, np.float32)).all(), name
            assert error(got, wanted[name]) < 1e-2, name
