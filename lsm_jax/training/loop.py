"""The training loop: read a batch, take a step, report, evaluate, save; and go on where the last one ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lsm_jax import interrupts
from lsm_jax.data import fingerprint, make_eval_iterator, make_train_iterator
from lsm_jax.models import abstract, count_parameters, flops_per_token
from lsm_jax.parallel import Agreement, data_shard, make_mesh, place_batch, token_sharding
from lsm_jax.training.checkpoints import Checkpoints, abstract_like
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.metrics import Meter, MetricsWriter, TrainProgress, memory_gib
from lsm_jax.training.partition import digests, join, like, split, targets
from lsm_jax.training.runs import (
    check_data,
    check_frozen,
    check_workdir,
    checkpoint_directory,
    starting_params,
    write_choices,
    write_config,
)
from lsm_jax.training.step import OVERFLOW, Program, TrainState, make_program, params_of


class TrainingStopped(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite, tokens found no room on their way to experts, or a batch
    could not be read."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended.

    Attributes:
        step: steps taken, those of earlier calls included.
        interrupted: the signal that ended it early, or None.
        loss: of the last step.
    """

    step: int
    interrupted: int | None
    loss: float


def train(config: TrainConfig, workdir: str | Path) -> TrainResult:
    """Train to the end of the run, from its last checkpoint if it has one.

    Ctrl-C and SIGTERM finish the step, save a checkpoint and return; before the end of the first step they act as they
    would without this function. Nothing is written before that. Resumed, a run takes the same steps, on a CPU to the bit,
    as one that never stopped.

    Args:
        config: the run; checked as a whole before anything is compiled.
        workdir: its directory, made if it is not there.

    Raises:
        ValueError: a config, data, mesh or directory that does not fit.
        TrainingStopped: `config.max_bad_steps` bad steps in a row, or an `expert_buffer` that overflowed.
    """
    workdir = Path(workdir).expanduser().absolute()
    config.validate(len(jax.devices()))
    check_workdir(workdir, config)
    mesh = make_mesh(config.mesh)
    print(
        f"{config.name}: reading {config.data.path or 'the demo text'}", file=sys.stderr, flush=True
    )
    if config.eval_every:
        with contextlib.closing(_eval_batches(config, mesh)) as held_out:
            next(held_out)
    checkpoints = Checkpoints(
        checkpoint_directory(workdir),
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        clean=True,
    )
    with (
        jax.set_mesh(mesh),
        contextlib.closing(_train_batches(config, mesh)) as batches,
        contextlib.closing(checkpoints),
    ):
        program = make_program(config, mesh)
        target = abstract_like(jax.eval_shape(program.init), program.shardings)
        data = fingerprint(config.data)
        if checkpoints.steps:
            check_data(workdir, data)
        state = checkpoints.restore(target, batches)
        first = next(batches)  # bad data is told before anything is compiled or written
        started, frozen = {}, {}
        if config.trainable or (state is None and (config.init_from or config.base)):
            every = targets(
                params_of(abstract(config.model)), program.param_shardings, config.trainable
            )
            started = starting_params(config, every)
            frozen = like(started, split(every, config.trainable)[1])
        known = digests(frozen)
        if state is not None:
            check_frozen(workdir, known)
        if state is None:
            state = program.init()
            trained = like(started, state.params)
            state = dataclasses.replace(state, params=join(state.params, trained))
        loop = _Loop(config, workdir, mesh, program, checkpoints, batches, frozen)
        return loop.run(state, first, data, known)


def _train_batches(config: TrainConfig, mesh: Mesh) -> Any:
    index, count = data_shard(mesh)
    return make_train_iterator(
        config.data,
        global_batch_size=config.batch_size,
        seed=config.seed,
        shard_index=index,
        shard_count=count,
        vocab_size=config.model.vocab_size,
    )


def _eval_batches(config: TrainConfig, mesh: Mesh) -> Any:
    index, count = data_shard(mesh)
    return iter(
        make_eval_iterator(
            config.data,
            global_batch_size=config.batch_size,
            shard_index=index,
            shard_count=count,
            vocab_size=config.model.vocab_size,
            remainder="pad",
        )
    )


