"""Training runs that are stopped or fail, and are resumed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import lsm_jax
from lsm_jax.training import Checkpoints, TrainingStopped, loop, read_rows, train
from tests.training import tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """Fixture: a training run that was never interrupted."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    result = train(tiny.config(text), workdir)
    assert result.step == 12 and result.interrupted is None
    return workdir


def losses(workdir):
    rows = [row for row in read_rows(workdir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["train/loss"] for row in rows]


def drive(workdir, text, *, stop=0, devices=1, fsdp=1):
    """Train the tiny run in another process on `devices` virtual devices, of which `fsdp` shard parameters;
    a signal stops it at step `stop` unless that is 0.
    """
    # With the caller's flags, too, since another code generator rounds differently.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
    }
    command = [sys.executable, "-m", "tests.training.tiny", workdir, text, str(stop), str(fsdp)]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)


def test_loss_falls_and_the_run_loads(uninterrupted):
    curve = losses(uninterrupted)
    assert curve[-1] < curve[0] - 0.5
    run = lsm_jax.load_run(uninterrupted)
    assert run.step == 12
    tokens = np.full((1, 4), 100)
    assert np.isfinite(run.model(tokens)[0]).all()
    first, *rows = read_rows(uninterrupted / "metrics.jsonl")
    assert rows[-1]["train/tokens"] == 12 * 256
    assert "perf/tokens_per_second" not in first  # only the compiled step has ended
    assert all(row["perf/model_flops_per_second"] > 0 for row in rows)
    speeds = [row["perf/tokens_per_second"] for row in rows]
    assert speeds[0] < 5 * sorted(speeds)[len(speeds) // 2]


@pytest.mark.slow
def test_sigterm_saves_and_resumes_to_the_bit(text, uninterrupted, tmp_path):
    result = train(tiny.config(text), tmp_path / "run", on_report=tiny.stop_at(5))
    assert result.interrupted is not None and 5 <= result.step < 12
    assert train(tiny.config(text), tmp_path / "run").step == 12
    assert losses(tmp_path / "run") == losses(uninterrupted)


def test_kill_resumes_to_the_bit(text, uninterrupted, tmp_path):
    killed = drive(tmp_path / "run", text, stop=-8)
    assert killed.returncode == -9
    # This run had its own process; in a shared one the file also lists what earlier calls chose.
    choices = json.loads((tmp_path / "run" / "implementations.json").read_text())
    assert all(choices[op].startswith("xla") for op in ("delta_memory", "attention"))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "train/lo')  # a row cut short by a kill
    assert train(tiny.config(text), tmp_path / "run").step == 12
    assert losses(tmp_path / "run") == losses(uninterrupted)


@pytest.mark.slow
def test_device_count_may_change(text, uninterrupted, tmp_path):
    """A run on 8 virtual devices has the losses of a run on 1 device, and a run that started on 8 is resumed
    on 1.
    """
    done = drive(tmp_path / "eight", text, devices=8, fsdp=4)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(uninterrupted), rtol=1e-5)
    stopped = drive(tmp_path / "moved", text, devices=8, fsdp=2, stop=5)
    assert stopped.returncode == 0, stopped.stderr
    assert train(tiny.config(text), tmp_path / "moved").step == 12
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(uninterrupted), rtol=1e-5)


