"""The lock of a run's directory: at most one run writes there at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsm_jax.files import bounded_json, reason, write_atomically

FILE = "run.lock"
HEARTBEAT_SECONDS = 30.0
STALE_SECONDS = 600.0
"""A lock of another host is taken over if its heartbeat, the file's modification time, is older than this."""

_BEGINNING_SECONDS = 2.0  # a file system without hard links shows a new lock before its contents


class LostLockError(RuntimeError):
    """Raised if another process has taken over the lock of a run."""


class RunLock:
    """The lock of one run's directory, the file `run.lock`: JSON with the owner's host, process id, start of the process,
    boot of the host, process namespace, time and a random token.

    The owner touches the file every `HEARTBEAT_SECONDS`. The lock is taken over, with a line on stderr, if its owner is
    gone: the process of this host no longer runs, or the heartbeat of another host is older than `STALE_SECONDS`. Of
    several processes that find the same lock without owner, one takes it over: each must first create a lock that is
    named after the old lock's token.

    `fcntl` locks are not used, because network filesystems may not pass them on to other hosts.

    Args:
        workdir: the run's directory.
        agree: returns the first process's text to all processes of the run, so that all of them act alike; a run of
            several processes has one lock, which its first process owns.
        first: whether this is the first process of the run.
    """

    def __init__(
        self, workdir: Path, *, agree: Callable[[str], str] = lambda text: text, first: bool = True
    ):
        self.path = workdir / FILE
        self._workdir, self._agree, self._first = workdir, agree, first
        self._owner: dict[str, Any] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> RunLock:
        """Lock the run's directory if it exists; otherwise `acquire` must be called when it is created."""
        self._acquire(create=False)
        return self

    def acquire(self) -> None:
        """Create the run's directory and lock it, unless `with` has locked it already.

        Raises:
            ValueError: a process that runs has the lock, or another process made a run in the directory in the meantime.
        """
        self._acquire(create=True)

    def _acquire(self, create: bool) -> None:
        problem = ""
        if self._first and self._owner is None:
            try:
                self._lock(create)
            except ValueError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self.path}: {reason(error)}; nothing was written"
        if problem := self._agree(problem):
            raise ValueError(problem)

    def _lock(self, create: bool) -> None:
        if create:
            self._workdir.mkdir(parents=True, exist_ok=True)
        elif not self._workdir.is_dir():
            return
        owner = _this_process()
        try:
            gone = _claim(self.path, owner)
        except _HeldError as error:
            raise ValueError(_refusal(self._workdir, self.path, error.holder)) from None
        self._owner = owner
        if gone:
            print(
                f"workdir={str(self._workdir)!r}: taking over the lock of {_describe(gone)}, which has ended",
                file=sys.stderr,
                flush=True,
            )
        if create and (self._workdir / "config.json").exists():
            self.release()
            raise ValueError(
                f"workdir={str(self._workdir)!r}: another process made a run there after this one had started; give the "
                "same command again to continue that run, or use another workdir"
            )
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()

    def check(self) -> None:
        """Check before a save that this process still owns the lock; a lock that was deleted is made again.

        Raises:
            LostLockError: another process has taken it over, as after a pause of this one that was longer than
                `STALE_SECONDS`.
        """
        if self._owner is None:
            return
        holder = _read(self.path)
        if holder is None:
            with contextlib.suppress(FileExistsError):
                _create(self.path, self._owner)
            holder = _read(self.path)
        if holder is not None and holder.get("token") != self._owner["token"]:
            raise LostLockError(
                f"{self.path}: {_describe(holder)} took over the lock of this run, so this process saves nothing further"
            )

    def release(self) -> None:
        """Delete the lock, if this process owns it."""
        self._ended.set()
        owner, self._owner = self._owner, None
        if owner is None:
            return
        with contextlib.suppress(OSError):
            if (_read(self.path) or {}).get("token") == owner["token"]:
                self.path.unlink()

    def __exit__(self, *exception: object) -> None:
        """Delete the lock, if this process owns it."""
        self.release()

    def _touch(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            owner = self._owner
            with contextlib.suppress(OSError):
                if owner and (_read(self.path) or {}).get("token") == owner["token"]:
                    os.utime(self.path, follow_symlinks=False)


class _HeldError(Exception):
    """Raised if the lock has an owner that runs, or may run; `holder` is the lock's content."""

    def __init__(self, holder: dict[str, Any]):
        self.holder = holder


def _claim(path: Path, owner: dict[str, Any]) -> dict[str, Any] | None:
    """Create the lock at `path` for `owner`, or replace a lock whose owner is gone; return the old lock, or None.

    Raises:
        _HeldError: the lock's owner runs, or may run.
    """
    while True:
        try:
            _create(path, owner)
            return None
        except FileExistsError:
            holder = _read(path)
        if holder is None:
            continue  # it was released in the meantime
        if not _is_gone(path, holder):
            raise _HeldError(holder)
        # Only the owner of the lock that is named after the old token may replace the old lock.
        takeover = path.with_name(f"{path.name}.{holder['token']}")
        _claim(takeover, owner)
        try:
            if (_read(path) or {}).get("token") == holder["token"]:
                write_atomically(path, _content(owner))
                return holder
        finally:
            takeover.unlink(missing_ok=True)


def _create(path: Path, owner: dict[str, Any]) -> None:
    """Create a lock with its contents at once; raises FileExistsError if there is one."""
    draft = path.with_name(f".{FILE}.{owner['token']}.{secrets.token_hex(4)}")
    write_atomically(draft, _content(owner))
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            file.write(_content(owner))
    finally:
        draft.unlink(missing_ok=True)


def _content(owner: dict[str, Any]) -> bytes:
    return json.dumps(owner, indent=2).encode() + b"\n"


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a lock; None if there is no lock. A lock that cannot be read has the token "unreadable"."""
    deadline = time.monotonic() + _BEGINNING_SECONDS
    while os.path.lexists(path):
        try:
            lock = bounded_json(path, max_bytes=1 << 16)
            if isinstance(lock.get("token"), str) and lock["token"].isalnum():
                return lock
        except ValueError:
            pass
        if time.monotonic() > deadline:
            return {"token": "unreadable"}
        time.sleep(0.05)
    return None


def _is_gone(path: Path, holder: dict[str, Any]) -> bool:
    """Return whether the owner of a lock no longer runs, as far as this host can know."""
    here, pid = _this_process(), holder.get("pid")
    same_host = all(holder.get(name) == here[name] for name in ("host", "pid_namespace"))
    if same_host and holder.get("boot_id") == here["boot_id"] and isinstance(pid, int):
        started = _process_start(pid)
        return started is None or started != holder.get("started")
    try:
        beat = path.stat().st_mtime
    except OSError:
        return False  # released in the meantime: the caller reads it again
    if same_host and beat < _boot_time():
        return True  # this host has restarted since
    return _now(path.parent) - beat > STALE_SECONDS


def _now(folder: Path) -> float:
    """Return the time by the clock of the filesystem, which may differ from this host's."""
    probe = folder / f".{FILE}.{secrets.token_hex(6)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _process_start(os.getpid()),
        "boot_id": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _namespace(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "token": secrets.token_hex(8),
    }


def _process_start(pid: int) -> str | None:
    """Return when a process of this host started, in a form that is only compared; None if it does not run."""
    if os.path.isdir("/proc/self"):
        try:
            # The second field, the program's name, may contain spaces and brackets. A zombie ("Z") has ended.
            fields = (
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join(done.stdout.split()) or None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot_time() -> float:
    """Return when this host started, in seconds since 1970; 0 if it is unknown."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("btime ")))
    except (OSError, StopIteration, ValueError):
        return 0.0


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _describe(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "an unknown process (the lock cannot be read)"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('time')})"


def _refusal(workdir: Path, path: Path, holder: dict[str, Any]) -> str:
    here = _this_process()
    known = holder.get("host") == here["host"] and holder.get("boot_id") == here["boot_id"]
    remedy = (
        "wait until it ends, stop it, or use another workdir"
        if known and holder.get("pid_namespace") == here["pid_namespace"]
        else f"wait until it ends, or use another workdir; if you know that it no longer runs, delete {path} (it is taken "
        f"over {STALE_SECONDS / 60:.0f} minutes after its last sign of life)"
    )
    return f"workdir={str(workdir)!r}: {_describe(holder)} writes this run; {remedy}"
