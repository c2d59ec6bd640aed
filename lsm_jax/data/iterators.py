"""Make the iterators over batches of tokens: `make_train_iterator` for training, `make_eval_iterator` for
held-out data."""

from __future__ import annotations

import atexit
import sys
import weakref

import grain

from lsm_jax.data.arguments import check_arguments
from lsm_jax.data.config import DataConfig
from lsm_jax.data.mixed_streams import (
    heldout_store_batches,
    heldout_stores,
    heldout_text_rows,
    mixed_store_batches,
    mixed_text_lanes,
)
from lsm_jax.data.rows import Batches
from lsm_jax.data.sources import open_store
from lsm_jax.data.store_streams import num_columns, store_batches, train_order
from lsm_jax.data.streams import LaneBatches, OrderedBatches, Prefetched
from lsm_jax.data.text_streams import text_lanes
from lsm_jax.data.tokenizers import Tokenizer

REMAINDERS = ("error", "pad")
_ENDLESS = sys.maxsize
_open_iterators: weakref.WeakSet[grain.DatasetIterator] = weakref.WeakSet()


def make_train_iterator(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    *,
    global_batch_size: int,
    seed: int,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
) -> grain.DatasetIterator:
    """Return an endless iterator over this host's training batches.

    The global batch of a step, B rows, is the same for any number of hosts H that divides B; host h has its rows
    [h B/H, (h+1) B/H). `get_state` and `set_state` resume exactly. The state of a store is only its step, so it can be
    resumed on another number of hosts; so is that of a mixture of stores.

    Args:
        config: the data config of the run.
        tokenizer: the tokenizer of the text; None loads `config.tokenizer`.
        global_batch_size: B, the rows of all hosts' batches together.
        seed: seed of the shuffled order.
        shard_index: number of this host, such as `jax.process_index()`.
        shard_count: H, such as `jax.process_count()`.
        vocab_size: vocabulary of the model; None is the tokenizer's.

    Returns:
        An iterator of dicts of arrays [B/H, T]: tokens and labels in int32, loss_mask in float32, and for packed rows
        segment_ids and positions in int32.

    Raises:
        ValueError: config, store, tokenizer, text or shards are not accepted.
    """
    tokenizer, rows_of, vocab_size = check_arguments(
        config, tokenizer, global_batch_size, shard_index, shard_count, vocab_size
    )
    if config.mixture:
        arguments = (config, tokenizer, global_batch_size, rows_of, seed)
        batches = mixed_store_batches(*arguments, vocab_size)
        if batches is not None:
            return _step_iterator(config, batches, _ENDLESS // global_batch_size)
        return _lanes_iterator(config, mixed_text_lanes(*arguments), shard_index, shard_count)
    source = open_store(config, heldout=False)
    if source is not None:
        store, _, count = source
        store.check_tokenizer(tokenizer)
        order = train_order(config, store, count, global_batch_size, seed)
        batches = store_batches(
            config, tokenizer, source, order, _ENDLESS, global_batch_size, rows_of, vocab_size
        )
        return _step_iterator(config, batches, _ENDLESS // global_batch_size)
    lanes = text_lanes(config, tokenizer, global_batch_size, rows_of, seed)
    return _lanes_iterator(config, lanes, shard_index, shard_count)


def make_eval_iterator(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    *,
    global_batch_size: int,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
    remainder: str = "error",
) -> grain.DatasetIterator:
    """Return an iterator over the batches of the held-out data, each sequence once, in stored or listed order.

    Args:
        config, tokenizer, global_batch_size, shard_index, shard_count, vocab_size: as in
            `make_train_iterator`.
        remainder: what to do if the batch size does not divide the number of sequences in a store: "error", or "pad" the
            last batch with rows whose loss_mask (and segment_ids) is 0. Packed text is always padded, since its number
            of rows is only known at its end.

    Returns:
        A finite iterator of dicts as in `make_train_iterator`.

    Raises:
        ValueError: as in `make_train_iterator`; also if the row length does not divide a store's length and
            `row_remainder` is "skip", or, with remainder="error", the batch size does not divide its number of sequences. No token is skipped.
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"remainder={remainder!r}; accepted: {', '.join(map(repr, REMAINDERS))}")
    tokenizer, rows_of, vocab_size = check_arguments(
        config, tokenizer, global_batch_size, shard_index, shard_count, vocab_size
    )
    stores = heldout_stores(config)
    if stores is None:
        rows = heldout_text_rows(config, tokenizer)
        dataset = OrderedBatches(rows, global_batch_size=global_batch_size, rows_of=rows_of)
        return _prefetched(config, dataset)
    for store, _, _ in stores:
        store.check_tokenizer(tokenizer)
        num_columns(config, store)  # raises if the rows are too long
        if store.length % config.sequence_length and config.row_remainder == "skip":
            raise ValueError(
                f"data.sequence_length={config.sequence_length} does not divide the length "
                f"{store.length} of the documents in {store.path}; evaluation must read every token: choose a length "
                "that does, or data.row_remainder='overlap'"
            )
    batches, total = heldout_store_batches(
        config, tokenizer, stores, global_batch_size, rows_of, vocab_size
    )
    if total % global_batch_size and remainder == "error":
        raise ValueError(
            f"global_batch_size={global_batch_size} does not divide the {total} held-out sequences of "
            f"{config.sequence_length} tokens in {', '.join(str(store.path) for store, _, _ in stores)}; choose a batch size "
            "that does, or remainder='pad'"
        )
    return _step_iterator(config, batches, -(-total // global_batch_size))


def _lanes_iterator(
    config: DataConfig, lanes: list[grain.IterDataset], shard_index: int, shard_count: int
) -> grain.DatasetIterator:
    """Return an iterator over training batches of which each row comes from one lane."""
    dataset = LaneBatches(lanes, shard=(shard_index, shard_count), num_threads=config.num_threads)
    return _prefetched(config, dataset)


def _step_iterator(config: DataConfig, batches: Batches, steps: int) -> grain.DatasetIterator:
    """Return an iterator over the batches number 0, 1, ..., `steps` - 1 of a token store; the
    config's number of threads read batches ahead."""
    options = grain.ReadOptions(
        num_threads=config.num_threads,
        prefetch_buffer_size=config.prefetch if config.num_threads else 0,
    )
    return _open(grain.MapDataset.range(steps).map(batches).to_iter_dataset(options))


def _prefetched(config: DataConfig, dataset: grain.IterDataset) -> grain.DatasetIterator:
    if config.num_threads and config.prefetch:
        dataset = Prefetched(dataset, config.prefetch)
    return _open(dataset)


def _open(dataset: grain.IterDataset) -> grain.DatasetIterator:
    """Return an iterator over a dataset's batches. It is closed when the interpreter exits, so that the
    dataset's threads end before the interpreter does."""
    iterator = iter(dataset)
    _open_iterators.add(iterator)
    return iterator


@atexit.register
def _close_all() -> None:
    # Grain's threads print tracebacks if they still run when the interpreter exits.
    for iterator in list(_open_iterators):
        iterator.close()
