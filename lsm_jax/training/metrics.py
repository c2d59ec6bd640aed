"""Write the metrics of a training run to metrics.jsonl and as TensorBoard events, measure its speed and memory,
and show its progress."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
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
from tensorboardX import SummaryWriter

SECONDS_BETWEEN_LINES = 10.0


class MetricsWriter:
    """Write a run's metrics by step, as lines of metrics.jsonl and as TensorBoard events.

    Args:
        workdir: the run's directory.
        step: the training step from which the run continues; the lines of later steps, and a line cut short by
            a kill, are removed from metrics.jsonl, since the run writes them again.
    """

    def __init__(self, workdir: Path, step: int):
        self._file = self._events = None
        if jax.process_index() != 0:  # one host writes for all
            return
        path = workdir / "metrics.jsonl"
        rows = [row for row in read_rows(path) if row.get("step", 0) <= step]
        draft = path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(draft, path)
        self._file = path.open("a", buffering=1)
        self._events: Any = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the metrics of one training step, numbers and (nested) lists of numbers by name, as one line of
        metrics.jsonl and as TensorBoard events; the events of a list are its minimum and maximum."""
        if self._file is None:
            return
        finite = {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, value in finite.items():
            if isinstance(value, list):
                scalars = {f"{name}/min": np.min(values[name]), f"{name}/max": np.max(values[name])}
            else:
                scalars = {name: value}
            for tag, number in scalars.items():
                if number is not None and np.isfinite(
                    number
                ):  # tensorboardX logs a warning for each NaN
                    self._events.add_scalar(tag, number, step)

    def close(self) -> None:
        """Write the metrics that are still buffered, and close metrics.jsonl and TensorBoard's events."""
        if self._file is None:
            return
        self._file.close()
        self._events.close()


def _finite(value: Any) -> Any:
    """Return `value`, a number or (nested) lists of numbers, with None in place of NaN and infinities,
    which JSON cannot represent."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the content of a metrics.jsonl as a list with one dict of metrics per line; a last line cut short by
    a kill is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


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
        """Return the training speed in tokens per second since the last call, and start a new measurement;
        0 if no step was counted."""
        now = time.perf_counter()
        seconds = now - self._start - self._paused
        rate = self._steps * tokens_per_step / seconds if self._steps and seconds > 0 else 0.0
        self._start, self._steps, self._paused = now, 0, 0.0
        return rate


class TrainProgress:
    """Show a training run's progress in a `with` block: a bar with step, loss, tokens/s and time left, or
    printed lines where there is no terminal.

    If there are several hosts, only the first one shows it.
    """

    def __init__(self, name: str, start: int, total: int):
        self.name, self.start, self.total = name, start, total
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
        self._task = self._bar.add_task(name, total=total, completed=start, status="compiling")

    def __enter__(self) -> TrainProgress:
        """Start the progress bar of a training run; without a terminal, print a first line in its place."""
        if self._lines:
            print(
                f"{self.name}: step {self.start} of {self.total}; compiling the step",
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

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a finished training step: its number, loss (nats per token) and the speed in tokens per
        second."""
        if step == self.start + 1:
            self._begin = (
                time.perf_counter()
            )  # time spent compiling says nothing about the time left
        status = f"loss {loss:.4f}"
        if tokens_per_second:
            status += f" · {tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, status=status)
        now = time.perf_counter()
        if self._lines and (now - self._last_line > SECONDS_BETWEEN_LINES or step == self.total):
            self._last_line = now
            timed_steps, left = step - self.start - 1, ""
            if timed_steps > 0:
                seconds = (now - self._begin) / timed_steps * (self.total - step)
                left = f" · {seconds:.0f} s left"
            print(f"step {step}/{self.total} · {status}{left}", file=sys.stderr, flush=True)
