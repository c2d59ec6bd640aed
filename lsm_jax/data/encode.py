"""Documents to store rows: ids by one process or by several, in the documents' order."""

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
    """What one store got.

    Attributes:
        rows: rows written.
        documents: documents read.
        short: documents left out since they are shorter than a row.
        longest: tokens in the longest of those.
        tokens: tokens made, of all documents.
        dropped: tokens that are in no row: short documents, and what is over the last full row.
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
    """Turns encoded pieces into rows.

    Args:
        documents: what the pieces are of.
        writer: takes the rows.
        encoded: (bytes, ids of consecutive pieces), in order.
        length: tokens in a row.
        separator: documents are put end to end with this id after each; None is LongCrawl64's
            rule: a row is one document's first `length` tokens, and shorter ones are left out.
        progress: called with the tokens and bytes of each part.
    """
    done = Written(documents=documents.num_documents)
    carry = np.zeros(0, np.uint32)
    index = 0
    for size, pieces in encoded:
        stream, rows = [carry], []
        for ids in pieces:
            done.tokens += len(ids)
            ends = index + 1 == len(documents) or documents.begins[index + 1]
            index += 1
            if separator is not None:
                stream.append(np.append(ids, np.uint32(separator)) if ends else ids)
            elif len(ids) >= length:
                rows.append(ids[:length])
                done.dropped += len(ids) - length
            else:
                done.short += 1
                done.longest = max(done.longest, len(ids))
                done.dropped += len(ids)
        if separator is not None:
            joined = np.concatenate(stream)
            whole = len(joined) // length * length
            carry = joined[whole:]
            rows = list(joined[:whole].reshape(-1, length))
        if rows:
            writer.add(np.stack(rows))
        progress(sum(map(len, pieces)), size)
    done.rows = writer.num_rows
    done.dropped += len(carry)
    if not done.rows:
        raise ValueError(
            f"no rows of {length} tokens: "
            + (
                f"all text makes only {len(carry)} tokens"
                if separator is not None
                else f"the longest of {done.documents} documents has {done.longest}; "
                "pass --pack to put documents end to end, or a shorter --sequence_length"
            )
        )
    return done


def encode_documents(
    parts: Sequence[Documents], tokenizer: str, *, json_escape: bool = False, num_workers: int = 1
) -> Generator[Iterator[tuple[int, list[np.ndarray]]]]:
    """Ids of each part's pieces, in order, by this process or by several.

    Args:
        parts: documents; each gives one iterator, to be used up before the next is asked for.
        tokenizer: a tokenizer's name or path.
        json_escape: escape text first.
        num_workers: processes; 1 works in this one.

    Yields:
        Iterators of (bytes, ids of consecutive pieces).
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
    running: deque = deque()
    for task in tasks:
        running.append(pool.submit(_work, part, task))
        if len(running) == ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _tasks(documents: Documents) -> Iterator[range]:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = parts, load_tokenizer(tokenizer, json_escape=json_escape)


def _end_with_parent() -> None:
    # A pool's workers would else wait forever for a parent that was killed.
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(part: int, task: range) -> tuple[int, list[np.ndarray]]:
    assert _worker is not None
    return _encode(_worker[0][part], _worker[1], task)
