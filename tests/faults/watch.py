"""Watch a run from outside: whether the moment of a kill has come, which files are temporary, whether processes have ended."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

END_SECONDS = 10.0  # a process that lives longer after its last signal counts as a hang
# Moment -> the longest delay in seconds after it.
MOMENTS = {
    "start": 2.0,  # after the process was started: imports
    "any": 4.0,  # after the process was started
    "read": 0.3,  # the log says that data are read: data, then the checkpoint
    "compile": 0.4,
    "describe": 0.02,  # config.json, metrics.draft or a lock file changes
    "step": 0.03,  # a row of metrics was written
    "save": 0.05,  # the temporary folder of a checkpoint exists
    "checksums": 0.02,  # a checkpoint got its name: checksums are written
    "end": 0.05,  # the last row was written
}
PREPARE = {"start": 1.0, "any": 2.0, "partial": 0.2}  # of the program that writes token stores


class Watch:
    """Say whether a moment of a run has come, from its log and its files.

    Args:
        moment: one of `MOMENTS` or `PREPARE`.
        workdir: the run's directory, or the folder of the token stores.
        log: the file with the output of this start.
        number: number of rows of metrics to wait for, if the moment is "step".
    """

    def __init__(self, moment: str, workdir: Path, log: Path, number: int):
        self.moment, self.workdir, self.log, self.number = moment, workdir, log, number
        self.before = self._state()

    def reached(self) -> bool:
        """Return whether the moment has come."""
        if self.moment in ("start", "any"):
            return True
        if self.moment in ("read", "compile"):
            words = dict(read=b": reading ", compile=b"; compiling the step")
            return words[self.moment] in self.log.read_bytes()
        state = self._state()
        if self.moment == "step":
            if state < self.before:  # rows after the last checkpoint were removed
                self.before = state
            return state >= self.before + self.number
        if self.moment == "end":
            return state > self.before
        return bool(state) and state != self.before

    def _state(self) -> Any:
        metrics = self.workdir / "metrics.jsonl"
        if self.moment == "step":
            return _content(metrics).count(b"\n")
        if self.moment == "end":
            return _content(metrics).count(b'"step": 24,')
        if self.moment == "describe":
            names = [n for n in _names(self.workdir) if not n.startswith(("checkpoints", "plots"))]
            return tuple((n, _changed(self.workdir / n)) for n in names)
        if self.moment == "save":
            return any("tmp" in name for name in _names(self.workdir / "checkpoints"))
        if self.moment == "checksums":
            return tuple(n for n in _names(self.workdir / "checkpoints") if n.isdecimal())
        return any(".partial-" in name for name in _names(self.workdir))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def is_temporary(path: Path) -> bool:
    """Return whether a path in a run's directory is a temporary file or folder by its name."""
    name = path.name
    return name.startswith(".") or name.endswith(".draft") or re.search(r"tmp", name) is not None


def group_is_gone(group: int) -> bool:
    """Return whether all processes of a group end within `END_SECONDS`."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def checkpoints(workdir: Path) -> list[str]:
    """Return the names of the complete checkpoints of a run."""
    return [name for name in _names(workdir / "checkpoints") if name.isdecimal()]
