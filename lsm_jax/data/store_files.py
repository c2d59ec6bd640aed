"""Check the files of a token store: its metadata, and that each chunk file exists, has its size and its checksum.

A store that was written here has a file `checksums.json`: the CRC-32 of `.zarray`, `.zattrs` and every chunk file as it is
on the disk, and the largest token id. Stores without it, such as the published LongCrawl64, are read too; damage that
decodes is then not noticed.
"""

from __future__ import annotations

import bz2
import dataclasses
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from lsm_jax.data.instructions import short_text
from lsm_jax.files import (
    bounded_json,
    inside,
    parse_json,
    read_bytes,
    reason,
    write_atomically,
)

CHECKSUMS = "checksums.json"
METADATA_FILES = (".zarray", ".zattrs")
COMPRESSORS = ("blosc", "zlib", "gzip", "bz2", "zstd")
MAX_CHUNK_BYTES = 1 << 28  # of a decoded chunk; the published store's chunks have 2^23
_CHECKED_AT_OPEN = 1024  # number of chunk files whose size is checked when a store is opened, about
_stores_without_checksums: set[Path] = set()  # named in the log


@dataclasses.dataclass(frozen=True)
class StoreMetadata:
    """The metadata of a token store from its `.zarray`, after checking.

    Attributes:
        shape: (documents, tokens of each).
        chunks: (documents, tokens of each) in one chunk file.
        dtype: the integer type of the stored token ids.
        compressor: name of the compressor; None stores the ids as they are in memory.
        separator: the character between the two numbers of a chunk file's name.
    """

    shape: tuple[int, int]
    chunks: tuple[int, int]
    dtype: np.dtype
    compressor: str | None
    separator: str

    @property
    def chunk_bytes(self) -> int:
        """The size in bytes of one chunk after decoding."""
        return self.chunks[0] * self.chunks[1] * self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, int]:
        """The number of chunks along documents and along tokens."""
        return -(-self.shape[0] // self.chunks[0]), -(-self.shape[1] // self.chunks[1])

    def chunk_name(self, row: int, column: int) -> str:
        """Return the name of a chunk's file relative to the store, such as "0.1"."""
        return f"{row}{self.separator}{column}"


def read_metadata(path: Path) -> StoreMetadata:
    """Read and check a store's `.zarray`.

    Raises:
        ValueError: the folder is no token store, or a field of `.zarray` is not accepted; the message names it.
    """
    if not path.is_dir():
        raise ValueError(f"token store {str(path)!r} is not a folder")
    if not (path / ".zarray").is_file():
        inner = sorted(p.name for p in path.iterdir() if p.is_dir())[:5]
        if (path / "zarr.json").exists():
            problem = "it is zarr v3; a token store is a zarr v2 array (see lsm_jax.data.tokenize)"
        elif (path / ".zgroup").exists():
            problem = f"it is a zarr group; give the path of an array inside it: {inner}"
        else:
            problem = "it has no .zarray file"
        raise ValueError(f"{path} is not a token store: {problem}")
    fields = parse_json(_metadata_bytes(path, ".zarray"), path / ".zarray")
    shape, chunks = fields.get("shape"), fields.get("chunks")
    if fields.get("zarr_format") != 2 or not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(
            f"{path} is not a token store: it has zarr_format={short_text(fields.get('zarr_format'), 80)}, "
            f"shape={short_text(shape, 80)}; a token store is a zarr v2 array [documents, length]"
        )
    if not all(type(n) is int for n in shape):
        raise ValueError(
            f"{path}/.zarray has shape={short_text(shape, 80)}; accepted are two integers"
        )
    two_integers = (
        isinstance(chunks, list) and len(chunks) == 2 and all(type(n) is int for n in chunks)
    )
    if not two_integers or min(chunks) < 1:
        raise ValueError(
            f"{path}/.zarray has chunks={short_text(chunks, 80)}; accepted are two positive integers"
        )
    if min(shape) < 1:
        raise ValueError(f"{path} is empty: its shape is {short_text(shape, 80)}")
    dtype = _integer_type(fields.get("dtype"))
    if dtype is None:
        raise ValueError(
            f"{path}/.zarray has dtype={short_text(fields.get('dtype'), 80)}; accepted are integers, such as '<u2'"
        )
    compressor = fields.get("compressor")
    name = compressor.get("id") if isinstance(compressor, dict) else compressor
    if name is not None and name not in COMPRESSORS:
        raise ValueError(
            f"{path}/.zarray has compressor={short_text(compressor, 80)}; accepted are null and an object "
            f'with an "id" of {", ".join(COMPRESSORS)}'
        )
    separator = fields.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise ValueError(
            f"{path}/.zarray has dimension_separator={short_text(separator, 80)}; accepted are '.' and '/'"
        )
    metadata = StoreMetadata(
        (shape[0], shape[1]), (chunks[0], chunks[1]), dtype, name, str(separator)
    )
    if metadata.chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(
            f"{path}/.zarray has chunks={short_text(chunks, 80)} of dtype {dtype.str!r}, which are {metadata.chunk_bytes} bytes a chunk; "
            f"accepted are at most {MAX_CHUNK_BYTES}"
        )
    return metadata


def read_attributes(path: Path) -> dict[str, Any]:
    """Read a store's `.zattrs`; {} if it has none.

    Raises:
        ValueError: the file is no JSON object.
    """
    if not (path / ".zattrs").exists():
        return {}
    return parse_json(_metadata_bytes(path, ".zattrs"), path / ".zattrs")


def _metadata_bytes(path: Path, name: str) -> bytes:
    if (path / name).is_symlink():
        inside(path, name, what="the token store", follow_links=True)
    return read_bytes(path / name, max_bytes=1 << 20)


def _integer_type(name: Any) -> np.dtype | None:
    """Return the integer type of a `.zarray`'s field dtype; None if it is no integer type."""
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        return None
    return dtype if dtype is not None and dtype.kind in "iu" else None


class ChunkFiles:
    """The chunk files of a token store. Each is checked when it is read for the first time, and again if its
    size or modification time has changed.

    Attributes:
        largest_token_id: the largest token id of the store, from `checksums.json`; None if the store has none.
    """

    def __init__(self, path: Path, metadata: StoreMetadata, *, compare_checksums: bool = True):
        """Check that all chunk files of a store exist, and the sizes of up to about 1,024 of them.

        Raises:
            ValueError: a chunk file is missing, is a link that leads out of the store or has a wrong size, or
                `checksums.json` cannot be read or does not match the metadata.
        """
        self._path, self._metadata = path, metadata
        self._checked: dict[tuple[int, int], tuple[int, int, int]] = {}
        names = self._existing()
        self._checksums: dict[str, str] | None = None
        self.largest_token_id: int | None = None
        if compare_checksums:
            self._read_checksums(len(names))
        # Check sizes now, so that no run begins on an incomplete copy. Of very many files only some are checked here, and
        # the others when they are read.
        for name in names[:: -(-len(names) // _CHECKED_AT_OPEN)]:
            self._check_size(name, os.stat(path / name))

    @property
    def has_checksums(self) -> bool:
        """Whether the store has a `checksums.json`."""
        return self._checksums is not None

    @property
    def count(self) -> int:
        """The number of the store's chunk files."""
        return self._metadata.grid[0] * self._metadata.grid[1]

    def check(self, rows: range, columns: range) -> None:
        """Check the chunk files that contain a range of documents (numbers) and a range of their tokens.

        Raises:
            ValueError: a chunk file is missing or does not match its size or checksum; the message names it.
        """
        chunks = self._metadata.chunks
        for row in range(rows.start // chunks[0], (rows.stop - 1) // chunks[0] + 1):
            for column in range(columns.start // chunks[1], (columns.stop - 1) // chunks[1] + 1):
                self._check_chunk(row, column)

    def _check_chunk(self, row: int, column: int) -> None:
        name = self._metadata.chunk_name(row, column)
        try:
            status = os.stat(f"{self._path}/{name}")
        except OSError as error:
            raise ValueError(
                f"{self._path}: chunk file {name} cannot be read: {reason(error)}; copy it again"
            ) from error
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self._checked.get((row, column)) == version:
            return
        self._check_size(name, status)
        if self._checksums is not None:
            data = read_bytes(self._path / name, max_bytes=status.st_size)
            self._compare(name, data, "chunk file ")
        if self._metadata.compressor not in (None, "blosc"):
            self._check_decoded_size(name)
        self._checked[row, column] = version

    def _existing(self) -> list[str]:
        """Return the names of all chunk files, in the order of the grid.

        Raises:
            ValueError: one is missing, or is a link that leads out of the store.
        """
        grid, path = self._metadata.grid, self._path
        total, found, outside = grid[0] * grid[1], set(), 0
        for row, column, is_link in _numbered_files(path, self._metadata.separator):
            if row >= grid[0] or column >= grid[1]:
                outside += 1
                continue
            if is_link:
                name = self._metadata.chunk_name(row, column)
                inside(path, name, what="the token store", follow_links=True)
            found.add((row, column))
        described = (
            f".zarray has shape={list(self._metadata.shape)} and chunks={list(self._metadata.chunks)}, which are "
            f"{total} chunk files"
        )
        if not found:
            raise ValueError(f"{path} is empty: it has none of its {total} chunk files")
        if len(found) < total:
            places = ((row, column) for row in range(grid[0]) for column in range(grid[1]))
            missing = next(place for place in places if place not in found)
            raise ValueError(
                f"{path}: chunk file {self._metadata.chunk_name(*missing)} is missing: {described}, and {len(found)} exist; "
                "copy the store again"
            )
        if outside:
            logging.warning(
                "%s: %d chunk files are not read, since they are outside the array: %s.",
                path,
                outside,
                described,
            )
        return [self._metadata.chunk_name(*place) for place in sorted(found)]

    def _check_size(self, name: str, status: os.stat_result) -> None:
        """Raise ValueError if a chunk file has another size than its metadata, or its own header, say."""
        size, decoded, header = status.st_size, self._metadata.chunk_bytes, b""
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self._path}: chunk file {name} is no regular file")
        expected = max(size, 1)
        if self._metadata.compressor is None:
            expected = decoded
        elif self._metadata.compressor == "blosc":
            with open(self._path / name, "rb") as file:
                header = file.read(16)
            expected = int.from_bytes(header[12:16], "little") if len(header) == 16 else 16
        if size != expected:
            raise ValueError(
                f"{self._path}: chunk file {name} is truncated or corrupt: it has {size} bytes "
                f"of {expected}; copy it again"
            )
        if self._metadata.compressor == "blosc":
            self._check_decoded(name, int.from_bytes(header[4:8], "little"))

    def _check_decoded(self, name: str, size: int | None) -> None:
        """Raise ValueError if a chunk is not decoded to the size that `.zarray` says; None is a larger size."""
        if size != self._metadata.chunk_bytes:
            actual = "more bytes" if size is None else f"{size} bytes"
            raise ValueError(
                f"{self._path}: chunk file {name} is truncated or corrupt, or .zarray is wrong: it decodes to {actual}, but "
                f"chunks={list(self._metadata.chunks)} of dtype {self._metadata.dtype.str!r} "
                f"are {self._metadata.chunk_bytes} bytes"
            )

    def _check_decoded_size(self, name: str) -> None:
        """Raise ValueError if a chunk of a compressor other than blosc is not decoded to its size. At most that
        size is decoded."""
        data = read_bytes(self._path / name, max_bytes=2 * self._metadata.chunk_bytes + 1024)
        if self._metadata.compressor == "zstd":
            return self._check_decoded(name, _zstd_content_size(data))
        try:
            decoded = _decode(data, self._metadata.compressor, self._metadata.chunk_bytes + 1)
        except (zlib.error, OSError, ValueError, EOFError) as error:
            raise ValueError(
                f"{self._path}: chunk file {name} is truncated or corrupt; copy it again ({error})"
            ) from error
        self._check_decoded(name, decoded if decoded <= self._metadata.chunk_bytes else None)

    def _read_checksums(self, num_chunks: int) -> None:
        """Read `checksums.json`, if the store has it, and compare the metadata with it."""
        path = self._path / CHECKSUMS
        if not path.exists() and not path.is_symlink():
            if self._path not in _stores_without_checksums:
                _stores_without_checksums.add(self._path)
                logging.info(
                    "%s has no %s: changed token ids are not noticed. `python -m lsm_jax.data.checksums %s` writes it.",
                    self._path,
                    CHECKSUMS,
                    self._path,
                )
            return
        if path.is_symlink():
            inside(self._path, CHECKSUMS, what="the token store", follow_links=True)
        content = bounded_json(path, max_bytes=(1 << 16) + 64 * num_chunks)
        files, largest = content.get("files"), content.get("largest_token_id")
        if content.get("algorithm") != "crc32":
            raise ValueError(
                f"{path} has algorithm={short_text(content.get('algorithm'), 80)}; accepted is 'crc32'"
            )
        if not isinstance(files, dict) or not all(
            isinstance(v, str) and re.fullmatch("[0-9a-f]{8}", v) for v in files.values()
        ):
            raise ValueError(f"{path} has no object 'files' of checksums of 8 hexadecimal digits")
        if largest is not None and type(largest) is not int:
            raise ValueError(
                f"{path} has largest_token_id={short_text(largest, 80)}; accepted is an integer"
            )
        self._checksums, self.largest_token_id = files, largest
        for name in METADATA_FILES:
            if name in files or (self._path / name).exists():
                self._compare(name, _metadata_bytes(self._path, name))

    def _compare(self, name: str, data: bytes, kind: str = "") -> None:
        """Raise ValueError unless a file's contents have the checksum in `checksums.json`."""
        assert self._checksums is not None
        expected, actual = self._checksums.get(name), checksum(data)
        if expected is None:
            raise ValueError(f"{self._path}/{CHECKSUMS} has no checksum of {kind}{name}")
        if actual != expected:
            raise ValueError(
                f"{self._path}: {kind}{name} does not match {CHECKSUMS}: its CRC-32 is {actual} instead of {expected}; copy it again, "
                f"or, if it was changed on purpose, write new checksums: python -m lsm_jax.data.checksums {self._path}"
            )


def checksum(data: bytes) -> str:
    """Return the CRC-32 of a file's contents as 8 hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def write_checksums(
    path: Path, chunks: dict[str, str], *, largest_token_id: int | None = None
) -> None:
    """Write `checksums.json` of a store: the checksums of its chunk files by name, and those of its metadata."""
    metadata = {
        name: checksum((path / name).read_bytes())
        for name in METADATA_FILES
        if (path / name).exists()
    }
    content: dict[str, Any] = {"algorithm": "crc32"}
    if largest_token_id is not None:
        content["largest_token_id"] = largest_token_id
    content["files"] = metadata | chunks
    write_atomically(path / CHECKSUMS, json.dumps(content))


def _numbered_files(path: Path, separator: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (row, column, whether its path has a link) for each chunk file in a store's folder."""
    if separator == ".":
        for entry in os.scandir(path):
            if match := re.fullmatch(r"(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})", entry.name):
                yield int(match[1]), int(match[2]), entry.is_symlink()
        return
    number = re.compile("0|[1-9][0-9]{0,17}")
    for folder in os.scandir(path):
        if number.fullmatch(folder.name) and folder.is_dir():
            for entry in os.scandir(folder.path):
                if number.fullmatch(entry.name):
                    is_link = folder.is_symlink() or entry.is_symlink()
                    yield int(folder.name), int(entry.name), is_link


def _decode(data: bytes, compressor: str | None, limit: int) -> int:
    """Return the number of bytes to which zlib, gzip or bz2 data decode, or `limit` if they are more."""
    decoder: Any = (
        bz2.BZ2Decompressor()
        if compressor == "bz2"
        else zlib.decompressobj(zlib.MAX_WBITS | 32)  # zlib or gzip
    )
    size = len(decoder.decompress(data, limit))
    if not decoder.eof and size < limit:
        raise ValueError("the compressed data end too early")
    return size


def _zstd_content_size(data: bytes) -> int | None:
    """Return the decoded size that the header of a zstd frame (RFC 8878, 3.1.1.1) says; None if it says none."""
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 18:
        return None
    descriptor = data[4]
    single_segment, size_code = descriptor >> 5 & 1, descriptor >> 6
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    length = (single_segment, 2, 4, 8)[size_code]
    size = int.from_bytes(data[start : start + length], "little") + (256 if length == 2 else 0)
    return size if length else None
