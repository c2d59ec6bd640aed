"""Find the best evaluations of a run, whose checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsm_jax.training.config import TrainConfig
from lsm_jax.training.metrics import read_rows


class BestSteps:
    """The steps of the best evaluations of a run, whose checkpoints are kept: a preservation policy of orbax.

    Args:
        metric: the metric's name in metrics.jsonl.
        mode: "min" if lower is better, or "max".
        number: how many checkpoints are kept.
        values: the metric by step, of the checkpoints that exist.
    """

    def __init__(self, metric: str, mode: str, number: int, values: dict[int, float]):
        self.metric, self._number = metric, number
        self._sign = 1.0 if mode == "min" else -1.0
        self._values = dict(values)

    def add(self, step: int, value: float) -> bool:
        """Record the metric of an evaluation, and return whether its checkpoint is to be kept: it is among the best ones. A
        value that is not finite is not recorded."""
        if not math.isfinite(value):
            return False
        self._values[step] = value
        return step in self.order()[: self._number]

    def order(self) -> list[int]:
        """Return the steps with a metric, the best first; of equal ones the later step first."""
        return sorted(self._values, key=lambda step: (self._sign * self._values[step], -step))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return, for each of orbax's checkpoints, whether it is among the best ones that exist."""
        del context
        existing = {checkpoint.step for checkpoint in checkpoints}
        kept = [step for step in self.order() if step in existing][: self._number]
        return [checkpoint.step in kept for checkpoint in checkpoints]


def best_steps(workdir: Path, config: TrainConfig, steps: list[int]) -> BestSteps:
    """Return the steps of a run's evaluated checkpoints by their metric; `steps` are those of all checkpoints."""
    metric = config.best_metric or "val/loss"
    values = {
        row["step"]: row[metric]
        for row in read_rows(workdir.expanduser() / "metrics.jsonl")
        if row["step"] in steps and isinstance(row.get(metric), int | float)
    }
    return BestSteps(metric, config.best_mode, config.keep_best, values)
