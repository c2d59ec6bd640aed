"""Find the files with documents at given paths: text, JSON, JSONL and parquet files, compressed ones, and data sets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from absl import logging

from lsm_jax.data.datasets_source import DataSet, data_set, unpacked_data_set
from lsm_jax.data.unpack import (
    COMPRESSED_SUFFIXES,
    PARQUET_SUFFIX,
    inner_name,
    is_packed,
    unpacked,
)

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
ARRAY_SUFFIX = ".json"
_skipped: set[str] = set()  # the warnings that were logged


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; an error of the disk inside the `with` block has the file's name."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files with documents at these paths. A folder stands for the files in it, in sorted order, whose names end
    as those of text, JSONL or parquet files, also compressed; a data set is one path, its name.

    Raises:
        ValueError: a path does not exist, a file is not text, or a folder has no such file.
    """
    files: list[Path] = []
    for given in paths:
        path = Path(given).expanduser().absolute()
        if not os.fspath(given):
            raise ValueError(
                "a data path is empty; accepted are files with text, folders and data sets"
            )
        if (found := data_set(given)) is not None:
            files.append(path if isinstance(found.where, Path) else Path(given))
        elif path.is_file():
            with opened(path) as file:
                if not is_packed(path) and b"\0" in file.read(4096):
                    raise ValueError(
                        f"{path} is not text; accepted are text, JSON, JSONL and parquet files, and .gz and .zst of text and "
                        "JSON"
                    )
            files.append(path)
        elif path.is_dir():
            files += _folder_files(path)
        else:
            raise ValueError(f"data path {str(given)!r} does not exist")
    return files


def _folder_files(path: Path) -> list[Path]:
    """Return the files with documents in a folder, and log once which others there are."""
    inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    readable = [p for p in inside if _is_readable(p)]
    if not readable:
        raise ValueError(
            f"{path} is neither a token store nor a folder with text: none of its {len(inside)} files ends in "
            f"{', '.join((*TEXT_SUFFIXES, *JSONL_SUFFIXES, PARQUET_SUFFIX))}, or in these and {' or '.join(COMPRESSED_SUFFIXES)}"
        )
    if len(readable) < len(inside):
        others = sorted({p.suffix or p.name for p in inside} - {p.suffix for p in readable})
        message = (
            f"{path}: {len(inside) - len(readable)} of {len(inside)} files are not read, since their names do not end as "
            f"text, JSONL or parquet does: {', '.join(others[:8])}"
        )
        if message not in _skipped:
            _skipped.add(message)
            logging.warning("%s", message)
    return readable


def _is_readable(path: Path) -> bool:
    """Return whether the name of a file in a folder is that of a file with documents. Names in .json are not, since most are
    of settings; those in .json.gz and .json.zst are."""
    suffix = Path(inner_name(path)).suffix.lower()
    if inner_name(path) != path.name:
        return suffix in (*TEXT_SUFFIXES, *JSONL_SUFFIXES, ARRAY_SUFFIX)
    return suffix in (*TEXT_SUFFIXES, *JSONL_SUFFIXES, PARQUET_SUFFIX)


def is_table(original: Path) -> bool:
    """Return whether a file or data set has rows in place of lines."""
    return original.suffix.lower() == PARQUET_SUFFIX or data_set(original) is not None


def plain_file(original: Path, columns: Sequence[str], cache: Path) -> Path:
    """Return the plain file with the documents of a file or data set: itself, or one in the cache."""
    found: DataSet | None = data_set(original)
    if found is not None:
        return unpacked_data_set(found, columns, cache)
    return unpacked(original, columns, cache) if is_packed(original) else original


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def is_jsonl(path: Path) -> bool:
    """Return whether the name of a file is that of a JSONL file."""
    return path.suffix.lower() in JSONL_SUFFIXES
