"""Tests of what a trainer does beside its steps: the average of the parameters, best checkpoints, samples, norms of parts,
seeds, and the files of a run's directory, all of them in runs that are stopped and resumed."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lsm_jax
from lsm_jax.cli import compare
from lsm_jax.evaluation import LossCurve, evaluate, plot_run
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training import (
    OptimizerConfig,
    SamplesConfig,
    best_step,
    read_rows,
    seeds,
    train,
    train_seeds,
)
from lsm_jax.training.batches import eval_batches
from lsm_jax.training.best import BestSteps
from lsm_jax.training.metrics import TrainProgress, short
from lsm_jax.training.optimizer import ema_decay_at
from lsm_jax.training.readme import FILES
from tests.training import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny.write_text(tmp_path_factory.mktemp("text"))


def config(text, **changes):
    """Return the config of a run that uses everything; its rate is so high that the held-out loss is best before the end."""
    fields = dict(
        total_tokens=10 * 256,
        optimizer=OptimizerConfig(peak_lr=0.08, warmup_tokens=512, schedule="constant"),
        label_smoothing=0.1,
        z_loss=1e-3,
        ema_decay=0.9,
        eval_every=2,
        eval_batches=1,
        checkpoint_every=3,
        keep_last=1,
        best_metric="val/loss",
        keep_best=2,
        grad_norms=True,
        samples=SamplesConfig(every=4, prompts=("to be", "a, b"), num_tokens=6),
        profile_start=2,
        profile_steps=1,
    )
    return tiny.config(text, **fields | changes)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Fixture: a run of `config` that was never interrupted, with its pictures."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert train(config(text), workdir).step == 10
    plot_run(workdir, "tiny")
    return workdir


def rows_of(workdir):
    """Return the metrics of a run without those that depend on the machine."""
    rows = read_rows(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_metrics_average_and_samples(text, whole, tmp_path):
    assert train(config(text), tmp_path / "run", on_report=tiny.stop_at(4)).step < 10
    assert train(config(text), tmp_path / "run").step == 10
    assert rows_of(tmp_path / "run") == rows_of(whole)
    for weights in ("trained", "ema"):
        runs = [lsm_jax.load_run(w, weights=weights).params for w in (tmp_path / "run", whole)]
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), *runs)))
    for step in (4, 8):
        assert (tmp_path / f"run/samples/{step}.txt").read_text() == (
            whole / f"samples/{step}.txt"
        ).read_text()
    assert checkpoints_of(tmp_path / "run") == checkpoints_of(whole)


def checkpoints_of(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())


@pytest.mark.slow
def test_the_best_checkpoints_are_kept(whole):
    losses = {row["step"]: row["val/loss"] for row in rows_of(whole) if "val/loss" in row}
    assert list(losses) == [2, 4, 6, 8, 10]
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert checkpoints_of(whole) == sorted({*best, 10})
    assert best_step(whole) == best[0] == lsm_jax.load_run(whole, step="best").step
    with pytest.raises(ValueError, match="accepted are the number of a checkpoint's step and 'best'"):  # fmt: skip
        lsm_jax.load_run(whole, step="newest")


def test_the_order_of_the_best_steps():
    best = BestSteps("val/loss", "max", 2, {1: 0.5, 2: 0.7})
    assert best.add(3, 0.6) and not best.add(4, 0.1) and not best.add(5, math.nan)
    assert best.add(6, 0.7) and best.order() == [6, 2, 3, 1, 4]
    checkpoints = [type("Info", (), dict(step=step)) for step in (1, 3, 4, 6)]
    assert best.should_preserve(checkpoints, context=None) == [False, True, False, True]


@pytest.mark.slow
def test_a_run_without_evaluations_has_no_best(text, tmp_path):
    train(tiny.config(text, total_tokens=3 * 256), tmp_path / "run")
    with pytest.raises(ValueError, match="no checkpoint of .* has val/loss"):
        best_step(tmp_path / "run")
    with pytest.raises(ValueError, match="ema_decay=0 and keeps no average"):
        lsm_jax.load_run(tmp_path / "run", weights="ema")
    with pytest.raises(ValueError, match="accepted are trained, ema"):
        lsm_jax.load_run(tmp_path / "run", weights="average")


@pytest.mark.slow
def test_the_average_follows_its_definition_and_is_evaluated(text, tmp_path):
    settings = config(text, checkpoint_every=1, keep_last=100, profile_steps=0, ema_decay=0.4)
    train(settings, tmp_path / "run")
    average = None
    for step in range(1, 11):
        params = lsm_jax.load_run(tmp_path / "run", step=step, weights="trained").params
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        stored = lsm_jax.load_run(tmp_path / "run", step=step)
        assert stored.weights == "ema"
        if average is not None:
            decay = min(
                0.4, step / (9 + step)
            )  # (1 + t) / (10 + t) after step t, which counts from 0
            assert decay == pytest.approx(float(ema_decay_at(settings, jnp.int32(step - 1))))
            trees = (average, params, stored.params)
            for a, p, found in zip(*map(jax.tree.leaves, trees), strict=True):
                wanted = decay * a + (1 - decay) * p
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
        average = jax.tree.map(lambda x: np.asarray(x, np.float64), stored.params)
    last = rows_of(tmp_path / "run")[-1]
    assert last["val/loss"] != last["val/ema_loss"]
    batch = next(eval_batches(settings, make_mesh(MeshConfig())))
    for name, weights in (("val/loss", "trained"), ("val/ema_loss", "ema")):
        run = lsm_jax.load_run(tmp_path / "run", weights=weights)
        found = evaluate(run.model, [batch], progress=False).curve
        assert last[name] == pytest.approx(found.mean, rel=1e-5)
    stored = LossCurve.load(tmp_path / "run" / "plots" / "loss_by_position.npz")  # of the average
    np.testing.assert_allclose(stored.loss, found.loss, rtol=1e-4)
    np.testing.assert_array_equal(stored.count, found.count)


def test_the_norms_of_the_parts_make_the_norm_of_all(whole):
    row = rows_of(whole)[0]
    parts = {name: value for name, value in row.items() if name.startswith("grad_norm/")}
    assert {"grad_norm/embedding", "grad_norm/0.mixer", "grad_norm/1.feedforward"} <= set(parts)
    assert len(parts["grad_norm/0.mixer"]) == 1  # a number for each period
    total = sum(np.sum(np.square(value)) for value in parts.values())
    assert math.sqrt(total) == pytest.approx(row["train/grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_the_reported_loss_is_the_likelihood(text, whole, tmp_path):
    plain = config(text, label_smoothing=0.0, z_loss=0.0, total_tokens=3 * 256, profile_steps=0)
    train(plain, tmp_path / "run")
    first, other = rows_of(tmp_path / "run")[0], rows_of(whole)[0]
    assert first["train/loss"] == pytest.approx(other["train/loss"], rel=1e-6)
    assert first["train/grad_norm"] != pytest.approx(other["train/grad_norm"], rel=1e-3)


def test_samples_are_written_and_shown(whole):
    page = (whole / "samples" / "8.txt").read_text()
    assert page.startswith("--- step 8, sample 1, prompt 'to be'\nto be")
    assert "--- step 8, sample 2, prompt 'a, b'\na, b" in page
    events = b"".join(path.read_bytes() for path in (whole / "tensorboard").iterdir())
    assert b"sample/1" in events and b"sample/2" in events and b"    to be" in events


def explained(workdir):
    """Check that the README.md of a run explains all its files, and return which of its lines were needed."""
    used = set()
    for path in workdir.rglob("*"):
        name = path.relative_to(workdir).as_posix()
        if path.is_file():
            found = [p for p in FILES if fnmatch.fnmatch(name, p + "*" * p.endswith("/"))]
            assert found, f"README.md does not explain {name}"
            used |= set(found)
    return used


@pytest.mark.slow
def test_every_file_of_the_demo_is_explained(tmp_path):
    command = [sys.executable, str(ROOT / "demo.py"), f"--workdir={tmp_path / 'run'}", "--total_tokens=49152"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "bits per byte" in done.stdout + done.stderr, done.stderr
    assert {"eval/*/", "eval/demo-*.json", "plots/loss_by_position.png"} <= explained(
        tmp_path / "run"
    )


def test_every_file_of_a_run_is_explained(whole):
    readme = (whole / "README.md").read_text()
    assert "10 steps of 256 bytes, seed 42, adamw with the schedule constant" in readme
    patterns = re.findall(r"^\| `([^`]+)` \|", readme, re.MULTILINE)
    assert patterns == list(FILES)
    used = explained(whole)
    assert {"plots/training.png", "plots/loss_by_position.png", "profile/", "samples/*.txt"} <= used
    assert (whole / "profile" / "step_times.png").stat().st_size > 5000


def test_a_readme_of_others_is_not_replaced(text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README.md").write_text("my own notes\n")
    train(tiny.config(text, total_tokens=3 * 256), tmp_path / "run")
    assert (tmp_path / "run" / "README.md").read_text() == "my own notes\n"


@pytest.mark.slow
def test_seeds_are_trained_resumed_and_compared(text, tmp_path, capsys):
    settings = tiny.config(text, total_tokens=4 * 256, eval_every=2, eval_batches=1)
    stop, ended = tiny.stop_at(2), []

    def stopped(config, workdir):
        return train(config, workdir, on_report=stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeds, "train", stopped)
        results, _ = train_seeds(settings, tmp_path / "runs", (3, 5))
    assert len(results) == 1 and results[0].interrupted is not None
    results, found = train_seeds(settings, tmp_path / "runs", (3, 5), on_end=ended.append)
    assert [r.step for r in results] == [4, 4]
    assert [path.name for path in ended] == ["seed-3", "seed-5"] and settings.seed == 42
    losses = [rows_of(path)[-1]["val/loss"] for path in ended]
    assert losses[0] != losses[1]
    assert found["mean"]["val/loss"] == pytest.approx(np.mean(losses))
    assert found["deviation"]["val/loss"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert json.loads((tmp_path / "runs" / "seeds.json").read_text()) == found
    table = seeds.summary_table(found).splitlines()
    assert [line.split()[0] for line in table] == ["seed", "3", "5", "mean"] and "±" in table[-1]
    assert seeds.summary_table(seeds.summary(tmp_path / "runs", (3,))).count("±") == 0
    capsys.readouterr()
    output = tmp_path / "picture.png"
    assert compare.main([f"x={tmp_path / 'runs'}", f"--output={output}"]) == 0
    printed = capsys.readouterr().out
    assert "x/seed-3" in printed and "x/seed-5" in printed and output.stat().st_size > 5000
    with pytest.raises(ValueError, match="3 is given twice"):
        train_seeds(settings, tmp_path / "runs", (3, 3))


def run(program, *flags):
    """Run a program of the repository and return what it printed."""
    command = [sys.executable, str(ROOT / program), *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_flags_of_the_programs(text, tmp_path):
    flags = (
        f"--workdir={tmp_path / 'runs'}", "--config=configs/lm.py:gla-nano", f"--config.data.path={text}",
        "--config.data.heldout_fraction=0.2", "--config.data.sequence_length=64", "--config.batch_size=4",
        "--config.total_tokens=2048", "--config.eval_every=4", "--config.eval_batches=1", "--config.ema_decay=0.9",
        "--config.best_metric=val/ema_loss", "--config.samples.every=4", "--config.samples.prompts=to be",
        "--config.samples.num_tokens=4", "--config.profile_start=2",
    )  # fmt: skip
    printed = run("train.py", *flags, "--seeds=0,1", "--profile=1")
    assert "profile: a step takes" in printed and "seeds.json" in printed and "±" in printed
    workdir = tmp_path / "runs" / "seed-1"
    for name in ("plots/training.png", "plots/loss_by_position.png", "profile/step_times.png"):
        assert (workdir / name).stat().st_size > 5000
    given = f"--workdir={workdir}", "--tasks=perplexity", "--max_tokens=512", "--batch_size=2"
    run("eval.py", *given)
    run("eval.py", *given, "--step=best", "--weights=trained")
    for folder, weights in (("8-first512", "ema"), ("8-first512-trained", "trained")):
        results = json.loads((workdir / "eval" / folder / "results.json").read_text())
        assert results["weights"] == weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(label_smoothing=1.0), "label_smoothing=1.0: it must be in"),
        (dict(z_loss=-1.0), "z_loss=-1.0: it must be at least 0"),
        (dict(ema_decay=1.0), "ema_decay=1.0: it must be in"),
        (dict(keep_best=0), "keep_best=0: it must be at least 1"),
        (dict(best_mode="low"), "best_mode='low': accepted are 'min' and 'max'"),
        (dict(best_metric="val/los"), "accepted in this run are val/loss, val/ema_loss; did you mean 'val/loss'"),
        (dict(best_metric="val/ema_loss", ema_decay=0.0), "accepted in this run are val/loss"),
        (dict(eval_every=0), "best_metric='val/loss': eval_every is 0"),
        (dict(samples=SamplesConfig(every=-1)), "samples.every=-1"),
        (dict(samples=SamplesConfig(prompts=())), "samples.prompts="),
        (dict(samples=SamplesConfig(num_tokens=0)), "samples.num_tokens=0"),
        (dict(samples=SamplesConfig(temperature=-1.0)), "samples.temperature=-1.0"),
        (dict(wandb="a/b/c"), "wandb='a/b/c': accepted is PROJECT or ENTITY/PROJECT"),
    ],
)  # fmt: skip
def test_errors_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        config("", **changes).validate()


def test_an_empty_prompt_without_bos_is_refused(text, tmp_path):
    settings = tiny.config(text, samples=SamplesConfig(every=1))
    settings.data.add_bos = False
    with pytest.raises(ValueError, match="samples.prompts: '' has no token, and data.add_bos is False"):  # fmt: skip
        train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_line_of_progress(capsys):
    assert [short(x) for x in (0, 512, 1.5e6, 999_600, 2.34e14, 1e21)] == [
        "0 ", "512 ", "1.5 M", "1 M", "234 T", "1e+03 E",
    ]  # fmt: skip
    with TrainProgress("run", 0, 1, "bytes") as progress:
        progress.advance(1, 2.5, 1e4, 0.25, flops=3e6, tokens=4096)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "loss 2.5000" in line and "10,000 bytes/s · 30 GFLOP/s · MFU 25.0% · 4.1 kbytes" in line
