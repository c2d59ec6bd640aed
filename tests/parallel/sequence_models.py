"""Compare a layer of each method, and models, on rows that devices share with one device: outputs and every
gradient.

The heads may be sharded over a tensor axis, too. `test_sequence` runs it in a process of eight devices:
`python -m tests.parallel.sequence_models DEVICES:METHOD ...`.
"""

from __future__ import annotations

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax import mixers, models
from lsm_jax.parallel import MeshConfig, make_mesh
from tests.mixers.conftest import run, stir
from tests.parallel.meshes import WIDTH, compare, mixer, run_of

BATCH, LENGTH = 2, 27  # not a multiple of any number of devices


def config_of(name: str) -> models.ModelConfig:
    """Return the config of a model by its name: two layers of METHOD or mom-METHOD (a Mixture-of-Memories),
    or one each of METHOD/METHOD/...
    """
    config = run_of(name.removeprefix("mom-").replace("/", "+none/") + "+none").model
    config.num_layers, config.remat = max(2, len(config.pattern)), "full"
    if name.startswith("mom-"):
        inner = mixer(name.removeprefix("mom-"))
        config.layers["A"].mixer = mixers.MoMConfig(mixer=inner, balance_scale=0.1)
    return config


def measure(config: models.ModelConfig, graph, params, rows):
    """Return the loss on a batch, and its gradients with respect to `params`, of the model with the nnx graph
    definition `graph`.
    """

    def loss(params):
        decoder = nnx.merge(graph, params)
        hidden, _, aux = decoder.hidden(
            rows["tokens"], segment_ids=rows.get("segment_ids"), contiguous=True
        )
        nll = models.next_token_loss(hidden, decoder.head(), rows["labels"], rows["mask"])
        losses = sum((v for k, v in aux.items() if k.endswith("_loss")), 0.0)
        return nll.sum() / rows["mask"].sum() + losses

    return jax.value_and_grad(loss)(params)


def rows_of(config: models.ModelConfig, packed: bool) -> dict:
    """Return a batch of two rows, of one document each or packed with several documents and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, size=(BATCH, LENGTH + 1)).astype(np.int32)
    ids = np.sort(rng.integers(1, 4, size=(BATCH, LENGTH)), axis=1).astype(np.int32)
    ids[1, -4:] = 0
    rows = dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], mask=np.ones(ids.shape, np.float32))
    return rows | dict(segment_ids=ids, mask=(ids != 0).astype(np.float32)) if packed else rows


@functools.cache
def layer_of(name: str, packed: bool):
    """Return the layer of METHOD or mom-METHOD that is compared on one and on several devices: a function
    (floats, segment ids) -> (outputs, gradients), its arguments `floats` (parameters and input) and
    segment ids, and its result on one device.
    """
    # With a window as long as the rows, LoLCATs' linear attention would have no effect.
    short = dict(window=5) if name == "lolcats" else {}
    config = mixer(name.removeprefix("mom-"), **short)
    if name.startswith("mom-"):
        config = mixers.MoMConfig(mixer=config, balance_scale=0.1)
    depth = dict(layer=1, num_layers=2)
    module = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), init_std=0.2, **depth)
    stir(module)
    graph, params = nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))
    floats = params, jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
    ids = rows_of(config_of("gla"), packed).get("segment_ids")

    def loss(floats, ids):
        params, x = floats
        y, _, aux = run(nnx.merge(graph, params), x, segment_ids=ids)
        total = jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))
        return total + sum(v for k, v in aux.items() if k.endswith("_loss")), y

    def both(floats, ids):
        (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(floats, ids)
        return y, gradients

    expected = jax.tree.map(np.asarray, jax.jit(both)(floats, ids))
    return both, floats, ids, expected


def check_layer(name: str, mesh, *, packed: bool) -> None:
    """Assert that a layer's outputs and gradients on a mesh whose devices share rows equal those on one
    device.
    """
    both, floats, ids, expected = layer_of(name, packed)
    with jax.set_mesh(mesh):
        got = jax.tree.map(np.asarray, jax.jit(lambda *given: both(*given))(floats, ids))
    for a, b in zip(got, expected, strict=True):
        compare(name, a, b)


def check_model(name: str, mesh, *, packed: bool) -> None:
    """Assert that a model's loss and gradients on a mesh whose devices share rows are those on one device."""
    config = config_of(name)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    rows = rows_of(config, packed)
    run = jax.jit(lambda p, r: measure(config, graph, p, r))
    loss, grads = jax.tree.map(np.asarray, run(params, rows))
    with jax.set_mesh(mesh):
        many = jax.jit(lambda p, r: measure(config, graph, p, r))
        other, more = jax.tree.map(np.asarray, many(params, rows))
    np.testing.assert_allclose(other, loss, rtol=1e-5, err_msg=name)
    compare(name, more, grads)


def mesh_of(devices: str):
    """Return the mesh of "N", a sequence axis of N devices, or of "NxM", which also has a tensor axis of M."""
    parts, _, heads = devices.partition("x")
    sizes = dict(sequence=int(parts), tensor=int(heads or 1))
    return make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])


def main(*cases: str) -> None:
    """Compare layers and models on shared rows with one device for each case: DEVICES:METHOD,
    DEVICES:mom-METHOD, or DEVICES:METHOD/METHOD for a model; `:packed` may follow.
    """
    for case in cases:
        devices, name, *packed = case.split(":")
        (check_model if "/" in name else check_layer)(name, mesh_of(devices), packed=bool(packed))
        print(case, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
