"""Functions that read numbers for benchmark rows (speed, last values) from the metrics of a training run."""

from __future__ import annotations

import statistics
from typing import Any

SPEED = "perf/tokens_per_second"


def median_speed(rows: list[dict[str, Any]]) -> float:
    """Return the median tokens/s in a run's rows of metrics.jsonl, without the first value, which contains
    compiling.
    """
    speeds = [row[SPEED] for row in rows if row.get(SPEED)]
    return statistics.median(speeds[1:] or speeds)


def last_value(rows: list[dict[str, Any]], key: str) -> float:
    """Return the last value of the metric `key` in a run's rows of metrics.jsonl."""
    return [row[key] for row in rows if row.get(key) is not None][-1]
