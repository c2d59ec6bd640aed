"""Grain datasets that make batches of packed rows; their state is JSON and resumes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grain
import numpy as np

from lsm_jax.data.packing import stack_rows


class LaneBatches(grain.IterDataset):
    """Training batches of B packed rows, one from each of B lanes; a lane is an endless sequence of packed
    rows.

    Row j of the batch of all hosts comes from lane j, which packs the pieces j, j + B, j + 2B, ... of the
    documents. Each host computes only the lanes of its rows, so the global batches are the same for any
    number of hosts.
    """

    def __init__(
        self,
        lanes: Sequence[grain.IterDataset],
        *,
        shard: tuple[int, int],
        num_threads: int,
    ):
        """Make the dataset of this host's rows of each training batch.

        Args:
            lanes: for each row of a batch that this host makes, the endless sequence of packed rows it is taken from.
            shard: (index of this host, number of hosts), which the state contains.
            num_threads: number of lanes that tokenise and pack at the same time.
        """
        super().__init__()
        self._lanes, self._shard, self._num_threads = lanes, shard, num_threads

    def __iter__(self) -> _LaneIterator:
        return _LaneIterator([iter(lane) for lane in self._lanes], self._shard, self._num_threads)


class _LaneIterator(grain.DatasetIterator):
    def __init__(
        self, lanes: list[grain.DatasetIterator], shard: tuple[int, int], num_threads: int
    ):
        super().__init__()
        self._lanes, self._shard = lanes, list(shard)
        self._pool = ThreadPoolExecutor(num_threads, "lsm-lanes") if num_threads > 1 else None

    def __next__(self) -> dict[str, np.ndarray]:
        rows = list((self._pool.map if self._pool else map)(next, self._lanes))
        return stack_rows(rows, len(rows))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes:
            lane.close()

    def get_state(self) -> dict[str, Any]:
        return {"shard": self._shard, "lanes": [lane.get_state() for lane in self._lanes]}

    def set_state(self, state: dict[str, Any]) -> None:
        if list(state["shard"]) != self._shard or len(state["lanes"]) != len(self._lanes):
            raise ValueError(
                f"the saved data state is of host [index, count]={state['shard']} with {len(state['lanes'])} rows, but "
                f"this is host {self._shard} with {len(self._lanes)} rows: text resumes only with the batch size "
                "and the number of hosts it was saved with (a token store with any number of hosts)"
            )
        for lane, saved in zip(self._lanes, state["lanes"], strict=True):
            lane.set_state(_tuples(saved))


class OrderedBatches(grain.IterDataset):
    """Held-out batches of all packed rows in order, each row once; the last batch is filled with padding."""

    def __init__(self, rows: grain.IterDataset, *, global_batch_size: int, rows_of: slice):
        """Make the dataset of this host's rows of each held-out batch.

        Args:
            rows: a finite dataset of the packed rows of all hosts.
            global_batch_size: rows in a global batch.
            rows_of: the range of a global batch's rows that this host makes.
        """
        super().__init__(rows)
        self._batch, self._rows_of = global_batch_size, rows_of

    def __iter__(self) -> _OrderedIterator:
        return _OrderedIterator(iter(self._parent), self._batch, self._rows_of)


class _OrderedIterator(grain.DatasetIterator):
    def __init__(self, rows: grain.DatasetIterator, batch: int, rows_of: slice):
        super().__init__(rows)
        self._batch, self._rows_of = batch, rows_of

    def __next__(self) -> dict[str, np.ndarray]:
        rows = []
        for _ in range(self._batch):
            try:
                rows.append(next(self._parent))
            except StopIteration:
                break
        if not rows:
            raise StopIteration
        batch = stack_rows(rows, self._batch)
        return {name: array[self._rows_of] for name, array in batch.items()}

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(_tuples(state))


class Prefetched(grain.experimental.ThreadPrefetchIterDataset):
    """Make batches ahead of their use, in one thread of grain. If an iterator's `close` is called
    a second time, nothing happens.

    Grain closes an iterator again when it is deleted. If the interpreter is exiting, the modules that `close` uses no longer
    exist.
    """

    def __init__(self, batches: grain.IterDataset, ahead: int):
        """Wrap the dataset `batches`, so that a thread makes up to `ahead` batches before they are
        requested."""
        super().__init__(batches, prefetch_buffer_size=ahead)
        self._ahead = ahead

    def __iter__(self) -> grain.DatasetIterator:
        return _PrefetchedIterator(iter(self._parent), self._ahead)


class _PrefetchedIterator(grain.experimental.ThreadPrefetchDatasetIterator):
    def close(self) -> None:
        if not self._closed:
            super().close()


def _tuples(state: Any) -> Any:
    """Return a dataset's state with lists converted to tuples: it was saved as JSON, which has only lists,
    but grain's packing compares its state with tuples."""
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return tuple(_tuples(value) for value in state)
    return state
