"""Tests of the Triton kernels of linear attention in Triton's interpreter, which needs no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from pallas_kernels.linear_attention import linear_attention, unsupported
from pallas_kernels.triton import launch
from tests.kernels import triton_process
from tests.kernels.marks import requires_triton
from tests.kernels.triton_interpreted import CASES

# The largest errors, of the output and the final memory and of a gradient, by dtype of q, k and v.
TOLERANCE = {"float32": (2e-6, 2e-5), "float16": (5e-3, 1e-2), "bfloat16": (5e-3, 1e-2)}
# With decays of e^-30, whose sums over a chunk lose digits, in float32.
STRONG = (5e-5, 1e-4)
# All three dtypes of every kind of decay.
FAST = tuple(
    f"{decay}, {dtype}" for decay in ("token", "channel", "bonus", "value") for dtype in TOLERANCE
)


@pytest.fixture(scope="module")
def interpreted():
    return triton_process.lazy_results("triton_interpreted", CASES, FAST)


@requires_triton
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_equals_the_recurrence_in_value_and_every_gradient(name, interpreted):
    errors = interpreted(name)
    assert errors.pop("not_causal") == 0
    case = CASES[name]
    output, gradient = STRONG if case.strong is True else TOLERANCE[case.dtype]
    for field, error in errors.items():
        assert error < (gradient if field.startswith("d_") else output), (field, errors)


@requires_triton
def test_another_platform_runs_the_next_backend_of_a_tuple():
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    output, _ = ops.linear_memory(q, q, q, implementation=("triton", "xla"))
    expected, _ = ops.linear_memory(q, q, q, implementation="xla")
    np.testing.assert_array_equal(output, expected)


def test_names_the_missing_packages(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: False)
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    message = (
        r"implementation='triton' requires the packages jax-triton and triton \(extra \[triton\]"
    )
    with pytest.raises(NotImplementedError, match=message):
        ops.linear_memory(q, q, q, implementation="triton")


def test_names_the_unmet_requirement(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    decay = jnp.zeros((1, 64, 1))

    def why(*x, **more):
        return unsupported("triton", *x, **more)

    assert why(q, q, q, decay) is None
    assert why(q.astype(jnp.float16), q.astype(jnp.float16), q.astype(jnp.float16)) is None
    assert "log_decay [B, T, G, K] alone" in why(q, q, q, decay, bonus=jnp.zeros((1, 64)))
    assert "not bfloat16, float32" in why(q, q.astype(jnp.float32), q)
    wide = q.astype(jnp.float32)
    assert "default_matmul_precision('tensorfloat32')" in why(wide, wide, wide)
    with jax.default_matmul_precision("tensorfloat32"):
        assert why(wide, wide, wide) is None
        assert "all in float32, not bfloat16, float32" in why(q, wide, wide)
    narrow = q[..., :32]
    assert why(narrow, narrow, q) == "K of 64, 128 or 256, not 32"
    assert why(q, q, narrow) == "V of 64, 128, 256 or 512, not 32"
    initial = jnp.zeros((1, 1, 64, 64))
    with pytest.raises(ValueError, match=r"accepted are \('mosaic_gpu', 'mosaic_tpu', 'triton'\)"):
        linear_attention(q, q, q, initial=initial, scale=1.0, implementation="cutile")
    with pytest.raises(NotImplementedError, match="requires no normalize"):
        ops.linear_memory(q, q, q, normalize=1e-3, implementation="triton")
