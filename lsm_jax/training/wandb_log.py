"""Send the metrics of a run to Weights & Biases (wandb), an optional package."""

from __future__ import annotations

import importlib
import json
import secrets
from pathlib import Path
from typing import Any

from lsm_jax.files import bounded_json, write_atomically
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.config_json import to_dict
from lsm_jax.training.failures import writing

_STEP = "train/step"  # the axis of all charts


def check_wandb(config: TrainConfig) -> None:
    """Check, before anything is compiled, that the package wandb is installed if the run sends metrics to it.

    Raises:
        ValueError: it is not installed.
    """
    if config.wandb:
        _package(config)


def _package(config: TrainConfig) -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"wandb={config.wandb!r}: the package wandb cannot be imported ({error}); install the extra [wandb], or leave the "
            "field empty"
        ) from error


class WandbLog:
    """A run at Weights & Biases, which a resumed run continues: its identifier is in the file `wandb.json` of the run's
    directory, and its own files are in the folder `wandb`. The variable WANDB_MODE selects online, offline or disabled.

    Args:
        config: the config of the run; `wandb` is its project.
        workdir: the run's directory.

    Raises:
        ValueError: wandb cannot be imported or cannot start a run, or `wandb.json` is damaged.
    """

    def __init__(self, config: TrainConfig, workdir: Path):
        wandb = _package(config)
        entity, _, project = config.wandb.rpartition("/")
        identifier = _identifier(workdir / "wandb.json")
        try:
            self._run = wandb.init(
                project=project,
                entity=entity or None,
                name=workdir.name,
                id=identifier,
                resume="allow",
                dir=str(workdir),
                config=to_dict(config),
                settings=wandb.Settings(console="off"),  # the progress bar is not part of a run
            )
        except Exception as error:  # such as a missing key; wandb has many types of errors
            raise ValueError(
                f"wandb={config.wandb!r}: no run can be started there ({' '.join(str(error).split())[:300]}); log in, set "
                "WANDB_MODE=offline, or leave the field empty"
            ) from error
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """Send numbers of one training step by name, without those that are None; after a run is resumed, those of a step that
        is taken again are sent again."""
        numbers = {name: value for name, value in scalars.items() if value is not None}
        self._run.log({_STEP: step, **numbers})

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """Send texts of one training step by name."""
        self._run.log({_STEP: step, **texts})

    def close(self) -> None:
        """Finish the run at Weights & Biases, after everything is sent or written."""
        self._run.finish()


def _identifier(path: Path) -> str:
    """Return the identifier that a file has, or write a new one to it."""
    if path.is_file() and not path.is_symlink():
        known = bounded_json(path).get("id")
        if not isinstance(known, str) or not known.isalnum():
            raise ValueError(f"{path}: id={known!r}; accepted are letters and digits, or no file")
        return known
    identifier = secrets.token_hex(4)
    with writing(path):
        write_atomically(path, json.dumps({"id": identifier}) + "\n")
    return identifier
