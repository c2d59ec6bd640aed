"""Adapters on every dense layer of every method: an adapted model is the model into which they are merged."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import LoRAConfig, layers, lora
from tests.mixers.conftest import run, stir
from tests.parallel.meshes import WIDTH, mixer

LORA = LoRAConfig(targets=("all",), rank=2, alpha=3.0)


def dense_layers(module):
    return [x for _, x in nnx.iter_graph(module) if isinstance(x, layers.Dense)]


def check(config):
    """Assert that adapters on all dense layers compute what the merged kernels compute, for the row, its gradients' places, and
    for a token after it."""
    module = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), init_std=0.2, layer=1, num_layers=2)
    stir(module)
    plain = nnx.graphdef(module)
    count = len(dense_layers(module))
    assert lora.add_adapters(module, LORA, rngs=nnx.Rngs(1)) == (["all"] if count else [])
    if not count:
        return
    stir(module)  # the second matrices start at zero
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert (
        sum("'lora'" in jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params))
        == 2 * count
    )
    merged = nnx.merge(plain, mixers.merge_adapters(params, LORA))
    x = jax.random.normal(jax.random.key(1), (2, 10, WIDTH))
    call = jax.jit(lambda m, x: run(m, x)[0])
    ours, theirs, before = (
        np.asarray(call(m, x)) for m in (module, merged, nnx.merge(plain, _without(params)))
    )
    scale = np.abs(ours).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * scale)
    assert np.abs(ours - before).max() > 1e-3 * scale


def _without(params):
    """Return the parameters without adapters, not merged."""
    if not isinstance(params, dict):
        return params
    return {key: _without(value) for key, value in params.items() if key != "lora"}


@pytest.mark.few
def test_adapters_are_the_merged_kernels(method):
    check(mixer(method.name))


@pytest.mark.parametrize("execution", ["masked", "packed"])
@pytest.mark.parametrize("single", [False, True])
def test_adapters_of_the_memories_of_a_mixture(execution, single):
    check(mixers.MoMConfig(mixer=mixer("gla"), execution=execution, single_projections=single))


def test_targets_name_layers_by_the_end_of_their_path():
    module = mixers.build(mixer("rwkv7"), WIDTH, rngs=nnx.Rngs(0))
    config = dataclasses.replace(LORA, targets=("decay.down", "up", "k_proj", "absent"))
    assert lora.add_adapters(module, config, rngs=nnx.Rngs(0)) == ["decay.down", "up", "k_proj"]
    adapted = {path for path, layer in lora.adaptable(module).items() if layer.lora is not None}
    assert adapted == {"decay.down", "decay.up", "rate.up", "first.up", "gate.up", "k_proj"}
    assert jnp.shape(module.gate.up.lora.a[...])[1] == 2
