"""Show the progress of an evaluation: a bar with speed and time left, or printed lines where there is no
terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SECONDS_BETWEEN_LINES = 15.0


class EvaluationProgress:
    """Count the steps and tokens of an evaluation in a `with` block, and show them as a progress bar.

    Args:
        description: text in front of the bar, such as the name of the evaluation.
        total: number of steps; None if not known.
        unit: name of what one step reads, in the plural, such as "batches".
        show: False prints nothing.
    """

    def __init__(
        self, description: str, total: int | None, *, unit: str = "batches", show: bool = True
    ):
        self.description, self.total = description, total
        self.tokens = self.steps = 0
        self._lines = show and not sys.stderr.isatty()
        self._start = self._last_line = time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit + " · {task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("· left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not show or self._lines,
        )
        self._task = self._bar.add_task(description, total=total, status="compiling")

    def __enter__(self) -> EvaluationProgress:
        """Start the progress bar of an evaluation."""
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the progress bar of an evaluation."""
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the evaluation's progress bar was created, including compilation."""
        return time.perf_counter() - self._start

    def expect(self, total: int | None) -> None:
        """Set the total number of steps of the evaluation, from which the time left is computed."""
        self.total = total
        self._bar.update(self._task, total=total)

    def advance(self, tokens: int, loss: float | None = None) -> None:
        """Count one finished step of the evaluation, and update the progress bar. `tokens` is the number of
        tokens that the step read; `loss` is the mean loss so far in nats per token, None if the evaluation
        has no loss."""
        self.tokens += tokens
        self.steps += 1
        status = f"{self.tokens / self.seconds:,.0f} tokens/s"
        if loss is not None:
            status = f"loss {loss:.4f} · {status}"
        self._bar.update(self._task, advance=1, status=status)
        if self._lines and time.perf_counter() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.perf_counter()
            done, left = str(self.steps), ""
            if self.total:
                done = f"{self.steps}/{self.total}"
                seconds_left = self.seconds / self.steps * (self.total - self.steps)
                left = f" · {seconds_left:.0f} s left"
            print(f"{self.description} {done} · {status}{left}", file=sys.stderr, flush=True)
