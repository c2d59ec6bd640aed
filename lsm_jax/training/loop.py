"""The training loop: read a batch, take a step, report, evaluate and save; a later call continues from the
last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lsm_jax import interrupts
from lsm_jax.data import fingerprint
from lsm_jax.models import abstract, count_parameters, flops_per_token
from lsm_jax.parallel import Agreement, make_mesh, place_batch, token_sharding
from lsm_jax.training.batches import eval_batches, train_batches
from lsm_jax.training.checkpoints import Checkpoints, abstract_like
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.metrics import Meter, MetricsWriter, TrainProgress, memory_gib
from lsm_jax.training.partition import digests, join, like, split, targets
from lsm_jax.training.profiler import profiler
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
    """Training cannot continue: too many consecutive steps had a loss or gradient that was not finite, a
    buffer for sending tokens to experts overflowed, or a batch could not be read."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended.

    Attributes:
        step: number of steps taken, including those of earlier calls.
        interrupted: the signal that ended the call early, or None.
        loss: the loss of the last step.
    """

    step: int
    interrupted: int | None
    loss: float


def train(
    config: TrainConfig, workdir: str | Path, *, on_report: Callable[[int], None] | None = None
) -> TrainResult:
    """Train to the end of the run, from its last checkpoint if it has one.

    On Ctrl-C and SIGTERM, `train` finishes the step, saves a checkpoint and returns; until the first step
    has ended, both signals act as they would without this function. Nothing is written before the first step
    has ended. A resumed run takes the same steps as a run that was never stopped; on a CPU the results are
    equal to the bit.

    Args:
        config: the config of the run; all of it is validated before anything is compiled.
        workdir: the run's directory, created if it does not exist.
        on_report: called with the number of each step after its metrics are reported, which is after the
            next step was started.

    Raises:
        ValueError: the config, data, mesh or directory is not valid.
        TrainingStopped: `config.max_bad_steps` consecutive steps were bad, or an `expert_buffer` overflowed.
    """
    workdir = Path(workdir).expanduser().absolute()
    config.validate(len(jax.devices()))
    check_workdir(workdir, config)
    mesh = make_mesh(config.mesh)
    print(
        f"{config.name}: reading {config.data.path or 'the demo text'}", file=sys.stderr, flush=True
    )
    if config.eval_every:
        with contextlib.closing(eval_batches(config, mesh)) as held_out:
            next(held_out)
    checkpoints = Checkpoints(
        checkpoint_directory(workdir),
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        clean=True,
    )
    with (
        jax.set_mesh(mesh),
        contextlib.closing(train_batches(config, mesh)) as batches,
        contextlib.closing(checkpoints),
    ):
        program = make_program(config, mesh)
        target = abstract_like(jax.eval_shape(program.init), program.shardings)
        data = fingerprint(config.data)
        if checkpoints.steps:
            check_data(workdir, data)
        state = checkpoints.restore(target, batches)
        first = next(batches)  # bad data raises before anything is compiled or written
        initial, frozen = {}, {}
        if config.trainable or (state is None and (config.init_from or config.base)):
            all_params = targets(
                params_of(abstract(config.model)), program.param_shardings, config.trainable
            )
            initial = starting_params(config, all_params)
            frozen = like(initial, split(all_params, config.trainable)[1])
        frozen_digests = digests(frozen)
        if state is not None:
            check_frozen(workdir, frozen_digests)
        else:
            state = program.init()
            loaded = like(initial, state.params)
            state = dataclasses.replace(state, params=join(state.params, loaded))
        loop = TrainLoop(config, workdir, mesh, program, checkpoints, batches, frozen, on_report)
        return loop.run(state, first, data, frozen_digests)


class TrainLoop:
    """One call of `train`: the program, the data, the checkpoints and the loop's measurements.

    Args:
        config: the config of the run.
        workdir: the run's directory.
        mesh: the devices.
        program: the compiled functions.
        checkpoints: where states are saved.
        batches: the iterator of training batches.
        frozen: the frozen parameters; empty if all are trained.
        on_report: see `train`.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: Path,
        mesh: Mesh,
        program: Program,
        checkpoints: Checkpoints,
        batches: Any,
        frozen: dict[str, Any],
        on_report: Callable[[int], None] | None = None,
    ):
        self.config, self.workdir, self.program = config, workdir, program
        self.checkpoints, self.batches, self.frozen = checkpoints, batches, frozen
        self.on_report = on_report
        self.mesh, self.rows = mesh, token_sharding(mesh)
        passes = 2 if frozen else 3  # forward, gradients of activations, gradients of parameters
        self.flops = passes * flops_per_token(config.model, config.data.sequence_length)
        self.loss, self.speed = math.nan, 0.0

    def run(
        self,
        state: TrainState,
        first: dict[str, np.ndarray],
        data: dict[str, Any],
        frozen: dict[str, int],
    ) -> TrainResult:
        """Train from `state` to the end of the run or to a signal.

        Args:
            state: the state before the first step.
            first: the first batch; the following ones come from the iterator.
            data: the fingerprint of the training data.
            frozen: the digests of the frozen parameters.
        """
        config, start = self.config, int(state.step)
        self._announce(start, sum(leaf.size for leaf in jax.tree.leaves(state.params)))
        # Metrics are read one step late, so that the device never waits for the host.
        pending = None
        step, stop, agreed = start, interrupts.Stop(), Agreement(self.mesh)
        stop_signal: int | None = None  # the one that all hosts agreed on
        with (
            TrainProgress(config.name, start, config.num_steps) as self.progress,
            profiler(self.workdir, config, start) as profile,
            contextlib.ExitStack() as resources,
        ):
            while step < config.num_steps and stop_signal is None:
                profile(step, state)
                try:
                    rows = first if step == start else next(self.batches)
                except (ValueError, OSError) as error:
                    if pending is not None:
                        self.report(*pending)
                    raise self._bad_data(step, state, error) from error
                state, metrics = self.program.train_step(state, self._to_devices(rows), self.frozen)
                step += 1
                if step == start + 1:
                    jax.block_until_ready(metrics)
                    stop = resources.enter_context(interrupts.noted())
                    self._start_writing(resources, start, data, frozen)
                else:
                    self.meter.step()
                if pending is not None:
                    self.report(*pending)
                pending = self._after_step(step, state, metrics)
                stop_signal = agreed(stop.signal)
            if pending is not None:
                self.report(*pending)
            if step > start:
                self.checkpoints.save(step, state, self.batches)
            self.checkpoints.wait()
        if stop_signal is None or step == config.num_steps:
            return TrainResult(step, None, self.loss)
        name = signal.Signals(stop_signal).name
        print(f"{name}: saved step {step} in {self.workdir}; the same command continues from there")
        return TrainResult(step, stop_signal, self.loss)

    def _start_writing(
        self,
        resources: contextlib.ExitStack,
        start: int,
        data: dict[str, Any],
        frozen: dict[str, int],
    ) -> None:
        """Write the files that describe the run, and open the metrics; called once the first step has
        ended."""
        write_config(self.workdir, self.config, data, frozen)
        write_choices(self.workdir)
        self.writer = MetricsWriter(self.workdir, start)
        resources.enter_context(contextlib.closing(self.writer))
        self.meter = Meter()  # the time before this includes compilation

    def _after_step(
        self, step: int, state: TrainState, metrics: dict[str, jax.Array]
    ) -> tuple[int, dict[str, jax.Array]] | None:
        """Evaluate and save if this step is one of those; returns the step and its metrics unless this
        reported them."""
        config = self.config
        last = step == config.num_steps
        evaluate = self._due(config.eval_every, step) or (bool(config.eval_every) and last)
        save = self._due(config.checkpoint_every, step)
        pending = (step, metrics)
        if evaluate or save or last:
            self.report(*pending)  # a checkpoint's metrics are written before the checkpoint
            pending = None
        if evaluate:
            self._evaluate(step, state)
        if save:
            began = time.perf_counter()
            self.checkpoints.save(step, state, self.batches)
            self.meter.pause(time.perf_counter() - began)
        return pending

    def _bad_data(self, step: int, state: TrainState, error: Exception) -> TrainingStopped:
        """Save the steps so far, and return the error to raise because the batch after `step` cannot be
        read."""
        # Other hosts can read their data, so they would not take part in the save.
        if jax.process_count() == 1:
            self.checkpoints.save(step, state, self.batches)
        return TrainingStopped(
            f"step {step + 1}: {error}. Once the data is corrected, the same command {self._next_start()}"
        )

    def _announce(self, start: int, num_trained: int) -> None:
        if jax.process_index() != 0:
            return
        config, count = self.config, count_parameters(self.config.model)
        tokens = config.num_steps * config.tokens_per_step
        devices = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
        part = f", {num_trained:,} of them trained" if self.frozen else ""
        print(
            f"{config.name}: {count['total']:,} parameters ({count['non_embedding']:,} without embeddings{part}), "
            f"{config.num_steps:,} steps of {config.tokens_per_step:,} tokens = {tokens:,} tokens, "
            f"on {devices}, in {self.workdir}"
            + (f"; continuing from step {start:,}" if start else ""),
            file=sys.stderr,
            flush=True,
        )

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return bool(every) and step % every == 0

    def _to_devices(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return place_batch(batch, self.rows, self.config.batch_size)

    def _next_start(self) -> str:
        """The step from which the same command would continue, as the end of a message."""
        self.checkpoints.wait()
        saved = self.checkpoints.steps
        return (
            f"continues from checkpoint {saved[-1]} in {self.workdir}"
            if saved
            else "starts at step 0"
        )

    def report(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Show a step's metrics, and write them to the log if this step is one of those.

        Raises:
            TrainingStopped: a buffer of the exchange overflowed, or too many consecutive steps were bad.
        """
        config = self.config
        values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        if overflow := values.get(OVERFLOW):
            raise TrainingStopped(
                f"step {step}: {overflow} choices of experts did not fit into the buffers between devices; the step changed nothing. "
                "Set expert_buffer higher for every layer with experts (--config.model.layers.L.feedforward.expert_buffer); then the "
                f"same command {self._next_start()}"
            )
        bad = values.pop("skipped_in_a_row")
        self.loss = values["train/loss"]
        if bad:
            self.progress.say(
                f"step {step}: loss, gradient or new parameters are not finite; skipped ({bad} in a row)"
            )
        if bad >= config.max_bad_steps:
            self.checkpoints.wait()
            saved = self.checkpoints.steps  # a bad step changes nothing, so the newest is good
            last = (
                f"checkpoint {saved[-1]} is the last good one, with the parameters of step {min(saved[-1], step - bad)},"
                if saved
                else "there is no checkpoint"
            )
            raise TrainingStopped(
                f"step {step}: {bad} steps in a row had a loss, gradient or new parameters that are not finite; {last} in {self.workdir}"
            )
        if self._due(config.log_every, step) or step == config.num_steps:
            self.speed = self.meter.tokens_per_second(config.tokens_per_step) or self.speed
            kind, memory = memory_gib()
            values |= {
                "train/tokens": step * config.tokens_per_step,
                "perf/tokens_per_second": self.speed,
                "perf/model_flops_per_second": self.speed * self.flops,
                f"perf/{kind}_memory_gib": memory,
            }
            self.writer.write(step, values)
        self.progress.advance(step, self.loss, self.speed)
        if self.on_report is not None:
            self.on_report(step)

    def _evaluate(self, step: int, state: TrainState) -> None:
        """Log the held-out loss over the first `eval_batches` batches, which are the same every time.

        In a run of attention transfer `val/loss` is the student's; the teacher's is `val/teacher_loss`.
        """
        began = time.perf_counter()
        params = join(self.frozen, state.params)
        nll, tokens, overflow = self._heldout_sums(self.program.eval_step, params)
        if overflow:
            self.checkpoints.save(step, state, self.batches)
            raise TrainingStopped(
                f"step {step}, held-out loss: {overflow:,.0f} choices of experts did not fit into the buffers between devices. Set "
                f"expert_buffer higher for every layer with experts; then the same command {self._next_start()}"
            )
        loss = nll / max(tokens, 1)
        values, teacher = {"val/loss": loss}, ""
        if self.program.teacher_eval_step is not None:
            nll, count, _ = self._heldout_sums(self.program.teacher_eval_step, params)
            values["val/teacher_loss"] = nll / max(count, 1)
            teacher = f" of the student, {values['val/teacher_loss']:.4f} of the teacher,"
        self.writer.write(step, values)
        self.progress.say(
            f"step {step}: held-out loss {loss:.4f}{teacher} over {tokens:,.0f} tokens"
        )
        self.meter.pause(time.perf_counter() - began)

    def _heldout_sums(self, eval_step: Callable, params: dict[str, Any]) -> tuple[float, ...]:
        """The sums of `eval_step`'s three results over the held-out batches."""
        sums = (0.0, 0.0, 0.0)
        with contextlib.closing(eval_batches(self.config, self.mesh)) as batches:
            for batch in itertools.islice(batches, self.config.eval_batches):
                more = eval_step(params, self._to_devices(batch))
                sums = tuple(a + float(b) for a, b in zip(sums, more, strict=True))
        return sums
