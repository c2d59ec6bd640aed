"""Tests that compile Triton's kernels, and programs with them, for NVIDIA cards that this machine does not have: `make test-aot`."""

from __future__ import annotations

import functools
import json
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from lsm_jax import models, ops
from lsm_jax.models import sampling
from lsm_jax.ops.core.states import Layer
from pallas_kernels.triton import captured
from pallas_kernels.triton import launch as triton_launch
from tests.kernels import triton_compiled
from tests.kernels.marks import requires_triton
from tests.kernels.test_aot import H200, all_optimizations  # noqa: F401 (a fixture of every test)

pytestmark = pytest.mark.aot


@requires_triton
@pytest.mark.parametrize("capability", triton_launch.CAPABILITIES)
@pytest.mark.parametrize("case", triton_compiled.CASES)
def test_triton_kernels_compile_and_use_no_more_than_today(case, capability):
    """Every Triton kernel of a call is compiled for a card, uses no more registers, spills and shared memory than the table says, and
    has the shared memory that it requires. `python -m tests.kernels.triton_compiled --write` stores the table.
    """
    table = json.loads(triton_compiled.TABLE.read_text())
    found = triton_compiled.configurations(triton_compiled.CASES[case])
    assert len(found) >= 1
    for configuration in found:
        counts = triton_compiled.compiled(configuration, capability)
        known = table[configuration.label][capability]
        for name, (count, most) in zip(
            counts, zip(counts.values(), known, strict=True), strict=True
        ):
            assert count <= most, (configuration.label, name)
        assert counts["shared"] <= 1024 * triton_compiled.SHARED[capability], configuration.label


def compile_tokens(tokens: int, folder, capability: str):
    """Compile a program of some tokens, each of which changes one layer of a stack of memories by the delta rule in Triton, for an H200; XLA
    writes what it compiles into a folder. With more than eight tokens it is a loop.
    """
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    stack, wide = array(3, 4, 2, 64, 64), array(4, 1, 2, 64, dtype=jnp.bfloat16)

    def step(index, carry, beta):
        stack, x = carry
        state = ops.DeltaState(Layer(stack, index % 3), jnp.zeros(4, jnp.int32))
        output, state = ops.delta_memory(x, x, x, beta, initial_state=state, implementation="triton")  # fmt: skip
        return state.memory.stack, output

    def run(stack, x, beta):
        carry, one = (stack, x), functools.partial(step, beta=beta)
        if tokens > 8:
            return jax.lax.fori_loop(0, tokens, one, carry)
        return functools.reduce(lambda carry, index: one(jnp.int32(index), carry), range(tokens), carry)  # fmt: skip

    options = dict(xla_dump_to=str(folder), xla_dump_hlo_as_text=True)
    with triton_launch.code_for(capability):
        traced = jax.jit(run, donate_argnums=0).trace(stack, wide, array(4, 1, 2))
        return traced.lower(lowering_platforms=("cuda",)).compile(options), 4 * stack.size


@requires_triton
@pytest.mark.parametrize("capability", ["8.0", "9.0"])
@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_one_token_by_triton_copies_no_memory(tokens, capability, tmp_path):
    """The kernel of one token stores the memory in the buffer of a stack of layers: XLA copies nothing."""
    compiled, size = compile_tokens(tokens, tmp_path, capability)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 4
    assert not re.search(r"f32\[3,4,2,64,64\]\S* (copy|fusion)\(", text)
    assert text.count('custom_call_target="__gpu$xla.gpu.ptx"') == (1 if tokens > 8 else tokens)


@requires_triton
@pytest.mark.parametrize("by_xla", [True, False])
@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_tokens_by_triton_are_launches_of_one_graph(capability, by_xla, tmp_path, monkeypatch):
    """XLA launches the kernels of eight tokens itself, in one graph of CUDA (command buffer). With jax-triton's call the graph contains calls, which
    XLA records by capturing what they launch.
    """
    monkeypatch.setattr(captured, "available", lambda package: by_xla)
    compiled, size = compile_tokens(8, tmp_path, capability)
    assert compiled.memory_analysis().alias_size_in_bytes == size
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    before, graph = file.read_text().split("kCommandBuffer")
    kinds = re.findall(r"^\s*\d+: (\w+) +\[[^\]]*\] (\w+)", graph, flags=re.MULTILINE)
    expected = ("kCustomKernel", "one_token") if by_xla else ("kCustomCall", "kCustomCall")
    assert kinds.count(expected) == 8 and not any(x in before for x in expected)


