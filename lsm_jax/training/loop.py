"""The training loop: read a batch, take a step, report, evaluate and save."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsm_jax import interrupts
from lsm_jax.data.mixed_streams import source_fractions
from lsm_jax.models import count_parameters, flops_per_token
from lsm_jax.parallel import Agreement, place_batch, token_sharding
from lsm_jax.training.batches import RecentBatches, eval_batches
from lsm_jax.training.checkpoints import Checkpoints
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.expert_buffers import ExpertBuffers
from lsm_jax.training.heldout import write_curve
from lsm_jax.training.lock import RunLock
from lsm_jax.training.metrics import Meter, MetricsWriter, TrainProgress, memory_gib, read_rows
from lsm_jax.training.partition import join
from lsm_jax.training.peak_flops import peak_flops
from lsm_jax.training.profiler import profiler
from lsm_jax.training.readme import write_readme
from lsm_jax.training.run_files import write_choices, write_config
from lsm_jax.training.samples import Samples, write_samples
from lsm_jax.training.step import OVERFLOW, Program, TrainState, make_program
from lsm_jax.training.wandb_log import WandbLog


class TrainingStopped(RuntimeError):
    """The error that is raised if training cannot continue: too many consecutive steps had a loss, gradient or new
    parameters that were not finite, a training batch could not be read, or another process took over the run's lock."""


class TrainingDiverged(TrainingStopped):
    """The error that is raised if too many consecutive steps had a loss, gradient or new parameters that were not finite."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a call of `train`: the step that it reached, what ended it, and the last loss.

    Attributes:
        step: number of steps taken, including those of earlier calls.
        interrupted: the signal that ended the call early, or None.
        loss: the loss of the last step.
    """

    step: int
    interrupted: int | None
    loss: float


