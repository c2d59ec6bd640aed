"""Make the batches of several sources: mixed by weight for training, one source after the other for evaluation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from lsm_jax.data.config import DataConfig
from lsm_jax.data.mixture import Schedule
from lsm_jax.data.order import ColumnOrder
from lsm_jax.data.rows import MixedBatches
from lsm_jax.data.sources import Part, open_store, parts_of
from lsm_jax.data.store import TokenStore
from lsm_jax.data.store_streams import num_columns, store_batches, train_order
from lsm_jax.data.text_streams import text_lanes, text_rows
from lsm_jax.data.tokenizers import Tokenizer

OpenStore = tuple[TokenStore, int, int]
_ENDLESS = sys.maxsize


def schedule_of(config: DataConfig, seed: int) -> Schedule:
    """Return the schedule of the sources of a data config's mixture in training."""
    return Schedule([part.weight for part in parts_of(config)], seed)


def source_fractions(config: DataConfig, seed: int, num_rows: int) -> dict[str, float]:
    """Return, by the name of each source of a mixture, its fraction of the first `num_rows` rows of training, which all have
    the same number of tokens; {} if the data config has no mixture."""
    if not config.mixture or not num_rows:
        return {}
    seen = _schedule(config.mixture, seed).seen(num_rows)
    names = [part.name for part in parts_of(config)]
    return {name: int(count) / num_rows for name, count in zip(names, seen, strict=True)}


@functools.lru_cache(maxsize=2)
def _schedule(mixture: str, seed: int) -> Schedule:
    return schedule_of(DataConfig(mixture=mixture), seed)


def _stores(parts: Sequence[Part], *, heldout: bool) -> list[OpenStore] | None:
    """Return the open store of each source; None if all are text.

    Raises:
        ValueError: some sources are stores and others text.
    """
    opened = [open_store(part.config, heldout=heldout) for part in parts]
    stores = [store for store in opened if store is not None]
    if stores and len(stores) < len(parts):
        text = next(part.name for part, store in zip(parts, opened, strict=True) if store is None)
        raise ValueError(
            f"data.mixture has the token store {stores[0][0].path} and {text!r}, which is none; accepted are stores alone or "
            "text alone: `python -m lsm_jax.data.tokenize` writes a store of text"
        )
    return stores or None


def mixed_store_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    batch: int,
    rows_of: slice,
    seed: int,
    vocab_size: int,
) -> MixedBatches | None:
    """Return the training batches of a mixture of token stores as a function of the step; None if the sources are text.

    Args:
        config: a data config with a mixture.
        tokenizer: the tokenizer with which all stores must have been written.
        batch: number of rows in a global batch, over all hosts.
        rows_of: the range of a global batch's rows that this host makes.
        seed: seed of the orders of reading and of the schedule.
        vocab_size: number of ids in the model's vocabulary.

    Raises:
        ValueError: a source is not accepted, or the sources are of different kinds.
    """
    parts = parts_of(config)
    stores = _stores(parts, heldout=False)
    if stores is None:
        return None
    batches = []
    for part, source in zip(parts, stores, strict=True):
        source[0].check_tokenizer(tokenizer)
        order = train_order(part.config, source[0], source[2], 1, seed)
        batches.append(
            store_batches(
                part.config, tokenizer, source, order, _ENDLESS, batch, rows_of, vocab_size
            )
        )
    place = schedule_of(config, seed)
    return MixedBatches(batches, place, global_batch_size=batch, rows_of=rows_of)


def mixed_text_lanes(
    config: DataConfig, tokenizer: Tokenizer, batch: int, rows_of: slice, seed: int
) -> list[grain.IterDataset]:
    """Return the endless rows of a mixture of texts from which each row of this host's training batches is taken; see
    `mixed_store_batches`."""
    place = schedule_of(config, seed)
    sources = [
        text_lanes(part.config, tokenizer, batch, rows_of, seed) for part in parts_of(config)
    ]
    return [
        MixedRows(lanes, functools.partial(_source_of, place, batch, slot))
        for slot, *lanes in zip(range(batch)[rows_of], *sources, strict=True)
    ]


