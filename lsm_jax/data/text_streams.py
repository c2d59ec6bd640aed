"""Make the rows of text: the lanes of training batches, and the held-out rows in order."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable

import grain
import numpy as np
from absl import logging

from lsm_jax.data.arguments import bos_id_of
from lsm_jax.data.config import DataConfig
from lsm_jax.data.documents import Documents
from lsm_jax.data.order import permutation
from lsm_jax.data.packing import document_tokens, packed_rows
from lsm_jax.data.sources import open_documents
from lsm_jax.data.tokenizers import Tokenizer

_ENDLESS = sys.maxsize
_COUNTED_BYTES = 1 << 20  # of text that is tokenised to count its tokens before the first batch
_short_texts: set[str] = set()  # the warnings that were logged


def text_lanes(
    config: DataConfig, tokenizer: Tokenizer, batch: int, rows_of: slice, seed: int
) -> list[grain.IterDataset]:
    """Return the endless packed rows of text from which each row of this host's training batches is taken (`LaneBatches`).

    Args:
        config: a data config with one source, which is text.
        tokenizer: the tokenizer of the text.
        batch: number of rows in a global batch, over all hosts.
        rows_of: the range of a global batch's rows that this host makes.
        seed: seed of the shuffled order.

    Raises:
        ValueError: the text does not exist, or is empty or far too short.
    """
    documents = open_documents(config, heldout=False)
    count = len(documents)
    lanes = 1 if config.shuffle else math.gcd(count, batch)
    where = f"data.path={config.path!r}"
    _check_some_text(documents, config, tokenizer, where=where, lanes=lanes)
    _check_row_length(
        documents, config, tokenizer, where=where, most=(1 << 16, 16), rest="repeated"
    )
    # If there are fewer documents than rows, the lanes read several epochs at the same time.
    order = functools.lru_cache(batch // count + 3)(functools.partial(permutation, count, seed))
    datasets = []
    for lane in range(batch)[rows_of]:
        index_of = functools.partial(
            _document_index, count, batch, lane, order if config.shuffle else None
        )
        pieces = grain.MapDataset.range(_ENDLESS // batch - 1).map(index_of)
        pieces = pieces.map(functools.partial(_piece_tokens, documents, tokenizer, config))
        datasets.append(packed_rows(_serial(pieces), config.sequence_length, config.packing))
    return datasets


def text_rows(config: DataConfig, tokenizer: Tokenizer) -> grain.IterDataset:
    """Return the packed rows of the held-out text of a data config with one source, in listed order.

    Raises:
        ValueError: the text does not exist, or is empty or far too short.
    """
    documents = open_documents(config, heldout=True)
    where = f"data.heldout_path={config.heldout_path!r}"
    if not config.heldout_path:
        where = f"the held-out part of data.path={config.path!r}"
    _check_some_text(documents, config, tokenizer, where=where)
    _check_row_length(documents, config, tokenizer, where=where, most=(1 << 20, 64), rest="padding")
    pieces = grain.MapDataset.range(len(documents)).map(
        functools.partial(_piece_tokens, documents, tokenizer, config)
    )
    return packed_rows(_serial(pieces), config.sequence_length, config.packing)


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
