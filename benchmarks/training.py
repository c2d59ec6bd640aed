"""Functions for benchmarks that train: a run to its end, and numbers for rows from the metrics of a run."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.run import log
from lsm_jax.data import fingerprint
from lsm_jax.parallel import make_mesh, place_batch, token_sharding
from lsm_jax.training import Program, TrainConfig, TrainResult, make_program, train
from lsm_jax.training.batches import RecentBatches, eval_batches, train_batches
from lsm_jax.training.checkpoints import abstract_like
from lsm_jax.training.expert_buffers import ExpertBuffers
from lsm_jax.training.loop import TrainLoop
from lsm_jax.training.memory_check import check_memory

SPEED = "perf/tokens_per_second"


def train_to_end(
    config: TrainConfig,
    workdir: Path,
    on_report: Callable[[int], None] | None = None,
    *,
    checkpoints: bool = True,
    program: Program | None = None,
) -> TrainResult:
    """Train a run to its last step, as `lsm_jax.training.train` does.

    Args:
        config: the config of the run.
        workdir: the run's directory.
        on_report: called with the number of each step after its metrics are reported, such as a `StepClock`.
        checkpoints: whether to save checkpoints, which takes longer than the steps of a short run of a large model;
            without them the run must be new and all its parameters trained.
        program: the run's functions, from `compiled_program`; None makes them. It requires checkpoints.

    Raises:
        InterruptedError: a signal ended the run before its last step, so that no row may be made from it.
    """
    if checkpoints:
        result = train(config, workdir, on_report=on_report, program=program)
    else:
        result = _train_unsaved(config, workdir, on_report=on_report)
    if result.interrupted is not None:
        raise InterruptedError(
            f"{workdir}: signal {result.interrupted} ended the run after {result.step} of {config.num_steps} steps"
        )
    return result


class StepTimeOver(Exception):
    """Raised by a `StepClock` after a step, so that the run ends without another one and without a checkpoint."""


class StepClock:
    """Report the progress of a training run as lines on stderr, and end it when its time is over: the `on_report`
    of `train`.

    Args:
        steps: the number of steps of the run.
        seconds: the time after which the run ends, from now on; infinite for no limit.
        every: steps between two lines.

    Attributes:
        first: seconds from the start until the first step was reported, which include all compiling but that of
            the evaluation; NaN before that.
        step: the last step that was reported.
    """

    def __init__(self, steps: int, seconds: float, *, every: int = 25):
        self._steps, self._seconds, self._every = steps, seconds, every
        self._began = time.perf_counter()
        self.first = math.nan
        self.step = 0

    def __call__(self, step: int) -> None:
        elapsed = time.perf_counter() - self._began
        self.step = step
        if math.isnan(self.first):
            self.first = elapsed
        if step % self._every == 0 or step in (1, self._steps):
            log(f"step {step} of {self._steps}, {elapsed:.0f} s")
        if elapsed > self._seconds and step < self._steps:
            raise StepTimeOver(f"{elapsed:.0f} s at step {step} of {self._steps}")


class _NoCheckpoints:
    """Stand for a run's `Checkpoints` in a `TrainLoop`, and save none."""

    best = None
    steps: tuple[int, ...] = ()

    def save(self, step: int, state: Any, data: Any) -> None:
        pass

    def wait(self) -> None:
        pass

    def raise_failure(self) -> None:
        pass


def _train_unsaved(
    config: TrainConfig, workdir: Path, *, on_report: Callable[[int], None] | None = None
) -> TrainResult:
    """Train a new run as `lsm_jax.training.train` does, by its loop, and save no checkpoint."""
    config.validate(len(jax.devices()))
    mesh = make_mesh(config.mesh)
    check_memory(config)
    buffers = ExpertBuffers(config, workdir)
    with jax.set_mesh(mesh), contextlib.closing(train_batches(config, mesh)) as iterator:
        program = make_program(buffers.config, mesh)
        batches = RecentBatches(iterator, 2 if buffers.in_use else 0)
        none: Any = _NoCheckpoints()
        loop = TrainLoop(config, workdir, mesh, program, none, batches, buffers, {}, on_report)
        return loop.run(program.init(), fingerprint(config.data), {})


def compiled_program(config: TrainConfig) -> Program:
    """Return the functions of a run of a model whose parameters are all trained, after compiling them for its batches. Equal
    calls in this process then compile nothing, until `jax.clear_caches`. Any thread may call this while another one trains."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        program: Any = make_program(config, mesh)
        program.init.lower().compile()
        state = abstract_like(jax.eval_shape(program.init), program.shardings)
        batch = _shapes(train_batches, config, mesh)
        program.train_step.lower(state, batch, {}, None).compile()
        heldout = _shapes(eval_batches, config, mesh)
        program.eval_step.lower(state.params, heldout).compile()
    return program


def _shapes(batches: Callable[..., Any], config: TrainConfig, mesh: Any) -> dict[str, Any]:
    """Return the arrays of a run's first batch without their contents, with the shardings that they have in training."""
    with contextlib.closing(batches(config, mesh)) as iterator:
        batch = place_batch(next(iterator), token_sharding(mesh), config.batch_size)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
    )


def median_speed(rows: list[dict[str, Any]]) -> float:
    """Return the median tokens/s in a run's rows of metrics.jsonl, without the first value, which contains
    compiling.
    """
    speeds = [row[SPEED] for row in rows if row.get(SPEED)]
    return statistics.median(speeds[1:] or speeds)


def last_value(rows: list[dict[str, Any]], key: str) -> float:
    """Return the last value of the metric `key` in a run's rows of metrics.jsonl."""
    return [row[key] for row in rows if row.get(key) is not None][-1]
