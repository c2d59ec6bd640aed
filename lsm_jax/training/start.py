"""Train a run: check and lock its directory, make the compiled functions, restore or initialise the train state,
and run the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lsm_jax.data import fingerprint
from lsm_jax.data.sources import with_tokenizer
from lsm_jax.models import abstract
from lsm_jax.parallel import first_process_text, make_mesh
from lsm_jax.training.batches import RecentBatches, eval_batches, train_batches
from lsm_jax.training.best import best_steps
from lsm_jax.training.checkpoints import Checkpoints, abstract_like
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.expert_buffers import ExpertBuffers
from lsm_jax.training.failures import WriteError
from lsm_jax.training.lock import LostLockError, RunLock
from lsm_jax.training.loop import TrainingStopped, TrainLoop, TrainResult
from lsm_jax.training.memory_check import check_memory
from lsm_jax.training.partition import digests, join, like, split, targets
from lsm_jax.training.run_files import (
    check_data,
    check_frozen,
    check_workdir,
    checkpoint_directory,
    pinned,
)
from lsm_jax.training.runs import starting_params
from lsm_jax.training.step import Program, make_program, params_of
from lsm_jax.training.wandb_log import check_wandb

# The errors by which jax reports to a process that it lost another one, on CPUs, on GPUs and in its coordinator.
_LOST_PROCESS = re.compile(
    "Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|coordination service", re.IGNORECASE
)


class TrainingNotSaved(TrainingStopped, OSError):
    """The error that is raised if a file of the run cannot be written: the disk is full or read-only, or permission is
    denied. The message names the file and the last complete checkpoint."""


def train(
    config: TrainConfig,
    workdir: str | Path,
    *,
    on_report: Callable[[int], None] | None = None,
    program: Program | None = None,
) -> TrainResult:
    """Train a model to the end of its run, from the run's last checkpoint if it has one.

    On Ctrl-C and SIGTERM, `train` finishes the step, saves a checkpoint and returns; until the first step
    has ended, both signals act as they would without this function. Nothing is written before the first step
    has ended. A resumed run takes the same steps as a run that was never stopped; on a CPU the results are
    equal to the bit. If choices of experts do not fit into the buffers between devices, the buffers grow and
    the step is taken again (`ExpertBuffers`).

    Args:
        config: the config of the run; all of it is validated before anything is compiled.
        workdir: the run's directory, created if it does not exist.
        on_report: called with the number of each step after its metrics are reported, which is after the
            next step was started.
        program: the functions that `make_program` made of this config and its mesh, which may be compiled already; None makes
            them.

    Raises:
        ValueError: the config, data, mesh or directory is not valid, another process trains the same run, or the run
            requires far more memory than there is.
        TrainingDiverged: `config.max_bad_steps` consecutive steps had a loss, gradient or new parameters that
            are not finite.
        TrainingStopped: a training batch could not be read, or another process ended or took over the run.
        TrainingNotSaved: a file of the run cannot be written.
    """
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"config={type(config).__name__}: accepted is a TrainConfig; train_recall trains small models"
        )
    workdir = Path(workdir).expanduser().absolute()
    config.validate(len(jax.devices()))
    config = pinned(config, workdir)
    config = dataclasses.replace(config, data=with_tokenizer(config.data))
    check_workdir(workdir, config)
    check_wandb(config)
    mesh = make_mesh(config.mesh)
    check_memory(config)
    agree = functools.partial(first_process_text, mesh=mesh)
    with RunLock(workdir, agree=agree, first=jax.process_index() == 0) as lock:
        try:
            return _train(config, workdir, mesh, lock, on_report, program)
        except WriteError as error:
            raise TrainingNotSaved(f"{error}; {_last_save(workdir)}") from error
        except LostLockError as error:
            raise TrainingStopped(f"{error}; {_last_save(workdir)}") from error
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            if jax.process_count() == 1 or not _LOST_PROCESS.search(reason):
                raise
            raise TrainingStopped(
                f"another of the run's {jax.process_count()} processes has ended or cannot be reached ({reason}); "
                f"{_last_save(workdir)}"
            ) from error


def _last_save(workdir: Path) -> str:
    """Return the end of an error message: the last complete checkpoint, from which the same command continues."""
    saved = Checkpoints(checkpoint_directory(workdir)).steps
    if not saved:
        return f"no checkpoint was saved in {workdir}, so the same command starts at step 0"
    return (
        f"checkpoint {saved[-1]} in {workdir} is complete, and the same command continues from it"
    )


def _train(
    config: TrainConfig,
    workdir: Path,
    mesh: Mesh,
    lock: RunLock,
    on_report: Callable[[int], None] | None,
    program: Program | None,
) -> TrainResult:
    """Train as `train` describes, in a directory that is locked, or is locked once it is created."""
    check_workdir(
        workdir, config
    )  # again, since another process may have made a run before the lock
    buffers = ExpertBuffers(config, workdir)
    print(
        f"{config.name}: reading {config.data.mixture or config.data.path or 'the demo text'}",
        file=sys.stderr,
        flush=True,
    )
    checkpoints = Checkpoints(
        checkpoint_directory(workdir),
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        clean=True,
    )
    if config.eval_every:
        with contextlib.closing(eval_batches(config, mesh)) as held_out:
            next(held_out)
    with (
        jax.set_mesh(mesh),
        contextlib.closing(train_batches(config, mesh)) as iterator,
        contextlib.closing(checkpoints),
    ):
        if program is None or buffers.growths:  # whose config has larger buffers than the given one
            program = make_program(buffers.config, mesh)
        target = abstract_like(jax.eval_shape(program.init), program.shardings)
        data = fingerprint(config.data)
        if checkpoints.steps:
            check_data(workdir, data)
        if config.best_metric:
            checkpoints.best = best_steps(workdir, config, checkpoints.steps)
        state = checkpoints.restore(target, iterator)
        # The host reads metrics one step late, so that it goes back by two batches at most.
        batches = RecentBatches(iterator, 2 if buffers.in_use else 0)
        batches.peek()  # bad data raises before anything is compiled or written
        initial, frozen = {}, {}
        if config.trainable or (state is None and (config.init_from or config.base)):
            all_params = targets(
                params_of(abstract(config.model)),
                program.param_shardings,
                config.trainable,
                config.frozen_dtype,
            )
            initial = starting_params(config, all_params)
            frozen = like(initial, split(all_params, config.trainable)[1])
        frozen_digests = digests(frozen)
        if state is not None:
            check_frozen(workdir, frozen_digests)
        else:
            state = program.init()
            loaded = like(initial, state.params)
            params = join(state.params, loaded)
            ema = jax.tree.map(jnp.copy, params) if config.ema_decay else {}
            state = dataclasses.replace(state, params=params, ema=ema)
        loop = TrainLoop(
            config, workdir, mesh, program, checkpoints, batches, buffers, frozen, on_report, lock
        )
        return loop.run(state, data, frozen_digests)
