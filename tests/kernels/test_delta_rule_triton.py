"""Tests of the Triton kernels of the delta rule and of diagonal-plus-low-rank memories in Triton's interpreter, which needs no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import triton_memories
from lsm_jax import ops
from lsm_jax.ops.backends.select import clear_choices
from pallas_kernels import dplr
from pallas_kernels.delta_rule import unsupported
from pallas_kernels.delta_rule.triton import passes
from pallas_kernels.linear_attention.triton.passes import Decays
from pallas_kernels.triton import launch
from tests.kernels import triton_process
from tests.kernels.marks import requires_triton
from tests.kernels.triton_delta import CASES

# The largest errors, of the output and the final memory and of a gradient, by dtype of q, k and v.
TOLERANCE = {"float32": (2e-6, 2e-5), "float16": (5e-3, 1e-2), "bfloat16": (5e-3, 1e-2)}
# With decays of e^-30, whose sums over a chunk lose digits, in float32.
STRONG = (5e-5, 1e-4)
# All three dtypes of every kernel.
FAST = (
    "token, row, bfloat16", "token, float16", "token, float32",
    *(f"{kind}, {dtype}" for kind in ("undecayed", "channel", "dplr") for dtype in TOLERANCE),
)  # fmt: skip


@pytest.fixture(scope="module")
def interpreted():
    return triton_process.lazy_results("triton_delta", CASES, FAST)


@requires_triton
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_equals_the_recurrence_in_value_and_every_gradient(name, interpreted):
    errors = interpreted(name)
    assert errors.pop("not_causal") == 0
    assert (errors.pop("parts") > 1) == name.endswith("parts")
    case = CASES[name]
    output, gradient = STRONG if case.strong is True else TOLERANCE[case.dtype]
    for field, error in errors.items():
        assert error < (gradient if field.startswith("d_") else output), (field, errors)


def parts_of(batch, length, heads, keys, values, dtype="bfloat16", **decays) -> int:
    """Return the number of parts of the rows of a call."""
    k, v = (jax.ShapeDtypeStruct((batch, length, heads, x), dtype) for x in (keys, values))
    tokens = passes.Tokens(k, k, k, None, None)
    return passes.count_parts(tokens, v, Decays(**decays), heads=heads)


def test_rows_have_parts_only_where_one_part_leaves_most_of_a_card_idle():
    assert parts_of(1, 32768, 4, 128, 128) == 8
    assert parts_of(1, 32768, 4, 64, 64) == 16
    assert parts_of(1, 16384, 8, 128, 128) == 4
    assert parts_of(1, 32768, 1, 256, 256) == 8
    # Few parts cost more than they save, the fewer the wider the keys are.
    assert parts_of(1, 16384, 16, 128, 128) == 1
    assert parts_of(2, 16384, 16, 128, 128) == 1
    assert parts_of(1, 8192, 4, 128, 128) == 4
    assert parts_of(1, 8192, 4, 128, 64) == 1
    assert parts_of(1, 16384, 4, 128, 64) == 8
    # Short rows, rows whose chunks no parts share alike, and rows of several memories.
    assert parts_of(8, 4096, 16, 128, 128) == parts_of(1, 4096, 1, 64, 64) == 1
    assert parts_of(1, 8192 + 64, 1, 64, 64) == 1
    assert parts_of(1, 32768, 4, 128, 128, bounds=np.zeros((1, 3), int)) == 1


@pytest.mark.parametrize("name", [n for n in triton_memories.CHECKS if " long" in n])
def test_long_checks_on_a_card_have_parts(name):
    case = triton_memories.CHECKS[name]
    if case.op not in triton_memories.DELTA:
        return
    length, heads = -(-case.length // 64) * 64, max(case.heads[0], case.heads[2])
    channels = dict(sums=0) if case.op in ("kda", "rwkv7") else {}
    parts = parts_of(2, length, heads, case.key_dim, case.value_dim, case.dtype, **channels)
    assert parts == 4


@requires_triton
def test_another_platform_runs_the_next_backend_of_a_tuple():
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16) / 8
    beta = jnp.ones((1, 64, 1))
    output, _ = ops.delta_memory(q, q, q, beta, implementation=("triton", "xla"))
    expected, _ = ops.delta_memory(q, q, q, beta, implementation="xla")
    np.testing.assert_array_equal(output, expected)


def test_names_the_missing_packages(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: False)
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    message = (
        r"implementation='triton' requires the packages jax-triton and triton \(extra \[triton\]"
    )
    with pytest.raises(NotImplementedError, match=message):
        ops.delta_memory(q, q, q, jnp.zeros((1, 64, 1)), implementation="triton")


def test_names_the_unmet_requirement(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)

    def why(*x):
        return unsupported("triton", *x)

    assert why(q, q, q) is None
    assert why(q, q, q, jnp.zeros((1, 64, 1))) is None
    assert why(q, q, q, jnp.zeros((1, 64, 1, 64))) is None
    assert why(q, q, q, jnp.zeros((1, 64, 1, 64), jnp.bfloat16)) == "log_decay in float32, not bfloat16"  # fmt: skip
    assert "not bfloat16, float32" in why(q, q.astype(jnp.float32), q)
    by_token, by_channel = (jnp.zeros((1, 64, 1, *x)) for x in ((), (64,)))
    assert why(q, q, q, by_token, "undecayed") is None
    assert why(q, q, q, by_channel, "undecayed") == "erase='decayed', not 'undecayed'"
    narrow = q[..., :32]
    assert why(narrow, narrow, q) == "K of 64, 128 or 256, not 32"
    assert why(q, q, narrow) == "V of 64, 128, 256 or 512, not 32"
    decay, wide = jnp.zeros((1, 64, 1, 64)), q.astype(jnp.float32)
    assert dplr.unsupported("triton", q, q, q, q, q, decay) is None
    reason = dplr.unsupported("triton", q, q, q, wide, q, decay)
    assert reason == "a and b in v's dtype, not float32 and bfloat16"


def test_is_selected_only_by_name():
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    jax.clear_caches()
    clear_choices()
    jax.eval_shape(lambda q: ops.delta_memory(q, q, q, q[..., 0])[0], q)
    assert "triton" not in ops.choices()["delta_memory"]
