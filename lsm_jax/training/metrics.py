"""Write the metrics of a training run to metrics.jsonl, as TensorBoard events and to Weights & Biases, measure its speed and
memory, and show its progress."""

from __future__ import annotations

import codecs
import collections
import errno
import itertools
import json
import math
import os
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar, text

from lsm_jax.files import unique_keys, write_atomically
from lsm_jax.training.failures import writing

SECONDS_BETWEEN_LINES = 10.0
_AVERAGED_LOSSES = 50  # in the mean that is shown beside a step's loss

_protocol: Any = event_pb2  # its messages are made at run time
Event, SessionLog = _protocol.Event, _protocol.SessionLog


class MetricsWriter:
    """Write a run's metrics by step, as lines of metrics.jsonl, as TensorBoard events, and to a further log if there is one.

    Args:
        workdir: the run's directory.
        step: the training step from which the run continues; the lines of later steps, and a line cut short by
            a kill, are removed from metrics.jsonl, since the run writes them again. If other lines are damaged,
            those that can be read remain, and the damaged file is copied to metrics.damaged-<n>.jsonl.
        log_every: the run's `log_every`. Rows of training steps up to `step` that are missing, as after metrics.jsonl
            was deleted, are reported in one line; 0 does not look for any.
        open_log: makes a further log with `write(step, scalars)`, `write_texts(step, texts)` and `close()`, in the first
            process only; None makes none.

    Raises:
        WriteError: a file cannot be written; the methods raise it too.
    """

    def __init__(
        self,
        workdir: Path,
        step: int,
        *,
        log_every: int = 0,
        open_log: Callable[[], Any] | None = None,
    ):
        self._file = self._events = self._log = None
        if jax.process_index() != 0:  # one host writes for all
            return
        self._path = path = workdir / "metrics.jsonl"
        with writing(path):
            data = _content(path)
            lines, damage = _readable_lines(data)
            if damage:
                _save_damaged(path, data, damage)
            lines = [(row, line) for row, line in lines if row["step"] <= step]
            if log_every and step >= log_every:
                steps = [row["step"] for row, _ in lines if "train/loss" in row]
                _report_missing(path, steps, step, log_every)
            kept = b"".join(line + b"\n" for _, line in lines)
            if kept != data or path.is_symlink() or not path.exists():
                write_atomically(path, kept)
            self._file = path.open("ab", buffering=0)
        self._events = Events(workdir / "tensorboard", step + 1)
        self._log = None if open_log is None else open_log()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the metrics of one training step, numbers and (nested) lists of numbers by name, as one line of
        metrics.jsonl and as TensorBoard events; the events of a list are its minimum and maximum."""
        if self._file is None or self._events is None:
            return
        finite = {name: _finite(value) for name, value in values.items()}
        line = json.dumps({"step": step, **finite}).encode() + b"\n"
        with writing(self._path):
            while line:  # a disk that is nearly full writes a part
                line = line[self._file.write(line) :]
        scalars = {}
        for name, value in finite.items():
            if isinstance(value, list):
                scalars[f"{name}/min"] = np.min(values[name])
                scalars[f"{name}/max"] = np.max(values[name])
            else:
                scalars[name] = value
        self._events.write(step, scalars)
        if self._log is not None:
            self._log.write(step, scalars)

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """Write texts of one training step by name as TensorBoard events, and to the further log."""
        if self._events is not None:
            self._events.write_texts(step, texts)
        if self._log is not None:
            self._log.write_texts(step, texts)

    def close(self) -> None:
        """Close metrics.jsonl, TensorBoard's events and the further log."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
        if self._log is not None:
            self._log.close()


class Events:
    """Write a new file of TensorBoard events without a thread, so that an error of the disk reaches the caller.

    Args:
        folder: the folder of the run's events, created if it does not exist.
        purge_step: TensorBoard shows no events of this step and later ones from files that were written before.

    Raises:
        WriteError: the file cannot be written; so does `write`.
    """

    def __init__(self, folder: Path, purge_step: int):
        # tensorboard reads the files of a run in the order of their names, which begin with the time.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"{name}.{secrets.token_hex(4)}"
        with writing(self._path):
            folder.mkdir(exist_ok=True)
            self._file = self._path.open("xb", buffering=0)  # a new file, never through a link
            self._write(
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)),
            )

    def _write(self, *events: Any) -> None:
        records = b""
        for event in events:
            data = event.SerializeToString()
            length = struct.pack("<Q", len(data))
            for part in (length, data):
                records += part + struct.pack("<I", masked_crc32c(part))
        while records:  # a disk that is nearly full writes a part
            records = records[self._file.write(records) :]

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """Write numbers of one training step by name; those that are None or not finite are left out."""
        events = [
            Event(wall_time=time.time(), step=step, summary=scalar(tag, number))
            for tag, number in scalars.items()
            if number is not None and np.isfinite(number)
        ]
        with writing(self._path):
            self._write(*events)

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """Write texts of one training step by name; TensorBoard shows them as Markdown, here as code."""
        pages = {tag: "    " + value.replace("\n", "\n    ") for tag, value in texts.items()}
        events = [
            Event(wall_time=time.time(), step=step, summary=text(tag, page))
            for tag, page in pages.items()
        ]
        with writing(self._path):
            self._write(*events)

    def close(self) -> None:
        """Close the file of events."""
        self._file.close()


