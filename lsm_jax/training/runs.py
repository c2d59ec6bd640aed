"""Load the model of a training run, and the parameters with which a run starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from lsm_jax.models import Decoder, abstract
from lsm_jax.training.best import best_steps
from lsm_jax.training.checkpoints import Checkpoints
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.partition import (
    digests,
    in_frozen_dtype,
    join,
    leaves_of,
    like,
    split,
    targets,
)
from lsm_jax.training.run_files import check_frozen, checkpoint_directory, read_config
from lsm_jax.training.step import params_of

WEIGHTS = ("trained", "ema")  # of which a run's model can be loaded


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model, loaded from one checkpoint of a run.

    Attributes:
        config: the config of the run.
        model: the decoder with the parameters of the checkpoint, in the form in which it is evaluated and
            generates (`ModelConfig.for_inference`): the student of a run of attention transfer.
        params: the same parameters as a pure dict.
        step: the step of the checkpoint.
        weights: "trained", or "ema" if the parameters are the moving average of the trained ones.
    """

    config: TrainConfig
    model: Decoder
    params: dict[str, Any]
    step: int
    weights: str = "trained"

    def teacher(self) -> Decoder | None:
        """Return the softmax model whose attention outputs the student learns in a run of attention transfer;
        its parameters are those of the student that softmax attention has. None for other runs."""
        config = self.config.model.teacher()
        if config is None:
            return None
        decoder = abstract(config)
        return nnx.merge(nnx.graphdef(decoder), like(self.params, params_of(decoder)))


def load_run(
    workdir: str | os.PathLike[str], step: int | str | None = None, weights: str | None = None
) -> Run:
    """Load the trained model of a run's checkpoint from its directory to the default device.

    Args:
        workdir: the run's directory.
        step: the step of the checkpoint; "best" is that of the best evaluation (`best_step`), and None selects the newest
            that can be read.
        weights: "trained" for the parameters after the last step; "ema" for their moving average (the config's
            `ema_decay`). None is the average if the run keeps one, and the trained parameters otherwise.

    Raises:
        ValueError: the directory has no run, no such checkpoint, none that can be read, or no average.
    """
    config = read_config(workdir)
    weights = _weights(config, weights, workdir)
    if isinstance(step, str):
        step = _step_of(step, workdir, config)
    model = abstract(config.model)
    shapes = params_of(model)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, shapes)
    target = targets(shapes, shardings, config.trainable, config.frozen_dtype)
    part = "params" if weights == "trained" else "ema"
    params, step = _load(workdir, config, target, step, part=part)
    evaluated = nnx.graphdef(abstract(config.model.for_inference()))
    return Run(config, nnx.merge(evaluated, params), params, step, weights)


def _weights(config: TrainConfig, weights: str | None, workdir: str | os.PathLike[str]) -> str:
    """Return which weights `load_run` loads, "trained" or "ema"."""
    if weights not in (None, *WEIGHTS):
        raise ValueError(f"weights={weights!r}: accepted are {', '.join(WEIGHTS)}")
    if weights == "ema" and not config.ema_decay:
        raise ValueError(
            f"weights='ema': the run in {str(workdir)!r} has ema_decay=0 and keeps no average; accepted is 'trained'"
        )
    return weights or ("ema" if config.ema_decay else "trained")


def _step_of(step: str, workdir: str | os.PathLike[str], config: TrainConfig) -> int:
    """Return the step that the text `step` names: "best", or a number."""
    if step == "best":
        return best_step(workdir, config)
    if not step.isascii() or not step.isdecimal():
        raise ValueError(
            f"step={step!r}: accepted are the number of a checkpoint's step and 'best'"
        )
    return int(step)


def best_step(workdir: str | os.PathLike[str], config: TrainConfig | None = None) -> int:
    """Return the step of the best checkpoint of a run: of those whose step has the metric in metrics.jsonl, the one with the
    lowest value, or the highest if the config's `best_mode` is "max". The metric is `best_metric`, or `val/loss` if that is
    empty.

    Raises:
        ValueError: the directory has no run, or no checkpoint was evaluated.
    """
    config = read_config(workdir) if config is None else config
    checkpoints = _open_checkpoints(workdir)
    best = best_steps(Path(workdir), config, checkpoints.steps)
    if not best.order():
        raise ValueError(
            f"step='best': no checkpoint of {str(workdir)!r} has {best.metric} in metrics.jsonl; there are checkpoints of steps "
            f"{', '.join(map(str, checkpoints.steps)) or 'none'}. Set best_metric to save the best evaluations"
        )
    return best.order()[0]


def starting_runs(
    workdir: str | os.PathLike[str], config: TrainConfig, argument: str = "workdir"
) -> Iterator[TrainConfig]:
    """Yield the configs of the runs from which a run started by `init_from`, each from the next.

    Args:
        workdir: the run's directory.
        config: the config of the run.
        argument: the name of the argument or flag from which `workdir` comes, for error messages.

    Raises:
        ValueError: one of the runs is not where `init_from` says, or started from itself.
    """
    chain = [Path(workdir).expanduser().resolve()]
    while config.init_from:
        place = Path(config.init_from).expanduser().resolve()
        if place in chain:
            ring = " -> ".join(map(str, [*chain[chain.index(place) :], place]))
            raise ValueError(
                f"{argument}={str(workdir)!r}: init_from of these runs is a ring: {ring}; accepted are runs of which the "
                "first did not start from another"
            )
        if not (place / "config.json").is_file():
            raise ValueError(
                f"{chain[-1] / 'config.json'}: init_from={config.init_from!r}, but {place} is not the directory of a run; "
                "if the run has moved, change init_from in that file"
            )
        chain.append(place)
        config = read_config(place, "init_from")
        yield config


