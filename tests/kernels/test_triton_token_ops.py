"""Tests of the Triton kernels of `selective_memory`, `short_convolution` and one-token steps in Triton's interpreter, which needs no GPU."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import triton_token_ops
from benchmarks.cases import triton_kernels
from benchmarks.registry import UsageError
from lsm_jax import ops
from pallas_kernels import decode_step
from pallas_kernels.selective_scan import complex_scan
from pallas_kernels.short_convolution import triton as convolution
from pallas_kernels.triton import launch
from tests.kernels import triton_process
from tests.kernels.marks import requires_triton
from tests.kernels.triton_interpreted_tokens import CASES

# The largest error of a result in float32, of one in the dtype of the case, and of a gradient in that dtype.
TOLERANCE = {"float32": (2e-6, 5e-6), "float16": (5e-4, 1e-3), "bfloat16": (4e-3, 8e-3)}
# All three dtypes of every kernel.
FAST = (
    "selective, float16", "selective, float32", "selective, one part",
    "convolution", "convolution, float16", "convolution, bfloat16", "convolution, one token", "convolution, two tokens",
    "token, bonus", "token, kda", "token, float16", "token, delta", "token, dplr",
)  # fmt: skip


@pytest.fixture(scope="module")
def interpreted():
    return triton_process.lazy_results("triton_interpreted_tokens", CASES, FAST)


@requires_triton
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_equals_xla_in_value_and_every_gradient(name, interpreted):
    errors = interpreted(name)
    assert errors.pop("not_causal", 0) == 0
    output, gradient = TOLERANCE[CASES[name].dtype]
    for field, error in errors.items():
        assert error < (gradient if field.startswith("d_") else output), (field, errors)


def test_selective_memory_names_the_unmet_requirement(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    u, rows = jnp.zeros((1, 4, 64)), jnp.zeros((1, 4, 16))

    def call(u=u, rows=rows, a=-1.0):
        decay = jnp.full((u.shape[2], rows.shape[2]), a)
        return ops.selective_memory(u, u, decay, rows, rows, implementation="triton")

    with pytest.raises(NotImplementedError, match="a multiple of 64 channels, not 32"):
        call(u=u[..., :32])
    with pytest.raises(NotImplementedError, match="memories of 8, 16 or 32 numbers for each channel, not 4"):  # fmt: skip
        call(rows=rows[..., :4])
    with pytest.raises(NotImplementedError, match="requires for a complex memory"):
        call(a=-1.0 + 1j)
    gates = jnp.zeros((1, 4, 64))
    with pytest.raises(ValueError, match=r"accepted are \('mosaic_gpu', 'mosaic_tpu'\)"):
        initial = jnp.zeros((1, 2, 64))
        complex_scan(gates, gates, gates, gates, initial=initial, implementation="triton")
    monkeypatch.setattr(launch, "usable", lambda: False)
    with pytest.raises(NotImplementedError, match=r"requires the packages jax-triton and triton"):
        call()


def test_short_convolution_names_the_unmet_requirement(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    x, weight = jnp.zeros((1, 64, 64), jnp.float16), jnp.zeros((4, 64))

    def call(x=x, weight=weight, **options):
        ops.short_convolution(x, weight, implementation="triton", **options)

    with pytest.raises(NotImplementedError, match="a weight of 2 to 4 rows, not 5"):
        call(weight=jnp.zeros((5, 64)))
    with pytest.raises(NotImplementedError, match="a multiple of 64 channels, or heads of .*, not 64 in heads of 16"):  # fmt: skip
        call(head_dim=16)
    with pytest.raises(NotImplementedError, match="requires 64 tokens or more, or implementation='triton', .* not 63"):  # fmt: skip
        ops.short_convolution(x[:, :63], weight, implementation=("triton",))
    with pytest.raises(NotImplementedError, match="requires no update_mask"):
        call(update_mask=jnp.ones((1, 64)))
    monkeypatch.setattr(launch, "usable", lambda: False)
    with pytest.raises(NotImplementedError, match=r"requires the packages jax-triton and triton"):
        call()


def test_tilings_of_convolutions_on_the_command_line(monkeypatch):
    monkeypatch.setattr(convolution, "TILINGS", dict(convolution.TILINGS))
    monkeypatch.setattr(triton_kernels, "TILINGS", (convolution.TILINGS,))
    triton_kernels.set_tilings(["convolution_backward=128:256:2:2"])
    assert convolution.TILINGS["convolution_backward"] == convolution.Tiling(128, 256, 2, 2)
    for sizes, problem in (("64:128:1:3", "multiple of unroll"), ("64:96:1:4", "powers of two")):
        with pytest.raises(UsageError, match=problem):
            triton_kernels.set_tilings([f"convolution_forward={sizes}"])


def test_one_token_names_the_unmet_requirement(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    q, memory = jnp.zeros((1, 2, 64), jnp.bfloat16), jnp.zeros((1, 2, 64, 64))

    def why(q, memory):
        return decode_step.unsupported(q, q, memory, "triton")

    assert why(q, memory) is None
    assert why(q, memory[..., :40]) == "K up to 256 and V a multiple of 16, not K 64 and V 40"
    assert "memory in float32, not bfloat16" in why(q, memory.astype(jnp.bfloat16))
    assert "q and v in bfloat16, float16 or float32" in why(q.astype(jnp.int32), memory)
    monkeypatch.setattr(launch, "usable", lambda: False)
    assert "jax-triton" in why(q, memory)
    x = jnp.zeros((1, 2, 1, 64))
    with pytest.raises(NotImplementedError, match="'triton' requires|has no kernel for calls"):
        ops.delta_memory(x, x, x, jnp.zeros((1, 2, 1)), implementation="triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective 8", "convolution 64", "one token with decay"])
def test_the_benchmark_checks_and_times_them(name, monkeypatch):
    """The benchmark's checks and times run, here with XLA in place of the kernels, and find wrong results."""
    run = triton_token_ops._call
    factor = 1.0

    def by_xla(*x, **options):
        return lambda implementation, y: jax.tree.map(
            lambda a: a * jnp.asarray(1.0 if implementation == "xla" else factor, a.dtype),
            run(*x, **options)("xla", y),
        )

    monkeypatch.setattr(triton_token_ops, "_call", by_xla)
    case = triton_token_ops.CHECKS[name]
    op = case.op
    if op in triton_token_ops.OPS[:2]:
        small = case._replace(batch=1, length=70, channels=64)
        monkeypatch.setitem(triton_token_ops.CHECKS, name, small)
        assert triton_kernels.check(name)["good"]
        factor = 1.1
        result = triton_kernels.check(name)
        assert not result["good"] and result["errors"]["output"] > 0.05
    times = triton_kernels.timer(dict(op=op, shape="1x64x2x64"), "xla")()
    assert len(times) == (1 if "token" in op else 2) and min(times) > 0
