"""Sweeps of state tracking: the config, the benchmark's cases, and that negative eigenvalues learn parity."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest

from benchmarks import sweeps
from benchmarks.__main__ import main as benchmarks
from benchmarks.cases import tracking as case
from benchmarks.run import read_rows
from configs import tracking
from lsm_jax import mixers
from lsm_jax.models import recall_state_size
from lsm_jax.training import compile_recall, from_dict, to_dict, train_recall
from lsm_jax.training.sweep import epoch_blocks


@pytest.mark.parametrize("size", tracking.SIZES)
def test_every_model_of_the_benchmark_has_a_config(size):
    for task, models in case.MODELS.items():
        for model in models.split(","):
            config = tracking.get_config(case.variant(model, task, size))
            assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
            assert len(config.members()) >= 3 and config.test[1].first == config.train[0].length + 1
            mixer = config.model.mixer
            if "negative" in model or "positive" in model:
                assert mixer.allow_negative_eigenvalues == ("negative" in model)


@pytest.mark.parametrize("size", tracking.SIZES)
def test_mixed_words_are_trained_besides_and_not_tested(size):
    """Each kind of word has as many batches, and the kinds alternate after at most 16."""
    plain, mixed = (
        tracking.get_config(f"gated_deltaproduct,steps=4,task={task},size={size}")
        for task in ("S5", "S5-mixed")
    )
    assert mixed.train[:1] == plain.train and mixed.test == plain.test
    assert [t.name for t in mixed.train[1:]] == ["S5 1-7", "S5 swaps 1-7"]
    sizes = [t.num_examples for t in mixed.train]
    blocks = epoch_blocks(np.random.default_rng(0), sizes, mixed.batch_size, mixed.steps_per_call)
    steps = {kind: sum(len(rows) for k, rows in blocks if k == kind) for kind in range(3)}
    assert set(steps.values()) == {sizes[0] // mixed.batch_size} and len(blocks[0][1]) <= 16


def test_the_pattern_has_feedforwards_without_a_state():
    model = tracking.get_config("gated_deltaproduct,steps=2,task=S3").model
    assert isinstance(model.mixer, mixers.GatedDeltaProductConfig)
    assert (model.mixer.decay, model.mixer.num_steps, model.vocab_size) == (False, 2, 13)
    sizes = recall_state_size(dataclasses.replace(model, pattern="CLF"), 16)
    assert sizes == dict(memory=[0, 512, 0], all=[64, 512, 0])


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("mamba2,negative=1", "mamba2 has no field allow_negative_eigenvalues"),
        ("deltanet,steps=2", "deltanet has no field num_steps"),
        ("deltanet,task=S4", "accepted are parity, S3, S5-swaps, S5, S5-mixed"),
        ("deltanet,pattern=F", "with at least one L"),
    ],
)
def test_invalid_variants_are_refused(variant, message):
    with pytest.raises(ValueError, match=message):
        tracking.get_config(variant)


def test_a_task_that_does_not_fit_is_refused():
    config = tracking.get_config("deltanet,task=S3")
    config.model.vocab_size = 12
    with pytest.raises(ValueError, match="train S3 1-24: vocab_size=12"):
        config.validate()
    other = types.SimpleNamespace(config=tracking.get_config("deltanet"))
    with pytest.raises(
        ValueError, match="the result of compile_recall for config='deltanet,task=S3'"
    ):
        train_recall(tracking.get_config("deltanet,task=S3"), compiled=other)
    with pytest.raises(SystemExit, match="'odd'; accepted are <method>"):
        benchmarks(["tracking", "--models", "deltanet+odd", "--output", "-"])


@pytest.mark.parametrize("ahead", [0, 2])
def test_each_sweep_is_compiled_once_and_its_row_written_as_it_ends(ahead, monkeypatch):
    """A sweep that does not compile fails alone, after the others have their rows."""
    compiled, trained = [], []

    def compile_one(config):
        compiled.append(config)
        if config == "b":
            raise RuntimeError("does not compile")
        return config.upper()

    def train(config, compiled):
        trained.append((config, compiled or compile_one(config)))
        return dict(score=len(trained))

    monkeypatch.setattr(sweeps, "compile_recall", compile_one)
    monkeypatch.setattr(sweeps, "train_recall", train)
    args = types.SimpleNamespace(ahead=ahead, minutes=1.0)
    cases = [dict(model=name) for name in "abc"]
    rows = sweeps.train_each(cases, lambda c: c["model"], lambda c, result: c | result, args)
    assert next(rows)["model"] == "a" and trained == [("a", "A")]
    assert next(rows)["model"] == "c"
    with pytest.raises(SystemExit, match="1 of 3 cases failed"):
        next(rows)
    assert sorted(compiled) == ["a", "b", "c"] and trained[-1] == ("c", "C")


@pytest.mark.slow
def test_negative_eigenvalues_learn_parity_and_positive_ones_do_not(tmp_path):
    """The published difference, at the smallest size at which it shows; the benchmark resumes its rows."""
    scores = {}
    for words in ("negative=1", "negative=0"):
        config = tracking.get_config(f"deltanet,task=parity,{words}")
        config.epochs = 1
        compiled = compile_recall(config)
        scores[words] = train_recall(config, compiled=compiled)["accuracy"]["S2 41-256"]
    assert scores["negative=1"] > 0.99 and scores["negative=0"] < 0.75
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(dict(task="parity", size="small", model="mamba2")) + "\n")
    arguments = ["tracking", "--tasks", "parity", "--models", "mamba2", "--output", str(rows)]
    benchmarks(arguments)
    assert len(read_rows(rows)) == 1