class _Loop:
    """The state of one call of `train` that is not the model's."""

    def __init__(
        self,
        config: TrainConfig,
        workdir: Path,
        mesh: Mesh,
        program: Program,
        checkpoints: Checkpoints,
        batches: Any,
        frozen: dict[str, Any],
    ):
        self.config, self.workdir, self.program = config, workdir, program
        self.checkpoints, self.batches, self.frozen = checkpoints, batches, frozen
        self.mesh, self.rows = mesh, token_sharding(mesh)
        passes = 2 if frozen else 3  # forward, gradients of activations, and of every parameter
        self.flops = passes * flops_per_token(config.model, config.data.sequence_length)
        self.loss, self.speed = math.nan, 0.0

    def run(
        self,
        state: TrainState,
        first: dict[str, np.ndarray],
        data: dict[str, Any],
        frozen: dict[str, int],
    ) -> TrainResult:
        """Train from `state`, by `first` and the batches after it, to the end or to a signal.

        `data` is their fingerprint, `frozen` the digests of the parameters that stand still.
        """
        config, start = self.config, int(state.step)
        self._announce(start, sum(leaf.size for leaf in jax.tree.leaves(state.params)))
        pending = (
            None  # metrics are read one step late, so that the device never waits for the host
        )
        step, stop, agreed = start, interrupts.Stop(), Agreement(self.mesh)
        ended: int | None = None  # the signal, as all hosts know of it
        with (
            TrainProgress(config.name, start, config.num_steps) as self.progress,
            _profiler(self.workdir, config, start) as profile,
            contextlib.ExitStack() as running,
        ):
            while step < config.num_steps and ended is None:
                profile(step, state)
                try:
                    rows = first if step == start else next(self.batches)
                except (ValueError, OSError) as error:
                    if pending is not None:
                        self._report(*pending)
                    raise self._bad_data(step, state, error) from error
                batch = self._to_devices(rows)
                state, metrics = self.program.train_step(state, batch, self.frozen)
                step += 1
                if step == start + 1:
                    jax.block_until_ready(metrics)
                    stop = running.enter_context(interrupts.noted())
                    write_config(self.workdir, config, data, frozen)
                    write_choices(self.workdir)
                    self.writer = MetricsWriter(self.workdir, start)
                    running.enter_context(contextlib.closing(self.writer))
                    self.meter = Meter()  # from here on, what came before was compiling
                else:
                    self.meter.step()
                if pending is not None:
                    self._report(*pending)
                pending = (step, metrics)
                evaluate = self._due(config.eval_every, step)
                evaluate |= bool(config.eval_every) and step == config.num_steps
                save = self._due(config.checkpoint_every, step)
                if evaluate or save or step == config.num_steps:
                    self._report(*pending)  # a checkpoint's rows stand before it does
                    pending = None
                if evaluate:
                    self._evaluate(step, state)
                if save:
                    began = time.perf_counter()
                    self.checkpoints.save(step, state, self.batches)
                    self.meter.pause(time.perf_counter() - began)
                ended = agreed(stop.signal)
            if pending is not None:
                self._report(*pending)
            if step > start:
                self.checkpoints.save(step, state, self.batches)
            self.checkpoints.wait()
        if ended is not None and step < config.num_steps:
            name = signal.Signals(ended).name
            print(
                f"{name}: saved step {step} in {self.workdir}; the same command goes on from there"
            )
            return TrainResult(step, ended, self.loss)
        return TrainResult(step, None, self.loss)

    def _bad_data(self, step: int, state: TrainState, error: Exception) -> TrainingStopped:
        """What to raise where the batch after `step` cannot be read; the steps before it are saved."""
        if jax.process_count() == 1:  # other hosts, whose data is good, would not join a save
            self.checkpoints.save(step, state, self.batches)
        return TrainingStopped(
            f"step {step + 1}: {error}. Mended, the same command {self._resumes()}"
        )

    def _announce(self, start: int, training: int) -> None:
        if jax.process_index() != 0:
            return
        config, count = self.config, count_parameters(self.config.model)
        tokens = config.num_steps * config.tokens_per_step
        devices = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
        part = f", {training:,} of them training" if self.frozen else ""
        print(
            f"{config.name}: {count['total']:,} parameters ({count['non_embedding']:,} without embeddings{part}), "
            f"{config.num_steps:,} steps of {config.tokens_per_step:,} tokens = {tokens:,} tokens, "
            f"on {devices}, in {self.workdir}"
            + (f"; going on from step {start:,}" if start else ""),
            file=sys.stderr,
            flush=True,
        )

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return bool(every) and step % every == 0

    def _to_devices(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return place_batch(batch, self.rows, self.config.batch_size)

    def _resumes(self) -> str:
        """What the same command would do after a stop."""
        self.checkpoints.wait()
        saved = self.checkpoints.steps
        return f"goes on from checkpoint {saved[-1]} in {self.workdir}" if saved else "begins anew"

    def _report(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Show a step, log it where it is due, and stop where too many were bad."""
        config = self.config
        values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        if overflow := values.get(OVERFLOW):
            raise TrainingStopped(
                f"step {step}: {overflow} choices of experts found no room in the buffers of the exchange between devices; "
                "the step changed nothing. Set expert_buffer higher (config.model.layers.L.feedforward.expert_buffer, of every "
                f"layer with experts), and the same command {self._resumes()}"
            )
        bad = values.pop("skipped_in_a_row")
        self.loss = values["train/loss"]
        if bad:
            self.progress.say(
                f"step {step}: loss, gradient or new parameters are not finite; skipped ({bad} in a row)"
            )
        if bad >= config.max_bad_steps:
            self.checkpoints.wait()
            saved = self.checkpoints.steps  # bad steps change nothing: the newest is good
            last = (
                f"checkpoint {saved[-1]} is the last good one, its parameters those of step {min(saved[-1], step - bad)},"
                if saved
                else "there is no checkpoint"
            )
            raise TrainingStopped(
                f"step {step}: {bad} steps in a row had a loss, gradient or new parameters that are not finite; {last} in {self.workdir}"
            )
        if self._due(config.log_every, step) or step == config.num_steps:
            self.speed = self.meter.read(config.tokens_per_step) or self.speed
            kind, memory = memory_gib()
            values |= {
                "train/tokens": step * config.tokens_per_step,
                "perf/tokens_per_second": self.speed,
                "perf/model_flops_per_second": self.speed * self.flops,
                f"perf/{kind}_memory_gib": memory,
            }
            self.writer.write(step, values)
        self.progress.advance(step, self.loss, self.speed)

    def _evaluate(self, step: int, state: TrainState) -> None:
        """Held-out loss over the first `eval_batches` batches, the same ones every time."""
        began = time.perf_counter()
        nll = tokens = lost = 0.0
        params = join(self.frozen, state.params)
        with contextlib.closing(_eval_batches(self.config, self.mesh)) as batches:
            for batch in itertools.islice(batches, self.config.eval_batches):
                found = self.program.eval_step(params, self._to_devices(batch))
                nll, tokens, lost = (
                    a + float(b) for a, b in zip((nll, tokens, lost), found, strict=True)
                )
        if lost:
            self.checkpoints.save(step, state, self.batches)
            raise TrainingStopped(
                f"step {step}, held-out loss: {lost:,.0f} choices of experts found no room in the buffers of the exchange between "
                f"devices. Set expert_buffer higher (of every layer with experts), and the same command {self._resumes()}"
            )
        loss = nll / max(tokens, 1)
        self.writer.write(step, {"val/loss": loss})
        self.progress.say(f"step {step}: held-out loss {loss:.4f} over {tokens:,.0f} tokens")
        self.meter.pause(time.perf_counter() - began)


@contextlib.contextmanager
def _profiler(workdir: Path, config: TrainConfig, start: int):
    """A function to call before each step, which opens and closes the profiler's window."""
    first = start + config.profile_start
    running = False

    def at(step: int, state: TrainState) -> None:
        nonlocal running
        if config.profile_steps and step in (first, first + config.profile_steps):
            jax.block_until_ready(state)
        if config.profile_steps and step == first:
            jax.profiler.start_trace(str(workdir / "profile"))
            running = True
        elif running and step == first + config.profile_steps:
            jax.profiler.stop_trace()
            running = False

    try:
        yield at
    finally:
        if running:
            jax.profiler.stop_trace()
