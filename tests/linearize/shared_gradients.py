"""Compare gradients on packed rows that devices share with those on one device, of released models:
`python -m tests.linearize.shared_gradients lora:GOLDEN full:GOLDEN ...`, in a process of four devices.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np
from flax import nnx

from lsm_jax.mixers import LoRAConfig
from lsm_jax.models import abstract
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.parallel.mesh import token_sharding
from lsm_jax.training.partition import join, leaves_of
from lsm_jax.training.step import params_of
from tests.convert.test_released import GOLDENS, imported
from tests.linearize.test_packed_documents import assert_equal, golden_batch, measured


def adapted(name: str):
    """Return the graph and the parameters of a golden's model with adapters, whose entries are random."""
    config, params = imported(GOLDENS / name)
    config = dataclasses.replace(config, lora=LoRAConfig(targets=("all",), rank=2))
    model, rng = abstract(config), np.random.default_rng(0)

    def draw(path, leaf):
        adapter = "lora" in jax.tree_util.keystr(path)
        return rng.normal(0, 0.3, leaf.shape).astype(np.float32) if adapter else leaf

    drawn = jax.tree_util.tree_map_with_path(draw, params_of(model))
    return nnx.graphdef(model), join(drawn, params)


def main(*which: str) -> None:
    """Compare the loss and the gradients of adapters ("lora:GOLDEN") or of all parameters ("full:GOLDEN") of goldens' models."""
    mesh = make_mesh(MeshConfig(data=1, sequence=4))
    for given in which:
        kind, name = given.split(":")
        trainable = dict(lora=("lora",), full=())[kind]
        graph, params = adapted(name)
        batch = golden_batch()
        one = measured(graph, params, trainable, batch)
        with jax.set_mesh(mesh):
            shared = {n: jax.device_put(x, token_sharding(mesh)) for n, x in batch.items()}
            several = measured(graph, params, trainable, shared)
        assert_equal(several, one, given)
        count = sum(np.abs(x).max() > 0 for x in leaves_of(one[1]).values())
        print(f"{given}: loss {one[0]:.6f}, {count} gradients are equal", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
