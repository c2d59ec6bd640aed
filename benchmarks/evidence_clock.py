"""The time of one call of the benchmark `evidence`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator

from benchmarks.run import Skipped


class TimeOver(BaseException):
    """Raised when the minutes of a call are over; the same command continues. No `Exception`, since it is no failure of the
    model that was measured."""


class Clock:
    """The time of one call.

    Args:
        seconds: its length; `math.inf` never ends.
        whole: whether to begin a long run only if it will end in this time, with its evaluations.
    """

    def __init__(self, seconds: float, *, whole: bool = False):
        self._end, self._whole = time.monotonic() + seconds, whole
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
