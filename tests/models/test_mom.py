"""Tests of models with a Mixture-of-Memories: published numbers of parameters, the router's loss and metrics,
and sharding over devices.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import mom
from lsm_jax import mixers, models
from lsm_jax.data import RecallTask
from lsm_jax.models import Decoder, LayerConfig, ModelConfig, RecallModel, RecallModelConfig
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training import RecallConfig, from_dict, to_dict
from lsm_jax.training.metrics import MetricsWriter, read_rows
from lsm_jax.training.recall_sweep import make_sweep
from lsm_jax.training.step import make_program
from tests.parallel.test_parallel import run_with_devices
from tests.training import tiny


def small_mom(**fields):
    """Return the config of a Mixture-of-Memories with small heads and chunks of eight tokens."""
    inner = mixers.GatedDeltaNetConfig(
        num_heads=2, head_dim=4, expand_v=1.0, op=mixers.OpConfig(chunk_size=8)
    )
    return mixers.MoMConfig(mixer=inner, **fields)


def model_config(pattern="LN", **fields) -> ModelConfig:
    """Return the config of a model of width 16 with four layers, some with a Mixture-of-Memories and some
    with softmax attention, as the pattern says.
    """
    softmax = mixers.SoftmaxConfig(num_heads=2, head_dim=8)
    layers = {"L": LayerConfig(mixer=small_mom(**fields), feedforward=None), "N": LayerConfig(mixer=softmax, feedforward=None)}  # fmt: skip
    return ModelConfig(
        vocab_size=257, hidden_size=16, num_layers=4, pattern=pattern, layers=layers, dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "total", "active"),
    [
        ("340m", 545_119_424, 444_062_912),  # "MoM 444M" of the paper, and its 24 layers of 1024
        ("340m,inner=gla", 471_354_368, 394_652_672),  # "GLA MoM 395M"
        ("1.3b", 1_618_419_904, 1_416_306_880),
    ],
)
def test_published_counts(variant, total, active):
    config = mom.get_config(variant)
    count = models.count_parameters(config.model)
    assert (count["total"], count["active"]) == (total, active)
    flops = models.flops_per_token(config.model, 2048) - 2 * 32000 * config.model.hidden_size
    assert 1.99 < flops / (count["active"] - count["embedding"]) < 3


def test_variants():
    hybrid = mom.get_config("340m,hybrid=1").model
    assert hybrid.letters() == "LLLLLLLN" * 3
    config = mom.get_config("tiny,inner=gla,memories=8,top_k=3,shared=0,execution=masked")
    mixer = config.model.layers["L"].mixer
    assert (mixer.num_memories, mixer.top_k, mixer.shared_memory) == (8, 3, False)
    assert type(mixer.mixer) is mixers.GLAConfig and mixer.execution == "masked"
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    mixer = (
        mom.get_config("tiny,inner=gla,conv=4,row_conv=3,balance_scale=0.01")
        .model.layers["L"]
        .mixer
    )
    assert (mixer.mixer.conv_size, mixer.row_conv_size) == (4, 3)
    assert mixer.balance_scale == 0.01
    assert (
        mom.get_config("tiny,inner=gla,conv=4,baseline=inner").model.layers["L"].mixer
        == mixer.mixer
    )
    expanded = mom.get_config("340m,expanded=3").model.layers["L"].mixer
    assert type(expanded) is mixers.GatedDeltaNetConfig and expanded.expand_v == 3.0
    for variant, words in (
        ("2b", "size '2b'; accepted are nano, tiny"),
        ("340m,memory=3", "option 'memory'; accepted are inner, memories"),
        ("340m,top_k=x", "top_k='x'; accepted is a whole number from 0"),
        ("340m,hybrid=4", "hybrid='4'; accepted are 0 and 1"),
        ("340m,shared=2", "shared='2'; accepted are 0 and 1"),
        ("340m,top_k=1,top_k=2", "option top_k is given twice"),
        (
            "340m,expanded=5,memories=8,single=1",
            "expanded=5 excludes memories, single, since it has one memory",
        ),
        (
            "340m,row_conv=4,baseline=inner",
            "baseline=inner excludes row_conv, since it has one memory",
        ),
        (
            "340m,inner=retnet,conv=4",
            "conv=4 requires an inner mixer with conv_size, which RetNetConfig",
        ),
        ("340m,inner=s4d", "cannot be one of several memories"),
    ):
        with pytest.raises(ValueError, match=words):
            mom.get_config(variant)


def batch(rows=8):
    """Return a training batch of `rows` rows with 32 tokens each."""
    tokens = np.random.default_rng(0).integers(1, 257, size=(rows, 33)).astype(np.int32)
    ids = np.where(np.arange(32) < 20, 1, 2).astype(np.int32)
    return dict(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=np.ones((rows, 32), np.float32),
        segment_ids=np.tile(ids, (rows, 1)), positions=np.tile(np.where(ids == 1, np.arange(32), np.arange(32) - 20), (rows, 1)).astype(np.int32),
    )  # fmt: skip


def run_of(**changes):
    return tiny.config("unused", **dict(model=model_config()) | changes)


@pytest.mark.slow
def test_balance_loss_is_trained_and_statistics_are_reported(tmp_path):
    """Without a next-token loss, only the balance loss of the Mixture-of-Memories' router is trained; its
    statistics are reported.
    """
    silent = batch() | dict(loss_mask=np.zeros((8, 32), np.float32))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = make_program(run_of(model=model_config("L", balance_scale=10.0)), mesh)
        _, metrics = program.train_step(program.init(), silent)
    assert float(metrics["train/loss"]) == 0 and float(metrics["train/grad_norm"]) > 0
    # With perfect balance the loss is k times the scale.
    assert 20.0 < float(metrics["mom/balance_loss"]) < 24.0
    load, entropy = (np.asarray(metrics[f"mom/{n}"]) for n in ("load", "entropy"))
    assert load.shape == (4, 4) and entropy.shape == (4,)
    np.testing.assert_allclose(load.sum(axis=1), 1, rtol=1e-5)
    assert not any("/tokens/" in name for name in metrics)

    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {name: np.asarray(value).tolist() for name, value in metrics.items()})
    writer.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    np.testing.assert_allclose(row["mom/load"], load)


@pytest.mark.slow
def test_accumulation_averages_the_statistics():
    found = []
    for pieces in (1, 2):
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        with jax.set_mesh(mesh):
            program = make_program(run_of(accumulation_steps=pieces), mesh)
            _, metrics = program.train_step(program.init(), batch())
        found.append(metrics)
    for name in ("mom/load", "mom/entropy", "train/loss"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-4)


def test_a_decoders_state_does_not_grow():
    model = models.abstract(model_config("L"))
    shapes = [jax.tree.map(jnp.shape, jax.eval_shape(lambda n=n: model.init_state(1, n))) for n in (8, 4096)]  # fmt: skip
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_a_decoder_decodes_what_it_reads_at_once():
    model = Decoder(model_config("L"), rngs=nnx.Rngs(0))
    tokens = jnp.arange(12)[None] * 7 % 257
    whole = jax.jit(lambda m, t: m(t)[0])(model, tokens)
    step = jax.jit(lambda m, t, s: m(t, state=s)[:2])
    state = model.init_state(1, 12)
    for t in range(12):
        logits, state = step(model, tokens[:, t : t + 1], state)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-4)


@pytest.mark.slow
def test_recall_trains_the_router_too():
    model = RecallModelConfig(mixer=small_mom(balance_scale=1.0), hidden_size=16, vocab_size=32)
    task = RecallTask(length=8, num_pairs=1, num_examples=4)
    config = RecallConfig(name="mom", model=model, train=(task,), test=(task,))
    sweep = make_sweep(config, 1)
    data = dict(
        tokens=jnp.ones((2, 8), jnp.int32), positions=jnp.ones((2, 1), jnp.int32), answers=jnp.ones((2, 1), jnp.int32)
    )  # fmt: skip
    params = nnx.to_pure_dict(nnx.state(RecallModel(model, rngs=nnx.Rngs(0)), nnx.Param))
    loss = jax.jit(sweep.loss)(params, data)
    plain = dict(jax.tree.map(lambda p: p, params))
    still = make_sweep(
        RecallConfig(name="mom", model=RecallModelConfig(mixer=small_mom(balance_scale=0.0), hidden_size=16, vocab_size=32), train=(task,), test=(task,)), 1
    )  # fmt: skip
    # One of the two layers is MoM: the loss is that of one layer divided by the depth, at least its minimum k
    # / depth.
    assert float(loss - jax.jit(still.loss)(plain, data)) > 0.99


SCRIPT = """
import jax, numpy as np
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training.step import make_program
from tests.models.test_mom import batch, run_of

found = []
for fsdp, data in ((1, 1), (2, 2)):
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
    with jax.set_mesh(mesh):
        program = make_program(run_of(), mesh)
        state = program.init()
        rows = jax.device_put(batch(), batch_sharding(mesh))
        losses = []
        for _ in range(3):
            state, metrics = program.train_step(state, rows)
            losses.append({n: np.asarray(metrics[n]) for n in ("train/loss", "train/grad_norm", "mom/load", "mom/balance_loss")})
    found.append(losses)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)
print("ok")
"""


@pytest.mark.slow
def test_data_and_fsdp_sharding_change_nothing():
    """Three training steps of a Mixture-of-Memories model on a mesh of 2 x 2 devices have the losses,
    gradient norms and routing of one device.
    """
    assert run_with_devices(4, "-c", SCRIPT).endswith("ok\n")
