"""A run is a directory: its config, metrics, checkpoints, plots and evaluations."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import flax
import grain
import jax
import optax
from flax import nnx
from orbax import checkpoint as orbax

from lsm_jax import ops
from lsm_jax.data import fingerprint_changes
from lsm_jax.models import Decoder, abstract
from lsm_jax.training.checkpoints import Checkpoints
from lsm_jax.training.config import TrainConfig, differences, from_dict, to_dict
from lsm_jax.training.partition import digests, join, leaves_of, like, split, targets
from lsm_jax.training.step import params_of


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
        config: the run's.
        model: the decoder with the checkpoint's parameters.
        params: the same parameters as a pure dict.
        step: the checkpoint's.
    """

    config: TrainConfig
    model: Decoder
    params: dict[str, Any]
    step: int


def checkpoint_directory(workdir: str | os.PathLike[str]) -> Path:
    """Where a run's checkpoints are."""
    return Path(workdir).expanduser().absolute() / "checkpoints"


def read_config(workdir: str | os.PathLike[str], argument: str = "workdir") -> TrainConfig:
    """The config of a run.

    Args:
        workdir: the run's directory.
        argument: what the caller calls it, for messages.

    Raises:
        ValueError: `workdir` is not a directory of a run that saves a model, or its config.json cannot be read.
    """
    if not (Path(workdir).expanduser() / "config.json").is_file():
        raise ValueError(
            f"{argument}={str(workdir)!r}: no config.json there; a run's directory is accepted"
        )
    config = _parse_config(workdir, argument)
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"{argument}={str(workdir)!r}: a run of {type(config).__name__} saves no model; result.json has its result"
        )
    try:
        config.model.validate()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{argument}={str(workdir)!r}: its config.json describes no model ({error}); set the file right"
        ) from error
    return config


def _parse_config(workdir: str | os.PathLike[str], argument: str) -> Any:
    path = Path(workdir).expanduser() / "config.json"
    try:
        config = from_dict(json.loads(path.read_text(encoding="utf-8")))
        if not dataclasses.is_dataclass(config):
            raise ValueError(f"it holds a {type(config).__name__}")
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{argument}={str(workdir)!r}: its config.json is not a config that this version wrote ({error}); "
            "set the file right, or use another directory"
        ) from error
    return config


