"""The order of a store's sequences, as functions of the sequence's number.

Number n is place n % B of global batch n // B. Orders know nothing of hosts: each host asks for
the numbers of its own places, so the global batches are the same for any number of hosts.
"""

from __future__ import annotations

import functools

import numpy as np


class ColumnOrder:
    """LongCrawl64's published order: all documents' first block, then all their second, ...

    `column = i // groups`, `row = i % groups` for batch i, where a group is `multiple` documents
    (forgetting_transformer, datamodule/longcrawl64.py); documents over the last full group are
    left out. Epochs repeat.
    """

    def __init__(self, num_documents: int, num_columns: int, *, multiple: int):
        self.num_documents = num_documents // multiple * multiple
        self.sequences_per_epoch = self.num_documents * num_columns

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(documents, blocks) of the sequences of these numbers."""
        place = numbers % self.sequences_per_epoch
        return place % self.num_documents, place // self.num_documents


class ShuffledOrder:
    """A seeded order, new each epoch, that reads each storage chunk once an epoch.

    Chunks are shuffled, and the sequences of `window_blocks` neighbours among them are shuffled
    together. What is over the last full batch differs each epoch.
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
        """Sets the order.

        Args:
            num_documents, num_columns: the grid of sequences.
            multiple: the global batch; an epoch is a multiple of it.
            block: documents and columns of the grid that lie in one storage chunk.
            window_blocks: storage chunks mixed at once.
            seed: same seed, same order, on any host.
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
        """(documents, blocks) of the sequences of these numbers, all of one epoch."""
        epoch = int(numbers[0]) // self.sequences_per_epoch
        window, offset = np.divmod(numbers - epoch * self.sequences_per_epoch, self._window)
        place = np.empty_like(offset)
        for w in np.unique(window):
            place[window == w] = self._places(epoch, int(w))[offset[window == w]]
        shuffled, ends = self._blocks(epoch)
        slot = np.searchsorted(ends, place, side="right")
        block = shuffled[slot]
        within = place - (ends[slot] - self._rows[block] * self._columns[block])
        row, column = np.divmod(within, self._columns[block])
        return self._row_start[block] + row, self._column_start[block] + column


def permutation(count: int, seed: int, *path: int) -> np.ndarray:
    """A permutation of range(count), the same on every machine and numpy version."""
    # numpy promises the bits of a bit generator, not those of `Generator.permutation`.
    bits = np.random.Philox(np.random.SeedSequence([seed & (2**64 - 1), *path]))
    return np.argsort(bits.random_raw(count), kind="stable")
