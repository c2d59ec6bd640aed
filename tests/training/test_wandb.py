"""Tests of the metrics sent to Weights & Biases: with a stand-in for its package, and with the package itself, offline."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest

from lsm_jax.training import SamplesConfig, train
from tests.training import tiny


class FakeRun:
    """A run of the stand-in, which records the calls."""

    def __init__(self, **given):
        self.given, self.rows, self.metrics, self.finished = given, [], [], False

    def define_metric(self, name, **given):
        self.metrics.append((name, given))

    def log(self, values):
        assert not self.finished
        self.rows.append(values)

    def finish(self):
        self.finished = True


def fake_package():
    """Return a module with the functions of wandb that a run calls, and the list of its runs."""
    module, runs = types.ModuleType("wandb"), []

    def init(**given):
        runs.append(FakeRun(**given))
        return runs[-1]

    module.init, module.Settings = init, dict
    return module, runs


def config(text, **changes):
    fields = dict(total_tokens=6 * 256, wandb="team/texts", eval_every=3, eval_batches=1)
    return tiny.config(text, **fields | changes)


@pytest.mark.slow
def test_metrics_are_sent_and_a_resumed_run_continues(tmp_path, monkeypatch):
    module, runs = fake_package()
    monkeypatch.setitem(sys.modules, "wandb", module)
    text, workdir = tiny.write_text(tmp_path / "text"), tmp_path / "run"
    samples = SamplesConfig(every=3, prompts=("to be",), num_tokens=4)
    assert train(config(text, samples=samples), workdir, on_report=tiny.stop_at(3)).step < 6
    assert train(config(text, samples=samples), workdir).step == 6
    first, second = runs
    assert first.finished and second.finished
    for run in runs:
        assert run.given["project"] == "texts" and run.given["entity"] == "team"
        assert run.given["dir"] == str(workdir) and run.given["resume"] == "allow"
        assert run.given["config"]["optimizer"]["peak_lr"] == 0.01
        assert run.metrics == [("train/step", {}), ("*", {"step_metric": "train/step"})]
    assert first.given["id"] == second.given["id"]
    assert json.loads((workdir / "wandb.json").read_text()) == {"id": first.given["id"]}
    steps = [row["train/step"] for row in second.rows if "train/loss" in row]
    assert steps[-1] == 6 and steps == list(range(steps[0], 7))
    assert any("val/loss" in row for row in second.rows)
    assert any(str(row.get("sample/1")).startswith("to be") for run in runs for row in run.rows)


def test_a_missing_package_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb='team/texts': the package wandb cannot be imported .*\[wandb\]"):  # fmt: skip
        train(config(tiny.write_text(tmp_path / "text")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_started_there_is_an_error_of_one_line(tmp_path, monkeypatch):
    module, _ = fake_package()

    def init(**given):
        raise RuntimeError("api_key not configured\n(no-tty)")

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ValueError, match=r"no run can be started there \(api_key not configured \(no-tty\)\)"):  # fmt: skip
        train(config(tiny.write_text(tmp_path / "text")), tmp_path / "run")


def test_a_damaged_identifier_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake_package()[0])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb.json").write_text('{"id": "../x"}')
    with pytest.raises(ValueError, match="wandb.json: id='../x'; accepted are letters and digits"):
        train(config(tiny.write_text(tmp_path / "text")), tmp_path / "run")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the extra [wandb] is absent")
def test_the_package_itself_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    text, workdir = tiny.write_text(tmp_path / "text"), tmp_path / "run"
    assert train(config(text, wandb="texts"), workdir).step == 6
    (stored,) = (workdir / "wandb").glob("offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    for name in (b"train/loss", b"val/loss", b"perf/tokens_per_second", b"peak_lr"):
        assert name in content
