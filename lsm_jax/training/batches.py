"""Make the training and held-out batches of a run, of which each process reads only the rows of its own
devices."""

from __future__ import annotations

import collections
import copy
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lsm_jax.data import make_eval_iterator, make_train_iterator
from lsm_jax.parallel import data_shard
from lsm_jax.training.config import TrainConfig


def train_batches(config: TrainConfig, mesh: Mesh) -> Any:
    """Return this process's iterator over a run's training batches, whose position can be saved and
    restored."""
    index, count = data_shard(mesh)
    return make_train_iterator(
        config.data,
        global_batch_size=config.batch_size,
        seed=config.seed,
        shard_index=index,
        shard_count=count,
        vocab_size=config.model.vocab_size,
    )


def eval_batches(config: TrainConfig, mesh: Mesh) -> Any:
    """Return this process's iterator over a run's held-out batches from the first; the last batch is
    padded."""
    index, count = data_shard(mesh)
    return iter(
        make_eval_iterator(
            config.data,
            global_batch_size=config.batch_size,
            shard_index=index,
            shard_count=count,
            vocab_size=config.model.vocab_size,
            remainder="pad",
        )
    )


class RecentBatches:
    """Read training batches one after another, and go back by the last few if steps must be taken again.

    Args:
        iterator: an iterator with `get_state` and `set_state`, as from `train_batches`.
        recent: number of batches by which it can go back.

    Attributes:
        iterator: the iterator, at the position after the last batch that was read; a checkpoint saves it.
    """

    def __init__(self, iterator: Any, recent: int):
        self.iterator = iterator
        self._positions: collections.deque[Any] = collections.deque(maxlen=recent)
        self._peeked: dict[str, np.ndarray] | None = None

    def peek(self) -> None:
        """Read the next training batch from the iterator and keep it for the next call of `next`; raises
        the error of the data if it cannot be read."""
        self._peeked = self._read()

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the next training batch: one that was peeked or gone back over, or else a new one from the
        iterator."""
        batch, self._peeked = self._peeked, None
        return self._read() if batch is None else batch

    def _read(self) -> dict[str, np.ndarray]:
        position = copy.deepcopy(self.iterator.get_state()) if self._positions.maxlen else None
        batch = next(self.iterator)
        self._positions.append(position)
        return batch

    def go_back(self, count: int) -> None:
        """Go back by the last `count` training batches, so that the next calls of `next` return them again."""
        positions = [self._positions.pop() for _ in range(count)]
        self.iterator.set_state(positions[-1])
