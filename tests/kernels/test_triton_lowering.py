"""Tests that programs with Triton kernels are lowered, on a CPU, for NVIDIA cards that this machine does not have.

Triton compiles the kernels to PTX code. What jax-triton then makes of that code is in JAX's CUDA plugin, which is not installed here;
`Kernel` and `Call` take its place. Code that XLA launches itself is in the program's text. `make test-aot` compiles whole programs with the
plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.gpu_triton
import pytest

from lsm_jax import ops
from pallas_kernels.triton import captured, launch
from tests.kernels import triton_token_ops
from tests.kernels.marks import requires_triton
from tests.kernels.triton_compiled import registers_of

STRUCT = jax.ShapeDtypeStruct


class Kernel:
    """A compiled kernel: the first arguments of the plugin's `TritonKernel`."""

    def __init__(self, name, warps, ctas, shared, ptx, *_: Any):
        self.name, self.ptx = name, ptx


class Call:
    """A launch of a kernel: the arguments of the plugin's `TritonKernelCall`."""

    def __init__(self, kernel, *grid_and_parameters: Any):
        self.kernel = kernel

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return name.encode()


@pytest.fixture
def lowered(monkeypatch):
    """A function that lowers a traced program for NVIDIA, and returns its text and the PTX code of its Triton calls."""
    codes: list[str] = []

    def call(kernel, *rest):
        codes.append(kernel.ptx)
        return Call(kernel, *rest)

    parts = dict(TritonKernel=Kernel, TritonKernelCall=call)
    for name in ("create_array_parameter", "create_scalar_parameter"):
        parts[name] = lambda *x: x
    for name, part in parts.items():
        monkeypatch.setattr(jaxlib.gpu_triton, name, part, raising=False)

    def lower(trace: Callable[[], Any], capability: str) -> tuple[str, list[str]]:
        with launch.code_for(capability):
            text = trace().lower(lowering_platforms=("cuda",)).as_text()
        by_xla = re.findall(r'custom_call @__gpu\$xla\.gpu\.ptx.*kernel_data = "([^"]*)"', text)
        plain = (re.sub(r"\\([0-9A-F]{2})", lambda x: chr(int(x[1], 16)), code) for code in by_xla)
        return text, [*codes, *plain]

    return lower


def both(function: Callable, *arguments: Any) -> Any:
    """Trace a call of an op that returns an output and a state, and all gradients of its output."""

    def gradients(*x):
        output, pull = jax.vjp(lambda *x: function(*x, implementation="triton")[0], *x)
        return output, pull(output)

    return jax.jit(gradients).trace(*arguments)


def memory(op: Callable, decay: str, *others: str, length: int = 130) -> Any:
    """Trace a memory with 64 channels and a decay of each "head" or "channel", and its gradients."""
    shapes = dict(head=(2, length, 2), channel=(2, length, 2, 64))
    wide = STRUCT(shapes["channel"], jnp.bfloat16)
    more = [STRUCT(shapes[x], jnp.float32) if x == "head" else wide for x in others]
    return both(op, wide, wide, wide, *more, STRUCT(shapes[decay], jnp.float32))


def attention() -> Any:
    q, k = STRUCT((2, 300, 4, 64), jnp.bfloat16), STRUCT((2, 300, 2, 64), jnp.bfloat16)

    def gated(q, k, v, log_forget, **options):
        return ops.attention(q, k, v, log_forget=log_forget, **options)

    return both(gated, q, k, k, STRUCT((2, 300, 4), jnp.float32))


PROGRAMS: dict[str, tuple[Callable[[], Any], int]] = {
    # The decays' factors, two scans, outputs, and one kernel for the gradients.
    "scalar decay": (lambda: memory(ops.linear_memory, "head"), 5),
    "one token, delta": (triton_token_ops.COMPILED["one token, delta"], 1),
    # The scores in place of the factors, and the gradients of values, of scores, and of queries, keys and decays.
    "channel decay": (lambda: memory(ops.linear_memory, "channel"), 7),
    "delta rule, scalar decay": (lambda: memory(ops.delta_memory, "head", "head"), 9),
    "delta rule, channel decay": (lambda: memory(ops.delta_memory, "channel", "head"), 9),
    # In parts: also their updates and the memories before them, and both again for the gradients.
    "delta rule, parts": (lambda: memory(ops.delta_memory, "head", "head", length=8192), 13),
    "dplr": (lambda: memory(ops.dplr_memory, "channel", "channel", "channel"), 12),
    "attention": (attention, 3),  # the output, and the gradients of queries and of keys
    # Forward and backward; and the memories before and after the parts of a row, and their gradients.
    "selective, 16, full": (triton_token_ops.COMPILED["selective, 16, full"], 2),
    "selective, 16": (triton_token_ops.COMPILED["selective, 16"], 6),
    "convolution, documents": (triton_token_ops.COMPILED["convolution, documents"], 2),
}
"""How each program is traced, and its number of Triton kernels."""
FAST = ("scalar decay", "one token, delta")


@requires_triton
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PROGRAMS]
)
def test_every_kernel_of_a_program_is_lowered(name, lowered):
    trace, count = PROGRAMS[name]
    text, codes = lowered(trace, "8.0")
    calls = re.findall(r"custom_call @(triton_kernel_call|__gpu\$xla\.gpu\.ptx)", text)
    assert len(calls) == len(codes) == count
    for code in codes:
        assert ".version 8.8" in code and ".target sm_80" in code, code[:1000]


