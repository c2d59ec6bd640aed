"""Tests that compile the kernels to machine code, also for chips that this machine does not have, and limit
the registers that they spill: `make test-aot`.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.ops.core.saved import memories_saved
from pallas_kernels.delta_rule import cases as delta_rule_cases
from pallas_kernels.dplr import cases as dplr_cases
from pallas_kernels.gated_norm import cases as gated_norm_cases
from pallas_kernels.gated_norm import gated_rms_norm_gradients
from pallas_kernels.grouped_product import gated, hopper
from pallas_kernels.linear_attention import cases as linear_attention_cases
from pallas_kernels.linear_attention.hopper import (
    channel_scan,
)
from pallas_kernels.residual_norm import cases as residual_norm_cases
from pallas_kernels.residual_norm import residual_norm_forward, residual_norm_gradients
from pallas_kernels.rwkv7 import cases as rwkv7_cases
from pallas_kernels.selective_scan.cases import TPU_COMPILED
from pallas_kernels.short_convolution import cases as convolution_cases
from tests.kernels import test_gated_norm_gpu as gated_norm
from tests.kernels import test_residual_norm_gpu as residual_norm
from tests.kernels import test_rwkv7_gpu as rwkv7
from tests.kernels import test_selective_scan_gpu as scans
from tests.kernels import test_short_convolution_gpu as convolution

pytestmark = pytest.mark.aot

# The `GpuTargetConfigProto` from which XLA compiles for an H200.
H200 = """
platform_name: "CUDA" device_description_str: "NVIDIA H200" dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 device_vendor: "NVIDIA Corporation" name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
"""
# The folder of `nvidia-cuda-nvdisasm`, next to the compilers.
CUDA = next((x for p in sys.path if (x := Path(p, "nvidia", "cu13")).is_dir()), Path("nowhere"))
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# Each case: the op; heads of q, k and v; K and V; the op's other arguments; the largest number of bytes that
# its kernels may spill.
ON_HOPPER = [
    *(("linear_memory", *case) for case in linear_attention_cases.HOPPER_COMPILED),
    *(("delta_memory", *case) for case in delta_rule_cases.HOPPER_COMPILED),
    *(("dplr_memory", *case) for case in dplr_cases.HOPPER_COMPILED),
    ("slot_memory", (4, 4, 4), 256, 256, "slots", 696),
    ("attention", (4, 2, 2), 64, 64, "log_forget", 0),
    ("attention", (4, 2, 2), 128, 128, "log_forget segment_ids update_mask", 208),
    ("attention", (4, 4, 4), 128, 128, "log_forget window", 176),
]
# The same for kernels without a gradient.
FORWARD_ON_HOPPER = [
    ("attention", (16, 4, 4), 256, 256, "segment_ids", 64),
    ("attention", (16, 4, 4), 256, 256, "log_forget segment_ids update_mask", 40),
    ("attention", (16, 4, 4), 256, 256, "log_forget window", 28),
]
ON_TPU = [
    *(("linear_memory", *case[:4]) for case in linear_attention_cases.TPU_COMPILED),
    *(("delta_memory", *case[:4]) for case in delta_rule_cases.TPU_COMPILED),
    *(("dplr_memory", *case[:4]) for case in dplr_cases.TPU_COMPILED),
    ("attention", (4, 2, 2), 64, 64, "log_forget segment_ids"),
    ("attention", (4, 4, 4), 128, 128, "log_forget window"),
]

# Grouped products: the kernel, and the names of its inputs in `_SHAPES`.
_SHAPES: dict[str, tuple[int, ...]] = dict(
    x=(8192, 1024), inner=(8192, 896), pair=(8192, 1792), up=(8, 1024, 1792), down=(8, 896, 1024), groups=(64,), count=(1,),
    starts=(8,), blocks=(8,), weight=(8192,), scale=(1,),
    e4m3_x=(8192, 1024), e4m3_inner=(8192, 896), e5m2_dy=(8192, 1024), e5m2_pair=(8192, 1792),
    e4m3_up=(8, 1024, 1792), e4m3_up_T=(8, 1792, 1024), e4m3_down=(8, 896, 1024), e4m3_down_T=(8, 1024, 896),
)  # fmt: skip
_TRANSPOSED = functools.partial(hopper.product, transposed=True)
GROUPED = {
    "product": (hopper.product, "inner down groups count"),
    "transposed": (_TRANSPOSED, "pair up groups count"),
    "sums": (hopper.sums, "x pair starts blocks"),
    "gated": (gated.gated_product, "x up groups count weight"),
    "gradients": (gated.gated_gradients, "x down groups count pair weight"),
    # Products of 8-bit floats, whose last argument is a scale.
    "product in fp8": (_TRANSPOSED, "e4m3_inner e4m3_down_T groups count scale"),
    "transposed in fp8": (_TRANSPOSED, "e5m2_pair e4m3_up groups count scale"),
    "gated in fp8": (gated.gated_product, "e4m3_x e4m3_up_T groups count weight scale"),
    "gradients in fp8": (gated.gated_gradients, "e5m2_dy e4m3_down groups count pair weight scale"),
}


def case_id(case) -> str:
    """Return the name of a kernel's case for pytest, without the number of bytes that the compiled kernel
    spills.
    """
    op, heads, key_dim, value_dim, given = case[:5]
    sizes = [f"heads={','.join(map(str, heads))}", f"K={key_dim}", f"V={value_dim}"]
    return "-".join([op, *sizes, *given.split()])


@pytest.fixture(autouse=True)
def all_optimizations():
    """A fixture that lets XLA compile kernels with all optimizations, which `conftest` switches off."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def compile_for(device, abstract_device, case, implementation, *, backward=True):
    """Compile the value and, if `backward`, every gradient of one case of a memory's or of attention's kernel, in
    bfloat16, to machine code for `device`.
    """
    op, (heads, key_heads, memories), key_dim, value_dim, given = case
    given, length = given.split(), 1024
    sharding = SingleDeviceSharding(device)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shapes = (heads, key_dim), (key_heads, key_dim), (memories, value_dim)
    inputs = {
        n: array(2, length, *s, dtype=jnp.bfloat16) for n, s in zip("qkv", shapes, strict=True)
    }
    if op == "delta_memory":
        inputs["beta"] = array(2, length, memories)
    if op == "dplr_memory":
        inputs |= dict(a=inputs["k"], b=inputs["k"])
    if "log_decay" in given:
        inputs["log_decay"] = array(2, length, memories, *([key_dim] * ("channel" in given)))
    if "value_log_decay" in given:
        inputs["value_log_decay"] = array(2, length, memories, value_dim)
    if "writes" in given:
        inputs |= dict(log_write=array(2, length, memories), skip=array(memories))
    if "gate" in given:
        inputs["log_input_gate"] = array(2, length, memories)
    if "bonus" in given:
        inputs["bonus"] = array(memories, key_dim)
    if "slots" in given:
        inputs |= dict(s=array(2, length, memories, 64), log_decay=array(2, length, memories, 64))
    if "log_forget" in given:
        inputs["log_forget"] = array(2, length, heads)
    marks = {
        n: array(2, length, dtype=jnp.int32) for n in ("segment_ids", "update_mask") if n in given
    }
    options: dict[str, Any] = dict(window=200) if "window" in given else {}
    options |= dict(erase="undecayed") if "undecayed" in given else {}
    options |= dict(rank=4) if "rank" in given else {}
    options |= dict(normalize=1e-6) if "gate" in given else {}

    @memories_saved("memories" in given)
    def both(inputs, marks):
        def call(x):
            return getattr(ops, op)(**x, **marks, **options, implementation=implementation)[0]

        if not backward:
            return call(inputs)
        output, pull = jax.vjp(call, inputs)
        return output, pull(output)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract_device)):
        platform = "cuda" if abstract_device.platform == "gpu" else "tpu"
        lowered = jax.jit(both).trace(inputs, marks).lower(lowering_platforms=(platform,))
    lowered.compile()


