"""Timing shared by the benchmarks: medians of repeated calls, with the machine and the commit beside them."""

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


def milliseconds(function, *args, repeats: int = 20) -> float:
    """The median time of a call, in ms, after two calls to compile and warm up."""
    for _ in range(2):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def batch_milliseconds(program, *args, calls: int = 20) -> float:
    """The median over 7 batches of the time of a call, in ms: many calls are asked for before the last is waited for."""
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
    """Arguments, what is computed beside them, and results that reuse neither."""
    found = compiled.memory_analysis()
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + found.temp_size_in_bytes + new


def append_row(path: Path, row: dict) -> None:
    """Write a row at the end of a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def alone(lock: Path | None, shared: bool = False):
    """The device for oneself, where other processes that share it hold the same lock when they use it; `shared` with those
    that share it too, as programs being compiled may."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def provenance() -> dict:
    """When, where and on what code a number was measured."""
    commit = os.environ.get("GIT_COMMIT", "")  # for a copy of the tree without its history
    if not commit:
        try:
            command = ["git", "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            pass
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
