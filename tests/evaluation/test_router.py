"""Tests of the reports on routers: counts by token, mutual information, the plot over training, and the task
"router" of eval.py.
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx

from lsm_jax.evaluation import TASKS, Request, count_routes, plot_router, specialisation
from lsm_jax.evaluation.router import by_layer, information, read_router
from lsm_jax.models import Decoder, LayerConfig
from lsm_jax.training.runs import Run
from tests.models.test_mom import batch, model_config, run_of, small_mom
from tests.training import tiny


@pytest.mark.slow
def test_counts_are_the_routers_choices():
    model = Decoder(model_config("L"), rngs=nnx.Rngs(0))
    rows = batch(2) | dict(segment_ids=np.where(np.arange(32) < 30, 1, 0)[None].repeat(2, 0))
    counts = count_routes(model, [rows, rows])
    assert [layer.shape for layer in counts] == [(4, 257)] * 4
    seen = np.bincount(rows["tokens"][:, :30].ravel(), minlength=257)
    np.testing.assert_array_equal(
        counts[0].sum(0), 2 * 2 * seen
    )  # two batches, two memories a token
    # The first layer sees the token alone: its norm, then the router.
    block = model.periods.blocks[0]
    block = jax.tree.map(lambda p: p[0], block)
    logits = block.mixer.router(block.mixer_norm(model.embedding[...]))
    order = np.argsort(-np.asarray(logits), axis=-1)[:, :2]
    token = int(rows["tokens"][0, 0])
    assert set(np.flatnonzero(counts[0][:, token])) == set(order[token])


def test_information_and_named_tokens():
    split = np.zeros((2, 4), np.int64)
    split[0, :2] = split[1, 2:] = 10
    assert information(split) == pytest.approx(1.0)
    assert information(np.full((2, 4), 5)) == pytest.approx(0.0)
    (layer,) = specialisation([split], spell=lambda i: f"t{i}")
    assert [t["token"] for t in layer["memories"][1]["tokens"]] == ["t2", "t3"]
    assert layer["memories"][0]["tokens"][0] == dict(token="t0", id=0, share=1.0, count=10)
    twice = np.stack([split[0] + split[1], split[0], split[1]])  # every token is counted for two
    (layer,) = specialisation([twice], spell=str, top_k=2)
    assert layer["memories"][0]["tokens"] == []  # it gets all tokens alike
    assert [t["share"] for t in layer["memories"][1]["tokens"]] == [1.0, 1.0]


def test_plot_over_training(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        dict(step=s, **{"mom/load": [[0.5, 0.5], [1 - s / 9, s / 9]], "mom/entropy": [0.6, 0.5]})
        for s in (1, 2)
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "mom')
    steps, load = read_router(metrics, "mom/load")
    assert steps.tolist() == [1, 2] and load.shape == (2, 2, 2)
    assert plot_router(metrics, tmp_path / "router.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="there is no moe/load"):
        plot_router(metrics, tmp_path / "none.png", kind="moe")


def test_layers_of_different_numbers_of_memories(tmp_path):
    """In a model whose layers alternate between Mixtures-of-Memories of two and of three memories, the
    metrics have one entry for each of the two kinds; the report on routers arranges their values in the
    order of the layers.
    """
    few, many = np.arange(4.0).reshape(2, 2), 10 + np.arange(6.0).reshape(2, 3)
    named = {"mom/load/0": few.tolist(), "mom/load/1": many.tolist(), "mom/entropy": [0.5] * 4}
    layers = by_layer(named, "mom/load")
    assert layers == [few[0].tolist(), many[0].tolist(), few[1].tolist(), many[1].tolist()]
    assert by_layer(named, "mom/entropy") == [0.5] * 4 and by_layer(named, "moe/load") == []
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(dict(step=s, **named)) + "\n" for s in (1, 2)))
    _, load = read_router(metrics, "mom/load")
    assert load.shape == (2, 4, 3) and np.isnan(load[:, ::2, 2]).all()
    np.testing.assert_array_equal(load[0, 1::2], many)
    assert plot_router(metrics, tmp_path / "router.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_model_with_two_kinds_counts_both():
    config = model_config("LM")
    config.layers["M"] = LayerConfig(mixer=small_mom(num_memories=2, top_k=1), feedforward=None)
    del config.layers["N"]
    counts = count_routes(Decoder(config, rngs=nnx.Rngs(0)), [batch(2)])
    assert [layer_counts.shape for layer_counts in counts] == [(4, 257), (2, 257)] * 2
    assert [int(layer_counts.sum()) for layer_counts in counts] == [2 * 64, 64] * 2
    layers = specialisation(counts, spell=str, top_k=[2, 1, 2, 1])
    assert [len(layer["memories"]) for layer in layers] == [4, 2, 4, 2]


@pytest.mark.slow
def test_task_on_a_run(tmp_path):
    config = run_of(data=tiny.config(tiny.write_text(tmp_path / "text")).data)
    model = Decoder(config.model, rngs=nnx.Rngs(0))
    run = Run(config, model, {}, 3)
    folder = tmp_path / "run" / "eval" / "3"
    results = TASKS["routing"](run, Request(batch_size=4, max_tokens=512), folder)
    assert results == json.loads((folder / "routing.json").read_text())
    assert len(results["layers"]) == 2 and results["choices"] > 0
    softmax = Decoder(model_config("N"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no layer of the model is a Mixture-of-Memories"):
        count_routes(softmax, [batch(2)])
