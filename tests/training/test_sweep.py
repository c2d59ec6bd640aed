"""Tests of sweeps of associative recall: models that are trained in one mapped program train as each would
alone, recall is learned, and the config, the command and the report are right.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.cases import recall_table
from benchmarks.run import read_rows as read_benchmark
from configs import mqar
from lsm_jax import mixers
from lsm_jax.data import RecallTask
from lsm_jax.models import recall_state_size
from lsm_jax.parallel import largest_divisor
from lsm_jax.training import from_dict, read_config, read_rows, to_dict, train_recall
from lsm_jax.training.recall_sweep import (
    compile_recall,
    compiler_options,
    load_task,
    make_accuracy,
    make_sweep,
)
from lsm_jax.training.sweep import epoch_blocks


def tiny(method="linear_attention", **changes):
    """Return the config of a small recall sweep of two members. Each epoch has four steps of 16 examples,
    half of them with 16 tokens and two pairs to recall, half with 8 tokens and one pair.
    """
    config = mqar.get_config(f"{method},width=16,suite=tiny")
    tasks = tuple(RecallTask(length=t, num_pairs=p, num_examples=32) for t, p in ((16, 2), (8, 1)))
    fields = dict(train=tasks, test=tasks, batch_size=16, epochs=2, steps_per_call=2)
    return dataclasses.replace(config, **fields | changes)


def test_products_of_small_models_are_not_tuned_on_gpus(monkeypatch):
    config, given = tiny(), []
    options = compiler_options(config, "gpu")
    assert options == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    jax.jit(jnp.sin, compiler_options=options)(1.0)  # XLA knows these names
    assert compiler_options(config, "cpu") == {}
    config.model.hidden_size = 512
    assert compiler_options(config, "gpu") == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda _, options: given.append(options))
    compile_recall(tiny())
    assert len(given) > 2 and all(x == options for x in given)  # first state, training and test


RUN: dict = dict(learning_rates=(1e-3, 1e-2, 1e30), stop_above=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear_attention", "deltanet", "softmax"])
def test_members_train_as_they_would_alone(method):
    config = tiny(method, clip_norm=1.0)
    data = load_task(config, config.train[0], 0)
    rows = np.arange(32, dtype=np.int32).reshape(2, 16)[[0, 1, 0]]

    def trained(**changes):
        sweep = make_sweep(dataclasses.replace(config, **changes), 3)
        state = jax.jit(sweep.first)()
        state, losses = jax.jit(sweep.train)(state, data, rows)
        score = sweep.evaluate(make_accuracy(config), state.params, data, 8)
        return state.params, losses, score

    together, losses, scores = trained(learning_rates=(1e-2, 1e-3), seeds=(0, 1))
    assert losses.shape == (3, 4) and scores.shape == (4,)
    for member, rate, seed in ((0, 1e-2, 0), (3, 1e-3, 1)):
        alone, own, score = trained(learning_rates=(rate,), seeds=(seed,))
        np.testing.assert_allclose(losses[:, member], own[:, 0], rtol=1e-5)
        np.testing.assert_allclose(scores[member], score[0], atol=1e-6)
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[member], b[0], rtol=1e-3, atol=1e-4)


def test_the_step_is_adamw_with_a_cosine():
    config = tiny(learning_rates=(1e-2,), weight_decay=0.5)
    sweep = make_sweep(config, 4)
    data = load_task(config, config.train[0], 0)
    state = jax.jit(sweep.first)()
    before = jax.tree.map(lambda x: np.asarray(x[0], np.float64), state.params)
    batch = jax.tree.map(lambda x: x[:16], data)
    gradient = jax.jit(jax.grad(sweep.loss))
    mean = second = jax.tree.map(np.zeros_like, before)
    for step in range(2):
        grads = gradient(jax.tree.map(lambda x: x[0], state.params), batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * np.asarray(g), mean, grads)
        second = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * np.asarray(g) ** 2, second, grads)
        rate = 1e-2 * 0.5 * (1 + np.cos(np.pi * step / 4))

        def update(path, p, m, s, rate=rate, step=step):
            direction = (
                m / (1 - 0.9 ** (step + 1)) / (np.sqrt(s / (1 - 0.999 ** (step + 1))) + 1e-8)
            )
            decayed = path[-1].key in ("kernel", "embedding")
            return p - rate * (direction + (0.5 * p if decayed else 0))

        before = jax.tree_util.tree_map_with_path(update, before, mean, second)
        state, _ = jax.jit(sweep.train)(state, data, np.arange(16, dtype=np.int32)[None])
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-3, atol=2e-4)


def test_blocks_cover_an_epoch():
    rng = np.random.default_rng(0)
    blocks = epoch_blocks(rng, [100, 64], 10, 4)
    assert {rows.shape for _, rows in blocks} == {(2, 10)}
    for which, size in ((0, 100), (1, 60)):
        rows = np.concatenate([rows.ravel() for index, rows in blocks if index == which])
        assert len(rows) == len(set(rows)) == size
    order = [index for index, _ in blocks]
    assert order != sorted(order)
    assert {rows.shape for _, rows in epoch_blocks(rng, [100], 10, 78)} == {(10, 10)}
    with pytest.raises(ValueError, match="batch_size=65: .* 64"):
        epoch_blocks(rng, [100, 64], 65, 1)
    assert [largest_divisor(1000, most) for most in (64, 1, 0, 5000)] == [50, 1, 1, 1000]


def test_a_sweep_says_why_it_ends_early(capsys):
    test = (
        RecallTask(length=16, num_pairs=2, num_examples=512),
    )  # some answers are right by chance
    result = train_recall(tiny(learning_rates=(1e-2,), stop_above=1e-9, test=test))
    printed = capsys.readouterr().err
    assert result["epochs"] == 1 and "at most 8 steps" in printed
    assert "stopped after 1 of 2 epochs: the best member's accuracy is above stop_above" in printed


@pytest.mark.slow
def test_a_run_writes_its_result(tmp_path):
    """A sweep writes its result, also if one of the learning rates is far too high."""
    config = tiny(**RUN)
    result = train_recall(config, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result))
    assert result["method"] == "linear_attention" and result["steps"] == 8 and result["epochs"] == 2
    assert set(result["accuracy"]) == {"16x2", "8x1"}
    assert result["mean"] == max(member["mean"] for member in result["members"])
    assert result["learning_rate"] in config.learning_rates
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 8]
    assert np.isfinite(rows[-1]["loss/1.0e-03"])
    again = train_recall(config)
    for name in ("mean", "accuracy", "members", "learning_rate"):
        assert result[name] == again[name], "the same config gives the same numbers"
    with pytest.raises(ValueError, match="batch_size: 16 -> 8"):
        train_recall(dataclasses.replace(config, batch_size=8), tmp_path)
    with pytest.raises(ValueError, match="RecallConfig saves no model"):
        read_config(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", mixers.METHODS)
def test_every_method_is_mapped(method):
    """Two members of a sweep of every method are trained and evaluated in one mapped program, as on a GPU;
    the loss decreases over four steps on one batch.
    """
    config = mqar.get_config(f"{method},width=32,suite=tiny")
    config.test = (RecallTask(length=32, num_pairs=2, num_examples=16),)
    data = load_task(config, config.test[0], 0)
    sweep = make_sweep(config, 100)
    rows = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    state, losses = jax.jit(sweep.train)(jax.jit(sweep.first)(), data, rows)
    score = jax.jit(lambda p: sweep.evaluate(make_accuracy(config), p, data, 8))(state.params)
    assert np.isfinite(losses).all() and np.isfinite(score).all()
    assert np.all(losses[-1] < losses[0])


@pytest.mark.slow
def test_deltanet_learns_to_recall():
    result = train_recall(mqar.get_config("deltanet,width=32,suite=tiny"))
    assert result["mean"] > 0.95


@pytest.mark.parametrize("method", mixers.METHODS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_every_method_has_a_config(method, width):
    config = mqar.get_config(f"{method},width={width},suite=published")
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.model.hidden_size == width and len(config.learning_rates) == 4


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("gla,width=64", 4864),
        ("gla,width=128", 17_920),
        ("mamba2,width=64", 16_384),
        ("mamba2,width=256", 65_536),
        ("deltanet,width=64", 8960),
        ("deltanet,width=128", 34_304),
        ("gated_deltanet,width=64", 17_152),
    ],
)
def test_states_are_as_large_as_published(variant, size):
    model = mqar.get_config(variant).model
    row = dict(
        width=model.hidden_size, pattern=model.pattern, state_size=recall_state_size(model, 64)
    )
    assert recall_table.state_bytes(row) == size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(epochs=0), "epochs=0: it must be at least 1"),
        (dict(batch_size=33), "batch_size=33: a training task has 32 examples"),
        (dict(learning_rates=()), "learning_rates is empty"),
        (dict(learning_rates=(-1.0,)), "all must be greater than 0"),
        (dict(stop_above=0.0), "stop_above=0.0: it must be greater than 0"),
        (dict(test=(RecallTask(length=8, num_pairs=3, num_examples=1),)), "test 8x3: num_pairs=3"),
    ],
)
def test_errors_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        tiny(**change).validate()


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("glo", "gla"),
        ("gla,suite=x", "accepted are 64x4, published, tiny"),
        ("gla,widht=64", "accepted are width, suite, pattern, steps"),
        ("gla,width=4", "width='4'; accepted is a whole number from 8"),
        ("gla,pattern=CN", "accepted are the letters C"),
    ],
)
def test_invalid_variants_are_refused(variant, message):
    with pytest.raises(ValueError, match=message):
        mqar.get_config(variant)


@pytest.mark.slow
def test_the_command_overrides_and_trains(tmp_path):
    arguments = [
        "--config=configs/mqar.py:linear_attention,width=16,suite=tiny",
        "--config.epochs=1",
    ]
    arguments += ["--config.learning_rates=(0.01,)", "--config.batch_size=4096"]
    arguments += ["--config.model.mixer.num_heads=1", f"--workdir={tmp_path / 'run'}"]
    run = subprocess.run([sys.executable, "train.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "finished 2 steps" in run.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [m["learning_rate"] for m in result["members"]] == [0.01]


def test_the_table_is_resumed(tmp_path, monkeypatch, capsys):
    configs = {method: tiny(method, **RUN) for method in ("linear_attention", "gla")}
    monkeypatch.setattr(mqar, "get_config", lambda variant: configs[variant.partition(",")[0]])
    output = tmp_path / "rows.jsonl"
    command = ["recall_table", "--suite=published", "--widths=16", f"--output={output}"]
    for _ in range(2):
        benchmarks([*command, "--methods=linear_attention", "--epochs=2"])
    rows = read_benchmark(output)
    assert len(rows) == 1 and rows[0]["steps"] == 8 and "commit" in rows[0]
    assert "--config.epochs=2" in rows[0]["command"]
    benchmarks([*command, "--minutes=0", "--methods=gla"])
    assert "not begun" in capsys.readouterr().err and len(read_benchmark(output)) == 1


def test_the_loss_is_that_of_the_queries_alone():
    config = tiny()
    sweep = make_sweep(config, 1)
    params = jax.tree.map(lambda x: x[0], jax.jit(sweep.first)().params)
    data = load_task(config, config.train[0], 0)
    batch = jax.tree.map(lambda x: x[:4], data)
    last = int(jnp.max(batch["positions"]))
    tokens = batch["tokens"].at[:, last + 1 :].set(0)
    loss = jax.jit(sweep.loss)
    np.testing.assert_array_equal(loss(params, batch), loss(params, batch | dict(tokens=tokens)))
