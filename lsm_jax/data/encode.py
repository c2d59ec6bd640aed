"""Tokenise documents, in one process or several, and write the rows of a store in the documents' order."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context, parent_process

import numpy as np

from lsm_jax.data.documents import Documents
from lsm_jax.data.tokenizers import Tokenizer, load_tokenizer
from lsm_jax.data.writer import StoreWriter

_TASK_BYTES = 1 << 20


@dataclasses.dataclass
class Written:
    """Counts of the rows, documents and tokens that were written into a store.

    Attributes:
        rows: rows written.
        documents: documents read.
        short: documents that are not in the store because they are shorter than a row.
        longest: tokens in the longest of the short documents.
        tokens: tokens in all documents.
        dropped: tokens that are in no row: those of short documents, after a row's end, or after the last full row.
    """

    rows: int = 0
    documents: int = 0
    short: int = 0
    longest: int = 0
    tokens: int = 0
    dropped: int = 0


def write_documents(
    documents: Documents,
    writer: StoreWriter,
    encoded: Iterable[tuple[int, list[np.ndarray]]],
    *,
    length: int,
    separator: int | None,
    progress: Callable[[int, int], None] = lambda tokens, size: None,
) -> Written:
    """Cut the token ids of documents into rows of `length` tokens and write the rows to a token store;
    return the counts of rows, documents and tokens.

    Args:
        documents: the documents whose token ids `encoded` has.
        writer: the store to which rows are added, opened for writing.
        encoded: pairs (size in bytes of some consecutive pieces, token ids of each of them), in the order
            of the pieces in `documents`.
        length: tokens in a row.
        separator: concatenate the documents with this id after each. None is LongCrawl64's rule: a row is the first
            `length` tokens of one document, and shorter documents are dropped.
        progress: called with (tokens, bytes) of each item of `encoded`.

    Raises:
        ValueError: all documents together do not fill one row.
    """
    counts = Written(documents=documents.num_documents)
    carry = np.zeros(0, np.uint32)
    index = 0
    for size, pieces in encoded:
        stream, rows = [carry], []
        for ids in pieces:
            counts.tokens += len(ids)
            ends = index + 1 == len(documents) or documents.begins[index + 1]
            index += 1
            if separator is not None:
                stream.append(np.append(ids, np.uint32(separator)) if ends else ids)
            elif len(ids) >= length:
                rows.append(ids[:length])
                counts.dropped += len(ids) - length
            else:
                counts.short += 1
                counts.longest = max(counts.longest, len(ids))
                counts.dropped += len(ids)
        if separator is not None:
            joined = np.concatenate(stream)
            end = len(joined) // length * length
            carry = joined[end:]
            rows = list(joined[:end].reshape(-1, length))
        if rows:
            writer.add(np.stack(rows))
        progress(sum(map(len, pieces)), size)
    counts.rows = writer.num_rows
    counts.dropped += len(carry)
    if not counts.rows:
        raise ValueError(
            f"sequence_length={length} is longer than the text: "
            + (
                f"all documents together have {len(carry)} tokens; choose a smaller --sequence_length, more text, or for "
                "a held-out store a larger --heldout_fraction"
                if separator is not None
                else f"the longest of {counts.documents} documents has {counts.longest}; "
                "pass --pack to concatenate documents, or a smaller --sequence_length"
            )
        )
    return counts


def encode_documents(
    parts: Sequence[Documents], tokenizer: str, *, json_escape: bool = False, num_workers: int = 1
) -> Generator[Iterator[tuple[int, list[np.ndarray]]]]:
    """Tokenise the pieces of each set of documents (such as training and held-out), in order, in one
    process or several.

    Args:
        parts: sets of documents, such as training and held-out.
        tokenizer: name or path of the tokenizer.
        json_escape: JSON-escape the text before it is tokenised.
        num_workers: number of processes; with 1, this process tokenises, and no other is started.

    Yields:
        For each set of documents an iterator of (size in bytes of some consecutive pieces, token ids of
        each of them). It must be exhausted before the next set's iterator is requested.
    """
    if num_workers == 1:
        loaded = load_tokenizer(tokenizer, json_escape=json_escape)
        for part in parts:
            yield (_encode(part, loaded, task) for task in _tasks(part))
        return
    # Spawned, not forked: the parent may have threads.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(parts, tokenizer, json_escape),
    )
    try:
        for number, part in enumerate(parts):
            yield _in_order(pool, number, _tasks(part), 4 * num_workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: Executor, part: int, tasks: Iterable[range], ahead: int
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Tokenise the pieces of documents in the processes of `pool`, one range of pieces per job, and yield
    for each range (size in bytes, token ids of each piece), in the order of `tasks`. At most `ahead` ranges
    are submitted before their results are needed."""
    running: deque = deque()
    for task in tasks:
        running.append(pool.submit(_encode_in_worker, part, task))
        if len(running) == ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _tasks(documents: Documents) -> Iterator[range]:
    """Divide the pieces of documents into the jobs of a pool of processes: yield ranges of consecutive
    pieces with at least 1 MiB of text each, except the last."""
    start, size = 0, 0
    for i, length in enumerate(documents.lengths.tolist()):
        size += length
        if size >= _TASK_BYTES:
            yield range(start, i + 1)
            start, size = i + 1, 0
    if start < len(documents):
        yield range(start, len(documents))


def _encode(
    documents: Documents, tokenizer: Tokenizer, task: range
) -> tuple[int, list[np.ndarray]]:
    pieces = [np.array(tokenizer.encode(documents[i].text), np.uint32) for i in task]
    return int(documents.lengths[task.start : task.stop].sum()), pieces


_worker: tuple[Sequence[Documents], Tokenizer] | None = None


def _start_worker(parts: Sequence[Documents], tokenizer: str, json_escape: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = parts, load_tokenizer(tokenizer, json_escape=json_escape)


def _end_with_parent() -> None:
    # Without this, a worker would wait forever for a parent that was killed.
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(part: int, task: range) -> tuple[int, list[np.ndarray]]:
    assert _worker is not None
    return _encode(_worker[0][part], _worker[1], task)
