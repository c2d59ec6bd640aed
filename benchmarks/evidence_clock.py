"""The time of one call of the benchmark `evidence`, and of a run in all calls."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.run import Skipped, log
from benchmarks.timing import alone
from lsm_jax.files import write_atomically


class TimeOver(BaseException):
    """Raised when the minutes of a call are over; the same command continues. No `Exception`, since it is no failure of the
    model that was measured."""


@contextlib.contextmanager
def counted(path: Path) -> Iterator[Callable[[], float]]:
    """Add the seconds of a `with` block to those in a file, however the block ends, so that an interrupted run has the seconds of all
    its calls; yield the function that returns their sum."""
    before, began = json.loads(path.read_text()) if path.is_file() else 0.0, time.perf_counter()

    def seconds() -> float:
        return round(before + time.perf_counter() - began, 1)

    try:
        yield seconds
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(seconds()))


class Clock:
    """The time of one call.

    Args:
        seconds: its length; `math.inf` never ends.
        whole: whether to begin a long run only if it will end in this time, with its evaluations.
        lock: a file that processes on one device lock while they train; None locks nothing.
    """

    def __init__(self, seconds: float, *, whole: bool = False, lock: Path | None = None):
        self._end, self._whole, self._lock = time.monotonic() + seconds, whole, lock
        self._besides = (
            60.0  # seconds of a model besides its steps, as predicted before one has ended
        )

    def check(self) -> None:
        """Raise TimeOver if the time is over."""
        if time.monotonic() >= self._end:
            raise TimeOver

    def check_evaluations(self) -> None:
        """Raise TimeOver if the time is over, unless this clock was made with `whole`: a run that has ended is evaluated then."""
        if not self._whole:
            self.check()

    def check_whole(self, step_seconds: float) -> None:
        """Raise Skipped if a run whose steps last so long would not end, with all that the slowest model so far took besides
        its steps. It begins in any case if this clock was not made with `whole`."""
        needed, left = step_seconds + self._besides, self._end - time.monotonic()
        if self._whole and needed > left:
            raise Skipped(f"its {needed:.0f} s are more than the {left:.0f} s that are left")

    @contextlib.contextmanager
    def turn(self, step_seconds: float) -> Iterator[None]:
        """Wait for the lock and hold it inside a `with` block, for a run whose steps last `step_seconds`, 0 if that is not known.

        Raises:
            TimeOver: the time is over by then.
            Skipped: the run would not end in the time (`check_whole`).
        """
        began = time.monotonic()
        with alone(self._lock):
            if (waited := time.monotonic() - began) > 1:
                log(f"waited {waited:.0f} s for the device")
            self.check()
            if step_seconds:
                self.check_whole(step_seconds)
            yield

    def note_besides(self, seconds: float) -> None:
        """Note how long a model took besides its steps: compiling, saving and evaluating."""
        self._besides = max(self._besides, seconds)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """End training inside a `with` block, as SIGTERM does, when the time is over: it saves its last step."""
        self.check()
        left = self._end - time.monotonic()

        def over(*_: object) -> None:  # before the first step; then training answers the signal
            raise TimeOver

        before = signal.signal(signal.SIGTERM, over)
        timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        if left < math.inf:
            timer.start()
        try:
            yield
        except InterruptedError as error:
            late = time.monotonic() >= self._end
            raise TimeOver if late else KeyboardInterrupt from error  # which ends the benchmark
        finally:
            timer.cancel()
            signal.signal(signal.SIGTERM, before)