def check_workdir(workdir: Path, config: Any) -> None:
    """Check that a directory can be made, or is this config's.

    Raises:
        ValueError: it is a file, cannot be written to, or was made with another config; the differing fields are listed.
    """
    nearest = next(p for p in (workdir, *workdir.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "may not be written to" if nearest.is_dir() else "is a file"
        raise ValueError(
            f"workdir={str(workdir)!r}: {nearest} {why}; accepted is a directory, made if it is not there"
        )
    checkpoints = checkpoint_directory(workdir)
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ValueError(
            f"workdir={str(workdir)!r}: {checkpoints} is a file; accepted is a directory"
        )
    if (workdir / "config.json").is_file():
        old = _parse_config(workdir, "workdir")
        kinds = [type(c).__name__ for c in (old, config)]
        different = differences(old, config)
        if kinds[0] != kinds[1]:
            different = [f"type: {kinds[0]} -> {kinds[1]}"]
        if different:
            raise ValueError(
                f"workdir={str(workdir)!r} was made with another config; use another workdir, or set back:\n  "
                + "\n  ".join(different)
            )


def check_data(workdir: Path, data: dict[str, Any]) -> None:
    """Check that the training data are those that a run to be resumed began with, by their `fingerprint`.

    Raises:
        ValueError: they differ; what changed is listed. A directory without data.json, as earlier versions left it, passes.
    """
    path = workdir / "data.json"
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        different = fingerprint_changes(old, data)
    except FileNotFoundError:
        return
    except (ValueError, AttributeError) as error:
        different = [f"{path} cannot be read: {error}"]
    if different:
        raise ValueError(
            f"workdir={str(workdir)!r}: the training data changed since the run began; bring them back, or start anew in "
            f"another workdir (--init_from takes this one's parameters), or remove {path} to go on with them as they are:\n  "
            + "\n  ".join(different)
        )


def check_frozen(workdir: str | os.PathLike[str], frozen: dict[str, int]) -> None:
    """Check that the parameters that stand still are those that a run began with, by their `digests`.

    Raises:
        ValueError: they differ; what changed is listed. A directory without frozen.json passes.
    """
    path = Path(workdir).expanduser() / "frozen.json"
    if not path.is_file():
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    if changed := sorted(
        name for name in old.keys() | frozen.keys() if old.get(name) != frozen.get(name)
    ):
        raise ValueError(
            f"workdir={str(workdir)!r}: parameters that stand still are not those that the run began with; bring back what its "
            f"base or init_from was then. {len(changed)} changed: {', '.join(changed[:5])}"
        )


def write_config(
    workdir: Path, config: TrainConfig, data: dict[str, Any], frozen: dict[str, int] | None = None
) -> None:
    """Write config.json, which makes the directory a run's, the training data's data.json, and environment.json.

    `frozen` holds the `digests` of parameters that stand still, for frozen.json; None or empty writes none.
    """
    if jax.process_index() != 0:
        return
    workdir.mkdir(parents=True, exist_ok=True)
    _write_json(workdir / "data.json", data)
    if frozen:
        _write_json(workdir / "frozen.json", frozen)
    _write_json(workdir / "config.json", to_dict(config))
    _write_json(workdir / "environment.json", _environment())


def load_run(workdir: str | os.PathLike[str], step: int | None = None) -> Run:
    """Load a run from its directory, onto the default device.

    Args:
        workdir: the run's directory.
        step: of the checkpoint; None is the newest that can be read.

    Raises:
        ValueError: no run, no such checkpoint, or none that can be read.
    """
    config = read_config(workdir)
    model = abstract(config.model)
    shapes = params_of(model)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = targets(shapes, jax.tree.map(lambda _: device, shapes), config.trainable)
    params, step = _load(workdir, config, target, step)
    return Run(config, nnx.merge(nnx.graphdef(model), params), params, step)


def starting_params(config: TrainConfig, target: dict[str, Any]) -> dict[str, Any]:
    """The parameters a run starts from, as far as `init_from` or `base` has them, into the shapes and shardings of `target`.

    Raises:
        ValueError: no such run, a model of other shapes, or one without parameters that stand still in this run.
    """
    if config.init_from:
        return initial_params(config.init_from, target, config.trainable)
    if config.base is None:
        return {}
    found = config.base.load(config.model, target)
    still = split(target, config.trainable)[1]
    _check_same(f"base={config.base!r}", leaves_of(found), leaves_of(target), leaves_of(still))
    return found


def initial_params(
    source: str, target: dict[str, Any], trainable: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Another run's newest parameters, into the shapes and shardings of `target`.

    Args:
        source: the run's directory.
        target: of every parameter of this run's model.
        trainable: this run's; parameters that train here may be absent there, and are then absent from the result.

    Raises:
        ValueError: no such run, or a model of other shapes.
    """
    config = read_config(source, "init_from")
    shapes = params_of(abstract(config.model))
    ours, theirs = leaves_of(target), leaves_of(shapes)
    needed = leaves_of(split(target, trainable)[1]) if trainable else ours
    _check_same(f"init_from={source!r}", theirs, ours, needed)
    return _load(source, config, like(target, shapes), None, "init_from")[0]


def _check_same(what: str, theirs: dict[str, Any], ours: dict[str, Any], needed: Any) -> None:
    """Raise ValueError unless `theirs` has the leaves of `ours`, `needed` ones at least, in their shapes and no others."""
    wrong = [
        f"{name}: {theirs[name].shape if name in theirs else 'absent'} -> {ours[name].shape if name in ours else 'absent'}"
        for name in sorted(theirs.keys() | ours.keys())
        if (name not in theirs and name in needed)
        or name not in ours
        or (name in theirs and theirs[name].shape != ours[name].shape)
    ]
    if wrong:
        raise ValueError(f"{what}: another model; parameters differ:\n  " + "\n  ".join(wrong[:20]))


def _load(
    workdir: str | os.PathLike[str],
    config: TrainConfig,
    target: dict[str, Any],
    step: int | None,
    argument: str = "workdir",
) -> tuple[dict[str, Any], int]:
    """Every parameter of a run, those that stand still from where they are kept, and the step of its checkpoint."""
    trained, still = split(target, config.trainable)
    checkpoints = _open_checkpoints(workdir, argument)
    try:
        params, step = checkpoints.load_params(trained, step)
    finally:
        checkpoints.close()
    if not still:
        return params, step
    frozen = like(starting_params(config, target), still)
    check_frozen(workdir, digests(frozen))
    return join(frozen, params), step


def _open_checkpoints(workdir: str | os.PathLike[str], argument: str = "workdir") -> Checkpoints:
    """For reading only: nothing is made or removed."""
    directory = checkpoint_directory(workdir)
    if not directory.is_dir():
        raise ValueError(f"{argument}={str(workdir)!r}: the run has no checkpoint yet")
    return Checkpoints(directory, keep_last=1_000_000)


def write_choices(workdir: Path) -> None:
    """Write implementations.json: what each op traced so far runs as."""
    if jax.process_index() != 0:
        return
    _write_json(workdir / "implementations.json", ops.choices())


def _environment() -> dict[str, Any]:
    modules = {"jax": jax, "flax": flax, "optax": optax, "orbax": orbax, "grain": grain}
    return {
        "python": platform.python_version(),
        **{name: getattr(module, "__version__", "unknown") for name, module in modules.items()},
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(draft, path)