def _finite(value: Any) -> Any:
    """Return `value`, a number or (nested) lists of numbers, with None in place of NaN and infinities,
    which JSON cannot represent."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, one dict of metrics per line, in the order of their steps.

    Left out are lines that are no JSON objects in UTF-8 with an integer `step` of at least 0, and rows that a later
    row of the same step repeats.
    """
    return [row for row, _ in _readable_lines(_content(Path(path)))[0]]


def _content(path: Path) -> bytes:
    """Return the contents of a metrics.jsonl; b"" if it does not exist or is a link to nothing.

    Raises:
        OSError: it cannot be read, or is no regular file: reading a pipe or a device might never end.
    """
    if not path.exists():
        return b""
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.read_bytes()


def _readable_lines(data: bytes) -> tuple[list[tuple[dict[str, Any], bytes]], list[str]]:
    """Return the rows of a metrics.jsonl, each with its line, and a description of each damaged line.

    A last line without its end, which a kill cut short, is left out and is no damage.
    """
    rows: list[tuple[dict[str, Any], bytes]] = []
    damage: list[str] = []
    latest: dict[tuple[int, str], int] = {}  # (step, metric) -> index in `rows`
    repeated: set[int] = set()
    if data.startswith(codecs.BOM_UTF8):
        damage.append("line 1 begins with a byte-order mark")
        data = data.removeprefix(codecs.BOM_UTF8)
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        row = _parse_row(line)
        if isinstance(row, str):
            if number < len(lines):
                damage.append(f"line {number} {row}")
            continue
        for name in row:
            if name == "step":
                continue
            key = row["step"], name
            if key in latest and latest[key] not in repeated:
                repeated.add(latest[key])
                damage.append(f"line {number} repeats step {row['step']}")
            latest[key] = len(rows)
        if rows and rows[-1][0]["step"] > row["step"] and not damage:
            damage.append(f"line {number} has step {row['step']} after step {rows[-1][0]['step']}")
        rows.append((row, line))
    rows = [row for index, row in enumerate(rows) if index not in repeated]
    return sorted(rows, key=lambda row: row[0]["step"]), damage


def _parse_row(line: bytes) -> dict[str, Any] | str:
    """Return the row in a line of metrics.jsonl, or what is wrong with the line."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError:
        return "is no UTF-8"
    except (json.JSONDecodeError, RecursionError):
        return "is no JSON"
    except ValueError as error:  # a key that occurs twice, or a number of too many digits
        return f"cannot be read ({error})"
    if not isinstance(row, dict):
        return "is no JSON object"
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return "has no step" if "step" not in row else f"has the step {step!r}"[:60]
    return row


def _save_damaged(path: Path, data: bytes, damage: list[str]) -> None:
    """Copy a damaged metrics.jsonl to the first free metrics.damaged-<n>.jsonl, and say so in one line."""
    copies = (path.with_name(f"metrics.damaged-{n}.jsonl") for n in itertools.count(1))
    copy = next(p for p in copies if not os.path.lexists(p))
    write_atomically(copy, data)
    more = f" and {len(damage) - 3} more" if len(damage) > 3 else ""
    print(
        f"{path}: {len(damage)} damaged: {', '.join(damage[:3])}{more}; the rows that can be read remain, and the damaged "
        f"file is {copy.name}",
        file=sys.stderr,
        flush=True,
    )


def _report_missing(path: Path, steps: list[int], step: int, log_every: int) -> None:
    """Say in one line which rows up to a training step are missing in a metrics.jsonl, if any are.

    `log_every` may have changed in the past. The distance of two rows between which it changed is less than the
    distances before and after it together, and the distance of two rows between which one is missing is not.

    Args:
        path: the metrics.jsonl.
        steps: the steps of its rows with a training loss, in ascending order.
        step: the training step.
        log_every: the present number of steps between two rows.
    """
    places = [0, *steps]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    missing = []
    for i, gap in enumerate(gaps if len(gaps) > 1 else ()):
        before = gaps[i - 1] if i else max(log_every, gaps[1])
        after = gaps[i + 1] if i + 1 < len(gaps) else max(log_every, gaps[i - 1])
        if gap >= before + after:
            missing.append((places[i] + 1, places[i + 1] - 1))
    if step - places[-1] >= max([log_every, *gaps[-1:]]):
        missing.append((places[-1] + 1, step))
    if missing:
        ranges = [f"{first} to {last}" for first, last in missing[:3]]
        more = f" and {len(missing) - 3} more ranges" if len(missing) > 3 else ""
        print(
            f"{path} has no rows of steps {', '.join(ranges)}{more}; training continues after step {step} without them",
            file=sys.stderr,
            flush=True,
        )


def memory_gib() -> tuple[str, float]:
    """Return ("device", the peak memory in GiB that the first local device has used so far), or, if the device
    does not report its memory, ("host", the peak memory in GiB of this process)."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return "device", stats["peak_bytes_in_use"] / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return "host", peak * (1 if sys.platform == "darwin" else 1024) / 2**30


