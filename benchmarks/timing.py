"""Timing shared by the benchmarks: medians of repeated calls, with the machine and the commit beside them."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import subprocess
import time
from pathlib import Path

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


@contextlib.contextmanager
def alone(lock: Path | None):
    """The device for oneself, where other processes that share it hold the same lock when they use it."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
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
