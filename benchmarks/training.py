"""Functions for benchmarks that train: a run to its end, and numbers for rows from the metrics of a run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from lsm_jax.training import TrainConfig, TrainResult, train

SPEED = "perf/tokens_per_second"


def train_to_end(config: TrainConfig, workdir: Path) -> TrainResult:
    """Train a run to its last step, as `lsm_jax.training.train` does.

    Raises:
        InterruptedError: a signal ended the run before its last step, so that no row may be made from it.
    """
    result = train(config, workdir)
    if result.interrupted is not None:
        raise InterruptedError(
            f"{workdir}: signal {result.interrupted} ended the run after {result.step} of {config.num_steps} steps"
        )
    return result


def median_speed(rows: list[dict[str, Any]]) -> float:
    """Return the median tokens/s in a run's rows of metrics.jsonl, without the first value, which contains
    compiling.
    """
    speeds = [row[SPEED] for row in rows if row.get(SPEED)]
    return statistics.median(speeds[1:] or speeds)


def last_value(rows: list[dict[str, Any]], key: str) -> float:
    """Return the last value of the metric `key` in a run's rows of metrics.jsonl."""
    return [row[key] for row in rows if row.get(key) is not None][-1]
