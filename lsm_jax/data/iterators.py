"""Batch iterators: `make_train_iterator`, `make_eval_iterator`."""

from __future__ import annotations

import atexit
import functools
import math
import sys
import weakref
from collections.abc import Callable

import grain
import numpy as np

from lsm_jax.data.config import DataConfig
from lsm_jax.data.documents import Documents
from lsm_jax.data.entrance import bos_id_of, entrance
from lsm_jax.data.order import ColumnOrder, permutation
from lsm_jax.data.packing import document_tokens, packed_rows
from lsm_jax.data.rows import StoreBatches
from lsm_jax.data.sources import open_documents, open_store
from lsm_jax.data.store_streams import num_columns, store_batches, train_order
from lsm_jax.data.streams import LaneBatches, OrderedBatches, Prefetched
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
    """Endless training batches of this host.

    Step n's global batch is the same for any `shard_count` that divides the batch; host h has
    rows [h B/H, (h+1) B/H) of it. `get_state` and `set_state` resume exactly. A store's state is
    the step alone, so it resumes on any number of hosts too.

    Args:
        config: what to read.
        tokenizer: None loads `config.tokenizer`.
        global_batch_size: rows of all hosts' batches together.
        seed: of the shuffled order.
        shard_index, shard_count: this host among all, e.g. `jax.process_index()`, `_count()`.
        vocab_size: the model's; None takes the tokenizer's.

    Returns:
        Iterator of dicts, leading axis B/H: tokens, labels int32, loss_mask float32, and for
        packed rows segment_ids and positions int32, each [B/H, T].

    Raises:
        ValueError: bad config, store, tokenizer, text or shards.
    """
    tokenizer, rows_of, vocab_size = entrance(
        config, tokenizer, global_batch_size, shard_index, shard_count, vocab_size
    )
    source = open_store(config, heldout=False)
    if source is not None:
        store, _, count = source
        store.check_tokenizer(tokenizer)
        order = train_order(config, store, count, global_batch_size, seed)
        batches = store_batches(
            config, tokenizer, source, order, _ENDLESS, global_batch_size, rows_of, vocab_size
        )
        return _step_iterator(config, batches, _ENDLESS // global_batch_size)
    documents = open_documents(config, heldout=False)
    count = len(documents)
    lanes = 1 if config.shuffle else math.gcd(count, global_batch_size)
    _check_some_text(documents, config, tokenizer, where=f"data.path={config.path!r}", lanes=lanes)
    # Short text gives lanes of several epochs at once.
    order = functools.lru_cache(global_batch_size // count + 3)(
        functools.partial(permutation, count, seed)
    )
    lanes = []
    for lane in range(global_batch_size)[rows_of]:
        place = functools.partial(
            _document_of, count, global_batch_size, lane, order if config.shuffle else None
        )
        pieces = grain.MapDataset.range(_ENDLESS // global_batch_size - 1).map(place)
        pieces = pieces.map(functools.partial(_piece, documents, tokenizer, config))
        lanes.append(packed_rows(_serial(pieces), config.sequence_length, config.packing))
    dataset = LaneBatches(lanes, shard=(shard_index, shard_count), num_threads=config.num_threads)
    return _prefetched(config, dataset)


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
    """Batches of the held-out data, each sequence once, in stored or listed order.

    Args:
        config, tokenizer, global_batch_size, shard_index, shard_count, vocab_size: as in
            `make_train_iterator`.
        remainder: what to do where the batch doesn't divide a store's sequences: "error", or
            "pad" the last batch with rows whose loss_mask (and segment_ids) is 0. Packed text
            is always padded: how many rows it makes is known only at its end.

    Returns:
        A finite iterator of the same dicts.

    Raises:
        ValueError: as for training, and where a store's length or (unless padded) number of
            sequences isn't a multiple of the row length or batch: nothing is left out.
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"remainder={remainder!r}; accepted: {', '.join(map(repr, REMAINDERS))}")
    tokenizer, rows_of, vocab_size = entrance(
        config, tokenizer, global_batch_size, shard_index, shard_count, vocab_size
    )
    source = open_store(config, heldout=True)
    if source is not None:
        store, _, count = source
        store.check_tokenizer(tokenizer)
        columns = num_columns(config, store)
        if store.length % config.sequence_length:
            raise ValueError(
                f"data.sequence_length={config.sequence_length} does not divide the length "
                f"{store.length} of {store.path}; evaluation leaves no token out"
            )
        total = count * columns
        if total % global_batch_size and remainder == "error":
            raise ValueError(
                f"{store.path} has {total} held-out sequences of {config.sequence_length}, not a "
                f"multiple of the global batch {global_batch_size}; choose a batch that divides "
                "them, or remainder='pad'"
            )
        order = ColumnOrder(count, columns, multiple=1)
        batches = store_batches(
            config, tokenizer, source, order, total, global_batch_size, rows_of, vocab_size
        )
        return _step_iterator(config, batches, -(-total // global_batch_size))
    documents = open_documents(config, heldout=True)
    where = f"data.heldout_path={config.heldout_path!r}"
    if not config.heldout_path:
        where = f"the held-out part of data.path={config.path!r}"
    _check_some_text(documents, config, tokenizer, where=where)
    pieces = grain.MapDataset.range(len(documents)).map(
        functools.partial(_piece, documents, tokenizer, config)
    )
    rows = packed_rows(_serial(pieces), config.sequence_length, config.packing)
    dataset = OrderedBatches(rows, global_batch_size=global_batch_size, rows_of=rows_of)
    return _prefetched(config, dataset)


def _document_of(
    count: int,
    batch: int,
    lane: int,
    order: Callable[[int], np.ndarray] | None,
    place: int,
) -> int:
    """The document at a place of a lane: of the endless list of epochs, lanes take turns."""
    epoch, index = divmod(place * batch + lane, count)
    return index if order is None else int(order(epoch)[index])


def _piece(documents: Documents, tokenizer: Tokenizer, config: DataConfig, index: int):
    bos_id = bos_id_of(config, tokenizer)
    end_id = bos_id if config.format == "text" else tokenizer.eos_id
    return document_tokens(
        documents,
        index,
        tokenizer,
        bos_id=bos_id if config.add_bos else None,
        end_id=end_id if config.predict_end else None,
        align=config.align_documents,
    )


def _check_some_text(
    documents: Documents, config: DataConfig, tokenizer: Tokenizer, *, where: str, lanes: int = 1
) -> None:
    """Raise ValueError where one of `lanes`, which take documents in turn, has no text: it would never give a first row."""
    for lane in range(lanes):
        own = range(lane, len(documents), lanes)
        if all(_piece(documents, tokenizer, config, i) is None for i in own):
            which = ""
            if lanes > 1:
                which = f" of number {lane} modulo {lanes}, which data.shuffle=False gives to one row of a batch,"
            raise ValueError(f"no text in {where}: every document{which} is empty")


def _serial(pieces: grain.MapDataset) -> grain.IterDataset:
    return pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _step_iterator(config: DataConfig, batches: StoreBatches, steps: int) -> grain.DatasetIterator:
    options = grain.ReadOptions(
        num_threads=config.num_threads,
        prefetch_buffer_size=config.prefetch if config.num_threads else 0,
    )
    return _opened(grain.MapDataset.range(steps).map(batches).to_iter_dataset(options))


def _prefetched(config: DataConfig, dataset: grain.IterDataset) -> grain.DatasetIterator:
    if config.num_threads and config.prefetch:
        dataset = Prefetched(dataset, config.prefetch)
    return _opened(dataset)


def _opened(dataset: grain.IterDataset) -> grain.DatasetIterator:
    iterator = iter(dataset)
    _open_iterators.add(iterator)
    return iterator


@atexit.register
def _close_all() -> None:
    # Grain's threads print tracebacks if they are still at work when the interpreter goes.
    for iterator in list(_open_iterators):
        iterator.close()
