"""Tests that compile the kernels of a generated token, and the loop over tokens, for an H200 that need not be here: `make test-aot`."""

from __future__ import annotations

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from lsm_jax import models
from lsm_jax.models import sampling, token_step
from pallas_kernels.decode_step import deferred, deferred_step, empty_writes
from pallas_kernels.row_product.cases import COMPILED, TILES_COMPILED
from tests.kernels import test_row_product_gpu as row_product
from tests.kernels import test_tile_product_gpu as tile_product
from tests.kernels.test_aot import CUDA, H200, assert_spills_nothing

pytestmark = pytest.mark.aot

# Instructions of XLA that launch no kernel.
FREE = "parameter|tuple|get-tuple-element|bitcast|constant|while|call|after-all|opt-barrier"


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.id)
def test_products_of_a_few_tokens_compile_for_an_h200_and_spill_nothing(case, capfd, monkeypatch):
    arrays = jax.eval_shape(functools.partial(row_product.make, case))
    given = {name: a for name, a in arrays.items() if a is not None}
    absent = dict.fromkeys(arrays.keys() - given.keys())
    function = functools.partial(row_product.run, case)
    assert_spills_nothing(lambda a: function(a | absent), (given,), 1, capfd, monkeypatch)


def deferred_call(keys: int, batch: int, group: int, gated: bool):
    """Return a function that defers its writes, of arrays, and their shapes."""
    heads, rank, values = 4, 16, 2 * keys
    output_gate = 2 * heads * keys + heads * values
    columns = 0, heads * keys, 2 * heads * keys, output_gate + heads * values
    here = jax.ShapeDtypeStruct
    memory = here((batch, heads, keys, values), jnp.float32)
    pending = jax.eval_shape(
        functools.partial(empty_writes, group=group, dtype=jnp.bfloat16), memory
    )
    gate = here((rank, heads * keys), jnp.bfloat16), here((heads * keys,), jnp.float32)
    tokens = here((batch, columns[-1] + rank), jnp.bfloat16)
    call = dict(columns=columns, temperature=16.0, scale=0.1)
    run = functools.partial(deferred_step, **call, gate=output_gate if gated else None)
    return lambda a: run(*a), (memory, pending, here((), jnp.int32), tokens, *gate)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("keys", "batch", "group"), [(128, 256, 4), (128, 64, 8), (256, 256, 8)])
def test_steps_that_defer_their_writes_compile_for_an_h200_and_spill_nothing(
    keys, batch, group, gated, capfd, monkeypatch
):
    """With a program for each part of a memory."""
    monkeypatch.setattr(deferred, "PROGRAMS", {})
    run, arrays = deferred_call(keys, batch, group, gated)
    assert_spills_nothing(run, (arrays,), 1, capfd, monkeypatch)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", deferred.PROGRAMS)
def test_programs_that_compute_rows_in_turn_run_at_the_same_time(group, gated, capfd, monkeypatch):
    """They spill nothing, and as many as a call has for a processor of an H200 fit on it."""
    programs, rest = divmod(deferred.PROGRAMS[group], 132)
    assert programs == {4: 3, 8: 2}[group] and not rest
    monkeypatch.setenv("MOSAIC_GPU_DUMP_RESOURCES", "1")
    jax.clear_caches()
    run, arrays = deferred_call(128, 256, group, gated)
    output = assert_spills_nothing(run, (arrays,), 1, capfd, monkeypatch)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", output))
    assert programs * 128 * (-(-registers // 8) * 8) <= 65536  # allocated by eight of a thread
    (memory,) = map(int, re.findall(r"smem_scratch_bytes=(\d+)", output))
    assert (
        programs * (memory + 16 + 1024) <= 233472
    )  # two barriers, and what the system takes of each


@pytest.mark.parametrize("case", TILES_COMPILED, ids=lambda case: case.id)
def test_products_by_tiles_compile_for_an_h200_and_spill_nothing(case, capfd, monkeypatch):
    arrays = jax.eval_shape(functools.partial(tile_product.make, case))
    function = functools.partial(tile_product.run, case)
    assert_spills_nothing(function, (arrays,), 1, capfd, monkeypatch)


def launches(text: str) -> int:
    """Return the number of kernels and copies in the body of the loop of a compiled program."""
    computations = {
        name: body
        for name, body in re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }  # fmt: skip

    def count(name: str) -> int:
        lines = computations[name].splitlines()
        kernels = [x for x in lines if re.search(r" = (?:\(.*?\)|\S+) [\w-]+\(", x)]
        called = [m[1] for x in lines if (m := re.search(r" call\(.*to_apply=%?([\w.-]+)", x))]
        own = [x for x in kernels if not re.search(rf" = (?:\(.*?\)|\S+) (?:{FREE})\(", x)]
        return len(own) + sum(map(count, called))

    (body,) = re.findall(r" while\(.*body=%?([\w.-]+)", text)
    return count(body)


@pytest.mark.parametrize(
    "batch, a_layer, programs",
    [
        (1, 5, {}),
        (64, 12, {}),
        (128, 5, deferred.PROGRAMS),
        (256, 5, {}),
        (256, 5, deferred.PROGRAMS),
    ],
)
def test_a_token_of_gla_has_few_launches_and_copies_no_memory(
    batch, a_layer, programs, capfd, monkeypatch
):
    """Counted in the loop over tokens of models of 2 and of 4 layers; without the kernels there are 15 and 17 launches a layer. Nothing
    spills, and the loop holds no second copy of the memories, nor of the writes that are pending.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    monkeypatch.setattr(deferred, "PROGRAMS", programs)
    jax.clear_caches()
    counts = [compiled_launches(layers, batch) for layers in (2, 4)]
    assert counts[1] - counts[0] <= 2 * a_layer
    assert counts[0] <= 2 * a_layer + 9
    spilled = re.findall(r"frame, (\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spilled and set(spilled) == {"0"}


def compiled_launches(layers: int, batch: int) -> int:
    """Return the number of launches of a token of `batch` rows of GLA 340M with so many layers, compiled for an H200."""
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    here = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    place = functools.partial(jax.tree.map, lambda x: here(x.shape, x.dtype))
    config = models.lm("gla", "340m")
    config.num_layers = layers
    model = models.abstract(config)
    graph, params = nnx.split(model)
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    read = functools.partial(sampling.read_prompt, graph, capacity=64, prefill_chunk=None, unroll_layers=True)  # fmt: skip
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        assert token_step.serves(model, batch)
        hidden, state = jax.eval_shape(read, params, jax.ShapeDtypeStruct((batch, 16), jnp.int32), None)  # fmt: skip
        rest = jax.random.key(0), jnp.float32(0), None
        options: dict = dict(num_tokens=16, greedy=True, top_k=None, stop_token=None)
        with mock.patch.object(jax, "default_backend", lambda: "gpu"):
            decode = sampling.program(batch, True)
        traced = decode.trace(graph, *place((params, hidden, state)), *rest, **options, by_kernels=True)  # fmt: skip
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    memories = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * memories
    return launches(compiled.as_text())
