"""Make the iterators over batches of tokens: `make_train_iterator` for training, `make_eval_iterator` for
held-out data."""

from __future__ import annotations

import atexit
import functools
import math
import sys
import weakref
from collections.abc import Callable

import grain
import numpy as np
from absl import logging

from lsm_jax.data.arguments import bos_id_of, check_arguments
from lsm_jax.data.config import DataConfig
from lsm_jax.data.documents import Documents
from lsm_jax.data.order import ColumnOrder, permutation
from lsm_jax.data.packing import document_tokens, packed_rows
from lsm_jax.data.rows import StoreBatches
from lsm_jax.data.sources import open_documents, open_store
from lsm_jax.data.store_streams import num_columns, store_batches, train_order
from lsm_jax.data.streams import LaneBatches, OrderedBatches, Prefetched
from lsm_jax.data.tokenizers import Tokenizer

REMAINDERS = ("error", "pad")
_ENDLESS = sys.maxsize
_COUNTED_BYTES = 1 << 20  # of text that is tokenised to count its tokens before the first batch
_short_texts: set[str] = set()  # the warnings that were logged
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
    resumed on another number of hosts.

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
    where = f"data.path={config.path!r}"
    _check_some_text(documents, config, tokenizer, where=where, lanes=lanes)
    _check_row_length(
        documents, config, tokenizer, where=where, most=(1 << 16, 16), rest="repeated"
    )
    # If there are fewer documents than rows, the lanes read several epochs at the same time.
    order = functools.lru_cache(global_batch_size // count + 3)(
        functools.partial(permutation, count, seed)
    )
    lanes = []
    for lane in range(global_batch_size)[rows_of]:
        index_of = functools.partial(
            _document_index, count, global_batch_size, lane, order if config.shuffle else None
        )
        pieces = grain.MapDataset.range(_ENDLESS // global_batch_size - 1).map(index_of)
        pieces = pieces.map(functools.partial(_piece_tokens, documents, tokenizer, config))
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
    source = open_store(config, heldout=True)
    if source is not None:
        store, _, count = source
        store.check_tokenizer(tokenizer)
        columns = num_columns(config, store)
        if store.length % config.sequence_length and config.row_remainder == "skip":
            raise ValueError(
                f"data.sequence_length={config.sequence_length} does not divide the length "
                f"{store.length} of the documents in {store.path}; evaluation must read every token: choose a length "
                "that does, or data.row_remainder='overlap'"
            )
        total = count * columns
        if total % global_batch_size and remainder == "error":
            raise ValueError(
                f"global_batch_size={global_batch_size} does not divide the {total} held-out sequences of "
                f"{config.sequence_length} tokens in {store.path}; choose a batch size that does, or remainder='pad'"
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
    _check_row_length(documents, config, tokenizer, where=where, most=(1 << 20, 64), rest="padding")
    pieces = grain.MapDataset.range(len(documents)).map(
        functools.partial(_piece_tokens, documents, tokenizer, config)
    )
    rows = packed_rows(_serial(pieces), config.sequence_length, config.packing)
    dataset = OrderedBatches(rows, global_batch_size=global_batch_size, rows_of=rows_of)
    return _prefetched(config, dataset)


def _document_index(
    count: int,
    batch: int,
    lane: int,
    order: Callable[[int], np.ndarray] | None,
    n: int,
) -> int:
    """Return the index of the n-th piece of a document that lane j reads. Lane j makes row j of each batch
    of B rows: it reads the pieces j, j + B, j + 2B, ... of all epochs, concatenated.

    Args:
        count: number of pieces of documents in an epoch.
        batch: B, the number of lanes, which is the number of rows in a global batch.
        lane: j, the number of the lane.
        order: function from an epoch's number to the permutation of the pieces in that epoch; None is the
            listed order.
        n: number of the piece in the lane, from 0.
    """
    epoch, index = divmod(n * batch + lane, count)
    return index if order is None else int(order(epoch)[index])


def _piece_tokens(documents: Documents, tokenizer: Tokenizer, config: DataConfig, index: int):
    """Return the token ids and the labels of a document's piece, by the data config's rules for BOS, end
    and alignment; None if it predicts no token."""
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
    """Raise ValueError if some row of the batches would never be filled: if the documents' pieces lane,
    lane + `lanes`, lane + 2 `lanes`, ..., from which row number `lane` is made, are all without text.
    Reading would search forever for that row's first token."""
    for lane in range(lanes):
        indices = range(lane, len(documents), lanes)
        if all(_piece_tokens(documents, tokenizer, config, i) is None for i in indices):
            which = ""
            if lanes > 1:
                which = (
                    f" whose number modulo {lanes} is {lane} (with data.shuffle=False, "
                    "one row of each batch reads only these)"
                )
            raise ValueError(f"no text in {where}: every document{which} is empty")


def count_text(documents: Documents, config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens of documents if they are fewer than one row has; None if they are enough.

    At most `_COUNTED_BYTES` are tokenised; for a longer text the number is an upper bound by its bytes. A text of more
    than 16 bytes per token of a row is enough.
    """
    length, num_bytes = config.sequence_length, int(documents.lengths.sum())
    if num_bytes > _COUNTED_BYTES:
        # JSON-escaping makes up to 6 characters of a byte; each document may have a BOS.
        most = num_bytes * (6 if config.json_escape else 1) + documents.num_documents
        return most if most < length else None
    if num_bytes > 16 * length:
        return None
    total = 0
    for index in range(len(documents)):
        piece = _piece_tokens(documents, tokenizer, config, index)
        total += 0 if piece is None else len(piece["tokens"])
        if total >= length:
            return None
    return total


def _check_row_length(
    documents: Documents,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    where: str,
    most: tuple[int, int],
    rest: str,
) -> None:
    """Log a warning if text does not fill one row, and raise ValueError if a long row would consist nearly
    only of repeated text or padding.

    Args:
        documents, config, tokenizer: the text and how it is tokenised.
        where: the config's field of the text, for the messages.
        most: (a, b): an error if a row has more than a tokens and more than b times the text's.
        rest: how the rest of the row is filled, for the warning.
    """
    num_tokens, length = count_text(documents, config, tokenizer), config.sequence_length
    if num_tokens is None:
        return
    message = f"{where} has only {num_tokens} of the {length} tokens of one row"
    if length > most[0] and length > most[1] * num_tokens:
        raise ValueError(
            f"data.sequence_length={length}: {message}; choose a smaller data.sequence_length, or more text"
        )
    if message not in _short_texts:
        _short_texts.add(message)
        logging.warning("%s; the rest is %s.", message, rest)


def _serial(pieces: grain.MapDataset) -> grain.IterDataset:
    """Convert a dataset of the pieces of documents to one that is read in order, in the calling thread,
    without reading ahead."""
    return pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _step_iterator(config: DataConfig, batches: StoreBatches, steps: int) -> grain.DatasetIterator:
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
