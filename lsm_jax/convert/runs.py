"""Write runs of imported parameters. They can be evaluated and started from; without optimizer state they
cannot be resumed."""

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
    """Return the absolute path of the directory for a new run, after checking that no run is there.

    Raises:
        ValueError: the directory contains a run.
    """
    target = Path(workdir).expanduser().absolute()
    if (target / "config.json").exists() or checkpoint_directory(target).exists():
        raise ValueError(f"workdir={str(workdir)!r} contains a run; accepted is a new directory")
    return target


def save_run(workdir: Path, config: TrainConfig, params: dict[str, Any]) -> None:
    """Create the run of an imported model: write its config to `workdir`, and its parameters as the
    checkpoint of step 0."""
    write_config(workdir, config, {})
    checkpoints = Checkpoints(checkpoint_directory(workdir))
    checkpoints.save_params(0, params)
    checkpoints.close()


def command(
    program: str,
    description: str | None,
    source: str,
    make: Callable[..., TrainConfig],
    arguments: Sequence[str] | None,
    options: dict[str, str] | None = None,
) -> int:
    """Run the command line of a module that imports pretrained models as runs, and return its exit status.

    Args:
        program: name of the module that is run, for messages.
        description: the module's docstring, which --help shows.
        source: help text of the option --source.
        make: function of `source`, `workdir` and the further options that makes the run and returns its config.
        arguments: the command's arguments; None is the process's.
        options: help texts of further options, by name; `make` receives each as a keyword argument, None if it is absent.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", required=True, help=source)
    parser.add_argument("--workdir", required=True, help="directory of the new run")
    for name, help_ in (options or {}).items():
        parser.add_argument(f"--{name}", help=help_)
    parsed = parser.parse_args(arguments)
    try:
        config = make(**vars(parsed))
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    print(
        f"wrote the run {config.name} to {parsed.workdir}; evaluate it with eval.py --workdir={parsed.workdir}"
    )
    return 0