@pytest.mark.slow
def test_a_broken_checkpoint_is_skipped(text, uninterrupted, tmp_path, capfd):
    stopped = train(tiny.config(text), tmp_path / "run", on_report=tiny.stop_at(7)).step
    newest = tmp_path / "run" / "checkpoints" / str(stopped)
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 200:
            os.truncate(path, path.stat().st_size // 2)
    assert train(tiny.config(text), tmp_path / "run").step == 12
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert f"checkpoint {stopped} " in said and "the one before" in said
    assert losses(tmp_path / "run") == losses(uninterrupted)


@pytest.mark.slow
def test_a_flipped_bit_is_detected(text, tmp_path, capfd):
    config = tiny.config(text, total_tokens=4 * 256)
    train(config, tmp_path / "run")
    checkpoints, checksums = tmp_path / "run" / "checkpoints", tmp_path / "run" / "checksums"
    assert sorted(p.name for p in checksums.iterdir()) == ["3.json", "4.json"]

    def flip(part):
        files = [p for p in (checkpoints / "4" / part).rglob("*") if p.is_file()]
        file = max(files, key=lambda p: p.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        return file.relative_to(checkpoints / "4")

    damaged = flip("training")
    assert lsm_jax.load_run(tmp_path / "run").step == 4  # reads no optimizer state
    flipped = flip("params")
    with pytest.raises(ValueError, match=f"{flipped} is not what was saved"):
        lsm_jax.load_run(tmp_path / "run", step=4)
    assert lsm_jax.load_run(tmp_path / "run").step == 3
    capfd.readouterr()
    assert train(config, tmp_path / "run").step == 4
    said = capfd.readouterr().err
    assert f"{flipped} is not what was saved; its file {damaged} is not" in said
    assert "continuing from checkpoint 3" in said
    assert lsm_jax.load_run(tmp_path / "run", step=4).step == 4  # saved anew, with its checksums
    (checksums / "4.json").unlink()  # as in a run of an earlier version
    assert lsm_jax.load_run(tmp_path / "run", step=4).step == 4


@pytest.mark.slow
def test_all_checkpoints_broken_is_an_error(text, tmp_path):
    train(tiny.config(text, total_tokens=4 * 256), tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").rglob("manifest.ocdbt"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the checkpoints 3, 4 in .* can be read"):
        train(tiny.config(text, total_tokens=4 * 256), tmp_path / "run")


@pytest.mark.slow
def test_keep_policies(text, tmp_path):
    changes = dict(checkpoint_every=1, keep_last=2, keep_every=4, total_tokens=10 * 256)
    train(tiny.config(text, **changes), tmp_path / "run")
    kept = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept >= {4, 8, 9, 10} and not kept & {1, 2, 3, 5, 6, 7}


def test_another_config_is_refused_with_its_differences(text, uninterrupted):
    changed = tiny.config(text, seed=7, log_every=5, accumulation_steps=2)
    changed.optimizer.peak_lr = 1.0
    with pytest.raises(ValueError) as error:
        train(changed, uninterrupted)
    assert "seed: 42 -> 7" in str(error.value) and "optimizer.peak_lr: 0.01 -> 1.0" in str(
        error.value
    )
    assert "log_every" not in str(error.value) and "accumulation" not in str(error.value)


def test_bad_steps_are_skipped_and_then_stop_the_run(text, tmp_path, monkeypatch):
    place_batch, num_batches = loop.place_batch, itertools.count(1)

    def place_poisoned(batch, *args):
        number = next(num_batches)
        if number == 4 or number > 7:
            batch = batch | {"tokens": np.full_like(batch["tokens"], 999)}
        return place_batch(batch, *args)

    monkeypatch.setattr(loop, "place_batch", place_poisoned)
    with pytest.raises(
        TrainingStopped,
        match="step 10: 3 steps in a row .* checkpoint 9 is the last good one, with the parameters of step 7",
    ):
        train(tiny.config(text, max_bad_steps=3), tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/skipped_steps"] for row in rows[:7]] == [0, 0, 0, 1, 1, 1, 1]
    assert np.isfinite([row["train/loss"] for row in rows[4:7]]).all()


@pytest.mark.slow
def test_init_from_starts_with_its_parameters(text, uninterrupted, tmp_path):
    train(
        tiny.config(
            text,
            init_from=str(uninterrupted),
            total_tokens=256,
            optimizer=tiny.OptimizerConfig(peak_lr=1e-9),
        ),
        tmp_path / "run",
    )
    ours, theirs = lsm_jax.load_run(tmp_path / "run"), lsm_jax.load_run(uninterrupted)
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    other = tiny.config(text, init_from=str(uninterrupted))
    other.model.hidden_size = 32
    with pytest.raises(ValueError, match="another model; parameters differ"):
        train(other, tmp_path / "other")
    other.init_from = str(tmp_path / "none")
    with pytest.raises(ValueError, match="no config.json there"):
        train(other, tmp_path / "other")
    assert not (tmp_path / "other" / "config.json").exists()  # so a corrected command may use it


@pytest.mark.slow
def test_changed_data_are_refused(tmp_path):
    text = tiny.write_text(tmp_path / "text")
    config = tiny.config(text, total_tokens=256, optimizer=tiny.OptimizerConfig())
    train(config, tmp_path / "run")
    content = (text / "3.txt").read_text()
    (text / "3.txt").write_text(content + " More.")
    (text / "more.txt").write_text("A document that was not there.")
    with pytest.raises(ValueError, match="the training data changed since the run began") as error:
        train(config, tmp_path / "run")
    assert "new files: more.txt\n  files whose size changed: 3.txt" in str(error.value)
    (text / "more.txt").unlink()
    (text / "3.txt").write_text(content)
    assert train(config, tmp_path / "run").step == 1
    (text / "3.txt").unlink()
    (tmp_path / "run" / "data.json").unlink()  # as in a directory of an earlier version
    assert train(config, tmp_path / "run").step == 1


@pytest.mark.slow
def test_held_out_loss_is_logged(text, tmp_path):
    train(tiny.config(text, eval_every=2, total_tokens=4 * 256), tmp_path / "run")
    steps = [r["step"] for r in read_rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in r]
    assert steps == [2, 4]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["type"].endswith(":TrainConfig")
    assert saved["data"]["tokenizer"] == "bytes"  # the default, auto, is resolved


@pytest.mark.slow
def test_bad_data_late_in_a_run_loses_no_step(tmp_path):
    """If a training run meets bad data, the steps before are saved, and the run can be resumed once the data
    is corrected.
    """
    folder = tiny.write_text(tmp_path / "text")
    lines = [json.dumps({"text": p.read_text()}) for p in sorted(folder.iterdir())] * 5
    data = tmp_path / "lines.jsonl"
    data.write_text(
        "\n".join([*lines, *['{"text": "cut off'] * 8]) + "\n"
    )  # some of them are training data
    changes = dict(checkpoint_every=1000, total_tokens=60 * 256)
    config = tiny.config(data, **changes)
    config.data.shuffle = False
    said = r"step (\d+): .* is not JSON.* continues from checkpoint (\d+) in"
    with pytest.raises(TrainingStopped, match=said) as stopped:
        train(config, tmp_path / "run")
    bad, saved = map(int, re.search(said, str(stopped.value)).groups())
    assert 1 < bad == saved + 1 and len(losses(tmp_path / "run")) == saved
    data.write_text("\n".join(lines) + "\n")
    (tmp_path / "run" / "data.json").unlink()  # the fingerprint of the text before the correction
    assert train(config, tmp_path / "run").step == 60


@pytest.mark.slow
def test_metrics_are_written_before_their_checkpoint_and_a_profile_is_written(
    text, tmp_path, monkeypatch
):
    save, saves = Checkpoints.save, []

    def record_save(self, step, *args):
        saves.append((step, read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"]))
        save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", record_save)
    changes = dict(total_tokens=4 * 256, profile_start=1, profile_steps=2)
    train(tiny.config(text, **changes), tmp_path / "run")
    assert saves == [(3, 3), (4, 4)]
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
