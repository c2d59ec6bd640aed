"""Respond to SIGINT and SIGTERM: a program prints one line and exits at once, but a training loop finishes its step first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import types
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A record of whether a signal has requested that training stops after the current step.

    Attributes:
        signal: number of the signal that was received, such as SIGTERM's; None if there was none.
    """

    signal: int | None = None
    _first_ignored: bool = False  # whether `watch` has ignored the first signal


_active: Stop | None = None  # the record of the innermost `noted` block, if any


def leave_on_signals(program: str, *, cleanup_seconds: float = 1.0) -> None:
    """Make SIGINT and SIGTERM end the process with one line and the exit code 128 + the signal's number.

    Call it in the main thread, before slow imports. During a compilation, which may take minutes, Python runs no signal
    handler; then a thread, which is woken by the signal, ends the process.

    Args:
        program: name of the program, with which the printed line begins.
        cleanup_seconds: time for the main thread to clean up before the process is ended.
    """
    reported = False

    def report(number: int) -> None:
        nonlocal reported
        if not reported:  # by os.write, since the handler may interrupt another write to stderr
            name = signal.Signals(number).name
            os.write(2, f"{program}: {name}: stopped; nothing further was saved\n".encode())
            # If the exception of `leave` is raised inside a callback, Python prints and drops it; do not show that.
            # `watch` then ends the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        reported = True

    def leave(number: int, frame: types.FrameType | None) -> None:
        if reported:
            os._exit(128 + number)
        report(number)
        if _importing(
            frame
        ):  # an exception while an extension module starts would abort the process
            os._exit(128 + number)
        raise SystemExit(128 + number)

    def watch() -> None:
        while True:
            number = os.read(read_end, 1)[0]
            if number not in _SIGNALS:
                continue
            if _active is not None and not _active._first_ignored:
                _active._first_ignored = True
                continue
            time.sleep(cleanup_seconds)
            report(number)
            os._exit(128 + number)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in _SIGNALS:
        signal.signal(number, leave)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()


def _importing(frame: types.FrameType | None) -> bool:
    """Return whether a stack frame belongs to an import in progress. A signal handler must not raise an
    exception there, since that can abort the process while an extension module starts."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def noted() -> Iterator[Stop]:
    """Return a context manager that, inside its `with` block, records the first SIGINT or SIGTERM in the `Stop` that it
    yields, instead of ending the process.

    A second signal calls the handler that was installed before the `with` block. Outside the main thread no signal is
    recorded.
    """
    global _active
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in _SIGNALS}

    def note(number: int, _frame: object) -> None:
        stop.signal = number
        for s, handler in before.items():
            signal.signal(s, handler)

    _active = stop
    for s in before:
        signal.signal(s, note)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _active = None
