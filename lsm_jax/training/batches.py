"""The batches of a run that one process reads: its part of the rows of each batch."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from lsm_jax.data import make_eval_iterator, make_train_iterator
from lsm_jax.parallel import data_shard
from lsm_jax.training.config import TrainConfig


def train_batches(config: TrainConfig, mesh: Mesh) -> Any:
    """The iterator of training batches, whose position can be saved and restored."""
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
    """An iterator over the held-out batches from the first; the last one is padded."""
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
