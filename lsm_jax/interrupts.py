"""SIGINT and SIGTERM: a program that starts leaves at once, in one line; one that trains ends its step first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import types
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 1.0  # seconds in which the main thread may clean up


class Stop:
    """Attributes: signal: the number of the signal noted, or None."""

    signal: int | None = None
    _passed_over: bool = False


_noting: Stop | None = None


def leave_on_signals(program: str) -> None:
    """From now on SIGINT and SIGTERM end the process with one line and the exit code 128 + their number.

    Call it in the main thread, before slow imports. Python hears of no signal inside a compilation, which may take minutes;
    a thread that hears of it ends the process then.

    Args:
        program: begins the line.
    """
    told = False

    def tell(number: int) -> None:
        nonlocal told
        if not told:  # by os.write: a handler may stand inside another write to stderr
            name = signal.Signals(number).name
            os.write(2, f"{program}: {name}: stopped; nothing further was saved\n".encode())
            # An exception out of a callback of Python's or a library's is printed, and lost: `watch` ends the process then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        told = True

    def leave(number: int, frame: types.FrameType | None) -> None:
        if told:
            os._exit(128 + number)
        tell(number)
        if _importing(frame):  # an exception out of an extension's start would abort the process
            os._exit(128 + number)
        raise SystemExit(128 + number)

    def watch() -> None:
        while True:
            number = os.read(heard, 1)[0]
            if number not in _SIGNALS:
                continue
            if _noting is not None and not _noting._passed_over:
                _noting._passed_over = True
                continue
            time.sleep(_GRACE)
            tell(number)
            os._exit(128 + number)

    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in _SIGNALS:
        signal.signal(number, leave)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()


def _importing(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def noted() -> Iterator[Stop]:
    """Note the first SIGINT or SIGTERM; a second one acts at once, as it would outside."""
    global _noting
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in _SIGNALS}

    def note(number: int, _frame: object) -> None:
        stop.signal = number
        for s, handler in before.items():
            signal.signal(s, handler)

    _noting = stop
    for s in before:
        signal.signal(s, note)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _noting = None
