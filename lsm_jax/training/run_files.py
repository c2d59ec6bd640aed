"""Read, check and write the files that describe a training run: its config, the fingerprint of its data, the digests of its
frozen parameters, versions and devices.
"""

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
from orbax import checkpoint as orbax

from lsm_jax import hub, ops
from lsm_jax.data import fingerprint_changes
from lsm_jax.data.sources import pin
from lsm_jax.files import bounded_json, check_folder, write_atomically
from lsm_jax.training.config import TrainConfig, check_implementations
from lsm_jax.training.config_json import check_types, differences, from_dict, to_dict
from lsm_jax.training.failures import refuse_links, writing


def checkpoint_directory(workdir: str | os.PathLike[str]) -> Path:
    """Return the path of the folder in a run's directory that has its checkpoints."""
    return Path(workdir).expanduser().absolute() / "checkpoints"


def read_config(workdir: str | os.PathLike[str], argument: str = "workdir") -> TrainConfig:
    """Read the config of a run from the config.json in its directory.

    Args:
        workdir: the run's directory.
        argument: the name of the argument or flag from which `workdir` comes, for error messages.

    Raises:
        ValueError: `workdir` is not the directory of a run that saves a model, or its config.json cannot be
            read.
    """
    if not (Path(workdir).expanduser() / "config.json").is_file():
        raise ValueError(
            f"{argument}={str(workdir)!r}: no config.json there ({Path(workdir).expanduser().absolute()}); a run's directory "
            "is accepted"
        )
    config = _parse_config(workdir, argument)
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"{argument}={str(workdir)!r}: a run of {type(config).__name__} saves no model; result.json has its result"
        )
    try:
        check_types(config)
        config.model.validate()
        check_implementations(config.model, "model.")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{argument}={str(workdir)!r}: its config.json describes no model ({error}); correct the file"
        ) from error
    return config


def _parse_config(workdir: str | os.PathLike[str], argument: str) -> Any:
    path = Path(workdir).expanduser() / "config.json"
    try:
        config = from_dict(bounded_json(path))
        if not dataclasses.is_dataclass(config):
            raise ValueError(f"it contains a {type(config).__name__}")
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{argument}={str(workdir)!r}: its config.json is not a config that this version wrote ({error}); "
            "correct the file, or use another directory"
        ) from error
    return config


def pinned(config: TrainConfig, workdir: Path) -> TrainConfig:
    """Return the config of a run with commits in place of the branches of the Hugging Face hub that it names: those of the
    run's config.json, or for a new run those that the branches have now.

    Raises:
        ValueError: the hub has no such model or data set, or cannot be reached and the cache does not have it.
    """
    exists = os.path.isfile(workdir / "config.json")  # False too for a name that is too long
    before = _parse_config(workdir, "workdir") if exists else None
    if not isinstance(before, TrainConfig):
        before = None
    changes: dict[str, Any] = {"data": pin(config.data, before.data if before else None)}
    if isinstance(path := getattr(config.base, "path", None), str):
        old = getattr(before.base, "path", "") if before else ""
        base = hub.pinned(path, "base.path", before=old)
        changes["base"] = dataclasses.replace(config.base, path=base)
    return dataclasses.replace(config, **changes)


def check_workdir(workdir: Path, config: Any) -> None:
    """Check that `workdir` can be the directory of a run of this config: that it can be created or written to,
    and that a run that it already contains has the same config, so that this run can be resumed.

    Raises:
        ValueError: `workdir` is a file, is not writable, contains links in the place of what training writes
            or a metrics.jsonl that is no file, or was
            created with another config; the message lists the fields that differ.
    """
    try:
        check_folder(workdir)
    except ValueError as error:
        raise ValueError(
            f"workdir={str(workdir)!r}: {error}; accepted is a directory, which is created if it does not exist"
        ) from error
    checkpoints = checkpoint_directory(workdir)
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ValueError(
            f"workdir={str(workdir)!r}: {checkpoints} is a file; accepted is a directory"
        )
    refuse_links(workdir)
    metrics = workdir / "metrics.jsonl"
    if (
        metrics.exists() and not metrics.is_file()
    ):  # such as a pipe, which would be read without end
        raise ValueError(
            f"workdir={str(workdir)!r}: {metrics} is no regular file; accepted is a file, or none"
        )
    if (workdir / "config.json").is_file():
        old = _parse_config(workdir, "workdir")
        kinds = [type(c).__name__ for c in (old, config)]
        different = differences(old, config)
        if kinds[0] != kinds[1]:
            different = [f"type: {kinds[0]} -> {kinds[1]}"]
        if different:
            raise ValueError(
                f"workdir={str(workdir)!r} was made with another config; use another workdir, or undo these changes:\n  "
                + "\n  ".join(different)
            )


