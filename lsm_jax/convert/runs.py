"""Write runs of imported parameters. They can be evaluated and started from; without optimizer state they
cannot be resumed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lsm_jax import programs
from lsm_jax.files import check_folder, disk_error, write_atomically
from lsm_jax.hub import reference_of
from lsm_jax.training import Checkpoints, TrainConfig
from lsm_jax.training.run_files import checkpoint_directory, write_config


def new_workdir(workdir: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the directory for a new run, after checking that no run is there and that files
    can be written there.

    Raises:
        ValueError: the directory contains a run, or cannot be made.
    """
    if not os.fspath(workdir):
        raise ValueError("workdir is empty; accepted is a new directory")
    target = Path(workdir).expanduser().absolute()
    if any(os.path.lexists(p) for p in (target / "config.json", checkpoint_directory(target))):
        raise ValueError(f"workdir={str(workdir)!r} contains a run; accepted is a new directory")
    try:
        check_folder(target)
    except ValueError as error:
        raise ValueError(f"workdir={str(workdir)!r}: {error}") from error
    return target


def name_of(source: Path) -> str:
    """Return the name of an imported model: that of its file or folder, or for a model of the Hugging Face hub that of its id
    or file."""
    found = reference_of(source)
    return source.resolve().name if found is None else (found.rest or found.id).rpartition("/")[2]


@contextlib.contextmanager
def new_run(workdir: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of the directory for a new run, as `new_workdir` returns it. If the block raises and the directory did
    not exist before, it is deleted, so that the import can be repeated."""
    target = new_workdir(workdir)
    existed = os.path.lexists(target)
    try:
        yield target
    except BaseException:
        if not existed:
            shutil.rmtree(target, ignore_errors=True)
        raise


def save_run(workdir: Path, config: TrainConfig, params: dict[str, Any], source: Path) -> None:
    """Create the run of an imported model: write its config to `workdir`, its parameters as the checkpoint of step 0, and
    source.json, which names the source: its path, or for a model of the Hugging Face hub its id with the commit."""
    write_config(workdir, config, {})
    found = reference_of(source)
    name = str(source.absolute()) if found is None else str(found)
    write_atomically(workdir / "source.json", json.dumps({"source": name}) + "\n")
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
        prog=programs.shown_name(f"python -m {program}"),
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
    except ValueError as error:
        print(f"{programs.shown_name(program)}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"{programs.shown_name(program)}: {disk_error(error, kept='no run was written')}",
            file=sys.stderr,
        )
        return 1
    print(
        f"wrote the run {config.name} to {parsed.workdir}; evaluate it with eval.py --workdir={parsed.workdir}"
    )
    return 0
