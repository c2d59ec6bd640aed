"""Write files of results: each is replaced at once, so that a reader never sees part of one, and never through
a link."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.files import MEGABYTE, inside, reason, replacing, write_atomically

_PROBE_BYTES = MEGABYTE


class UnwrittenResults(OSError):
    """The results of a task were computed, but could not be written.

    Attributes:
        results: the results.
    """

    def __init__(self, error: OSError, results: Any):
        super().__init__(error.errno, error.strerror, error.filename)
        self.results = results


@contextlib.contextmanager
def writing(results: Any) -> Iterator[None]:
    """Raise UnwrittenResults, which has the results, instead of an OSError in a `with` block that writes them."""
    try:
        yield
    except OSError as error:
        raise UnwrittenResults(error, results) from error


def output_folder(workdir: str | os.PathLike[str], name: str) -> Path:
    """Return the path workdir/eval/NAME of a folder of results, after checking that it is inside the run's
    directory and goes through no link below it.

    Raises:
        ValueError: `name` is absolute or contains "..", or a part of the path is a link or a file.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
        raise ValueError(
            f"output={name!r} is not inside {Path(workdir) / 'eval'}; accepted is the name of a folder in it"
        )
    inside(workdir, f"eval/{name}", what=f"output={name!r}")
    folder = Path(workdir) / "eval" / name
    for part in (folder, *folder.parents):
        if part.exists():
            if not part.is_dir():
                raise ValueError(f"output={name!r}: {part} is a file; accepted is a folder")
            break
    return folder


def check_writable(folder: Path) -> None:
    """Check that files can be written to a folder: write 1 MiB to it, or to the folder in which it would be
    made, and delete it.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    existing = next(part for part in (folder, *folder.parents) if part.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".probe-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, reason(error), str(existing)) from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as an indented JSON file; the file is replaced at once, never in part."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` as a file of JSON lines, one per row; a value that JSON does not have is written as
    text. The file is replaced at once."""
    lines = (json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write `text` as a file in UTF-8; the file is replaced at once, never in part."""
    with _named(path):
        write_atomically(path, text)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write the dict `arrays` as a compressed NPZ file of arrays by name; the file is replaced at once,
    never in part."""
    with _named(path), replacing(path) as draft, open(draft, "wb") as file:
        np.savez_compressed(file, **arrays)


def write_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure as a PNG file, which is replaced at once, never in part."""
    with _named(path), replacing(path) as draft:
        figure.savefig(draft, format="png")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise an OSError of a `with` block with the path of the result instead of its draft's."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
