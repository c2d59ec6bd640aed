"""Write token stores in LongCrawl64's format. A store has its name only once it is complete."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import tensorstore as ts

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

        Raises:
            ValueError: `path` is empty, exists already, or is no store that can be overwritten.
        """
        if not os.fspath(path):
            raise ValueError("the path of the store is empty")
        self.path = Path(path).expanduser().absolute()
        if self.path.exists() and not overwrite:
            raise ValueError(f"{self.path} exists already; pass overwrite to replace it")
        if self.path.exists() and not (self.path / ".zarray").is_file():
            raise ValueError(f"{self.path} is no token store; overwrite replaces only token stores")
        self._partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self._length, self._attributes = length, attributes
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0
        self._row_multiple = row_multiple
        self._array: ts.TensorStore | None = None
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
        chunk."""
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
            metadata = {
                "zarr_format": 2,
                "shape": [len(rows), self._length],
                "chunks": [min(CHUNK, len(rows)), min(CHUNK, self._length)],
                "dtype": self._dtype.str,
                "compressor": _COMPRESSOR,
                "fill_value": 0,
                "filters": None,
                "order": "C",
            }
            kvstore = {"driver": "file", "path": str(self._partial)}
            spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
            self._array = ts.open(spec, create=True, open=True).result()
        else:
            start = self._array.shape[0]
            self._array = self._array.resize(exclusive_max=[start + len(rows), None]).result()
        self._array[start:].write(rows).result()

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
        (self._partial / ".zattrs").write_text(json.dumps(self._attributes))
        if self.path.exists():
            old = self.path.with_name(f".{self.path.name}.old-{os.getpid()}")
            os.rename(self.path, old)
            os.rename(self._partial, self.path)
            shutil.rmtree(old)
        else:
            os.rename(self._partial, self.path)
