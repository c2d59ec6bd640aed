"""A run of imported parameters: it can be evaluated and started from, not resumed, since there is no optimizer's state."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lsm_jax.training import Checkpoints, TrainConfig
from lsm_jax.training.runs import checkpoint_directory, write_config


def new_workdir(workdir: str | os.PathLike[str]) -> Path:
    """The directory of a run to be made.

    Raises:
        ValueError: there is a run in it.
    """
    target = Path(workdir).expanduser().absolute()
    if (target / "config.json").exists() or checkpoint_directory(target).exists():
        raise ValueError(f"workdir={str(workdir)!r} holds a run; accepted is a new directory")
    return target


def save_run(workdir: Path, config: TrainConfig, params: dict[str, Any]) -> None:
    """Write a run's config and its parameters, as those of step 0."""
    write_config(workdir, config, {})
    saved = Checkpoints(checkpoint_directory(workdir))
    saved.save_params(0, params)
    saved.close()


def command(
    program: str,
    about: str | None,
    source: str,
    make: Callable[..., TrainConfig],
    arguments: Sequence[str] | None,
    further: dict[str, str] | None = None,
) -> int:
    """The command line of an import; its exit status.

    Args:
        program: the module's name.
        about: its docstring.
        source: what --source is.
        make: (source, workdir) -> the run's config.
        arguments: of the command; None takes the process's.
        further: what other options are, by name; `make` takes each as a keyword, None where it is not given.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", required=True, help=source)
    parser.add_argument("--workdir", required=True, help="the run to make")
    for name, help_ in (further or {}).items():
        parser.add_argument(f"--{name}", help=help_)
    options = parser.parse_args(arguments)
    try:
        config = make(**vars(options))
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    print(f"{config.name} is in {options.workdir}: eval.py --workdir={options.workdir}")
    return 0