def check_data(workdir: Path, data: dict[str, Any]) -> None:
    """Check, before a run is resumed, that its training data are the same as when it began: compare their
    fingerprint `data` with that in the run's data.json.

    A run without data.json, which earlier versions did not write, passes the check.

    Raises:
        ValueError: the training data differ; the message lists the changes.
    """
    path = workdir / "data.json"
    if not os.path.lexists(path):
        return
    try:
        different = fingerprint_changes(bounded_json(path, max_bytes=1 << 30), data)
    except ValueError as error:
        different = [str(error)]
    if different:
        raise ValueError(
            f"workdir={str(workdir)!r}: the training data changed since the run began; restore them, or start a run in "
            f"another workdir (--init_from can load this run's parameters), or remove {path} to continue with the changed data:\n  "
            + "\n  ".join(different)
        )


def check_frozen(workdir: str | os.PathLike[str], frozen: dict[str, int]) -> None:
    """Check that the frozen parameters of a run are the same as when it began: compare their digests `frozen`,
    by path, with those in the run's frozen.json.

    A run without frozen.json passes the check.

    Raises:
        ValueError: frozen parameters differ, and the message lists them; or frozen.json cannot be read.
    """
    path = Path(workdir).expanduser() / "frozen.json"
    if not os.path.lexists(path):
        return
    try:
        old = bounded_json(path, max_bytes=1 << 30)
        if wrong := [name for name, digest in old.items() if not isinstance(digest, int)]:
            raise ValueError(f"{path}: {wrong[0]} is {old[wrong[0]]!r}; accepted is an integer")
    except ValueError as error:
        raise ValueError(
            f"workdir={str(workdir)!r}: the digests of the frozen parameters cannot be compared ({error}); restore the file, or "
            "remove it to continue without the comparison"
        ) from error
    if changed := sorted(
        name for name in old.keys() | frozen.keys() if old.get(name) != frozen.get(name)
    ):
        raise ValueError(
            f"workdir={str(workdir)!r}: frozen parameters are not those that the run began with; restore the content that its "
            f"base or init_from had then. {len(changed)} changed: {', '.join(changed[:5])}"
        )


def write_config(
    workdir: Path, config: TrainConfig, data: dict[str, Any], frozen: dict[str, int] | None = None
) -> None:
    """Write the files that describe a run to its directory, which is created if it does not exist: config.json,
    data.json, environment.json (versions and devices) and frozen.json.

    Args:
        workdir: the run's directory.
        config: the config of the run.
        data: the fingerprint of the training data, the content of data.json.
        frozen: the digest of each frozen parameter, by its path, the content of frozen.json; if None or empty,
            frozen.json is not written.
    """
    if jax.process_index() != 0:
        return
    with writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "data.json", data)
    if frozen:
        write_json(workdir / "frozen.json", frozen)
    write_json(workdir / "config.json", to_dict(config))
    write_json(workdir / "environment.json", _environment())


def write_choices(workdir: Path) -> None:
    """Write implementations.json to a run's directory: the backend that was selected for each op that has
    been traced so far."""
    write_json(workdir / "implementations.json", ops.choices())


def _environment() -> dict[str, Any]:
    modules = {"jax": jax, "flax": flax, "optax": optax, "orbax": orbax, "grain": grain}
    return {
        "python": platform.python_version(),
        **{name: getattr(module, "__version__", "unknown") for name, module in modules.items()},
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value as a JSON file in a run's directory, such that a reader sees the complete file or none; a link is
    replaced. Only the first host writes.

    Raises:
        WriteError: the file cannot be written.
    """
    if jax.process_index() != 0:
        return
    with writing(path):
        write_atomically(path, json.dumps(value, indent=2) + "\n")
