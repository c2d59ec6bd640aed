"""Tests of the maps of evaluation: a layer's attention weights equal those that its op applies, and its gates
equal those that the mixer computes, for the same input.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, models, ops
from lsm_jax.evaluation import TASKS, MapsConfig, Request, layer_maps, maps
from lsm_jax.mixers import Context
from lsm_jax.models import Decoder, LayerConfig, ModelConfig

TOKENS = np.random.default_rng(0).integers(0, 61, 37)


def model_of(*configs, depth: int | None = None) -> Decoder:
    letters = "ABCDEF"[: len(configs)]
    layers = {
        letter: LayerConfig(mixer=config, feedforward=None)
        for letter, config in zip(letters, configs, strict=True)
    }
    config = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=depth or len(configs),
        pattern=letters,
        layers=layers,
        dtype="float32",
        remat="none",
        init_std=0.3,
    )
    return Decoder(config, rngs=nnx.Rngs(0))


def op_weights(model: Decoder) -> np.ndarray:
    """Return the softmax weights [heads, T, T] of the model's first layer: the output of its attention op
    if the value of token j is the unit vector j.
    """
    graphdef, params = nnx.split(model.periods.blocks[0])
    block = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], params))
    x = block.mixer_norm(model.embedding[...][TOKENS][None])
    context = Context(0, positions=jnp.arange(len(TOKENS))[None])
    query, context = block.mixer.read(x, context)
    written, _ = block.mixer.write(x, context)
    heads = written["v"].shape[2]
    written["v"] = jnp.tile(jnp.eye(len(TOKENS))[None, :, None], (1, 1, heads, 1))
    output, _ = ops.attention(query, **written, **block.mixer.options())
    return np.moveaxis(np.asarray(output[0]), 1, 0)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            mixers.SoftmaxConfig(num_heads=4, num_kv_heads=2, window=9), marks=pytest.mark.slow
        ),
        mixers.get_method("fox").config(num_heads=4, num_kv_heads=2),
        pytest.param(
            mixers.get_method("fox").config(num_heads=4, forget_gate="alibi", window=20),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["window", "fox", "alibi"],
)
def test_attention_equals_the_ops(config, monkeypatch):
    model = model_of(config)
    weights = op_weights(model)
    (layer,) = layer_maps(model, TOKENS, MapsConfig(heads=(3, 1)), progress=False)
    np.testing.assert_allclose(layer.attention, weights[[3, 1]], rtol=2e-5, atol=1e-6)
    assert layer.pool == 1 and (layer.forgetting is None) == ("log_forget" not in layer.gates)
    if layer.forgetting is not None:
        gates = layer.gates["log_forget"][:, [3, 1]].astype(np.float64)
        for query, key in ((5, 5), (30, 29), (36, 20)):
            expected = np.exp(gates[key + 1 : query + 1].sum(0))
            np.testing.assert_allclose(layer.forgetting[:, query, key], expected, rtol=1e-4)
        assert layer.forgetting[0, 20, 36] == 0
    monkeypatch.setattr(maps, "PIXELS", 10)
    (pooled,) = layer_maps(model, TOKENS, MapsConfig(heads=(3, 1)), progress=False)
    assert pooled.pool == 4 and pooled.attention.shape == (2, 10, 10)
    padded = np.pad(weights[[3, 1]], ((0, 0), (0, 3), (0, 3)))
    expected = padded.reshape(2, 10, 4, 10, 4).max((2, 4))
    np.testing.assert_allclose(pooled.attention, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("hgrn2", "softmax"), pytest.param(("rwkv7", "mamba", "mamba2"), marks=pytest.mark.slow)],
)
def test_layers_return_the_outputs_of_the_model(names):
    depth = 2 * len(names)
    model = model_of(*(mixers.get_method(n).config.for_width(32) for n in names), depth=depth)
    after = [x for _, _, x in maps.run_layers(model, TOKENS, range(depth))][-1]
    expected = jax.jit(lambda: model.hidden(jnp.asarray(TOKENS)[None])[0])()
    np.testing.assert_allclose(model.norm(after), expected, rtol=1e-4, atol=1e-4)


def test_gates_are_log_decays_by_token():
    configs = (mixers.GLAConfig(num_heads=2), mixers.DeltaNetConfig(num_heads=2))
    model = model_of(mixers.RetNetConfig(num_heads=2), *configs)
    retnet, gla = layer_maps(model, TOKENS, MapsConfig(), progress=False)
    assert [m.layer for m in (retnet, gla)] == [0, 1] and gla.attention is None
    decay = np.log(1 - 2.0 ** -(5 + np.arange(2)))
    np.testing.assert_allclose(retnet.gates["log_decay"], np.tile(decay, (37, 1)), rtol=1e-5)
    assert gla.gates["log_decay"].shape == (37, 2, 8) and (gla.gates["log_decay"] < 0).all()
    with pytest.raises(ValueError, match="layer 2 is a DeltaNet, which has neither"):
        layer_maps(model, TOKENS, MapsConfig(layers=(2,)), progress=False)
    with pytest.raises(ValueError, match="maps.layers=.*the model's layers are 0 to 2"):
        layer_maps(model, TOKENS, MapsConfig(layers=(3,)), progress=False)
    with pytest.raises(ValueError, match="maps.heads=.*the heads of layer 0 are 0 to 1"):
        layer_maps(model, TOKENS, MapsConfig(layers=(0,), heads=(2,)), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(mixers.METHODS))
def test_every_method_shows_its_gates_or_says_it_has_none(method, tmp_path):
    config = models.lm(method, "tiny", vocab_size=61)
    config.num_layers, config.dtype = 2, "float32"
    model = Decoder(config, rngs=nnx.Rngs(0))
    try:
        layers = layer_maps(model, TOKENS, MapsConfig(), progress=False)
    except ValueError as error:
        assert "no layer of the model has attention weights or gates" in str(error)
        return
    for layer in layers:
        for gate in layer.gates.values():
            assert gate.shape[0] == 37 and np.isfinite(gate).all() and (gate <= 0).all()
        assert maps.plot_maps(layer, tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_maps_task_writes_pictures_and_arrays(run, tmp_path):
    results = TASKS["maps"](run, Request(maps=MapsConfig(length=20)), tmp_path)
    assert results == json.loads((tmp_path / "maps.json").read_text())
    assert len(results["tokens"]) == 20 and results["tokens"][0] == 256
    (layer,) = results["layers"]
    assert layer["method"] == "RetNet" and layer["arrays"] == {"log_decay": [20, 1]}
    assert (tmp_path / layer["picture"]).read_bytes().startswith(b"\x89PNG")
    assert np.load(tmp_path / "maps_layer00.npz")["log_decay"].shape == (20, 1)
    prompt = TASKS["maps"](run, Request(prompt="def f"), tmp_path)
    assert prompt["tokens"] == [256, *b"def f"] and prompt["text"] == "def f"
    request = Request(maps=MapsConfig(length=33))
    with pytest.raises(
        ValueError, match=r"maps.length=33: a row of --sequence_length has only 32 tokens"
    ):
        TASKS["maps"](run, request, tmp_path)
    for changes in (dict(length=1), dict(layers=(-1,)), dict(heads=(1, 1)), dict(layers=("a",))):
        with pytest.raises(ValueError, match=f"maps.{next(iter(changes))}="):
            Request(maps=dataclasses.replace(MapsConfig(), **changes)).validate()