@pytest.mark.parametrize("case", ON_HOPPER + FORWARD_ON_HOPPER, ids=case_id)
def test_compiles_for_an_h200_and_spills_no_more_than_today(case, capfd, monkeypatch):
    assert_spills_no_more(case, capfd, monkeypatch, backward=case in ON_HOPPER)


@pytest.mark.parametrize("given, known", [("", 728), (" memories", 744)])
def test_slices_of_keys_in_one_program_spill_little(given, known, capfd, monkeypatch):
    """The scan of two slices of key channels, which large batches select."""
    monkeypatch.setattr(channel_scan, "PROCESSORS", 1)
    jax.clear_caches()  # of the same shapes with one slice in each program
    case = ("linear_memory", (4, 4, 4), 256, 512, f"channel log_decay{given}", known)
    try:
        assert_spills_no_more(case, capfd, monkeypatch, backward=True)
    finally:
        jax.clear_caches()


def assert_spills_no_more(case, capfd, monkeypatch, *, backward: bool) -> str:
    """Compile a case of `ON_HOPPER` for an H200, and check that its kernels spill no more bytes than its last entry says. Return their
    assembly.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_SASS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[
        0
    ]
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    *case, known = case
    compile_for(device, abstract, case, "mosaic_gpu", backward=backward)
    output = "".join(capfd.readouterr())
    spilled = re.findall(r"frame, (\d+) bytes spill stores", output)
    assert len(spilled) >= (3 if backward else 1)  # one forward and two backward kernels, or more
    assert sum(map(int, spilled)) <= known
    assert output.count("HGMMA") > 0
    assert not late_writes(output)
    return output


def late_writes(sass: str) -> list[tuple[str, str]]:
    """Return the tensor-core products in the assembly `sass` that have an instruction which writes a register
    of their left operand before they have finished, with these instructions.

    ptxas 13.0 emits such instructions where it knows an entry at compile time; on the card the products then
    read the old value.
    """
    line = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
    reading: dict[int, str] = {}
    found = []
    for name, text in line.findall(sass):
        arguments = [x.strip() for x in text.split(",")]
        if name.startswith("WARPGROUP.DEPBAR"):
            reading = {}
        elif name.startswith(("HGMMA", "QGMMA")):
            if left := re.match(r"R(\d+)", arguments[1]):
                reading |= {int(left[1]) + n: text for n in range(4)}
        elif (target := re.match(r"R(\d+)", arguments[0])) and not name.startswith("BAR"):
            size = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            written = range(int(target[1]), int(target[1]) + size)
            found += [(reading[x], f"{name} {text}") for x in written if x in reading]
    return found


def test_finds_late_writes():
    """`late_writes` finds the instruction that overwrites an operand too early in code that ptxas once
    emitted for a kernel, and finds none in the same code in the right order.
    """
    made = "/*0010*/ HGMMA.64x64x16.F32.BF16 R48, R24, gdesc[UR8], R48 ;\n"
    late, waited = (
        "/*0020*/ @P0 MOV R25, 0x3f803f80 ;\n",
        "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n",
    )
    assert len(late_writes(made + late + waited)) == 1
    assert not late_writes(late + made + waited + late)


def compile_scans_for(device, abstract_device, case, implementation, dtype=jnp.bfloat16):
    """Compile the value and every gradient of one case of a selective scan's kernel, with the input u in
    `dtype`, to machine code for `device`.
    """
    sharding = SingleDeviceSharding(device)

    def given(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arrays, marks = scans.make(case)
    arrays["u"] = arrays["u"].astype(dtype)
    cotangents = jax.eval_shape(lambda a: scans.call(a, marks, "xla"), arrays)
    inputs = jax.tree.map(given, (arrays, marks, cotangents))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract_device)):
        platform = "cuda" if abstract_device.platform == "gpu" else "tpu"
        run = jax.jit(lambda a, m, c: scans.both(a, m, implementation, c))
        lowered = run.trace(*inputs).lower(lowering_platforms=(platform,))
    lowered.compile()


@pytest.mark.parametrize("states", [8, 16, 0])
@pytest.mark.parametrize("documents", [False, True])
def test_selective_scans_compile_for_an_h200_and_spill_nothing(
    states, documents, capfd, monkeypatch
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[
        0
    ]
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    compile_scans_for(device, abstract, scans.Case(1024, 256, states, documents), "mosaic_gpu")
    spilled = re.findall(r"frame, (\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert len(spilled) >= 6
    assert not any(map(int, spilled))


@pytest.mark.parametrize("case", gated_norm_cases.COMPILED, ids=lambda case: case.id)
def test_gated_norms_compile_for_an_h200_and_spill_nothing(case, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    arrays, options, dy = gated_norm.shapes_of(case)
    sharding = SingleDeviceSharding(device)
    inputs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (arrays, dy)
    )
    norm = functools.partial(ops.gated_rms_norm, **options, implementation="mosaic_gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        run = jax.jit(lambda *a: gated_norm.both(norm, *a))
        run.trace(*inputs).lower(lowering_platforms=("cuda",)).compile()
    spilled = re.findall(r"frame, (\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert len(spilled) == 2
    assert not any(map(int, spilled))


@pytest.mark.parametrize("op", rwkv7.OPS)
@pytest.mark.parametrize("case", rwkv7_cases.COMPILED, ids=lambda case: case.id)
def test_kernels_of_rwkv7_compile_for_an_h200_and_spill_nothing(op, case, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    sharding = SingleDeviceSharding(device)
    inputs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        rwkv7.shapes_of(op, case),
    )
    call = functools.partial(rwkv7.by_op, op, "mosaic_gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        run = jax.jit(lambda *a: rwkv7.both(call, *a))
        run.trace(*inputs).lower(lowering_platforms=("cuda",)).compile()
    spilled = re.findall(r"frame, (\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spilled == ["0"] * rwkv7.KERNELS[op]


@pytest.mark.parametrize(
    "case",
    [c._replace(skip=False) for c in gated_norm_cases.COMPILED],
    ids=lambda case: case.id,
)
def test_gated_norms_gradients_with_the_output_spill_nothing(case, capfd, monkeypatch):
    """The backward kernel that stores the norm's output for the weights of the product behind it; a float32 gate has a bias."""
    arrays, options, dy = gated_norm.shapes_of(case)
    arrays["scale"] = jax.ShapeDtypeStruct(arrays["x"].shape[2:], jnp.float32)
    if case.wide_gate:
        arrays["bias"] = arrays["scale"]
    gradients = functools.partial(gated_rms_norm_gradients, **options)
    assert_spills_nothing(lambda a, dy: gradients(**a, dy=dy), (arrays, dy), 1, capfd, monkeypatch)


