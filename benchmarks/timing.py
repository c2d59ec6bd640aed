"""Times of repeated calls, and where they were measured: the machine and the commit."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.registry import ROOT


def milliseconds(function, *args, repeats: int = 20) -> float:
    """Return the median time in ms of calling `function`, over `repeats` calls, after two calls that
    compile and warm up.
    """
    for _ in range(2):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def batch_milliseconds(program, *args, calls: int = 20) -> float:
    """Return the time in ms of one call of a compiled program with the arguments `args`: the median over 7
    batches of `calls` calls.

    All calls of a batch are dispatched before the result of the last is awaited.
    """
    for _ in range(2):
        jax.block_until_ready(program(*args))
    result, times = None, []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(calls):
            result = program(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * float(np.median(times))


def program_bytes(compiled: Any) -> int:
    """Return the device memory in bytes that a compiled program needs: its arguments, temporary arrays, and
    the results that reuse no argument.
    """
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new


def append_row(path: Path, row: dict) -> None:
    """Append a measured row to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def alone(lock: Path | None, shared: bool = False):
    """Lock a file for the time of the context, so that processes that time on one device do so one after
    another.

    Args:
        lock: the file to lock; None locks nothing.
        shared: whether other processes may have the lock `shared` at the same time, as while they compile.
    """
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def provenance(*, device: bool = True) -> dict:
    """Return the fields of a row that say where it was measured: the date, the commit, and with `device`
    the device and JAX's version.

    The environment variable GIT_COMMIT replaces the commit in a copy of the tree without its history.
    """
    commit = os.environ.get("GIT_COMMIT", "")
    if not commit:
        try:
            command = ["git", "rev-parse", "--short", "HEAD"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            commit = done.stdout.strip()
        except OSError:
            pass
    row = {"date": datetime.date.today().isoformat(), "commit": commit or "unknown"}
    if device:
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    return row
