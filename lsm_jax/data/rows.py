"""Make batches of training or held-out data from the rows of a token store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lsm_jax.data.order import ColumnOrder, ShuffledOrder
from lsm_jax.data.store import TokenStore

Batches = Callable[[int], dict[str, np.ndarray]]  # this host's rows of the batch of a training step


class StoreBatches:
    """The batches of a token store as a function of the training step's number, so that an iterator over
    batches has one integer as its state."""

    def __init__(
        self,
        store: TokenStore,
        order: ColumnOrder | ShuffledOrder,
        *,
        first_document: int,
        num_sequences: int,
        sequence_length: int,
        global_batch_size: int,
        rows_of: slice,
        bos_id: int | None,
        separator: int | None,
        vocab_size: int,
    ):
        """Define the batches of a token store by the order in which its sequences are read.

        Args:
            store: the token store, opened for reading.
            order: function from the numbers of sequences, in the order of reading, to (documents, blocks of a document).
            first_document: number in the store of the order's document 0.
            num_sequences: sequences with this number or a larger one are padding rows, with loss_mask 0.
            sequence_length: tokens in a block, which becomes a row of a batch.
            global_batch_size: rows in a global batch.
            rows_of: the range of a global batch's rows that this host makes.
            bos_id: the token at position 0 by LongCrawl64's rule; None: no BOS, and the last position predicts nothing.
            separator: the id that begins a segment inside a row; None: no segments.
            vocab_size: number of ids in the model's vocabulary; a token id that is not below it is an error.
        """
        self._store, self._order, self._first_document = store, order, first_document
        self._num_sequences, self._length = num_sequences, sequence_length
        self._slots = np.arange(global_batch_size)[rows_of]
        self._batch = global_batch_size
        self._bos_id, self._separator, self._vocab_size = bos_id, separator, vocab_size

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Return this host's B rows of the batch of training step `step`, as a dict of arrays [B, T]:
        tokens, labels and loss_mask; with a separator also segment_ids and positions."""
        return self.rows(step * self._batch + self._slots)

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the sequences with the given numbers, int64 [B], in the order of reading, as a dict of arrays as for a
        batch."""
        real = numbers < self._num_sequences
        rows = np.zeros((len(numbers), self._length), np.int32)
        overlaps = np.zeros(len(numbers), np.int64)
        if real.any():
            documents, blocks = self._places(numbers[real])
            # A document's last block may overlap with the one before it.
            starts = np.minimum(blocks * self._length, self._store.length - self._length)
            overlaps[real] = blocks * self._length - starts
            rows[real] = self._store.read(
                self._first_document + documents,
                starts,
                self._length,
                vocab_size=self._vocab_size,
            )
        batch = shift_rows(rows, bos_id=self._bos_id)
        # Without BOS, position p predicts the token after it: the last token of the overlap predicts a new one.
        repeated = overlaps - (self._bos_id is None)
        batch["loss_mask"] *= real[:, None] & (np.arange(self._length) >= repeated[:, None])
        if self._separator is not None:
            batch |= row_segments(batch["tokens"], self._separator)
            batch["segment_ids"] *= real[:, None]
            batch["positions"] *= real[:, None]
        return batch

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (documents, blocks) of sequences, which may be of several epochs."""
        epochs = numbers // self._order.sequences_per_epoch
        documents, blocks = np.empty_like(numbers), np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            documents[here], blocks[here] = self._order(numbers[here])
        return documents, blocks


class MixedBatches:
    """The batches of several token stores as a function of the training step's number."""

    def __init__(
        self,
        parts: Sequence[StoreBatches],
        place: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        *,
        global_batch_size: int,
        rows_of: slice,
    ):
        """Define batches whose rows come from several stores.

        Args:
            parts: the sequences of each store.
            place: function from the numbers of rows, int64 [B], to (the part, the number in that part) of each.
            global_batch_size: rows in a global batch.
            rows_of: the range of a global batch's rows that this host makes.
        """
        self._parts, self._place = parts, place
        self._batch, self._slots = global_batch_size, np.arange(global_batch_size)[rows_of]

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Return this host's B rows of the batch of training step `step`, as `StoreBatches` does."""
        sources, numbers = self._place(step * self._batch + self._slots)
        batch: dict[str, np.ndarray] = {}
        for source in np.unique(sources):
            here = sources == source
            rows = self._parts[source].rows(numbers[here])
            for name, values in rows.items():
                whole = batch.setdefault(
                    name, np.empty((len(here), *values.shape[1:]), values.dtype)
                )
                whole[here] = values
        return batch


def shift_rows(rows: np.ndarray, *, bos_id: int | None) -> dict[str, np.ndarray]:
    """Return the tokens, labels and loss mask of a batch that predicts each next token, from rows of a
    store.

    Args:
        rows: the token ids of B sequences of the store, int32 [B, T].
        bos_id: LongCrawl64's rule: `labels = rows`, `tokens = roll(rows, 1)` with BOS at position 0. None: `tokens = rows`,
            the labels are the next tokens, and the last position predicts nothing.
    """
    loss_mask = np.ones(rows.shape, np.float32)
    if bos_id is not None:
        tokens = np.roll(rows, 1, axis=1)
        tokens[:, 0] = bos_id
        return {"tokens": tokens, "labels": rows, "loss_mask": loss_mask}
    loss_mask[:, -1] = 0.0
    return {"tokens": rows, "labels": np.roll(rows, -1, axis=1), "loss_mask": loss_mask}


def row_segments(tokens: np.ndarray, separator: int) -> dict[str, np.ndarray]:
    """Return the segment ids (from 1) and the positions (from 0 in each segment) of the tokens in a store's
    rows, int32 [B, T]; each separator begins a segment."""
    begins = tokens == separator
    begins[:, 0] = True
    place = np.arange(tokens.shape[1])
    start = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    return {
        "segment_ids": np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": (place - start).astype(np.int32),
    }