@requires_triton
@pytest.mark.parametrize("capability", launch.CAPABILITIES)
def test_kernels_are_lowered_for_the_given_capability(capability, lowered):
    trace, _ = PROGRAMS["one token, delta"]
    _, (code,) = lowered(trace, capability)
    assert f".target sm_{capability.replace('.', '')}" in code
    registers, spilled = registers_of(code, round(10 * float(capability)))
    assert registers <= 168 and spilled == 0


def accesses(code: str) -> dict[str, set[int]]:
    """Return the positions of the parameters of PTX code by which memory is loaded ("ld") and stored ("st")."""
    sources: dict[str, set[int]] = {}
    found: dict[str, set[int]] = dict(ld=set(), st=set())
    for line in code.splitlines():
        operands = re.findall(r"%\w+", line)
        if parameter := re.search(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", line):
            sources[parameter[1]] = {int(parameter[2])}
        elif access := re.search(r"\b(ld|st)\.global\S*.*\[\s*(%\w+)", line):
            found[access[1]] |= sources.get(access[2], set())
        elif operands:
            from_all = (sources.get(x, set()) for x in operands[1:])
            sources[operands[0]] = sources.get(operands[0], set()).union(*from_all)
    return found


def call_small(changed, x, **options):
    from tests.kernels.triton_small import scale_and_add

    return launch.call(
        scale_and_add,
        (changed, x, 0.5, None),
        dict(total=STRUCT(x.shape, x.dtype), scaled=STRUCT(x.shape, x.dtype)),
        programs=1,
        warps=1,
        stages=1,
        captured=True,
        SIZE=x.size,
        **options,
    )


@requires_triton
@pytest.mark.parametrize("in_place", ["changed", ""])
def test_xla_passes_the_arguments_that_the_code_reads_and_writes(in_place, lowered):
    """The parameters are the inputs, the outputs, and two for scratch memory that the code does not touch. One of these has the changed array as a
    result, and the others an input, so that XLA's arguments are as many.
    """
    array = STRUCT((64,), jnp.float32)
    trace = jax.jit(lambda *x: call_small(*x, in_place=in_place)).trace
    text, (code,) = lowered(lambda: trace(array, array), "8.0")
    call = re.search(r"(%\S+) = .*custom_call @__gpu\S*ptx\(([^)]*)\)", text)
    assert call is not None
    inputs, results = call[2].split(", "), 3 if in_place else 2
    assert f"{call[1]}:{results} = " in text or call[1].endswith(f":{results}")
    assert re.findall(r"_param_(\d+)[,\s]*\n", code)[-1] == "6"
    assert len(inputs) + results == 7 and inputs[:3] == [
        "%arg0",
        "%arg1",
        "%arg1" if in_place else "%arg0",
    ]
    places = re.search(r"output_indices = \[([^\]]*)\]", text)
    assert places is not None
    assert [int(x.split(" ")[0]) for x in places[1].split(", ")] == [3, 4, 5][:results]
    alias = "output_tuple_indices = [2], operand_index = 0"
    assert (alias in text) == bool(in_place)
    # `triton_small.py` stores into its first array, and the two outputs behind its inputs.
    assert accesses(code) == dict(ld={0, 1}, st={0, 3, 4})


@requires_triton
def test_jax_triton_calls_what_xla_cannot_launch(lowered, monkeypatch):
    """Another version of jax has jax-triton's call, which launches the same kernel; a kernel with much shared memory is refused."""
    array = STRUCT((64,), jnp.float32)
    trace = jax.jit(lambda *x: call_small(*x, in_place="changed")).trace
    with monkeypatch.context() as patch:
        patch.setattr(captured, "_JAX", (0, 12))
        text, (code,) = lowered(lambda: trace(array, array), "8.0")
    assert "custom_call @triton_kernel_call" in text and "xla.gpu.ptx" not in text
    assert accesses(code) == dict(ld={0, 1}, st={0, 4, 5})  # The number is a parameter here.
    monkeypatch.setattr(captured, "_SHARED", -1)
    captured._compile.cache_clear()
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        lowered(lambda: trace(array, array), "8.0")


@requires_triton
def test_a_call_by_xla_under_vmap_runs_once_for_each_entry(lowered):
    arrays = STRUCT((3, 64), jnp.float32)
    one = jax.vmap(lambda changed, x: call_small(changed, x))
    text, codes = lowered(lambda: jax.jit(one).trace(arrays, arrays), "8.0")
    assert len(codes) == 1 and "stablehlo.while" in text
    with pytest.raises(NotImplementedError, match="Batching rule"):
        jax.vmap(lambda *x: call_small(*x, in_place="changed"))(
            jnp.ones((3, 64)), jnp.ones((3, 64))
        )


@requires_triton
def test_a_call_by_xla_can_be_the_body_of_a_loop_on_several_devices():
    """In `jax.shard_map` with checked replication the array that the kernel changes has the type of the array before."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh, rows = jax.make_mesh((1,), ("data",), axis_types=automatic), jax.sharding.PartitionSpec("data")  # fmt: skip

    def step(_, carry):
        results = call_small(*carry, in_place="changed")
        return results["changed"], results["total"]

    def loop(*carry):
        return jax.lax.fori_loop(0, 3, step, carry)

    mapped = jax.shard_map(loop, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=True)
    array = STRUCT((64,), jnp.float32)
    with launch.code_for("8.0"):
        assert [x.shape for x in jax.eval_shape(mapped, array, array)] == [(64,)] * 2
