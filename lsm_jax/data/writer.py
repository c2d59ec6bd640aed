"""Write token stores in LongCrawl64's format, with checksums. A store has its name only once it is complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorstore as ts

from lsm_jax.data.store_files import checksum, write_checksums
from lsm_jax.files import check_folder

CHUNK = 2048
_COMPRESSOR = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}


class StoreWriter:
    """Write a token store in a `with` block: the files have a temporary name, which becomes the store's
    name if the block ends without an error."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        length: int,
        *,
        vocab_size: int,
        attributes: dict[str, object],
        overwrite: bool = False,
        row_multiple: int = 1,
        files: Mapping[str, Path] | None = None,
    ):
        """Prepare a new token store; the files are written inside the `with` block.

        Args:
            path: path of the store.
            length: tokens in a row.
            vocab_size: ids are stored as `<u2` if 16 bits are enough for it, otherwise as `<u4`.
            attributes: the contents of `.zattrs`.
            overwrite: replace the store at `path` when the new one is complete.
            row_multiple: a power of two. The number of rows is cut to a multiple of it, or to the largest power of two
                that is not larger than the number of rows.
            files: further files that are copied into the store, by their names there.

        Raises:
            ValueError: `path` is empty, a link, exists already, or is no store that can be overwritten.
        """
        if not os.fspath(path):
            raise ValueError("the path of the store is empty")
        self.path = Path(path).expanduser().absolute()
        if self.path.is_symlink():
            raise ValueError(f"{self.path} is a link; accepted is the path of the store itself")
        if self.path.exists() and not overwrite:
            raise ValueError(f"{self.path} exists already; pass overwrite to replace it")
        if self.path.exists() and not (self.path / ".zarray").is_file():
            raise ValueError(f"{self.path} is no token store; overwrite replaces only token stores")
        try:
            check_folder(self.path.parent)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        self._partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self._length, self._attributes = length, attributes
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0
        self._row_multiple = row_multiple
        self._copied_files = dict(files or {})
        self._array: ts.TensorStore | None = None
        self._chunks = (CHUNK, CHUNK)
        self._checksums: dict[str, str] = {}
        self._largest_token_id = 0
        self.num_rows = 0

    def __enter__(self) -> StoreWriter:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, rows: np.ndarray) -> None:
        """Add rows of token ids [n, length] to the store; they are written as soon as they fill a storage
        chunk.

        Raises:
            ValueError: a token id is negative or too large for the store's integer type.
            OSError: the disk is full, or another error of the disk.
        """
        if rows.size:
            largest = int(rows.max())
            if rows.min() < 0 or largest > np.iinfo(self._dtype).max:
                raise ValueError(
                    f"token ids {rows.min()} to {largest} do not fit into the type {self._dtype.str!r} of {self.path}"
                )
        self._waiting.append(rows.astype(self._dtype))
        self._num_waiting += len(rows)
        self.num_rows += len(rows)
        if self._num_waiting >= CHUNK:
            waiting = np.concatenate(self._waiting)
            end = len(waiting) // CHUNK * CHUNK
            self._write(waiting[:end])
            self._waiting, self._num_waiting = [waiting[end:]], len(waiting) - end

    def _write(self, rows: np.ndarray) -> None:
        """Append rows of token ids to the store's zarr array; the first call creates the array."""
        if self._array is None:
            start = 0
            self._chunks = min(CHUNK, len(rows)), min(CHUNK, self._length)
            metadata = {
                "zarr_format": 2,
                "shape": [len(rows), self._length],
                "chunks": list(self._chunks),
                "dtype": self._dtype.str,
                "compressor": _COMPRESSOR,
                "fill_value": 0,
                "filters": None,
                "order": "C",
                "dimension_separator": ".",
            }
            kvstore = {"driver": "file", "path": str(self._partial)}
            # A chunk that has only fill values is written too, so that a missing file is always an error.
            spec = {
                "driver": "zarr",
                "kvstore": kvstore,
                "metadata": metadata,
                "store_data_equal_to_fill_value": True,
            }
            with self._disk_errors():
                self._array = ts.open(spec, create=True, open=True).result()
        else:
            start = self._array.shape[0]
            with self._disk_errors():
                self._array = self._array.resize(exclusive_max=[start + len(rows), None]).result()
        with self._disk_errors():
            self._array[start:].write(rows).result()
        self._largest_token_id = max(self._largest_token_id, int(rows.max()))
        # The files were written just now, so they are read from the system's cache.
        chunks = self._chunks
        for row in range(start // chunks[0], -(-(start + len(rows)) // chunks[0])):
            for column in range(-(-self._length // chunks[1])):
                name = f"{row}.{column}"
                self._checksums[name] = checksum((self._partial / name).read_bytes())

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise tensorstore's errors of the disk, in a `with` block, as OSError with the store's path."""
        try:
            yield
        except ValueError as error:
            code = re.search(r"os_error_code='(\d+)'", str(error))
            if code is None:
                raise
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(self.path)) from error

    def _close(self) -> None:
        """Finish the store: write the rows that are still in memory and the file .zattrs, then rename the
        folder from its temporary name to the store's name."""
        if not self.num_rows:
            raise ValueError(f"no rows to write to {self.path}")
        multiple = min(self._row_multiple, 1 << self.num_rows.bit_length() - 1)
        surplus = self.num_rows % multiple
        self.num_rows -= surplus
        if self._num_waiting > surplus:
            self._write(np.concatenate(self._waiting)[: self._num_waiting - surplus])
        for name, source in self._copied_files.items():
            shutil.copyfile(source, self._partial / name)
        (self._partial / ".zattrs").write_text(json.dumps(self._attributes))
        write_checksums(self._partial, self._checksums, largest_token_id=self._largest_token_id)
        if self.path.exists():
            old = self.path.with_name(f".{self.path.name}.old-{os.getpid()}")
            os.rename(self.path, old)
            os.rename(self._partial, self.path)
            shutil.rmtree(old)
        else:
            os.rename(self._partial, self.path)
