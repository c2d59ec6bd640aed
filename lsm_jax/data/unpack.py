"""Write files that have no documents at known offsets (compressed, parquet, data sets of the package `datasets`) as plain
text or JSONL files in a cache folder, once, so that their documents can be read in any order.

A file in the cache has its name only when it is complete. Its folder is named by the original's path, size and time, so
that a changed original is written anew; the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from absl import logging

from lsm_jax.data.instructions import short_text
from lsm_jax.files import replacing

PARQUET_SUFFIX = ".parquet"
COMPRESSED_SUFFIXES = (".gz", ".zst")
_CHUNK_BYTES = 1 << 20
_BATCH_ROWS = 1024  # rows of a parquet file that are decoded together
COLUMNS = {"alpaca": ("instruction", "input", "output")}
OPTIONAL = ("input",)


def inner_name(path: Path) -> str:
    """Return the name of a file without .gz or .zst."""
    return path.stem if path.suffix.lower() in COMPRESSED_SUFFIXES else path.name


def is_packed(path: Path) -> bool:
    """Return whether a file must be unpacked before its documents can be read."""
    return path.suffix.lower() in (PARQUET_SUFFIX, *COMPRESSED_SUFFIXES)


def cache_root(cache_dir: str) -> Path:
    """Return the folder for files that can be made again: the given one, or lsm_jax in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache_dir or f"{cache}/lsm_jax").expanduser().absolute()


def columns_of(text_key: str, format: str) -> tuple[str, ...]:
    """Return the fields of a document that are read; see `DataConfig.format`."""
    return COLUMNS.get(format, (text_key,))


def unpacked(path: Path, columns: Sequence[str], cache: Path) -> Path:
    """Return the plain file with the documents of a compressed file or parquet file; the first call writes it.

    Args:
        path: the file.
        columns: the fields of a document that are kept of a parquet file.
        cache: the folder for plain files.

    Raises:
        ValueError: the file is damaged, or lacks a column; the message names the file, and the row where there is one. Or a
            package is missing that its format requires.
    """
    status, parquet = path.stat(), path.suffix.lower() == PARQUET_SUFFIX
    identity = [str(path.absolute()), status.st_size, status.st_mtime_ns, parquet and list(columns)]
    if parquet:
        name, write = f"{path.stem}.jsonl", lambda file: _write_parquet(path, columns, file)
    else:
        name, write = _plain_name(path), lambda file: _write_plain(path, file)
    return written_once(cache, identity, name, write, path)


def written_once(
    cache: Path, identity: Any, name: str, write: Callable[[BinaryIO], None], what: object
) -> Path:
    """Return the path of a file in the cache, which `write` writes if it is not there.

    Args:
        cache: the folder for plain files.
        identity: a JSON value that differs for different contents.
        name: the file's name.
        write: function that writes the contents to an open file.
        what: the original, for the log.
    """
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    target = cache / "unpacked" / key / name
    if not target.exists():
        logging.info("%s: writing its documents to %s.", what, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(target) as draft, draft.open("wb") as file:
                write(file)
        except BaseException:
            with contextlib.suppress(OSError):
                target.parent.rmdir()
            raise
    return target


def _plain_name(path: Path) -> str:
    """Return the name of the plain file of a compressed file. `.json.gz` may have an array or, as usual for language-model
    data, JSON lines, which the first character tells."""
    name = inner_name(path)
    if not name.lower().endswith(".json"):
        return name
    start = b""
    for chunk in decompressed(path):
        start = chunk.lstrip()
        if start:
            break
    return name if start.startswith(b"[") else f"{name}l"


def decompressed(path: Path) -> Iterator[bytes]:
    """Yield the contents of a .gz or .zst file in parts.

    Raises:
        ValueError: the file is truncated or damaged, or a package is missing.
    """
    size = 0
    try:
        with open(path, "rb") as raw:
            if path.suffix.lower() == ".gz":
                file: Any = gzip.GzipFile(fileobj=raw)
            else:
                file = require_pyarrow(path).CompressedInputStream(raw, "zstd")
            with file:
                while chunk := file.read(_CHUNK_BYTES):
                    size += len(chunk)
                    yield chunk
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path} is truncated or damaged after {size} bytes of its contents; copy it again ({short_text(error, 200)})"
        ) from error


def _write_plain(path: Path, file: BinaryIO) -> None:
    for chunk in decompressed(path):
        file.write(chunk)


def require_pyarrow(what: object) -> Any:
    """Return the module pyarrow.

    Raises:
        ValueError: it is not installed; the message names the extra.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{what} requires pyarrow, of the extra [data]: pip install 'lsm_jax[data]'"
        ) from error
    return pyarrow


def _write_parquet(path: Path, columns: Sequence[str], file: BinaryIO) -> None:
    """Write the rows of a parquet file as lines of JSON."""
    pyarrow = require_pyarrow(path)
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no parquet file, or is damaged: {_short(error)}") from error
    with table:
        names = table.schema_arrow.names
        check_columns(names, columns, path)
        read = [name for name in columns if name in names]
        row = 0
        for group in range(table.num_row_groups):
            try:
                for batch in table.iter_batches(
                    _BATCH_ROWS, row_groups=[group], columns=read, use_threads=False
                ):
                    write_rows(_rows(batch, path, row), columns, path, file, first=row)
                    row += batch.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(
                    f"{path}, row group {group}, after row {row - 1}, is damaged: {_short(error)}"
                ) from error


def _rows(batch: Any, path: Path, first: int) -> Iterable[dict[str, Any]]:
    """Return the rows of a record batch as dicts; ValueError names the first row whose text is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, row {first + i}, has text that is not UTF-8") from error
        raise


def check_columns(names: Sequence[str], columns: Sequence[str], where: object) -> None:
    """Raise ValueError if a table lacks a column that is read.

    Args:
        names: the columns of the table.
        columns: the columns to read.
        where: the table, for the message.
    """
    missing = [name for name in columns if name not in names and name not in OPTIONAL]
    if missing:
        raise ValueError(
            f"{where} has no column {missing[0]!r}; its columns are {short_text(list(names), 200)} (data.text_key names the "
            "one with the text)"
        )


def write_rows(
    rows: Iterable[dict[str, Any]],
    columns: Sequence[str],
    where: object,
    file: BinaryIO,
    *,
    first: int = 0,
) -> None:
    """Write rows as lines of JSON, with the given columns.

    Args:
        rows: the rows, dicts.
        columns: the columns to write.
        where: the table, for error messages.
        file: the open file.
        first: the number of the first row, from 0.

    Raises:
        ValueError: a column is missing in a row or contains no string; the message names the row.
    """
    for number, row in enumerate(rows, first):
        fields = {name: row[name] for name in columns if name in row}
        for name in columns:
            if name in OPTIONAL and fields.get(name) is None:
                fields.pop(name, None)
            elif not isinstance(fields.get(name), str):
                if name not in fields:
                    check_columns(list(row), columns, f"{where}, row {number},")
                raise ValueError(
                    f"{where}, row {number}, has {name!r}={short_text(fields[name], 80)}; accepted is a string"
                )
        file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")


def _short(error: BaseException) -> str:
    return short_text(error, 200)
