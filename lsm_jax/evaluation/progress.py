"""A progress bar with speed and time left; plain lines where there is no terminal."""

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
    """Counts steps and tokens; a context manager.

    Args:
        description: what is being done.
        total: steps, or None where that is not known.
        unit: what a step is, in the plural.
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
        """Start the bar."""
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the bar."""
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the bar was made, compilation included."""
        return time.perf_counter() - self._start

    def expect(self, total: int | None) -> None:
        """How many steps there will be in all, known only now."""
        self.total = total
        self._bar.update(self._task, total=total)

    def advance(self, tokens: int, loss: float | None = None) -> None:
        """One step is done: so many tokens, and the mean loss so far in nats a token where there is one."""
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
                rest = self.seconds / self.steps * (self.total - self.steps)
                left = f" · {rest:.0f} s left"
            print(f"{self.description} {done} · {status}{left}", file=sys.stderr, flush=True)
