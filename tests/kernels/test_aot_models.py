"""Layers of every method as an evaluation calls them, compiled for an H200 that need not be here: `make test-aot`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from lsm_jax import mixers, models
from tests.kernels.test_aot import CUDA, H200

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("method", mixers.METHODS)
def test_padded_rows_that_continue_from_a_state_compile_without_a_derivative(method, monkeypatch):
    """A layer of a model of 125M reads a piece of prompts that are padded on their left, as `evaluation.reader.Answerer` does: several kernels are
    chosen for calls without a derivative alone, and interpreters do not see what fails when they are compiled.
    """
    monkeypatch.setenv("CUDA_ROOT", str(CUDA))
    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    here = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    place = functools.partial(jax.tree.map, lambda x: here(x.shape, x.dtype))
    config = models.lm(method, "125m", vocab_size=512)
    config.num_layers = len(config.pattern)
    graph, params = nnx.split(models.abstract(config))
    tokens = here((11, 1024), jnp.int32)

    def read(params, state, tokens, segment_ids):
        model = nnx.merge(graph, params)
        hidden, state, _ = model.hidden(tokens, state=state, segment_ids=segment_ids)
        return hidden[:, -1:], state

    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        empty = jax.eval_shape(lambda p: nnx.merge(graph, p).init_state(11, 1056), params)
        traced = jax.jit(read, donate_argnums=1).trace(place(params), place(empty), tokens, tokens)
        lowered = traced.lower(lowering_platforms=("cuda",))
    lowered.compile({"xla_gpu_autotune_level": 0})