def starting_params(config: TrainConfig, target: dict[str, Any]) -> dict[str, Any]:
    """Load the parameters with which a run starts from its source: another run (`config.init_from`) or a
    pretrained model (`config.base`).

    Args:
        config: the config of the run.
        target: abstract arrays of all parameters of the run's model, with shapes, dtypes and shardings.

    Returns:
        The parameters that the source has, in the dtypes and shardings of `target`, and the initial values of
        those in `config.frozen_initial` that it lacks; an empty dict if the config names no source.

    Raises:
        ValueError: the source is not a run, has a model of other shapes, or lacks parameters that are frozen
            in this run.
    """
    frozen = split(target, config.trainable)[1] if config.trainable else {}
    initial = {}
    if config.frozen_initial:
        initial, frozen = split(frozen, config.frozen_initial, "frozen_initial")
    if config.init_from:
        names = (*config.trainable, *config.frozen_initial)
        params = initial_params(config.init_from, target, names)
    elif config.base is None:
        return {}
    else:
        params = config.base.load(config.model, target)
        _check_same(
            f"base={config.base!r}", leaves_of(params), leaves_of(target), leaves_of(frozen)
        )
    return join(_initial_values(config, initial), params) if initial else params


def _initial_values(config: TrainConfig, target: dict[str, Any]) -> dict[str, Any]:
    """Return initial values of the parameters in the tree `target`, drawn with the run's seed, in the dtypes and
    shardings of `target`."""

    def draw() -> dict[str, Any]:
        drawn = params_of(Decoder(config.model, rngs=nnx.Rngs(config.seed)))
        return jax.tree.map(lambda x, t: x.astype(t.dtype), like(drawn, target), target)

    return jax.jit(draw, out_shardings=jax.tree.map(lambda x: x.sharding, target))()


def initial_params(
    source: str, target: dict[str, Any], trainable: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Load the newest parameters of another run, with which this run starts, in the shapes and shardings of
    `target`.

    Args:
        source: the directory of the other run.
        target: shapes and shardings of all parameters of this run's model.
        trainable: the `trainable` of this run; parameters that are trained here may be absent from the other
            run, and are then absent from the result. If empty, none may be absent.

    Raises:
        ValueError: `source` is not a run, has a model of other shapes, or its frozen parameters cannot be loaded.
    """
    config = read_config(source, "init_from")
    shapes = params_of(abstract(config.model))
    ours, theirs = leaves_of(target), leaves_of(shapes)
    needed = leaves_of(split(target, trainable)[1]) if trainable else ours
    _check_same(f"init_from={source!r}", theirs, ours, needed)
    return _load(source, config, like(target, shapes), None, "init_from")[0]


def _check_same(source: str, theirs: dict[str, Any], ours: dict[str, Any], needed: Any) -> None:
    """Check that parameters loaded from another run or a pretrained model fit this run's model: none that is
    needed is absent, and this run's model has each of them in the same shape.

    Args:
        source: the argument that names the other run or model, for the error message.
        theirs: the arrays or shapes of the loaded parameters, by path.
        ours: the arrays or shapes of the parameters of this run's model, by path.
        needed: the paths of the parameters that must be among the loaded ones.

    Raises:
        ValueError: the parameters do not fit; the message lists those that differ.
    """
    problems = [
        f"{name}: {theirs[name].shape if name in theirs else 'absent'} -> {ours[name].shape if name in ours else 'absent'}"
        for name in sorted(theirs.keys() | ours.keys())
        if (name not in theirs and name in needed)
        or name not in ours
        or (name in theirs and theirs[name].shape != ours[name].shape)
    ]
    if problems:
        raise ValueError(
            f"{source}: another model; parameters differ:\n  " + "\n  ".join(problems[:20])
        )


def _load(
    workdir: str | os.PathLike[str],
    config: TrainConfig,
    target: dict[str, Any],
    step: int | None,
    argument: str = "workdir",
    part: str = "params",
) -> tuple[dict[str, Any], int]:
    """Return (all parameters of a run, the training step of the checkpoint that was loaded). Checkpoints have
    only trained parameters; the frozen ones are loaded from the run or pretrained model that the run started
    from.

    Args:
        workdir: the run's directory.
        config: the config of the run.
        target: abstract arrays of all parameters, with shapes, dtypes and shardings.
        step: the step of the checkpoint; None selects the newest that can be read.
        argument: the name of the argument or flag from which `workdir` comes, for error messages.
        part: the trained parameters, "params", or their moving average, "ema".
    """
    trained, frozen_target = split(target, config.trainable)
    if frozen_target:  # raises if no run before this one has all parameters
        next((run for run in starting_runs(workdir, config, argument) if not run.trainable), None)
    checkpoints = _open_checkpoints(workdir, argument)
    try:
        params, step = checkpoints.load_params(trained, step, part)
    finally:
        checkpoints.close()
    if not frozen_target:
        return params, step
    # In the dtypes in which the run froze them, for the digests; a run that starts from this one may have others.
    stored_target = in_frozen_dtype(frozen_target, config.frozen_dtype)
    frozen = like(starting_params(config, join(target, stored_target)), frozen_target)
    check_frozen(workdir, digests(frozen))
    frozen = jax.tree.map(lambda x, t: x.astype(t.dtype), frozen, frozen_target)
    return join(frozen, params), step


def _open_checkpoints(workdir: str | os.PathLike[str], argument: str = "workdir") -> Checkpoints:
    """Open the checkpoints of a run for reading only: nothing in its directory is created or removed."""
    directory = checkpoint_directory(workdir)
    if not directory.is_dir():
        raise ValueError(f"{argument}={str(workdir)!r}: the run has no checkpoint yet")
    return Checkpoints(directory, keep_last=1_000_000)