@pytest.mark.parametrize("case", residual_norm_cases.COMPILED, ids=lambda case: case.id)
def test_gradients_of_residual_norms_compile_for_an_h200_and_spill_nothing(
    case, capfd, monkeypatch
):
    arrays = jax.eval_shape(functools.partial(residual_norm.make, case))
    gradients = functools.partial(residual_norm_gradients, eps=1e-5)
    assert_spills_nothing(lambda a: gradients(**a), (arrays,), 1, capfd, monkeypatch)


@pytest.mark.parametrize("case", residual_norm_cases.FORWARD_COMPILED, ids=lambda case: case.id)
def test_sums_with_their_norms_compile_for_an_h200_and_spill_nothing(case, capfd, monkeypatch):
    arrays = jax.eval_shape(functools.partial(residual_norm.make_sum, case))
    forward = functools.partial(residual_norm_forward, eps=1e-5)
    assert_spills_nothing(forward, arrays, 1, capfd, monkeypatch)


def assert_spills_nothing(function, shapes, kernels: int, capfd, monkeypatch) -> str:
    """Compile a function of arrays of these shapes for an H200, and check that its kernels, of this number, spill no register. Return what the
    compilers print.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    sharding = SingleDeviceSharding(device)
    inputs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes
    )
    jax.jit(function).trace(*inputs).lower(lowering_platforms=("cuda",)).compile()
    output = "".join(capfd.readouterr())
    assert re.findall(r"frame, (\d+) bytes spill stores", output) == ["0"] * kernels
    return output


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_compile_for_an_h200_and_spill_nothing(name, capfd, monkeypatch):
    """The kernels of experts of 1,024 x 896; a step's products run while those of the next are started."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_SASS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    sharding = SingleDeviceSharding(device)
    kernel, shapes = GROUPED[name]
    integers = "groups", "count", "starts", "blocks"
    dtypes = dict.fromkeys(integers, jnp.int32) | dict(weight=jnp.float32, scale=jnp.float32)
    narrow = dict(e4m3=jnp.float8_e4m3fn, e5m2=jnp.float8_e5m2)
    inputs = {
        x: jax.ShapeDtypeStruct(_SHAPES[x], narrow.get(x[:4]) or dtypes.get(x, jnp.bfloat16), sharding=sharding) for x in shapes.split()
    }  # fmt: skip
    options = {x: inputs.pop(x) for x in ("scale",) if x in inputs}
    run = jax.jit(lambda arrays, options: kernel(*arrays, **options))
    run.trace([*inputs.values()], options).lower(lowering_platforms=("cuda",)).compile()
    output = "".join(capfd.readouterr())
    assert re.findall(r"frame, (\d+) bytes spill stores", output) == ["0"]
    assert re.search(r"DEPBAR.LE gsb0, 0x[12]", output)  # one or two products in a step
    assert output.count("QGMMA" if options else "HGMMA") > 0
    assert not late_writes(output)


