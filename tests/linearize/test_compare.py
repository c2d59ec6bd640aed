"""Tests of `scripts.compare_linearized`: the comparison of Liger, a random gate and LoLCATs with equal
numbers of trained parameters and training tokens.
"""

from __future__ import annotations

import json

import pytest

from configs import liger
from lsm_jax.training import TrainResult
from scripts.compare_linearized import main, matched_ranks, runs_of, tiny_model, trained_parameters
from tests.marks import slow_after

METHODS = ("liger", "random_gate", "lolcats", "lolcats_lora", "no_gate", "window")


@pytest.mark.parametrize("name", slow_after(1, ["smollm2-135m", "llama3-8b"]))
def test_methods_train_equally_many_parameters(name):
    base = liger.MODELS[name]
    matched = matched_ranks(METHODS, base, window=64)
    counts = [count for _, count in matched.values()]
    assert max(counts) < 1.03 * min(counts)  # a rank of LoLCATs is 2.9 % of the smaller model's
    for method, (rank, count) in matched.items():
        runs = runs_of(method, base, window=64, rank=rank)
        assert sum(map(trained_parameters, runs)) == count
        assert len(runs) == (2 if method == "lolcats" else 1)
    assert matched["random_gate"][0] == 8  # the largest of the published recipes


def test_published_ranks_train_the_published_numbers():
    base = liger.MODELS["llama3-8b"]
    (run,) = runs_of("liger", base, window=64, rank=None)
    assert trained_parameters(run) == 4_718_592
    matched = matched_ranks(("liger", "window"), base, window=64, parameters=4_718_592)
    assert set(matched.values()) == {(8, 4_718_592)}
    with pytest.raises(
        ValueError, match="parameters=1000: liger trains 589824 parameters with adapters of rank 1"
    ):
        matched_ranks(("liger",), base, window=64, parameters=1000)


def test_arguments_are_checked(capsys, tmp_path):
    assert main(["--counts=llama3-8b", "--methods=liger,lolcats"]) == 0
    assert "lolcats" in capsys.readouterr().out
    for arguments, message in {
        ("--counts=gpt",): "counts='gpt'; accepted are smollm2-135m",
        (
            "--methods=ligr",
            f"--workdir={tmp_path}",
        ): "methods=['ligr']; accepted are liger, random_gate",
        ("--methods=", f"--workdir={tmp_path}"): "methods=[]; accepted are liger",
        (): "workdir is missing",
    }.items():
        assert main(list(arguments)) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_makes_no_row(capsys, monkeypatch, tmp_path):
    ended = TrainResult(step=3, interrupted=15, loss=5.0)
    monkeypatch.setattr("benchmarks.training.train", lambda *_, **__: ended)
    assert main([f"--workdir={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("compare_linearized: ") and "ended the run after 3 of" in error
    assert not (tmp_path / "rows.json").exists()


@pytest.mark.slow
def test_the_comparison_runs_and_resumes(tmp_path):
    assert tiny_model().num_layers == 4
    command = [f"--workdir={tmp_path}", "--methods=liger,lolcats", "--base_tokens=4096", "--tokens=9000", "--heldout_tokens=2048"]  # fmt: skip
    assert main(command) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["model"] for row in rows] == ["pretrained", "window, untuned", "liger", "lolcats"]
    assert [row["tokens"] for row in rows] == [0, 0, 8192, 8192]
    assert rows[2]["nats"] != rows[0]["nats"] and rows[3]["nats"] < 6
    assert main(command) == 0
    again = json.loads((tmp_path / "rows.json").read_text())
    assert [row["nats"] for row in again] == [row["nats"] for row in rows]
