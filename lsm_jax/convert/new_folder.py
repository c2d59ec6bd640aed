"""Write an exported model's folder: all of its files and their checksums, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from lsm_jax.convert.checkpoint import Checkpoint
from lsm_jax.convert.checksums import SUMS, sha256_of, sums_text
from lsm_jax.files import MEGABYTE, check_folder, disk_error, inside, replacing, write_atomically

_COPY_BYTES = 256 * MEGABYTE  # of a file that is copied; the largest tokenizers have some 40 MB


class NewFolder:
    """A folder that an export fills. Files are written inside it alone, never through a link.

    Attributes:
        path: the folder.
        sums: the SHA-256 of each file that was written, by its name.
    """

    def __init__(self, path: Path):
        self.path = path
        self.sums: dict[str, str] = {}

    def _target(self, name: str) -> Path:
        path = inside(self.path, name, what="the export")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, data: bytes | str) -> None:
        """Write a file."""
        path = self._target(name)
        write_atomically(path, data)
        self.sums[name] = sha256_of(path)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a value as an indented JSON file."""
        self.write(name, json.dumps(value, indent=2) + "\n")

    def write_tensors(
        self, name: str, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None
    ) -> None:
        """Write a safetensors file."""
        path = self._target(name)
        try:
            with replacing(path) as draft:
                save_file(arrays, draft, metadata=metadata)
        except SafetensorError as error:  # what the package raises if the disk is full
            raise OSError(f"{path} cannot be written: {error}") from error
        self.sums[name] = sha256_of(path)

    def copy_from(
        self,
        source: Checkpoint,
        suffixes: tuple[str, ...],
        changed: dict[str, dict[str, Any]] | None = None,
        skipped: tuple[str, ...] = (),
    ) -> None:
        """Copy the files of a checkpoint's folder whose names end in one of `suffixes`.

        Args:
            source: the checkpoint. A link in its folder to a file outside is an error.
            suffixes: the ends of the names.
            changed: contents to write instead of a file's, by name.
            skipped: names of files that are not copied.
        """
        for path in sorted(source.folder.iterdir()):
            if path.suffix not in suffixes or path.name in skipped:
                continue
            if path.is_dir() and not path.is_symlink():
                continue
            if changed and path.name in changed:
                self.write_json(path.name, changed[path.name])
            else:
                self.write(path.name, source.read(path.name, _COPY_BYTES))


@contextlib.contextmanager
def new_folder(out: str | os.PathLike[str], argument: str) -> Iterator[NewFolder]:
    """Yield a new folder to write files into, and write their checksums (SHA256SUMS) at the end of the block. If
    the block raises, the files that it wrote are deleted.

    Args:
        out: the folder; it must be empty or not exist.
        argument: the caller's name of `out`, for error messages.

    Raises:
        ValueError: the folder is not empty.
        OSError: a file cannot be written; the message names the file.
    """
    path = Path(out).expanduser()
    check_new(path, argument)
    existed = path.is_dir()
    path.mkdir(parents=True, exist_ok=True)
    folder = NewFolder(path)
    try:
        yield folder
        write_atomically(path / SUMS, sums_text(folder.sums))
    except BaseException as error:
        _delete(folder, existed)
        if isinstance(error, OSError) and error.errno is not None:
            message = disk_error(
                error, error.filename or path, kept="nothing of the export is left"
            )
            raise OSError(message) from error
        raise


def check_new(path: Path, argument: str) -> None:
    """Raise ValueError unless a folder is empty, or does not exist and can be made."""
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{argument}={str(path)!r} is a link to nothing; accepted is a new folder")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{argument}={str(path)!r} is not empty; accepted is a new folder")
    try:
        check_folder(path.absolute())
    except ValueError as error:
        raise ValueError(f"{argument}={str(path)!r}: {error}") from error


def _delete(folder: NewFolder, existed: bool) -> None:
    """Delete the files that an export wrote, and the folder if it is then empty and did not exist before."""
    with contextlib.suppress(OSError):
        for name in [*folder.sums, SUMS]:
            (folder.path / name).unlink(missing_ok=True)
            parent = (folder.path / name).parent
            if parent != folder.path:
                with contextlib.suppress(OSError):
                    parent.rmdir()
        if not existed:
            folder.path.rmdir()
