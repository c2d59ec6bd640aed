"""Train a small model on multi-query associative recall or on state tracking, with several learning rates at once, and
measure its accuracy at each length."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lsm_jax import ops
from lsm_jax.data import RecallTask, TrackingTask
from lsm_jax.models import RecallModel
from lsm_jax.parallel import largest_divisor
from lsm_jax.training.config_json import to_dict
from lsm_jax.training.failures import WriteError
from lsm_jax.training.lock import RunLock
from lsm_jax.training.metrics import MetricsWriter, TrainProgress
from lsm_jax.training.recall_config import SmallModelsConfig
from lsm_jax.training.recall_result import (
    announce,
    by_member,
    count_parameters,
    member_metrics,
    result_of,
)
from lsm_jax.training.run_files import check_workdir, write_json
from lsm_jax.training.sweep import Data, Sweep, SweepState, epoch_blocks

_DRAWING = threading.Lock()  # threads that compile sweeps of one task draw its examples once
Blocks = list[tuple[int, np.ndarray]]
Task = RecallTask | TrackingTask

_QUERIES_AT_A_TIME, _TOKENS_AT_A_TIME = (
    16384,
    65536,
)  # of one batch and member in an evaluation, at most


_WIDEST_UNTUNED = 256  # width of a model, up to which XLA does not tune its products


def compiler_options(config: SmallModelsConfig, platform: str) -> dict[str, bool | int]:
    """Return XLA's options for the programs of a sweep on a platform: on GPUs no candidate kernel is compiled and timed for a
    product where the model's width is at most 256; elsewhere XLA's own.

    The programs of such a model have a hundred products of less than a millisecond, and XLA compiles some thirty kernels for each.
    """
    if platform != "gpu" or config.model.hidden_size > _WIDEST_UNTUNED:
        return {}
    # Without Triton, products run by cuBLAS, which has kernels for every shape.
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def make_sweep(config: SmallModelsConfig, num_steps: int) -> Sweep:
    """Return the sweep of a recall config: one member (model) for each pair of a learning rate and a seed. The
    loss is the mean cross-entropy of the answers at the query tokens alone, plus the losses that layers report;
    `num_steps` is the length of the learning rate's schedule."""
    model = nnx.eval_shape(lambda: RecallModel(config.model, rngs=nnx.Rngs(0)))
    graph = nnx.graphdef(model)
    decayed = jax.tree.map(
        lambda p: bool(p.weight_decay),
        nnx.state(model, nnx.Param),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()

    def loss(params: Any, batch: Data) -> jax.Array:
        logits, losses = _query_logits(nnx.merge(graph, params), batch)
        # A masked sum instead of a gather, whose gradient would be a scatter into all logits.
        is_answer = batch["answers"][..., None] == jnp.arange(logits.shape[-1])
        right_logits = jnp.sum(jnp.where(is_answer, logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right_logits) + losses

    rates, seeds = zip(*config.members(), strict=True)
    return Sweep(
        init=lambda key: nnx.to_pure_dict(
            nnx.state(RecallModel(config.model, rngs=nnx.Rngs(key)), nnx.Param)
        ),
        loss=loss,
        optimizer=optax.chain(
            clip,
            optax.scale_by_adam(),
            optax.add_decayed_weights(config.weight_decay, mask=nnx.to_pure_dict(decayed)),
        ),
        seeds=seeds,
        rates=rates,
        schedule=lambda step: 0.5 * (1 + jnp.cos(jnp.pi * step / num_steps)),
    )


def _query_logits(model: RecallModel, batch: Data) -> tuple[jax.Array, jax.Array]:
    """Return the logits [B, P, vocab] of a model at the P query tokens of each example in a batch, and the
    sum of the losses that the model's layers report."""
    hidden, losses = model.hidden(batch["tokens"])
    hidden = jnp.take_along_axis(hidden, batch["positions"][..., None], axis=1)
    return model.logits(hidden), losses


def make_accuracy(config: SmallModelsConfig):
    """Return the function (parameters of one member, batch) -> accuracy: the fraction of the batch's queries for
    which this model's most likely token is the answer."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: RecallModel(config.model, rngs=nnx.Rngs(0))))

    def accuracy(params: Any, batch: Data) -> jax.Array:
        logits, _ = _query_logits(nnx.merge(graph, params), batch)
        right = jnp.argmax(logits, axis=-1) == batch["answers"]
        return jnp.mean(right.astype(jnp.float32))

    return accuracy


@functools.lru_cache(maxsize=32)  # the runs of a table have the same examples
def _examples(draw: Any, kind: type, fields: tuple, arguments: tuple) -> Data:
    examples = draw(kind(**dict(fields)), **dict(arguments))
    positions, answers = examples.queries()
    return jax.device_put(dict(tokens=examples.tokens, positions=positions, answers=answers))


def load_task(config: SmallModelsConfig, task: Task, *seed: int) -> Data:
    """Return the N examples of a task as a dict of arrays on the device: their `tokens` [N, T], and the `positions` and
    `answers` [N, P] of their P queries. `seed` and the config's `data_seed` determine them."""
    draw, arguments = config.drawing()
    arguments = dict(**arguments, seed=(config.data_seed, *seed))
    fields = tuple(dataclasses.asdict(task).items())
    with _DRAWING:
        return _examples(draw, type(task), fields, tuple(arguments.items()))


@dataclasses.dataclass(frozen=True)
class CompiledSweep:
    """A recall sweep that is ready to train, as `compile_recall` returns it: its examples are drawn and its programs compiled.

    Attributes:
        config: the config of the sweep.
        program: the compiled functions that train and test all members.
        first: the compiled function that returns the state of all members before the first step.
        train_data: the examples of each training task, on the device.
        blocks: the function that draws the order of the next epoch.
        first_epoch: the order of the first epoch.
        seconds: the seconds that drawing and compiling took.
    """

    config: SmallModelsConfig
    program: _Program
    first: Callable[[], SweepState]
    train_data: list[Data]
    blocks: Callable[[], Blocks]
    first_epoch: Blocks
    seconds: float

    @property
    def num_steps(self) -> int:
        """The training steps of all epochs, if no member's accuracy ends them early."""
        return self.config.epochs * sum(len(rows) for _, rows in self.first_epoch)


def compile_recall(config: SmallModelsConfig) -> CompiledSweep:
    """Draw the examples of a recall sweep and compile its programs, for `train_recall`.

    Several sweeps may be compiled at the same time by threads, also while another sweep trains.

    Raises:
        ValueError: the config is not valid.
    """
    config.validate()
    began = time.perf_counter()
    train_data = [load_task(config, t, 0, i) for i, t in enumerate(config.train)]
    test_data = [load_task(config, t, 1, i) for i, t in enumerate(config.test)]
    rng = np.random.default_rng((config.data_seed, 2))
    sizes = [task.num_examples for task in config.train]

    def blocks() -> Blocks:
        return epoch_blocks(rng, sizes, config.batch_size, config.steps_per_call)

    first_epoch = blocks()
    steps_per_call = len(first_epoch[0][1])
    sweep = make_sweep(config, config.epochs * len(first_epoch) * steps_per_call)
    options = compiler_options(config, jax.default_backend())
    first = jax.jit(sweep.first).lower().compile(options)
    state = jax.eval_shape(sweep.first)
    print(f"{config.name}: compiling", file=sys.stderr, flush=True)
    program = _compile(config, sweep, state, train_data, test_data, steps_per_call, options)
    seconds = time.perf_counter() - began
    return CompiledSweep(config, program, first, train_data, blocks, first_epoch, seconds)


def train_recall(
    config: SmallModelsConfig,
    workdir: str | Path | None = None,
    *,
    compiled: CompiledSweep | None = None,
) -> dict[str, Any]:
    """Train all members of a recall sweep at once, and select the one with the best mean accuracy after the
    last epoch.

    Training uses one device and always starts at step 0: a run lasts seconds to minutes and saves no
    checkpoint.

    Args:
        config: the config of the run; all of it is validated before anything is compiled.
        workdir: the folder for config.json, metrics.jsonl and result.json; None writes nothing.
        compiled: what `compile_recall` returned for this config, to be trained once; None compiles it.

    Returns:
        The content of result.json: `accuracy` by test task and their `mean`, `learning_rate` and `seed` of
        the best member; `members`, the same values of all members; `state_size`, numbers in each layer's
        state while decoding (`recall_state_size`); `parameters`, in total and without embeddings; steps,
        epochs, seconds, date, commit and device.

    Raises:
        ValueError: the config is not valid or not that of `compiled`, the directory was made with another config, or another
            process writes there.
        OSError: a file cannot be written.
    """
    if not isinstance(config, SmallModelsConfig):
        raise ValueError(
            f"config={type(config).__name__}: accepted is a RecallConfig or TrackingConfig; train trains language models"
        )
    config.validate()
    if compiled is not None and compiled.config is not config:
        raise ValueError(
            f"compiled={compiled.config.name!r}: accepted is the result of compile_recall for config={config.name!r}"
        )
    if workdir is None:
        return _train_recall(config, None, None, compiled)
    workdir = Path(workdir).expanduser().absolute()
    check_workdir(workdir, config)
    with RunLock(workdir) as lock:
        try:
            return _train_recall(config, workdir, lock, compiled)
        except WriteError as error:
            raise OSError(
                f"{error}; a sweep saves no checkpoint, so the same command starts at step 0"
            ) from error


def _train_recall(
    config: SmallModelsConfig,
    workdir: Path | None,
    lock: RunLock | None,
    compiled: CompiledSweep | None,
) -> dict[str, Any]:
    """Train a sweep as `train_recall` describes, in a directory that is locked, or is locked once it is created."""
    compiled = compile_recall(config) if compiled is None else compiled
    began, state = time.perf_counter(), compiled.first()
    num_parameters = count_parameters(state)
    writer = None
    if workdir is not None and lock is not None:
        lock.acquire()  # creates the directory of a new sweep
        write_json(workdir / "config.json", to_dict(config))
        writer = MetricsWriter(workdir, -1)
    announce(config, compiled.num_steps, compiled.seconds)
    scores, step, epoch = _train_epochs(compiled, state, writer)
    if writer is not None:
        writer.close()
    result = {
        **result_of(config, scores),
        "parameters": num_parameters,
        "steps": step,
        "epochs": epoch,
        "seconds": round(time.perf_counter() - began + compiled.seconds, 1),
        "compile_seconds": round(compiled.seconds, 1),
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("GIT_COMMIT", "unknown"),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "implementations": ops.choices(),
    }
    if workdir is not None:
        write_json(workdir / "result.json", result)
    return result


def _train_epochs(
    compiled: CompiledSweep, state: SweepState, writer: MetricsWriter | None
) -> tuple[np.ndarray, int, int]:
    """Train the members of a recall sweep until the last epoch, or until the mean accuracy of one exceeds the
    config's `stop_above`; return (accuracies [test tasks, members], number of steps, number of epochs)."""
    config, program, train_data = compiled.config, compiled.program, compiled.train_data
    epochs = itertools.chain([compiled.first_epoch], iter(compiled.blocks, None))
    sizes = [task.num_examples for task in config.train]
    length = np.average([t.num_tokens for t in config.train], weights=sizes)
    tokens = config.batch_size * len(config.members()) * length  # per step, of all members
    pending, losses, scores, epoch, step = None, np.zeros((0, 0)), np.zeros((0, 0)), 0, 0
    started = time.perf_counter()
    with TrainProgress(config.name, 0, compiled.num_steps) as progress:
        for epoch, blocks in zip(range(1, config.epochs + 1), epochs, strict=False):
            for task_index, rows in blocks:
                state, losses = program.train[task_index](state, train_data[task_index], rows)
                step += len(rows)
                # Losses are read one call late, so that the device never waits for the host.
                if pending is not None:
                    loss = float(np.nanmin(np.asarray(pending[1])[-1]))
                    speed = pending[0] * tokens / (time.perf_counter() - started)
                    progress.advance(pending[0], loss, speed)
                pending = (step, losses)
            scores = np.stack([np.asarray(accuracy(state.params)) for accuracy in program.test])
            best = scores.mean(axis=0).max()
            progress.say(f"epoch {epoch}: accuracy {best:.4f} ({by_member(config, scores)})")
            if writer is not None:
                writer.write(step, member_metrics(config, scores, losses))
            if best > config.stop_above:
                if epoch < config.epochs:
                    progress.say(
                        f"stopped after {epoch} of {config.epochs} epochs: the best member's accuracy is above "
                        f"stop_above={config.stop_above:g}; --config.stop_above=1 trains all epochs"
                    )
                break
    return scores, step, epoch


@dataclasses.dataclass(frozen=True)
class _Program:
    """The compiled functions of a recall sweep, which train and test all of its members.

    Attributes:
        train: for each training task, a function (state of all members, the task's examples, indices of the
            examples in N batches [N, batch_size]) -> (state after N steps, losses [N, members]).
        test: for each test task, a function (parameters of all members) -> their accuracies [members].
    """

    train: list[Any]
    test: list[Any]


def _compile(
    config: SmallModelsConfig,
    sweep: Sweep,
    state: SweepState,
    train_data: list[Data],
    test_data: list[Data],
    per_call: int,
    options: dict[str, bool | int],
) -> _Program:
    """Compile the training and test functions of all tasks of a recall sweep at the same time, in threads, with XLA's `options`;
    tasks whose arrays have the same shapes share one program."""
    accuracy = make_accuracy(config)

    def evaluate(params: Any, data: Data) -> jax.Array:
        number, length = data["tokens"].shape
        most = min(_QUERIES_AT_A_TIME // data["answers"].shape[1], _TOKENS_AT_A_TIME // length)
        return sweep.evaluate(accuracy, params, data, largest_divisor(number, most))

    train, test = jax.jit(sweep.train, donate_argnums=0), jax.jit(evaluate)
    rows = jax.ShapeDtypeStruct((per_call, config.batch_size), jnp.int32)
    lowered: dict[Any, Any] = {}
    for task, data in zip(config.train, train_data, strict=True):
        if (True, task.name, task.num_examples) not in lowered:
            lowered[True, task.name, task.num_examples] = train.lower(state, data, rows)
    for task, data in zip(config.test, test_data, strict=True):
        lowered[False, task.name, task.num_examples] = test.lower(state.params, data)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        compiled = dict(
            zip(lowered, pool.map(lambda x: x.compile(options), lowered.values()), strict=True)
        )

    def bind(task: Task, data: Data) -> Any:
        function = compiled[False, task.name, task.num_examples]
        return lambda params: function(params, data)

    return _Program(
        [compiled[True, task.name, task.num_examples] for task in config.train],
        [bind(task, data) for task, data in zip(config.test, test_data, strict=True)],
    )