@requires_triton
def test_one_row_is_multiplied_by_matrices_where_layers_are_unrolled():
    """XLA knows the pass that `sampling.compiler_options` disables; with it, one row has no product."""
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    here = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    place = functools.partial(jax.tree.map, lambda x: here(x.shape, x.dtype))
    config = models.lm("gla", "nano")
    config.num_layers = 2
    graph, params = nnx.split(models.abstract(config))
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.ndim > 1 else x.dtype), params
    )
    read = functools.partial(sampling.read_prompt, graph, capacity=64, prefill_chunk=None, unroll_layers=True)  # fmt: skip
    after = jax.eval_shape(read, params, jax.ShapeDtypeStruct((1, 16), jnp.int32), None)
    rest = jax.random.key(0), jnp.float32(0), None
    traced = sampling.program(1, True).trace(
        graph,
        *place((params, *after)),
        *rest,
        num_tokens=16,
        greedy=True,
        top_k=None,
        stop_token=None,
    )
    lowered = traced.lower(lowering_platforms=("cuda",))
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        options = sampling.compiler_options(1, True)
    untuned = {"xla_gpu_autotune_level": 0}
    products = [lowered.compile(untuned | o).as_text().count(" dot(") for o in ({}, options)]
    assert products[0] == 0 and products[1] >= 6, products


def test_finds_operands_that_a_copy_overwrites():
    """`overwritten_operands` finds the buffer of one tile in the loop of Triton's code that had other bits in a second run, and none if
    products end before the copy or if there are two buffers.
    """
    code = """
    %S = ttg.local_alloc : () -> !ttg.memdesc<1x64x64xbf16, #shared, #smem, mutable>
    %S_1 = ttg.memdesc_index %S[%c0] : !ttg.memdesc<1x64x64xbf16>
    %read_1 = ttg.memdesc_index %read[%n] : !ttg.memdesc<2x64x64xbf16>
    %turned = ttg.memdesc_trans %S_1 {order = array<i32: 1, 0>}
    %sum = ttng.warp_group_dot %read_1, %turned, %arg {isAsync = true}
    %wait = ttng.warp_group_dot_wait %sum {pendings = 1 : i32}
    %token = ttg.async_copy_global_to_local %pointers, %S_1 mask %inside
    """
    assert triton_compiled.overwritten_operands(code) == ["%S"]
    assert not triton_compiled.overwritten_operands(code.replace("pendings = 1", "pendings = 0"))
    assert not triton_compiled.overwritten_operands(code.replace("memdesc<1x", "memdesc<2x"))


def test_triton_kernels_spill_little_on_8():
    """The stored table has no kernel that spills more than 64 bytes on cards of compute capability 8.x with at most 128 channels, in any
    dtype, and none that needs more shared memory than 99 KiB there or on 12.0. With more channels its own bounds hold.
    """
    table = json.loads(triton_compiled.TABLE.read_text())
    small = [label for label in table if not re.search(r"\b[KVD]=(256|512)\b", label)]
    for dtype in ("bf16", "fp16", "tf32"):
        assert any(f" {dtype} K=128 " in label for label in small)
        assert any(f" {dtype} K=64 " in label for label in small) or dtype == "fp16"
    for label, row in table.items():
        assert set(row) == set(triton_launch.CAPABILITIES), label
        for capability in ("8.0", "8.6", "8.9"):
            assert label not in small or row[capability][1] <= 64, (label, capability)
        for capability in ("8.6", "8.9", "12.0"):
            assert row[capability][2] <= 99 * 1024, (label, capability)