@pytest.mark.parametrize("case", convolution_cases.HOPPER, ids=lambda case: case.id)
def test_short_convolutions_compile_for_an_h200_and_spill_little(case, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    inputs = convolution.make(
        case.length, case.channels, case.width, documents=case.documents, bias=case.bias,
        batch=case.batch, contiguous=case.contiguous,
    )  # fmt: skip
    sharding = SingleDeviceSharding(device)
    inputs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), inputs
    )

    def both(arrays, ids, dy):
        options = case.silu, case.head_dim, case.contiguous, False
        y, pull = jax.vjp(lambda a: convolution.fused(a, ids, *options), arrays)
        return y, pull(dy)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        traced = jax.jit(both).trace(*inputs, inputs[0]["x"])
        traced.lower(lowering_platforms=("cuda",)).compile()
    spilled = re.findall(r"frame, (\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert len(spilled) == 2
    # The backward kernels of documents that need no order have one number of each token more in flight.
    assert max(map(int, spilled)) <= (128 if case.documents else 4)


@pytest.mark.parametrize("case", ON_TPU, ids=case_id)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_a_tpu(chip, case):
    device = topologies.get_topology_desc(CHIPS[chip], "tpu").devices[0]
    compile_for(device, AbstractDevice(device.device_kind, 1, platform="tpu"), case, "mosaic_tpu")


@pytest.mark.parametrize("case", TPU_COMPILED, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("chip", CHIPS)
def test_selective_scans_compile_for_a_tpu(chip, dtype, case):
    device = topologies.get_topology_desc(CHIPS[chip], "tpu").devices[0]
    abstract = AbstractDevice(device.device_kind, 1, platform="tpu")
    compile_scans_for(device, abstract, case, "mosaic_tpu", dtype)


# The largest accepted number of bundles per head and 64 tokens of the gated delta rule's forward: half of
# those of a first version, which computed one head per program.
@pytest.mark.parametrize("chip, most", [("v5e", 878 // 2), ("v6e", 868 // 2)])
def test_a_tpu_takes_half_the_bundles_of_the_sketch(chip, most):
    from benchmarks.cases.bundles import (
        count,
    )  # its import sets variables that the GPU client reads

    found = count("gated delta rule", chip)
    assert found["heads"] >= 4
    assert found["forward"] <= most
