"""Read token stores in LongCrawl64's format: a zarr v2 array [documents, length] of integers.

LongCrawl64 as published (manifestai.com/articles/longcrawl64) has dtype `<u2`, chunks of 2048 x 2048, blosc lz4, fill
value 0, and `.zattrs` = {"encoder": "tiktoken-gpt2"}. Stores with another shape, chunks, integer type or compressor can be
read too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from absl import logging

from lsm_jax.data.store_files import ChunkFiles, read_attributes, read_metadata
from lsm_jax.data.tokenizers import Tokenizer


class TokenStore:
    """A store of tokenized documents in LongCrawl64's format, opened for reading and checked.

    Attributes:
        path: the folder of the store's zarr array.
        num_documents: number of documents, the array's rows.
        length: number of tokens in each document.
        chunks: (documents, tokens of each) in one chunk file.
        attributes: the contents of `.zattrs`.
        largest_token_id: the largest token id, from `checksums.json`; None if the store has no such file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cached_blocks: int = 2,
        block_length: int = 1,
        compare_checksums: bool = True,
    ):
        """Open a token store for reading, and check its files.

        Args:
            path: the folder of the store's zarr array.
            cached_blocks: size of the cache of decoded chunk files, as a number of blocks; a block is
                `block_length` tokens of each of the documents that share a chunk file.
            block_length: number of tokens that are read of a document at a time.
            compare_checksums: whether files are compared with the store's `checksums.json`, if it has one.

        Raises:
            ValueError: the folder is no token store, the store is empty, a chunk file is missing or truncated, or the
                metadata do not match their checksums.
        """
        self.path = Path(path).expanduser().absolute()
        metadata = read_metadata(self.path)
        self.num_documents, self.length = metadata.shape
        self.chunks = metadata.chunks
        self.attributes: dict[str, Any] = read_attributes(self.path)
        self._files = ChunkFiles(self.path, metadata, compare_checksums=compare_checksums)
        self.largest_token_id = self._files.largest_token_id
        columns, block_length = self.chunks[1], min(block_length, self.length)
        across = -(-block_length // columns) + (
            columns % block_length > 0 and block_length % columns > 0
        )
        cache_bytes = cached_blocks * across * metadata.chunk_bytes
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
            raise ValueError(
                f"{self.path} cannot be opened as a token store: {_plain(error)}"
            ) from error

    def read(self, rows: Any, starts: Any, length: int, *, vocab_size: int) -> np.ndarray:
        """Read a range of `length` tokens from each of n documents of the store.

        A chunk file is compared with its checksum when it is read for the first time, and again if it has changed.

        Args:
            rows: numbers of the documents to read, [n], or one number for all.
            starts: the first token to read of each document, [n], or one number for all.
            length: number of tokens to read of each document.
            vocab_size: number of ids in the model's vocabulary; a token id that is not below it is an error.

        Returns:
            The token ids, int32 [n, length].

        Raises:
            ValueError: a chunk is missing, does not match its checksum or cannot be decoded (the message names its file), or
                a token id is outside the vocabulary (the message names the document and column).
        """
        rows, starts = np.broadcast_arrays(np.atleast_1d(rows), np.atleast_1d(starts))
        # Consecutive documents are one read.
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(starts) != 0)) + 1
        reads = []
        for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            row, start = int(rows[first]), int(starts[first])
            self._files.check(range(row, row + (last - first)), range(start, start + length))
            reads.append(self._array[row : row + (last - first), start : start + length].read())
        try:
            parts = [read.result() for read in reads]
        except ValueError as error:
            raise ValueError(
                f"{self.path}: a chunk is truncated or corrupt; copy it again. {_plain(error)}"
            ) from error
        block = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if block.size and (block.max() >= vocab_size or block.min() < 0):
            row, column = np.argwhere((block >= vocab_size) | (block < 0))[0]
            raise ValueError(
                f"{self.path}: document {rows[row]}, column {starts[row] + column} has token id {block[row, column]}, "
                f"which is outside the vocabulary of {vocab_size}; check the tokenizer and the model's vocab_size"
            )
        return block.astype(np.int32)

    @property
    def has_checksums(self) -> bool:
        """Whether the store has a `checksums.json`."""
        return self._files.has_checksums

    def check_files(self) -> int:
        """Check every chunk file of the store, and return how many there are.

        Raises:
            ValueError: a chunk file is missing or damaged; the message names it.
        """
        self._files.check(range(self.num_documents), range(self.length))
        return self._files.count

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all token ids of the store are below `vocab_size`, if the store says which is the largest.

        Raises:
            ValueError: the largest token id is not below it.
        """
        if self.largest_token_id is not None and self.largest_token_id >= vocab_size:
            raise ValueError(
                f"{self.path} has token ids up to {self.largest_token_id}, which is outside the vocabulary of {vocab_size}; "
                "check the tokenizer and the model's vocab_size"
            )

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


def _plain(error: Exception) -> str:
    """Return the message of an error of tensorstore without the specification of the array."""
    return str(error).partition(" [tensorstore_spec=")[0]


def is_store(path: Path) -> bool:
    """Return whether the path is a token store: a folder with zarr metadata, or with a name that ends in
    .zarr."""
    return path.is_dir() and (
        path.suffix == ".zarr"
        or any((path / name).exists() for name in (".zarray", ".zgroup", "zarr.json"))
    )
