"""Profile the configured steps of a training run with JAX's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from lsm_jax.training.config import TrainConfig
from lsm_jax.training.step import TrainState


@contextlib.contextmanager
def profiler(
    workdir: Path, config: TrainConfig, start: int
) -> Iterator[Callable[[int, TrainState], None]]:
    """Yield, for a `with` block, a function (number of steps taken, train state) to call before each training
    step, which starts and stops JAX's profiler at the steps that the config's `profile_start` and `profile_steps`
    select.

    Args:
        workdir: the run's directory; the trace is written to its folder `profile`.
        config: the config of the run.
        start: the training step from which this process continues the run.
    """
    first = start + config.profile_start
    running = False

    def before_step(step: int, state: TrainState) -> None:
        nonlocal running
        if config.profile_steps and step in (first, first + config.profile_steps):
            jax.block_until_ready(state)
        if config.profile_steps and step == first and not running:  # a step may be taken again
            jax.profiler.start_trace(str(workdir / "profile"))
            running = True
        elif running and step == first + config.profile_steps:
            jax.profiler.stop_trace()
            running = False

    try:
        yield before_step
    finally:
        if running:
            jax.profiler.stop_trace()
