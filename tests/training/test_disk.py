"""A disk that is full or cannot be written: one line with the path and the last complete checkpoint."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.training import Checkpoints, TrainingNotSaved, read_rows, train
from lsm_jax.training.metrics import Events, MetricsWriter
from tests.training import tiny

ROOT = Path(__file__).parents[2]


def run_command(folder, workdir, limit=None):
    """Run train.py on the tiny run in another process whose files may have at most `limit` bytes; return
    (exit code, output).
    """
    text, config = tiny.write_text(folder / "text"), folder / "tiny_config.py"
    config.write_text(
        f"from tests.training import tiny\ndef get_config():\n    return tiny.config({str(text)!r})\n"
    )

    def set_limit():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}"],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, preexec_fn=set_limit,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def check_output(code, output, message):
    lines = output.splitlines()
    assert code == 1 and re.match(f"train.py: {message}", lines[-1]), output
    assert "Traceback" not in output and "Error" not in output and len(lines) <= 5, output


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_one_line(tmp_path):
    """The compiler's cache is off, since its files would be too large, too."""
    environment = os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    try:
        code, output = run_command(tmp_path, tmp_path / "run", limit=25_000)
    finally:
        if environment is not None:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = environment
    reason = "the file is larger than the limit of the process or the filesystem"
    check_output(
        code, output, rf"{tmp_path}/run/checkpoints/3: {reason}; no checkpoint was saved in"
    )
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) >= 3
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a disk of a given size; skips the test where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a disk is not allowed here")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_continues(small_disk, tmp_path):
    disk = small_disk("400k")
    run = disk / "run"
    code, output = run_command(tmp_path, run)
    check_output(
        code, output, rf"{run}/checkpoints/6: the disk is full; checkpoint 3 in {run} is complete"
    )
    assert Checkpoints(run / "checkpoints").steps == [3]
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    code, output = run_command(tmp_path, run)
    assert code == 0 and "finished 12 steps" in output
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, 13))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["12", "9"]


def test_parameters_that_cannot_be_saved_are_an_error(small_disk):
    """As in an import of a pretrained model, which saves once and closes."""
    folder = small_disk("16k")
    checkpoints = Checkpoints(folder / "checkpoints")
    with pytest.raises(OSError, match="checkpoints/0: the disk is full"):
        checkpoints.save_params(0, {"x": jnp.asarray(np.random.default_rng(0).normal(size=20_000))})
        checkpoints.close()
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        pytest.param(errno.EDQUOT, "the disk quota is used up", marks=pytest.mark.slow),
        pytest.param(errno.EROFS, "the filesystem is read-only", marks=pytest.mark.slow),
        pytest.param(errno.EACCES, "permission denied", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("writer", [pytest.param(Events, marks=pytest.mark.slow), MetricsWriter])
def test_metrics_that_cannot_be_written_end_the_run(
    tmp_path, monkeypatch, writer, number, reason, capfd
):
    text, real, folder = tiny.write_text(tmp_path / "text"), writer.write, tmp_path / "run"

    class Full:
        def __init__(self, file):
            self.close = file.close

        def write(self, data):
            raise OSError(number, os.strerror(number))

    def write(self, step, values):
        if step == 5:
            self._file = Full(self._file)
        return real(self, step, values)

    monkeypatch.setattr(writer, "write", write)
    place = "tensorboard/events.*" if writer is Events else "metrics.jsonl"
    said = (
        rf"{folder}/{place}: {reason}; checkpoint 3 in {folder} is complete, and the same command"
    )
    with pytest.raises(TrainingNotSaved, match=said) as error:
        train(tiny.config(text, total_tokens=6 * 256), folder)
    assert isinstance(error.value, OSError) and "\n" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not (folder / "run.lock").exists()


@pytest.mark.slow
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    text = tiny.write_text(tmp_path / "text")
    for name in ("tensorboard", "data.json"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        if name == "tensorboard":
            (folder / name).write_text("")
        else:
            (folder / name).mkdir()
        with pytest.raises(TrainingNotSaved, match=rf"{folder}/{name}.*; no checkpoint was saved"):
            train(tiny.config(text, total_tokens=3 * 256), folder)


def test_events_are_those_of_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    writer = MetricsWriter(tmp_path, 4)
    writer.write(5, {"a": 1.5, "b": [1.0, 3.0], "c": float("nan")})
    writer.close()
    [path] = (tmp_path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert events[0].file_version == "brain.Event:2" and events[1].step == 5
    values = {v.tag: v.simple_value for event in events[2:] for v in event.summary.value}
    assert values == {"a": 1.5, "b/min": 1.0, "b/max": 3.0}
