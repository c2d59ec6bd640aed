"""Read one damaged input under limits of time and memory, and say how that ended."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.snapshot import changes, snapshot

SECONDS = 10  # a case that takes longer is a hang
MEMORY = 1 << 30  # bytes that a case may add to the process
MOST_LINES = 40  # of an error or of output to stderr
OUTCOMES = {
    "correct": "what was read equals the intact input, or the intact part and a message",
    "accepted": "a changed value was read, of a file without a checksum",
    "refused": "an error that names the file or the field",
    "unnamed": "an error that names neither",
    "silent": "a changed value was read, of a file with a checksum",
    "traceback": "an exception that the programs do not turn into a message, or a traceback in the output",
    "hang": f"more than {SECONDS} s",
    "memory": "more than 1 GiB",
    "outside": "a file outside of the given folders was changed",
}
BAD = ("silent", "traceback", "hang", "memory", "outside")


class TooLong(BaseException):
    """Raised by the alarm; no `except Exception` of a library stops it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One damaged input.

    Attributes:
        subject: the kind of input, a name in the results.
        damage: what was done to it.
        read: a call without arguments that reads it and returns (value, intact value).
        names: an error must contain one of them; empty requires no name.
        protected: whether a changed value must be detected.
        accept: see `subjects.Subject`.
        unchanged: folders and snapshots of what `read` must not change, as (folder, filter of relative paths).
    """

    subject: str
    damage: str
    read: Callable[[], tuple[Any, Any]]
    names: frozenset[str] = frozenset()
    protected: bool = False
    accept: Callable[[Any, Any], str] = lambda value, intact: "no"
    unchanged: tuple[tuple[Path, Callable[[str], bool]], ...] = ()


def judge(case: Case) -> dict[str, Any]:
    """Read a case under the limits, and return its row: outcome, seconds, and the error or the reason."""
    before = [_kept(folder, wanted) for folder, wanted in case.unchanged]
    error, value, intact, began = None, None, None, time.perf_counter()
    base = _reset_peak()
    with Captured() as output:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            value, intact = case.read()
        except BaseException as raised:
            error = raised
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = time.perf_counter() - began
    added = max(0, _peak() - base)
    row = dict(subject=case.subject, damage=case.damage, seconds=round(seconds, 2))
    outcome, detail = _outcome(case, error, value, intact, output[0])
    if added > MEMORY and outcome != "hang":
        outcome, detail = "memory", f"{added / 2**30:.1f} GiB; {detail}"
    after = [_kept(folder, wanted) for folder, wanted in case.unchanged]
    if written := [line for a, b in zip(before, after, strict=True) for line in changes(a, b)]:
        outcome, detail = "outside", "; ".join(written[:3])
    return row | dict(outcome=outcome, detail=detail)


def _outcome(
    case: Case, error: BaseException | None, value: Any, intact: Any, output: str
) -> tuple[str, str]:
    """Return (outcome, detail) of a case, from its error or its value and its output."""
    if isinstance(error, TooLong):
        return "hang", "".join(traceback.format_tb(error.__traceback__)[-2:])[-300:]
    if isinstance(error, MemoryError):
        return "memory", repr(error)[:200]
    noisy = "Traceback (most recent call last)" in output or output.count("\n") > MOST_LINES
    if error is None:
        if value == intact:
            return ("traceback", output[-300:]) if noisy else ("correct", "")
        accepted = case.accept(value, intact)
        if accepted == "quiet" or (accepted == "announced" and _announced(case, output)):
            return ("traceback", output[-300:]) if noisy else ("correct", f"{accepted}: a part")
        what = f"read {str(value)[:80]}, not {str(intact)[:80]}"
        return ("silent" if case.protected else "accepted"), what
    text = str(error)
    from lsm_jax.training import TrainingStopped

    messages = (ValueError, OSError, TrainingStopped)
    if isinstance(error, SystemExit):
        messages = (SystemExit,) if isinstance(error.code, str) else ()
    if not isinstance(error, messages) or not text.strip() or noisy:
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = f"{Path(where[0].filename).name}:{where[0].lineno}" if where else ""
        return "traceback", f"{type(error).__name__}: {text[:200]} ({place})"
    if text.count("\n") > MOST_LINES:
        return "traceback", f"a message of {text.count(chr(10))} lines"
    names = [name for name in case.names if len(name) > 2 and not name.isdecimal()]
    if names and not any(name in text for name in names):
        return "unnamed", text[:300]
    return "refused", text[:200]


def _announced(case: Case, output: str) -> bool:
    words = [name for name in case.names if "." in name or name.startswith("checkpoint ")]
    return any(word in output for word in (*words, "cannot be read"))


def _kept(folder: Path, wanted: Callable[[str], bool]) -> dict[str, str]:
    return {name: entry for name, entry in snapshot(folder).items() if wanted(name)}


class Captured:
    """Send file descriptors 1 and 2 to a file inside a `with` block; returns a list that has its text later."""

    def __enter__(self) -> list[str]:
        sys.stdout.flush(), sys.stderr.flush()
        self.file = tempfile.TemporaryFile()
        self.saved = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(self.file.fileno(), number)
        self.text: list[str] = []
        return self.text

    def __exit__(self, *exception: object) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self.file.seek(0)
        self.text.append(self.file.read().decode(errors="replace"))
        self.file.close()


def _reset_peak() -> int:
    """Set the process's peak of resident memory to the present size, and return it in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not permitted: then the peak is that of the whole process
        pass
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def limit_memory() -> None:
    """Let the process allocate at most four times `MEMORY` of addresses more than it has."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmSize"))
        most = int(line.split()[1]) * 1024 + 4 * MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def too_long(number: int, frame: object) -> None:
    raise TooLong
