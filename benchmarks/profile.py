"""Measure the device time of each instruction of a compiled program, by XLA's name and by the place in the
model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lsm_jax.training.device_times import device_times


def by_kernel(call: Callable[[], Any], text: str, calls: int = 2) -> list[dict[str, Any]]:
    """Measure the device time of each instruction of a compiled program.

    Args:
        call: runs the program once; it has run before.
        text: the text of the compiled program, its `as_text()`.
        calls: number of calls of the program that are profiled.

    Returns:
        The rows of `lsm_jax.training.device_times.device_times`, one for each kernel, the longest first.

    Raises:
        RuntimeError: the recorded profile has no instruction of the compiled program.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = None
            for _ in range(calls):
                result = call()
            jax.block_until_ready(result)
        return device_times(Path(folder), text, calls)
