"""Run by `test_sequence`, in a process of eight devices: `python -m tests.parallel.sequence_models DEVICES METHOD ...`.

A model of two layers of a method, its rows cut over a sequence axis, has the loss and every gradient of one device.
"""

from __future__ import annotations

import math
import sys

import jax
import numpy as np
from flax import nnx

from lsm_jax import mixers, models
from lsm_jax.parallel import MeshConfig, make_mesh
from tests.parallel.meshes import compare, mixer, run_of

BATCH, LENGTH = 2, 27  # no multiple of any number of devices


def config_of(name: str) -> models.ModelConfig:
    """`METHOD`, `METHOD/METHOD` in turn, or `mom-METHOD` for a Mixture-of-Memories of it."""
    config = run_of(name.removeprefix("mom-").replace("/", "+none/") + "+none").model
    config.num_layers, config.remat = 2, "full"
    if name.startswith("mom-"):
        inner = mixer(name.removeprefix("mom-"))
        config.layers["A"].mixer = mixers.MoMConfig(mixer=inner, balance_scale=0.1)
    return config


def measure(config: models.ModelConfig, graph, params, rows):
    """Loss and gradients."""

    def loss(params):
        decoder = nnx.merge(graph, params)
        hidden, _, aux = decoder.hidden(rows["tokens"], segment_ids=rows.get("segment_ids"))
        nll = models.next_token_loss(hidden, decoder.head(), rows["labels"], rows["mask"])
        losses = sum((v for k, v in aux.items() if k.endswith("_loss")), 0.0)
        return nll.sum() / rows["mask"].sum() + losses

    return jax.value_and_grad(loss)(params)


def rows_of(config: models.ModelConfig, packed: bool) -> dict:
    """Two rows: of one document, or of documents and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, size=(BATCH, LENGTH + 1)).astype(np.int32)
    ids = np.sort(rng.integers(1, 4, size=(BATCH, LENGTH)), axis=1).astype(np.int32)
    ids[1, -4:] = 0
    rows = dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], mask=np.ones(ids.shape, np.float32))
    return rows | dict(segment_ids=ids, mask=(ids != 0).astype(np.float32)) if packed else rows


def check(name: str, sizes: dict[str, int], *, packed: bool) -> None:
    """Raise where the mesh gives something else than one device."""
    config = config_of(name)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    rows = rows_of(config, packed)
    run = jax.jit(lambda p, r: measure(config, graph, p, r))
    loss, grads = jax.tree.map(np.asarray, run(params, rows))
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        many = jax.jit(lambda p, r: measure(config, graph, p, r))
        other, more = jax.tree.map(np.asarray, many(params, rows))
    np.testing.assert_allclose(other, loss, rtol=1e-5, err_msg=name)
    compare(name, more, grads)


def main(devices: str, *names: str) -> None:
    """`devices` is "N" or "NxM", as for `tests.parallel.sequence`; a name may end in `:packed`."""
    jax.config.update("jax_disable_most_optimizations", True)
    parts, _, heads = devices.partition("x")
    for case in names:
        name, _, packed = case.partition(":")
        sizes = dict(data=1, sequence=int(parts), tensor=int(heads or 1))
        check(name, sizes, packed=bool(packed))
        print(case, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
