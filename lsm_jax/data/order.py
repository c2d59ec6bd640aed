"""The order in which a store's sequences are read, as functions of a sequence's number.

A store is a grid of sequences: documents x blocks, where block c of a document is its tokens [c T, (c+1) T). Sequence n is row
n % B of the global batch n // B. An order does not depend on the number of hosts: each host computes it for the numbers of
its rows, so the global batches are the same for any number of hosts.
"""

from __future__ import annotations

import functools

import numpy as np


class ColumnOrder:
    """The published order of reading LongCrawl64: the first block (row length) of all documents, then the
    second block of all, ...

    Batch i reads block `i // groups` of the documents in group `i % groups`, where a group is `multiple` documents
    (forgetting_transformer, datamodule/longcrawl64.py). Documents after the last full group are not read. All epochs are
    the same.
    """

    def __init__(self, num_documents: int, num_columns: int, *, multiple: int):
        """Define the published order of reading a store whose documents are cut into blocks.

        Args:
            num_documents: number of documents in the store.
            num_columns: number of blocks, each one sequence, into which every document is cut.
            multiple: the number of documents is cut to a multiple of it; the global batch size.
        """
        self.num_documents = num_documents // multiple * multiple
        self.sequences_per_epoch = self.num_documents * num_columns

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (documents, blocks): for each number of a sequence in the order of reading, the document
        it is in and which block of that document it is."""
        place = numbers % self.sequences_per_epoch
        return place % self.num_documents, place // self.num_documents


class ShuffledOrder:
    """A seeded order of reading a store that differs in each epoch and reads each storage chunk once per
    epoch.

    The storage chunks are shuffled; then the sequences of each `window_blocks` consecutive chunks are shuffled together.
    The sequences after the last full batch are not read; they are others in each epoch.
    """

    def __init__(
        self,
        num_documents: int,
        num_columns: int,
        *,
        multiple: int,
        block: tuple[int, int],
        window_blocks: int,
        seed: int,
    ):
        """Define a shuffled order of reading a store whose documents are cut into blocks.

        Args:
            num_documents: number of documents in the store.
            num_columns: number of blocks, each one sequence, into which every document is cut.
            multiple: the number of sequences in an epoch is cut to a multiple of it; the global batch size.
            block: (documents, columns) of the grid that one storage chunk contains.
            window_blocks: number of storage chunks that are shuffled together.
            seed: the same seed gives the same order on every host.
        """
        self.sequences_per_epoch = num_documents * num_columns // multiple * multiple
        self._total = num_documents * num_columns
        rows, columns = min(block[0], num_documents), min(block[1], num_columns)
        row_starts = np.arange(0, num_documents, rows)
        column_starts = np.arange(0, num_columns, columns)
        self._row_start = np.repeat(row_starts, len(column_starts))
        self._column_start = np.tile(column_starts, len(row_starts))
        self._rows = np.minimum(rows, num_documents - self._row_start)
        self._columns = np.minimum(columns, num_columns - self._column_start)
        self._window = window_blocks * rows * columns
        self._seed = seed
        self._blocks = functools.lru_cache(maxsize=2)(self._blocks_of_epoch)
        self._places = functools.lru_cache(maxsize=4)(self._places_of_window)

    def _blocks_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        shuffled = permutation(len(self._rows), self._seed, epoch)
        return shuffled, np.cumsum((self._rows * self._columns)[shuffled])

    def _places_of_window(self, epoch: int, window: int) -> np.ndarray:
        start = window * self._window
        size = min(self._window, self._total - start)
        return start + permutation(size, self._seed, epoch, window)

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (documents, blocks): for each number of a sequence in the order of reading, the document
        it is in and which block of that document it is. All numbers must be of one epoch."""
        epoch = int(numbers[0]) // self.sequences_per_epoch
        window, offset = np.divmod(numbers - epoch * self.sequences_per_epoch, self._window)
        place = np.empty_like(offset)
        for w in np.unique(window):
            place[window == w] = self._places(epoch, int(w))[offset[window == w]]
        shuffled, ends = self._blocks(epoch)
        slot = np.searchsorted(ends, place, side="right")
        block = shuffled[slot]
        offset_in_block = place - (ends[slot] - self._rows[block] * self._columns[block])
        row, column = np.divmod(offset_in_block, self._columns[block])
        return self._row_start[block] + row, self._column_start[block] + column


def permutation(count: int, seed: int, *path: int) -> np.ndarray:
    """Return a seeded permutation of range(count), which is the same on every machine and numpy version.

    Args:
        count: length of the permutation.
        seed: seed of the random numbers.
        path: further integers, such as the epoch, that select the permutation.
    """
    # numpy guarantees the stream of a bit generator between versions, but not that of `Generator.permutation`.
    bits = np.random.Philox(np.random.SeedSequence([seed & (2**64 - 1), *path]))
    return np.argsort(bits.random_raw(count), kind="stable")
