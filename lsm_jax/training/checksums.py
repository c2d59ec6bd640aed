"""Write and compare checksums of a checkpoint's files, which detect bits that the storage changed."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lsm_jax.files import bounded_json, write_atomically

_READ_BYTES = 1 << 20


def crc32(path: Path) -> int:
    """Return the CRC-32 checksum of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def write_checksums(path: Path, folder: Path) -> None:
    """Write the CRC-32 checksums of all files in the checkpoint `folder` to the JSON file `path`: an object
    of checksums by the file's path relative to `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    values = {p.relative_to(folder).as_posix(): crc32(p) for p in files}
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(values))


def read_checksums(path: Path) -> dict[str, int]:
    """Return the checksums in the file `path` by the name of their file; empty if `path` does not exist, because a kill
    came before it was written.

    Raises:
        ValueError: the file is not what `write_checksums` writes.
    """
    if not path.exists():
        return {}
    try:
        values = bounded_json(path, max_bytes=1 << 30)
        for name, value in values.items():
            if not isinstance(value, int) or ".." in Path(name).parts or Path(name).is_absolute():
                raise ValueError(f"{path} has the entry {name!r}: {value!r}"[:300])
    except ValueError as error:
        if not path.exists():  # deleted in the meantime
            return {}
        raise ValueError(
            f"its checksums are damaged ({error}); delete the file to read the checkpoint without them"
        ) from error
    return values


def check_files(path: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Compare the content of a checkpoint's files with the checksums that were written when it was saved;
    only the files that `wanted` selects are read.

    If `path` does not exist, because a kill came before it was written, nothing is compared.

    Args:
        path: the JSON file of the checksums.
        folder: the folder of the checkpoint.
        wanted: function from a file's path relative to `folder` to whether the file is read.

    Raises:
        ValueError: a file differs or is missing, or the checksums are damaged; the message names the file.
    """
    values = read_checksums(path)
    names = [name for name in values if wanted(name)]

    def problem(name: str) -> str | None:
        file = folder / name
        if not file.is_file():
            return f"its file {name} is gone"
        return None if crc32(file) == values[name] else f"its file {name} is not what was saved"

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        problems = [error for error in pool.map(problem, names) if error]
    if problems:
        raise ValueError("; ".join(problems[:3]))