class Meter:
    """Measure the training speed in tokens per second since the last reading; time that the loop spends on
    anything but steps is not counted."""

    def __init__(self) -> None:
        self._start, self._steps, self._paused = time.perf_counter(), 0, 0.0

    def step(self) -> None:
        """Count one finished training step for the speed in tokens per second."""
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Do not count `seconds` in the measured training speed: the time in which the loop did not train, but
        evaluated the model or saved a checkpoint."""
        self._paused += seconds

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Return the training speed in tokens per second since the last call, and start a new measurement; 0 if no step
        was counted, and the measurement then continues."""
        if not self._steps:
            return 0.0
        now = time.perf_counter()
        seconds = now - self._start - self._paused
        rate = self._steps * tokens_per_step / seconds if seconds > 0 else 0.0
        self._start, self._steps, self._paused = now, 0, 0.0
        return rate


class TrainProgress:
    """Show a training run's progress in a `with` block: a bar with step, loss, the mean of the last losses, tokens/s and
    time left, or printed lines where there is no terminal.

    If there are several hosts, only the first one shows it.

    Args:
        name: the name shown.
        start: number of steps taken before this call.
        total: number of steps of the run.
        unit: the word for the run's tokens, such as "bytes".
    """

    def __init__(self, name: str, start: int, total: int, unit: str = "tokens"):
        self.name, self.start, self.total, self.unit = name, start, total, unit
        self._losses: collections.deque[float] = collections.deque(maxlen=_AVERAGED_LOSSES)
        self._shown = jax.process_index() == 0
        self._lines = self._shown and not sys.stderr.isatty()
        self._begin = self._last_line = time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("· left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=self._lines or not self._shown,
        )
        # A complete run compiles no step.
        self._first = "compiling the step" if start < total else "the run is complete"
        self._task = self._bar.add_task(name, total=total, completed=start, status=self._first)

    def __enter__(self) -> TrainProgress:
        """Start the progress bar of a training run; without a terminal, print a first line in its place."""
        if self._lines:
            print(
                f"{self.name}: step {self.start} of {self.total}; {self._first}",
                file=sys.stderr,
                flush=True,
            )
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the progress bar of a training run."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a message about the training run on a line that stays above the progress bar."""
        if self._lines:
            print(text, file=sys.stderr, flush=True)
        elif self._shown:
            self._bar.console.print(text, highlight=False, markup=False)

    def advance(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        mfu: float | None = None,
        *,
        flops: float = 0.0,
        tokens: int = 0,
    ) -> None:
        """Show a finished training step: its number, loss (nats per token), the speed in tokens per second and in model
        operations per second, the share of the devices' peak speed (MFU) unless it is None, and the tokens of the run so
        far."""
        if step == self.start + 1:
            self._begin = (
                time.perf_counter()
            )  # time spent compiling says nothing about the time left
        status = f"loss {loss:.4f}"
        if math.isfinite(loss):
            self._losses.append(loss)
        if len(self._losses) > 1:
            mean = sum(self._losses) / len(self._losses)
            status += f" (mean of {len(self._losses)}: {mean:.4f})"
        if tokens_per_second:
            status += f" · {tokens_per_second:,.0f} {self.unit}/s"
            if flops:
                status += f" · {short(tokens_per_second * flops)}FLOP/s"
            if mfu is not None:
                status += f" · MFU {mfu:.1%}"
        if tokens:
            status += f" · {short(tokens)}{self.unit}"
        self._bar.update(self._task, completed=step, status=status)
        now = time.perf_counter()
        if self._lines and (now - self._last_line > SECONDS_BETWEEN_LINES or step == self.total):
            self._last_line = now
            timed_steps, left = step - self.start - 1, ""
            if timed_steps > 0:
                seconds = (now - self._begin) / timed_steps * (self.total - step)
                left = f" · {seconds:.0f} s left"
            print(f"step {step}/{self.total} · {status}{left}", file=sys.stderr, flush=True)


def short(number: float) -> str:
    """Return a number with three digits and the prefix of its thousands, ready for a unit: "1.23 M" or "512 "."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    return f"{number:.3g} {prefixes[0]}"
