"""Read token stores in LongCrawl64's format: a zarr v2 array [documents, length] of integers.

LongCrawl64 as published (manifestai.com/articles/longcrawl64) has dtype `<u2`, chunks of 2048 x 2048, blosc lz4, fill
value 0, and `.zattrs` = {"encoder": "tiktoken-gpt2"}. Stores with another shape, chunks, integer type or compressor can be
read too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from absl import logging

from lsm_jax.data.tokenizers import Tokenizer

_CHECKED_AT_OPEN = 1024  # number of chunk files whose size is checked, about


class TokenStore:
    """A store of tokenized documents in LongCrawl64's format, opened for reading and checked.

    Attributes:
        path: the folder of the store's zarr array.
        num_documents: number of documents, the array's rows.
        length: number of tokens in each document.
        chunks: (documents, tokens of each) in one chunk file.
        attributes: the contents of `.zattrs`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cached_blocks: int = 2,
        block_length: int = 1,
    ):
        """Open a token store for reading, and check its files.

        Args:
            path: the folder of the store's zarr array.
            cached_blocks: size of the cache of decoded chunk files, as a number of blocks; a block is
                `block_length` tokens of each of the documents that share a chunk file.
            block_length: number of tokens that are read of a document at a time.

        Raises:
            ValueError: the folder is no token store, the store is empty, or a chunk file is truncated.
        """
        self.path = Path(path).expanduser().absolute()
        metadata = _read_metadata(self.path)
        self.num_documents, self.length = metadata["shape"]
        self.chunks: tuple[int, int] = tuple(metadata["chunks"])
        self.attributes: dict[str, Any] = _read_json(self.path / ".zattrs", missing={})
        self._check_chunk_files(metadata)
        columns = self.chunks[1]
        across = -(-block_length // columns) + (
            columns % block_length > 0 and block_length % columns > 0
        )
        cache_bytes = cached_blocks * across * _chunk_bytes(metadata)
        try:
            self._array = ts.open(
                {
                    "driver": "zarr",
                    "kvstore": {"driver": "file", "path": str(self.path)},
                    "recheck_cached_data": False,
                    "recheck_cached_metadata": False,
                },
                read=True,
                context=ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}}),
            ).result()
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be opened as a token store: {error}") from error

    def read(self, rows: Any, starts: Any, length: int, *, vocab_size: int) -> np.ndarray:
        """Read a range of `length` tokens from each of n documents of the store.

        Args:
            rows: numbers of the documents to read, [n], or one number for all.
            starts: the first token to read of each document, [n], or one number for all.
            length: number of tokens to read of each document.
            vocab_size: number of ids in the model's vocabulary; a token id that is not below it is an error.

        Returns:
            The token ids, int32 [n, length].

        Raises:
            ValueError: a chunk cannot be decoded (the message names its file), or a token id is outside the vocabulary
                (the message names the document and column).
        """
        rows, starts = np.broadcast_arrays(np.atleast_1d(rows), np.atleast_1d(starts))
        # Consecutive documents are one read.
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(starts) != 0)) + 1
        reads = []
        for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            row, start = int(rows[first]), int(starts[first])
            reads.append(self._array[row : row + (last - first), start : start + length].read())
        try:
            parts = [read.result() for read in reads]
        except ValueError as error:
            raise ValueError(
                f"{self.path}: a chunk is truncated or corrupt; copy it again. {error}"
            ) from error
        block = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if block.size and (block.max() >= vocab_size or block.min() < 0):
            row, column = np.argwhere((block >= vocab_size) | (block < 0))[0]
            raise ValueError(
                f"{self.path}: document {rows[row]}, column {starts[row] + column} has token id {block[row, column]}, "
                f"which is outside the vocabulary of {vocab_size}; check the tokenizer and the model's vocab_size"
            )
        return block.astype(np.int32)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check by the store's `.zattrs` that its tokens were written with this tokenizer.

        Raises:
            ValueError: the store was written with another tokenizer, or with another choice of JSON-escaping.
        """
        encoder = self.attributes.get("encoder")
        if encoder is None:
            logging.warning(
                "%s names no encoder in .zattrs; its ids are read as those of tokenizer %r.",
                self.path,
                tokenizer.name,
            )
        elif encoder != tokenizer.name:
            raise ValueError(
                f"{self.path} was written with encoder {encoder!r}, but the tokenizer is "
                f"{tokenizer.name!r}; set data.tokenizer to the store's"
            )
        escaped = self.attributes.get("json_escape")
        if escaped is not None and bool(escaped) != tokenizer.json_escape:
            raise ValueError(
                f"{self.path} was written with json_escape={bool(escaped)}, but data.json_escape="
                f"{tokenizer.json_escape}; set data.json_escape={bool(escaped)}"
            )

    def _check_chunk_files(self, metadata: dict[str, Any]) -> None:
        separator = metadata.get("dimension_separator", ".")
        files = sorted(_chunk_files(self.path, separator))
        grid = [-(-n // c) for n, c in zip(metadata["shape"], self.chunks, strict=True)]
        total = grid[0] * grid[1]
        if not files:
            raise ValueError(f"{self.path} is empty: it has none of its {total} chunk files")
        if len(files) < total:
            logging.warning(
                "%s: %d of %d chunks have no file; all their tokens are read as %s.",
                self.path,
                total - len(files),
                total,
                metadata.get("fill_value"),
            )
        compressor = metadata.get("compressor")
        raw = _chunk_bytes(metadata)
        # Check sizes now, so that no run begins on an incomplete copy. Of very many files only some are checked here, and
        # the others when they are read.
        for name in files[:: -(-len(files) // _CHECKED_AT_OPEN)]:
            size = os.path.getsize(self.path / name)
            if compressor is None:
                expected = raw
            elif compressor.get("id") == "blosc":
                with open(self.path / name, "rb") as file:
                    header = file.read(16)
                expected = int.from_bytes(header[12:16], "little") if len(header) == 16 else 16
            else:
                expected = max(size, 1)
            if size != expected:
                raise ValueError(
                    f"{self.path}: chunk file {name} is truncated or corrupt: it has {size} bytes "
                    f"of {expected}; copy it again"
                )


def is_store(path: Path) -> bool:
    """Return whether the path is a token store: a folder with zarr metadata, or with a name that ends in
    .zarr."""
    return path.is_dir() and (
        path.suffix == ".zarr"
        or any((path / name).exists() for name in (".zarray", ".zgroup", "zarr.json"))
    )


def _read_metadata(path: Path) -> dict[str, Any]:
    """Return the contents of a store's .zarray, after checking that it describes a token store."""
    if not path.is_dir():
        raise ValueError(f"token store {str(path)!r} is not a folder")
    if not (path / ".zarray").is_file():
        inside = sorted(p.name for p in path.iterdir() if p.is_dir())[:5]
        if (path / "zarr.json").exists():
            problem = "it is zarr v3; a token store is a zarr v2 array (see lsm_jax.data.tokenize)"
        elif (path / ".zgroup").exists():
            problem = f"it is a zarr group; give the path of an array inside it: {inside}"
        else:
            problem = "it has no .zarray file"
        raise ValueError(f"{path} is not a token store: {problem}")
    metadata = _read_json(path / ".zarray")
    shape, chunks = metadata.get("shape"), metadata.get("chunks")
    if metadata.get("zarr_format") != 2 or not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(
            f"{path} is not a token store: it has zarr_format={metadata.get('zarr_format')}, "
            f"shape={shape}; a token store is a zarr v2 array [documents, length]"
        )
    if not all(type(n) is int for n in shape):
        raise ValueError(f"{path}/.zarray has shape={shape}; accepted are two integers")
    two_integers = (
        isinstance(chunks, list) and len(chunks) == 2 and all(type(n) is int for n in chunks)
    )
    if not two_integers or min(chunks) < 1:
        raise ValueError(f"{path}/.zarray has chunks={chunks}; accepted are two positive integers")
    if min(shape) < 1:
        raise ValueError(f"{path} is empty: its shape is {shape}")
    try:
        integers = np.dtype(metadata.get("dtype")).kind in "iu"
    except TypeError:
        integers = False
    if not integers:
        raise ValueError(
            f"{path}/.zarray has dtype={metadata.get('dtype')!r}; accepted are integers, such as '<u2'"
        )
    return metadata


def _chunk_bytes(metadata: dict[str, Any]) -> int:
    """Return the size in bytes of one of a store's chunk files after decoding, from the contents of its
    .zarray."""
    rows, columns = metadata["chunks"]
    return rows * columns * np.dtype(metadata["dtype"]).itemsize


def _read_json(path: Path, missing: Any = None) -> Any:
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} contains a {type(value).__name__}; accepted is a JSON object")
    return value


def _chunk_files(path: Path, separator: str) -> Iterator[str]:
    """Yield the names of the chunk files that exist in a store's array, such as "0.1", or "0/1" with the separator "/"."""
    if separator == ".":
        yield from (e.name for e in os.scandir(path) if re.fullmatch(r"\d+\.\d+", e.name))
        return
    for folder in os.scandir(path):
        if folder.name.isdigit() and folder.is_dir():
            for entry in os.scandir(folder.path):
                if entry.name.isdigit():
                    yield f"{folder.name}/{entry.name}"
