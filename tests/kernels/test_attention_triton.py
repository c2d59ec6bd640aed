"""Tests of the Triton kernels of attention, and of slot memory on those of linear attention, in Triton's interpreter, which needs no
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import triton_attention
from benchmarks.calls import compare
from benchmarks.cases import triton_kernels
from lsm_jax import ops
from lsm_jax.ops.backends.select import clear_choices
from pallas_kernels.forgetting_attention import forgetting_attention, unsupported
from pallas_kernels.forgetting_attention.bounds import Rows
from pallas_kernels.forgetting_attention.triton import passes
from pallas_kernels.forgetting_attention.triton.passes import (
    FEW_REGISTERS_8_0,
    TILINGS,
    TILINGS_8_0,
    WIDE_TILINGS,
    lowest_keys,
    tiling_of,
)
from pallas_kernels.forgetting_attention.triton.requirements import TILE
from pallas_kernels.triton import launch
from tests.kernels import triton_cases_attention, triton_cases_slots, triton_process
from tests.kernels.marks import requires_triton

# The largest errors, of the output and the final memories and of a gradient, by dtype of q, k and v.
TOLERANCE = {"float32": (1e-6, 1e-5), "float16": (5e-3, 1e-2), "bfloat16": (5e-3, 1e-2)}
FAST = {
    "triton_cases_attention": ("state, documents", "bfloat16, row", "float16, row"),
    "triton_cases_slots": ("float32", "float16", "bfloat16"),
}
"""Cases of the default tests, by module: all three dtypes."""
CASES = [
    (module.__name__.rpartition(".")[2], name)
    for module in (triton_cases_attention, triton_cases_slots)
    for name in module.CASES
]


@pytest.fixture(scope="module")
def interpreted():
    modules = {m: [n for module, n in CASES if module == m] for m, _ in CASES}
    return {m: triton_process.lazy_results(m, names, FAST[m]) for m, names in modules.items()}


@requires_triton
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(m, n, marks=() if n in FAST[m] else pytest.mark.slow, id=f"{m[13:]}, {n}")
        for m, n in CASES
    ],
)
def test_equals_xla_in_value_and_every_gradient(module, name, interpreted):
    errors = interpreted[module](name)
    assert errors.pop("not_causal") == 0
    cases = triton_cases_attention if module == "triton_cases_attention" else triton_cases_slots
    output, gradient = TOLERANCE[cases.CASES[name].dtype]
    for field, error in errors.items():
        assert error < (gradient if field.startswith("d_") else output), (field, errors)


def test_first_visible_key_of_each_query():
    run = jnp.asarray([[-1, 0, 0, 0, 2, 2, 2, 2]])
    rows = Rows(None, run)
    np.testing.assert_array_equal(lowest_keys(rows, 1, 8, 8, None), [[0, 1, 1, 1, 4, 4, 4, 4]])
    np.testing.assert_array_equal(lowest_keys(rows, 1, 8, 8, 2), [[0, 1, 1, 2, 4, 4, 5, 6]])
    halves = rows._replace(places=jnp.asarray([2, 6]))
    np.testing.assert_array_equal(lowest_keys(halves, 1, 4, 8, 2), [[1, 2, 5, 6]])
    assert lowest_keys(Rows(None, None), 1, 8, 8, None) is None


def test_tiles_of_programs_divide_the_tiles_of_bounds():
    for tiling in (
        *TILINGS.values(),
        *TILINGS_8_0.values(),
        *FEW_REGISTERS_8_0.values(),
        *WIDE_TILINGS.values(),
    ):
        assert TILE % tiling.queries == 0 and TILE % tiling.keys == 0


def test_tilings_of_code_for_8_0():
    """Heads of 128 have four warps without documents and a window, and few registers with them, if query and key heads are equally many, a
    power of two.
    """

    def tilings(heads, key_heads, dim=128, dtype=jnp.bfloat16):
        q, k = (jnp.zeros((1, 128, h, dim), dtype) for h in (heads, key_heads))
        return [tiling_of("attend", q, k, limited=limited) for limited in (False, True)]

    usual = [TILINGS["attend", 128], TILINGS["attend_limited", 128]]
    many = [TILINGS_8_0["attend", 128], TILINGS["attend_limited", 128]]
    few = [TILINGS_8_0["attend", 128], FEW_REGISTERS_8_0["attend_limited", 128]]
    for capability in ("8.9", "9.0"):
        with launch.code_for(capability):
            assert tilings(4, 4) == usual
            assert tilings(4, 4, 64) == [TILINGS["attend", 64]] * 2
    with launch.code_for("8.0"):
        assert tilings(4, 4) == tilings(1, 1) == few
        assert tilings(4, 2) == tilings(12, 12) == many
        assert tilings(4, 2, 64) == [TILINGS_8_0["attend", 64], TILINGS_8_0["attend_limited", 64]]
        assert tilings(4, 4, dtype=jnp.float32) == [WIDE_TILINGS["attend", 128]] * 2


@requires_triton
def test_another_platform_runs_the_next_backend_of_a_tuple():
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    output, _ = ops.attention(q, q, q, implementation=("triton", "xla"))
    np.testing.assert_array_equal(output, ops.attention(q, q, q, implementation="xla")[0])


def test_names_the_missing_packages(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: False)
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    message = (
        r"implementation='triton' requires the packages jax-triton and triton \(extra \[triton\]"
    )
    with pytest.raises(NotImplementedError, match=message):
        ops.attention(q, q, q, implementation="triton")
    with pytest.raises(NotImplementedError, match=message):
        ops.slot_memory(q, q, q, q, implementation="triton")


def test_names_the_unmet_requirement(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    q = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)

    def why(*x, **more):
        return unsupported("triton", *x, **more)

    assert why(q, q, q) is None and why(q, q[:, :, :1], q[:, :, :1]) is None
    half = q.astype(jnp.float16)
    assert why(half, half, half) is None
    assert "not bfloat16, float32" in why(q, q.astype(jnp.float32), q)
    wide = q.astype(jnp.float32)
    assert "default_matmul_precision('tensorfloat32')" in why(wide, wide, wide)
    with jax.default_matmul_precision("tensorfloat32"):
        assert why(wide, wide, wide) is None
    narrow = q[..., :32]
    assert "not 32 and 32" in why(narrow, narrow, narrow)
    assert "not 64 and 32" in why(q, q, narrow)
    assert "a divisor of the query heads, not 2 and 2 for 1 query heads" in why(q[:, :, :1], q, q)
    with pytest.raises(ValueError, match=r"accepted are \('mosaic_gpu', 'mosaic_tpu', 'triton'\)"):
        forgetting_attention(q, q, q, scale=1.0, implementation="cutile")
    ids = jnp.ones((1, 64), jnp.int32)
    with pytest.raises(NotImplementedError, match="no window together with segment_ids"):
        ops.attention(q, q, q, window=8, segment_ids=ids, implementation="triton")
    with pytest.raises(
        NotImplementedError, match="V of 64, 128, 256 or 512, not 32 in the memory of"
    ):
        ops.slot_memory(q, q, q, narrow, narrow.astype(jnp.float32), implementation="triton")


def test_is_selected_only_by_name():
    q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    jax.clear_caches()
    clear_choices()
    jax.eval_shape(lambda q: ops.attention(q, q, q, log_forget=jnp.zeros(1))[0], q)
    assert "triton" not in ops.choices()["attention"]


@pytest.mark.parametrize(
    "name",
    ["attention without gates", *(pytest.param(n, marks=pytest.mark.slow) for n in ("attention state window", "slots documents"))],
)  # fmt: skip
def test_checks_of_the_benchmark_accept_xla(name):
    """The checks that run on a card find XLA in bfloat16 within their tolerances: they compare the same call."""
    call = triton_attention.call_of(triton_attention.CHECKS[name])
    assert triton_kernels.judge(compare.judged(call, "xla"))["good"]


def test_tilings_of_the_command_line(monkeypatch):
    monkeypatch.setattr(passes, "TILINGS", dict(TILINGS))
    monkeypatch.setattr(passes, "TILINGS_8_0", dict(TILINGS_8_0))
    monkeypatch.setattr(passes, "FEW_REGISTERS_8_0", dict(FEW_REGISTERS_8_0))
    assert triton_attention.set_tiling("", "attend/64", [64, 64, 4, 2, 168]) is None
    assert passes.TILINGS["attend", 64] == passes.Tiling(64, 64, 4, 2, 168)
    with launch.code_for("8.0"):
        q = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
        assert passes.tiling_of("attend", q, q, limited=False) == passes.Tiling(64, 64, 4, 2, 168)
    numbers = [128, 32, 4, 3, 0, 2, 8, 1]
    assert triton_attention.set_tiling("", "attend/128", numbers) is None
    assert passes.TILINGS["attend", 128] == passes.Tiling(128, 32, 4, 3, parts=2, columns=8, ahead=1)  # fmt: skip
    for kernel, wrong in {
        "attend": ([96, 64, 4, 2], [64, 128, 4, 2], [64, 64, 4, 2, 0, 3], [64, 64, 4, 2, 0, 2, 4]),
        "query_gradients": ([64, 64, 4, 2, 0, 2], [64, 64, 4, 2, 0, 1, 8]),
    }.items():
        for numbers in wrong:
            assert "accepted are attend/64, " in triton_attention.set_tiling("", f"{kernel}/64", numbers)  # fmt: skip
    assert "accepted are" in triton_attention.set_tiling("", "attend/32", [64, 64, 4, 2])
