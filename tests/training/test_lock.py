"""One process writes a run at a time, and readers beside it always get a complete checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import lsm_jax
from lsm_jax.training import Checkpoints, TrainingStopped, lock, read_rows, train, train_recall
from lsm_jax.training.lock import STALE_SECONDS, LostLockError, RunLock
from tests.training import tiny

ROOT = Path(__file__).parents[2]


def content(**changes):
    """Return the content of a lock of this process, with changes."""
    return lock._this_process() | changes


def write_lock(workdir, **changes):
    workdir.mkdir(exist_ok=True)
    (workdir / "run.lock").write_text(json.dumps(content(**changes)))


def ended_process():
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_lock_is_refused_while_its_owner_runs_and_deleted_by_it(tmp_path):
    with RunLock(tmp_path) as held:
        saved = json.loads((tmp_path / "run.lock").read_text())
        assert saved["pid"] == os.getpid() and saved["host"] == socket.gethostname()
        said = rf"process {os.getpid()} on {saved['host']} \(since {re.escape(saved['time'])}\) writes this run; wait"
        with pytest.raises(ValueError, match=said), RunLock(tmp_path):
            pass
        held.check()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_created_before_the_directory_is(tmp_path):
    with RunLock(tmp_path / "new" / "run") as held:
        assert not (tmp_path / "new").exists()
        held.acquire()
        assert (tmp_path / "new" / "run" / "run.lock").exists()
    with RunLock(tmp_path / "other") as held:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="another process made a run there"):
            held.acquire()
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("changes", "old", "refused"),
    [
        ({}, False, True),
        ({"pid": None}, False, False),  # a process that has ended
        ({"started": "another process of the same id"}, False, False),
        ({"host": "another"}, False, True),
        ({"host": "another"}, True, False),
        ({"pid": None, "pid_namespace": "of another container"}, False, True),
        ({"boot_id": "before"}, True, False),
        ({"boot_id": "of another host of the same name"}, False, True),
    ],
)
def test_who_may_take_over(tmp_path, capsys, changes, old, refused):
    if "pid" in changes:
        changes = changes | {"pid": ended_process()}
    write_lock(tmp_path, **changes)
    if old:
        then = time.time() - STALE_SECONDS - 1
        os.utime(tmp_path / "run.lock", (then, then))
    if refused:
        with pytest.raises(ValueError, match="writes this run") as error, RunLock(tmp_path):
            pass
        if changes:
            assert f"delete {tmp_path / 'run.lock'}" in str(error.value)
        return
    with RunLock(tmp_path):
        said = capsys.readouterr().err
        assert "taking over the lock of process" in said and len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_read_waits_for_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_BEGINNING_SECONDS", 0.1)
    (tmp_path / "run.lock").write_text("{")
    with pytest.raises(ValueError, match="an unknown process .* writes"), RunLock(tmp_path):
        pass
    os.utime(tmp_path / "run.lock", (0, 0))
    with RunLock(tmp_path):
        pass


def test_an_owner_that_lost_its_lock_saves_nothing(tmp_path, monkeypatch):
    with RunLock(tmp_path) as held:
        (tmp_path / "run.lock").unlink()
        held.check()  # made again
        assert (tmp_path / "run.lock").exists()
        write_lock(tmp_path, host="another")
        with pytest.raises(LostLockError, match="process .* on another .* took over the lock"):
            held.check()
    assert (tmp_path / "run.lock").exists()  # the other's


RACE = """
import sys, time
from pathlib import Path
from lsm_jax.training.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    with RunLock(Path(sys.argv[1])):
        print("owner", flush=True)
        sys.stdin.readline()
except ValueError:
    print("refused", flush=True)
"""


@pytest.mark.slow
def test_one_of_several_processes_takes_over(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    gone = ended_process()
    write_lock(tmp_path, pid=gone)
    # A process that ended while it took over.
    old = json.loads((tmp_path / "run.lock").read_text())["token"]
    (tmp_path / f"run.lock.{old}").write_text(json.dumps(content(pid=gone)))
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate("\n", timeout=20)
    assert sorted(said) == ["owner\n", "refused\n", "refused\n", "refused\n"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_second_training_is_refused(tmp_path):
    text = tiny.write_text(tmp_path / "text")
    config = tiny.config(text, total_tokens=2 * 256, optimizer=tiny.OptimizerConfig())

    def second(step):
        with pytest.raises(ValueError, match="writes this run; wait until it ends"):
            train(config, tmp_path / "run")

    assert train(config, tmp_path / "run", on_report=second).step == 2
    assert not (tmp_path / "run" / "run.lock").exists()
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_second_sweep_is_refused(tmp_path):
    from configs.mqar import get_config

    with RunLock(tmp_path), pytest.raises(ValueError, match="writes this run"):
        train_recall(get_config("gla,suite=tiny"), tmp_path)


WRITER = """
import sys
from tests.training import tiny
from lsm_jax.training import train
config = tiny.config(sys.argv[1], total_tokens=100_000 * 256, checkpoint_every=3, keep_last=1)
config.model.num_layers, config.model.pattern = 1, "N"
train(config, sys.argv[2])
"""


@pytest.mark.slow
def test_readers_always_see_a_complete_checkpoint(tmp_path):
    """A process saves every third step and keeps one checkpoint, while this one reads in a loop."""
    text, run = tiny.write_text(tmp_path / "text"), tmp_path / "run"
    with open(tmp_path / "said", "w") as said:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(text), str(run)],
            stdout=said, stderr=said, env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not Checkpoints(run / "checkpoints").steps:
            assert writer.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        steps = [lsm_jax.load_run(run).step for _ in range(40)]
        assert steps == sorted(steps) and len(set(steps)) > 5
    finally:
        writer.send_signal(signal.SIGTERM)
        assert writer.wait(60) == 0
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_deleted_checkpoints_end_with_an_error(tmp_path, monkeypatch):
    """Every checkpoint is deleted before it can be read."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")

    def read(step, parts):
        (tmp_path / "checkpoints" / str(step)).rmdir()
        (tmp_path / "checkpoints" / str(step + 1)).mkdir()
        raise FileNotFoundError("gone")

    monkeypatch.setattr(checkpoints, "_read", read)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match="20 checkpoints were deleted, one after another, while"):
        checkpoints.load_params({})
    with pytest.raises(ValueError, match=r"step=21: .* has checkpoints of steps 22"):
        checkpoints.load_params({}, step=21)


def test_the_loss_of_another_process_is_one_line(monkeypatch, tmp_path):
    text = tiny.write_text(tmp_path)

    def lose(*arguments):
        raise jax.errors.JaxRuntimeError(
            "UNKNOWN: Gloo all-reduce failed: Connection closed by peer\nmore"
        )

    monkeypatch.setattr("lsm_jax.training.start._train", lose)
    with pytest.raises(jax.errors.JaxRuntimeError):
        train(tiny.config(text), tmp_path / "run")
    monkeypatch.setattr("lsm_jax.training.start.first_process_text", lambda text, mesh: text)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        TrainingStopped, match="another of the run's 2 processes has ended .*same command"
    ) as stopped:
        train(tiny.config(text), tmp_path / "run")
    assert "\n" not in str(stopped.value)