class TrainLoop:
    """The loop of one call of `train`: take training steps, report their metrics, evaluate and save
    checkpoints until the run is complete or a signal ends it.

    Args:
        config: the config of the run.
        workdir: the run's directory.
        mesh: the mesh of the devices on which the run trains.
        program: the compiled functions of the run, such as the training step.
        checkpoints: the run's checkpoints, to which train states are saved.
        batches: the iterator over the run's training batches.
        buffers: the buffers in which tokens are sent to experts.
        frozen: the frozen parameters; empty if all are trained.
        on_report: a function that is called with the number of each step after its metrics are reported, or
            None.
        lock: the lock of the run's directory; None if the caller has made sure that no other process writes there.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: Path,
        mesh: Mesh,
        program: Program,
        checkpoints: Checkpoints,
        batches: RecentBatches,
        buffers: ExpertBuffers,
        frozen: dict[str, Any],
        on_report: Callable[[int], None] | None = None,
        lock: RunLock | None = None,
    ):
        self.lock = lock
        self.config, self.workdir, self.program = config, workdir, program
        self.checkpoints, self.batches, self.frozen = checkpoints, batches, frozen
        self.buffers, self.on_report = buffers, on_report
        self.mesh, self.rows = mesh, token_sharding(mesh)
        passes = 2 if frozen else 3  # forward, gradients of activations, gradients of parameters
        self.flops = passes * flops_per_token(config.model, config.data.sequence_length)
        peak = peak_flops(mesh.devices.flat[0].device_kind)  # all devices of a mesh are alike
        self.peak = None if peak is None else peak * mesh.size
        self.loss, self.speed = math.nan, 0.0
        self.writer: Any = None  # a `MetricsWriter`, from the end of the first step
        # Metrics are read one step late, so that the device never waits for the host.
        self.pending: tuple[int, dict[str, jax.Array]] | None = None
        self.compiled, self.overflow = False, self._no_overflow()
        self.compiling_step = (
            -1
        )  # the last step whose time includes a compilation, which the speed leaves out
        self.unit = "bytes" if config.data.tokenizer == "bytes" else "tokens"
        self.samples = Samples(config, mesh) if config.samples.every else None

    def run(self, state: TrainState, data: dict[str, Any], frozen: dict[str, int]) -> TrainResult:
        """Train from `state` to the last step of the run, or until SIGINT or SIGTERM is received; return
        the step that it reached, the signal that ended it if any, and the last loss.

        Args:
            state: the train state before the first step of this call.
            data: the fingerprint of the training data, which is written to data.json.
            frozen: the digest of each frozen parameter's content, by its path; written to frozen.json.
        """
        config = self.config
        self.state, self.step, self.start = state, int(state.step), int(state.step)
        self._announce(sum(leaf.size for leaf in jax.tree.leaves(state.params)))
        stop: interrupts.Stop | None = None  # from the end of the first step
        agreed = Agreement(self.mesh)
        stop_signal: int | None = None  # the one that all hosts agreed on
        with (
            TrainProgress(config.name, self.start, config.num_steps, self.unit) as self.progress,
            profiler(
                self.workdir, config, self.start, self._program_text, self.progress.say
            ) as profile,
            contextlib.ExitStack() as resources,
        ):
            if self._evaluation_is_missing():
                self._start_writing(resources, data, frozen)
                self._is_best(self._evaluate())  # the checkpoint exists
            while self.step < config.num_steps and stop_signal is None:
                profile(self.step, self.state)
                try:
                    rows = next(self.batches)
                except (ValueError, OSError) as error:
                    if not self._report_pending():
                        continue  # the batch is read again later
                    raise self._bad_data(error) from error
                metrics = self._take_step(rows)
                if stop is None:
                    stop = resources.enter_context(interrupts.noted())
                    if self.writer is None:
                        self._start_writing(resources, data, frozen)
                self.checkpoints.raise_failure()
                if self._report_pending():
                    self.pending = self.step, metrics
                    self._after_step()
                stop_signal = agreed(stop.signal)
            self._report_pending()
            if self.step > self.start:
                self._save()
            self.checkpoints.wait()
        if stop_signal is None or self.step == config.num_steps:
            return TrainResult(self.step, None, self.loss)
        name = signal.Signals(stop_signal).name
        print(
            f"{name}: saved step {self.step} in {self.workdir}; the same command continues from there"
        )
        return TrainResult(self.step, stop_signal, self.loss)

    def _start_writing(
        self, resources: contextlib.ExitStack, data: dict[str, Any], frozen: dict[str, int]
    ) -> None:
        """Write the files that describe the run (config, data, environment, implementations), and open its
        metrics; called once the first step has ended."""
        if self.lock is not None:
            self.lock.acquire()  # creates the directory of a new run
        write_config(self.workdir, self.config, data, frozen)
        write_choices(self.workdir)
        write_readme(self.workdir, self.config)
        open_log = functools.partial(WandbLog, self.config, self.workdir)
        self.writer = MetricsWriter(
            self.workdir,
            self.start,
            log_every=self.config.log_every,
            open_log=open_log if self.config.wandb else None,
        )
        resources.enter_context(contextlib.closing(self.writer))
        self.meter = Meter()  # the time before this includes compilation

    def _take_step(self, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Start the next training step and return its metrics, arrays on the devices that may not be computed
        yet: only if the step must first be compiled does this wait for its end. `rows` has the rows of the
        batch that this process reads."""
        began = time.perf_counter()
        batch = self._to_devices(rows)
        self._batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
        )
        self.state, metrics = self.program.train_step(self.state, batch, self.frozen, self.overflow)
        self.step += 1
        if self.overflow is not None:
            self.overflow = metrics[OVERFLOW]
        if self.compiled:
            return metrics
        self.compiled, self.compiling_step = True, self.step
        jax.block_until_ready(metrics)
        if self.writer is not None:
            self.meter.pause(time.perf_counter() - began)
        return metrics

    def _program_text(self) -> str:
        """Return the text of the compiled training step; it is compiled again if JAX has not stored the program."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (self.state, self._batch, self.frozen, self.overflow),
        )
        train_step: Any = self.program.train_step
        return train_step.lower(*shapes).compile().as_text()

    def _report_pending(self) -> bool:
        """Report the training step whose metrics have not been read yet, if there is one, or undo it if
        choices of experts did not fit into the buffers between devices.

        Returns:
            True if the step was reported or there was none. False if choices of experts did not fit: then the
            buffers have grown, and `self.step`, the train state and the position in the batches are those before
            that step. All hosts read the same replicated count of choices, so that all of them undo the step.
        """
        if self.pending is None:
            return True
        (step, metrics), self.pending = self.pending, None
        count = int(metrics[OVERFLOW]) if self.overflow is not None else 0
        if not count:
            self.report(step, metrics)
            return True
        # The steps from this one on have returned their state unchanged.
        self.batches.go_back(self.step - step + 1)
        self.step = step - 1
        began = time.perf_counter()
        self._grow_buffers(step, count)
        self.meter.pause(time.perf_counter() - began)
        return False

    def _grow_buffers(self, step: int, count: int, during: str = "training") -> None:
        """Grow the buffers in which tokens are sent to experts, because `count` choices of experts did not fit
        in step `step`, and make the program with the larger buffers. The train state is saved first, since the
        larger program may not fit into memory. `during` is "training" or "evaluation"."""
        if self.step > self.start:
            self._save()
            self.checkpoints.wait()
        change = self.buffers.grow(step, count, during)
        what = f"step {step}" if during == "training" else f"step {step}, held-out loss"
        self.progress.say(
            f"{what}: {count:,} choices of experts did not fit; {change}, compiling again"
        )
        self.program = make_program(self.buffers.config, self.mesh)
        self.compiled, self.overflow = False, self._no_overflow()

    def _no_overflow(self) -> jax.Array | None:
        """Return the count 0 that the first training step receives as its `overflow`, the choices of
        experts that did not fit in the step before; None if the run uses no buffers for experts."""
        if not self.buffers.in_use:
            return None
        # With the sharding of the metric, so that the second step is not compiled again.
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=replicated)()

    def _after_step(self) -> None:
        """Compute the held-out loss and save a checkpoint if the config asks for them after the step just
        taken; that step's metrics are reported first."""
        config, last = self.config, self.step == self.config.num_steps
        evaluate = self._due(config.eval_every, self.step) or (bool(config.eval_every) and last)
        save = self._due(config.checkpoint_every, self.step)
        # A checkpoint's metrics are written before the checkpoint.
        sample = self._due(config.samples.every, self.step)
        if (evaluate or save or sample or last) and not self._report_pending():
            return
        if evaluate:
            save |= self._is_best(self._evaluate())
        began = time.perf_counter()
        if save:
            self._save()
        if sample:
            self._sample()
        self.meter.pause(time.perf_counter() - began)

    def _is_best(self, values: dict[str, float]) -> bool:
        """Return whether an evaluation with these metrics is among the best ones of the run, which are saved."""
        best = self.checkpoints.best
        return best is not None and best.add(self.step, values[best.metric])

    def _sample(self) -> None:
        """Continue the config's prompts, with the average of the parameters if there is one; write the texts to
        samples/STEP.txt and to TensorBoard, and show the first one."""
        assert self.samples is not None
        params = join(self.frozen, self.state.ema or self.state.params)
        texts = self.samples(params)
        if not texts:
            return  # not the first process
        write_samples(self.workdir, self.config.samples.prompts, texts, self.step)
        self.writer.write_texts(self.step, {f"sample/{i}": t for i, t in enumerate(texts, 1)})
        self.progress.say(f"step {self.step}, sample: {texts[0]!r}")

    def _save(self) -> None:
        """Save the train state and the position of the data, unless another process has taken over the run."""
        if self.lock is not None:
            self.lock.check()
        self.checkpoints.save(self.step, self.state, self.batches.iterator)

    def _bad_data(self, error: Exception) -> TrainingStopped:
        """Save the train state reached so far, and return the error to raise because the next training
        batch cannot be read."""
        # Other hosts can read their data, so they would not take part in the save.
        if jax.process_count() == 1:
            self._save()
        return TrainingStopped(
            f"step {self.step + 1}: {error}. Once the data is corrected, the same command {self._next_start()}"
        )

    def _announce(self, num_trained: int) -> None:
        if jax.process_index() != 0:
            return
        config, count, start = self.config, count_parameters(self.config.model), self.start
        tokens = config.num_steps * config.tokens_per_step
        devices = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
        part = f", {num_trained:,} of them trained" if self.frozen else ""
        grown = ""
        if self.buffers.in_use and self.buffers.growths:
            grown = f"; expert_buffer {self.buffers.largest:g}, to which it had grown"
        print(
            f"{config.name}: {count['total']:,} parameters ({count['non_embedding']:,} without embeddings{part}), "
            f"{config.num_steps:,} steps of {config.tokens_per_step:,} {self.unit} = {tokens:,} {self.unit}, "
            f"on {devices}, in {self.workdir}"
            + (f"; continuing from step {start:,}" if start else "")
            + grown,
            file=sys.stderr,
            flush=True,
        )

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return bool(every) and step % every == 0

    def _to_devices(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return place_batch(batch, self.rows, self.config.batch_size)

    def _next_start(self) -> str:
        """Return the end of an error message, which says where the same command would continue training: "starts
        at step 0", or "continues from checkpoint STEP in WORKDIR"."""
        self.checkpoints.wait()
        saved = self.checkpoints.steps
        return (
            f"continues from checkpoint {saved[-1]} in {self.workdir}"
            if saved
            else "starts at step 0"
        )

    def report(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Show the metrics of a training step in the progress bar, and write them to metrics.jsonl at every
        `log_every`-th step.

        Raises:
            TrainingStopped: `config.max_bad_steps` consecutive steps had a loss, gradient or new parameters that
                are not finite.
        """
        config = self.config
        values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        bad = values.pop("skipped_in_a_row")
        self.loss = values["train/loss"]
        if step != self.compiling_step:
            self.meter.step()  # it has ended, since its metrics were read
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
            raise TrainingDiverged(
                f"step {step}: {bad} steps in a row had a loss, gradient or new parameters that are not finite; {last} in {self.workdir}"
            )
        if self._due(config.log_every, step) or step == config.num_steps:
            self.speed = self.meter.tokens_per_second(config.tokens_per_step) or self.speed
            kind, memory = memory_gib()
            values |= {
                "train/tokens": step * config.tokens_per_step,
                f"perf/{kind}_memory_gib": memory,
            }
            fractions = source_fractions(config.data, config.seed, step * config.batch_size)
            values |= {f"data/{name}": fraction for name, fraction in fractions.items()}
            if self.speed:  # not known after the first step alone, which was compiled
                values |= {
                    "perf/tokens_per_second": self.speed,
                    "perf/model_flops_per_second": self.speed * self.flops,
                }
                if self.peak is not None:
                    values["perf/mfu"] = self._mfu()
            if self.buffers.in_use:
                values |= {
                    OVERFLOW: self.buffers.overflow_count,
                    "moe/expert_buffer": self.buffers.largest,
                }
            self.writer.write(step, values)
        tokens = step * config.tokens_per_step
        self.progress.advance(
            step, self.loss, self.speed, self._mfu(), flops=self.flops, tokens=tokens
        )
        if self.on_report is not None:
            self.on_report(step)

    def _mfu(self) -> float | None:
        """Return the share of the devices' peak that the last measured speed requires (model FLOPs utilization); None if
        the peak is not known."""
        return None if self.peak is None else self.speed * self.flops / self.peak

    def _evaluate(self) -> dict[str, float]:
        """Compute the held-out loss over the first `eval_batches` batches, the same ones every time, and
        write it to metrics.jsonl; return the metrics. The loss by position is written to plots/loss_by_position.npz.

        `val/ema_loss` is the loss of the average of the parameters, if there is one. In a run of attention transfer `val/loss`
        is the student's; the teacher's is `val/teacher_loss`.
        """
        began = time.perf_counter()
        curves = {"val/loss": self._heldout_curve("eval_step", self.state.params)}
        if self.state.ema:
            curves["val/ema_loss"] = self._heldout_curve("eval_step", self.state.ema)
        if self.program.teacher_eval_step is not None:
            params = self.state.params
            curves["val/teacher_loss"] = self._heldout_curve("teacher_eval_step", params)
        values = {name: float(nll.sum() / max(n.sum(), 1)) for name, (nll, n) in curves.items()}
        self.writer.write(self.step, values)
        write_curve(self.workdir, *curves.get("val/ema_loss", curves["val/loss"]))
        labels = {"val/ema_loss": "of the average", "val/teacher_loss": "of the teacher"}
        others = "".join(f", {values[n]:.4f} {labels[n]}" for n in values if n in labels)
        self.progress.say(
            f"step {self.step}: held-out loss {values['val/loss']:.4f}{others}, over {curves['val/loss'][1].sum():,.0f} {self.unit}"
        )
        self.meter.pause(time.perf_counter() - began)
        return values

    def _heldout_curve(self, name: str, params: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of (loss in nats, number of tokens) at each position of the held-out rows, float64 [T]. `name`
        selects the model: "eval_step" the trained one, "teacher_eval_step" its teacher; `params` are its trained parameters.

        If choices of experts do not fit into the buffers between devices, the buffers grow and the loss is
        computed again, until all choices fit."""
        nll, tokens, overflow = self._heldout_sums(getattr(self.program, name), params)
        while overflow:
            self._grow_buffers(self.step, int(overflow), "evaluation")
            nll, tokens, overflow = self._heldout_sums(getattr(self.program, name), params)
        return nll, tokens

    def _heldout_sums(
        self, eval_step: Callable, params: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the sums, over the held-out batches, of (the loss in nats and the number of predicted tokens at each
        position, the number of choices of experts that did not fit into the buffers). `eval_step` is a function (all
        parameters, batch) -> these three sums for one batch, and `params` are the trained parameters."""
        sums: list[Any] = [0.0, 0.0, 0.0]
        all_params = join(self.frozen, params)
        with contextlib.closing(eval_batches(self.config, self.mesh)) as batches:
            for batch in itertools.islice(batches, self.config.eval_batches):
                more = eval_step(all_params, self._to_devices(batch))
                sums = [a + np.asarray(b, np.float64) for a, b in zip(sums, more, strict=True)]
        return sums[0], sums[1], float(sums[2])

    def _evaluation_is_missing(self) -> bool:
        """Return whether the run was killed while an evaluation grew the buffers in which tokens are sent to
        experts: after the checkpoint was saved, and before the held-out loss was written."""
        growths = self.buffers.growths
        if not growths or (growths[-1]["step"], growths[-1]["during"]) != (
            self.start,
            "evaluation",
        ):
            return False
        rows = read_rows(self.workdir / "metrics.jsonl")
        return not any(row["step"] == self.start and "val/loss" in row for row in rows)