def _source_of(place: Schedule, batch: int, slot: int, step: int) -> int:
    return int(place(np.array([step * batch + slot]))[0][0])


class MixedRows(grain.IterDataset):
    """The rows of several endless sequences of packed rows, in an order that a function of the row's number gives."""

    def __init__(self, lanes: Sequence[grain.IterDataset], source_of: Callable[[int], int]):
        """Mix sequences of rows.

        Args:
            lanes: the rows of each source.
            source_of: function from the number of a row, from 0, to the number of its source.
        """
        super().__init__()
        self._lanes, self._source_of = lanes, source_of

    def __iter__(self) -> _MixedIterator:
        return _MixedIterator([iter(lane) for lane in self._lanes], self._source_of)


class _MixedIterator(grain.DatasetIterator):
    def __init__(self, lanes: list[grain.DatasetIterator], source_of: Callable[[int], int]):
        super().__init__()
        self._lanes, self._source_of, self._row = lanes, source_of, 0

    def __next__(self) -> Any:
        row = next(self._lanes[self._source_of(self._row)])
        self._row += 1
        return row

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row, "lanes": [lane.get_state() for lane in self._lanes]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        for lane, saved in zip(self._lanes, state["lanes"], strict=True):
            lane.set_state(saved)


def _heldout_parts(config: DataConfig) -> list[Part]:
    return [Part("", 1.0, config)] if config.heldout_path else parts_of(config)


def heldout_stores(config: DataConfig) -> list[OpenStore] | None:
    """Return the open stores with the held-out documents of all sources of a data config; None if they are text.

    Raises:
        ValueError: there are no held-out documents, or the sources are of different kinds.
    """
    return _stores(_heldout_parts(config), heldout=True)


def heldout_store_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    stores: Sequence[OpenStore],
    batch: int,
    rows_of: slice,
    vocab_size: int,
) -> tuple[MixedBatches, int]:
    """Return (the held-out batches of stores as a function of the step, the number of their sequences), in stored order, one
    store after the other; the arguments are those of `mixed_store_batches`."""
    batches, ends = [], []
    for source in stores:
        columns = num_columns(config, source[0])
        count = source[2] * columns
        order = ColumnOrder(source[2], columns, multiple=1)
        batches.append(
            store_batches(config, tokenizer, source, order, count, batch, rows_of, vocab_size)
        )
        ends.append(count + (ends[-1] if ends else 0))
    place = functools.partial(_consecutive, np.array(ends))
    return MixedBatches(batches, place, global_batch_size=batch, rows_of=rows_of), ends[-1]


def _consecutive(ends: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, number in it) of rows that are read one source after the other; rows after the end of all are counted
    on in the last source. `ends` is the number of rows of each source and those before it."""
    source = np.minimum(np.searchsorted(ends, rows, side="right"), len(ends) - 1)
    return source, rows - np.concatenate([[0], ends[:-1]])[source]


def heldout_text_rows(config: DataConfig, tokenizer: Tokenizer) -> grain.IterDataset:
    """Return the packed rows of the held-out text of all sources of a data config, one source after the other."""
    rows = [text_rows(part.config, tokenizer) for part in _heldout_parts(config)]
    return rows[0] if len(rows) == 1 else ConsecutiveRows(rows)


class ConsecutiveRows(grain.IterDataset):
    """The rows of several finite sequences of rows, one after the other."""

    def __init__(self, parts: Sequence[grain.IterDataset]):
        """Join sequences of rows."""
        super().__init__()
        self._parts = parts

    def __iter__(self) -> _ConsecutiveIterator:
        return _ConsecutiveIterator([iter(part) for part in self._parts])


class _ConsecutiveIterator(grain.DatasetIterator):
    def __init__(self, parts: list[grain.DatasetIterator]):
        super().__init__()
        self._parts, self._part = parts, 0

    def __next__(self) -> Any:
        while True:
            try:
                return next(self._parts[self._part])
            except StopIteration:
                if self._part + 1 == len(self._parts):
                    raise
                self._part += 1

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def get_state(self) -> dict[str, Any]:
        return {"part": self._part, "parts": [part.get_state() for part in self._parts]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._part = state["part"]
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.set_state(saved)
