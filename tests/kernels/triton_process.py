"""Start Triton's interpreter in a process of its own: it cannot be switched on after Triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def results_of(module: str, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return, by name, the errors that the program `tests.kernels.MODULE` prints for the given cases."""
    command = [sys.executable, "-m", f"tests.kernels.{module}", *names]
    environment = os.environ | dict(TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {line.pop("case"): line for line in lines}


def lazy_results(
    module: str, names: Collection[str], fast: Collection[str]
) -> Callable[[str], dict[str, float]]:
    """Return a function that returns the errors of a case. It starts the program `tests.kernels.MODULE` once for the cases
    `fast` and once for all others of `names`, when one of them is asked for."""
    results: dict[str, dict[str, float]] = {}

    def result(name: str) -> dict[str, float]:
        if name not in results:
            together = [n for n in names if (n in fast) == (name in fast)]
            results.update(results_of(module, together))
        return dict(results[name])

    return result
