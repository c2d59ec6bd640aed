"""Tests of Linear-MoE models: the published numbers of parameters and hyperparameters, variants of the
config, and a small hybrid that trains and decodes.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import linear_moe, lm
from lsm_jax import mixers, models
from lsm_jax.feedforward import MoEConfig
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training import from_dict, to_dict
from lsm_jax.training.optimizer import learning_rate
from lsm_jax.training.step import make_program
from tests.models.test_mom import batch
from tests.parallel.test_parallel import run_with_devices


@pytest.mark.parametrize(
    ("size", "total", "active"),
    [("a0.3b-2b", 2.18, 0.328), ("a1b-7b", 6.78, 1.143)],
)
def test_published_counts(size, total, active):
    """Linear-MoE models have the published billions of parameters (all and active) without embeddings, also
    counted by hand: mixer with output gate, experts, router, norms.
    """
    config = linear_moe.get_config(size).model
    count = models.count_parameters(config)
    assert round(count["non_embedding"] / 1e9, 2) == total
    assert round((count["active"] - count["embedding"]) / 1e9, 3) == active
    width, depth, inner = config.hidden_size, config.num_layers, dict(zip((1024, 2048), (896, 1024), strict=True))  # fmt: skip
    layer = 5 * width**2 + 64 * 3 * width * inner[width] + 64 * width + 2 * width + 128
    assert count["total"] == depth * layer + width + 2 * 151936 * width
    flops = models.flops_per_token(config, 2048) - count["embedding"]
    assert 1.99 < flops / (count["active"] - count["embedding"]) < 2.2


def test_published_hyperparameters():
    config = linear_moe.get_config("a0.3b-2b,mixer=gla,pattern=LLLN")
    assert config.model.letters() == "LLLN" * 3
    assert config.model.layers["N"].mixer.num_heads == 8
    assert config.model.layers["L"].mixer == mixers.GLAConfig(num_heads=8, expand_k=1.0)
    experts = MoEConfig(num_experts=64, top_k=8, expert_size=896, router="softmax_topk")
    assert config.model.layers["L"].feedforward == config.model.layers["N"].feedforward == experts
    assert not config.model.tie_embeddings and config.model.init_std == 0.008
    for size, first, last, tokens in (("a0.3b-2b", 1e-4, 1e-5, 15e9), ("a1b-7b", 1e-5, 1e-6, 1e11)):  # fmt: skip
        config = linear_moe.get_config(size)
        rates = [learning_rate(config, step) for step in (0, config.num_steps)]
        np.testing.assert_allclose(rates, [first, last], rtol=1e-4)
        assert (config.data.sequence_length, config.total_tokens) == (2048, tokens)
        assert config.optimizer.weight_decay == 0.1 and config.optimizer.b2 == 0.95


def test_any_method_is_a_mixer():
    for method in mixers.METHODS:
        for size in linear_moe.SIZES:
            config = linear_moe.get_config(f"{size},mixer={method},pattern=LLLN")
            assert type(config.model.layers["L"].mixer) is mixers.METHODS[method].config
    config = linear_moe.get_config("tiny,execution=dense,vocab_size=300")
    assert config.model.layers["L"].feedforward.execution == "dense"
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_wrong_variants_are_refused():
    for variant, words in (
        ("a2b", "size 'a2b'; accepted are a0.3b-2b, a1b-7b, a-small, tiny"),
        ("tiny,mix=gla", "option 'mix'; accepted are mixer, pattern"),
        ("tiny,mixer=glo", "mixer='glo'; accepted are linear_attention"),
        ("tiny,pattern=LM", "letters that model.layers lacks: M; accepted are L, N"),
        ("tiny,vocab_size=x", "vocab_size='x'; accepted is a whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            linear_moe.get_config(variant)
    with pytest.raises(ValueError, match="feedforward='glu'; accepted are swiglu"):
        lm.get_config("gla-tiny,feedforward=glu")


def test_experts_in_any_language_model():
    model = lm.get_config("mamba2-tiny,feedforward=moe,pattern=LN").model
    assert model.num_layers == 4
    assert {type(layer.feedforward) for layer in model.layers.values()} == {MoEConfig}


def shrunk(pattern="LN"):
    """Return the training config of a Linear-MoE run with two layers of width 16 and a batch of eight rows
    of 32 tokens.
    """
    config = linear_moe.get_config(f"tiny,pattern={pattern}")
    experts = MoEConfig(num_experts=4, top_k=2, expert_size=8, shared_size=4, z_scale=1e-3)
    mixer = mixers.LinearAttentionConfig(
        num_heads=2, output_gate=True, op=mixers.OpConfig(chunk_size=32)
    )
    model = dataclasses.replace(
        config.model, hidden_size=16, num_layers=2, dtype="float32", init_std=0.1, remat="none",
        layers={
            "L": models.LayerConfig(mixer=mixer, feedforward=experts),
            "N": models.LayerConfig(mixer=mixers.SoftmaxConfig(num_heads=2), feedforward=experts),
        },
    )  # fmt: skip
    data = dataclasses.replace(config.data, sequence_length=32)
    optimizer = dataclasses.replace(config.optimizer, peak_lr=1e-2, warmup_tokens=0)
    return dataclasses.replace(config, model=model, data=data, optimizer=optimizer, batch_size=8, total_tokens=10**5)  # fmt: skip


@pytest.mark.parametrize("pattern", ["L", pytest.param("LN", marks=pytest.mark.slow)])
def test_a_shrunk_model_trains_and_reports_its_router(pattern):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = make_program(shrunk(pattern), mesh)
        state, losses = program.init(), []
        for _ in range(8):
            state, metrics = program.train_step(state, batch())
            losses.append(float(metrics["train/loss"]))
    assert losses[-1] < losses[0] - 0.5 and int(metrics["train/skipped_steps"]) == 0
    assert metrics["moe/load"].shape == (2, 4) and metrics["moe/entropy"].shape == (2,)
    np.testing.assert_allclose(metrics["moe/load"].sum(axis=1), 1, rtol=1e-5)
    # The minimum of a layer's balance loss is about 1, and the loss is the mean over layers.
    assert 0.99e-2 < float(metrics["moe/balance_loss"]) < 2e-2
    assert 0 < float(metrics["moe/z_loss"]) < 1e-2


@pytest.mark.slow
def test_a_decoder_decodes_what_it_reads_at_once():
    model = models.Decoder(shrunk().model, rngs=nnx.Rngs(0))
    tokens = jnp.arange(12)[None] * 7 % 257
    whole = jax.jit(lambda m, t: m(t)[0])(model, tokens)
    step = jax.jit(lambda m, t, s: m(t, state=s)[:2])
    state = model.init_state(1, 12)
    for t in range(12):
        logits, state = step(model, tokens[:, t : t + 1], state)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-4)


def test_layers_may_differ_in_their_experts():
    """If the layers of a period have different numbers of experts, a statistic with one entry per expert (the
    load) is reported for each of these layers by itself, as "moe/load/0" and "moe/load/1".
    """
    config = shrunk().model
    more = dataclasses.replace(config.layers["N"].feedforward, num_experts=6)
    config.layers["N"] = dataclasses.replace(config.layers["N"], feedforward=more)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    _, _, aux = jax.eval_shape(lambda m, t: m(t), models.abstract(config), tokens)
    assert {name: aux[name].shape for name in aux} == {
        "moe/balance_loss": (), "moe/z_loss": (), "moe/entropy": (2,), "moe/load/0": (1, 4), "moe/load/1": (1, 6),
    }  # fmt: skip


SCRIPT = """
import jax, numpy as np
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training.step import make_program
from tests.models.test_linear_moe import batch, shrunk

found = []
for fsdp, data in ((1, 1), (2, 2)):
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
    with jax.set_mesh(mesh):
        program = make_program(shrunk(), mesh)
        state = program.init()
        rows = jax.device_put(batch(), batch_sharding(mesh))
        for _ in range(3):
            state, metrics = program.train_step(state, rows)
            names = ("train/loss", "train/grad_norm", "moe/load", "moe/balance_loss", "moe/z_loss")
            found.append({n: np.asarray(metrics[n]) for n in names})
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found[:3], found[3:])
print("ok")
"""


@pytest.mark.slow
def test_data_and_fsdp_sharding_change_nothing():
    """Three training steps of a Linear-MoE model on a mesh of 2 x 2 devices have the losses, gradient norms
    and routing of one device.
    """
    assert run_with_devices(4, "-c", SCRIPT).endswith("ok\n")
