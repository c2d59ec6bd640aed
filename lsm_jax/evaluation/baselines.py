"""Compute the size in bits per byte to which compressors without a network reduce text, as baselines for a
language model on the same held-out bytes.

`ContextModel` is the classical byte model of a fixed order, `xz_bits` is the strongest setting of a
general-purpose compressor. Both results are in bits per byte, as a language model's loss can be stated.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence

import numpy as np

from lsm_jax.data import TokenStore

MAX_ORDER = 2  # the table of counts has 256 ** (order + 1) numbers


class ContextModel:
    """A baseline without a network: a model of each byte given the previous `order` bytes, from counts on
    `train`.

    Each order is interpolated with the next lower one, down to the uniform distribution, by Witten and Bell's
    rule ("The zero-frequency problem", 1991, method C, as in PPMC):
    `p(c | s) = (n(s, c) + u(s) p(c | s')) / (n(s) + u(s))`, where s' is s without its oldest byte and u(s)
    counts the distinct bytes seen after s. A document's first bytes use the lower orders; no context includes
    bytes of another document.

    Args:
        train: documents, each uint8 [n].
        order: 0, 1 or 2 bytes of context.

    Raises:
        ValueError: `order` is another number, or `train` has no bytes.
    """

    def __init__(self, train: Iterable[np.ndarray], order: int):
        if not 0 <= order <= MAX_ORDER:
            raise ValueError(f"order={order}, accepted: 0 to {MAX_ORDER}")
        self._orders = [_Order(table) for table in _count(train, order)]

    def probabilities(self, document: np.ndarray) -> np.ndarray:
        """Return the probability of every byte of a document given the bytes before it: uint8 [n] ->
        float64 [n]."""
        probability = np.full(document.size, 1 / 256)
        for k, model in enumerate(self._orders):
            probability[k:] = model.interpolate(_contexts(document, k), probability[k:])
        return probability

    def bits(self, heldout: Iterable[np.ndarray]) -> float:
        """Return the bits per byte to which the model compresses the documents: the mean of -log2 of the
        bytes' probabilities.

        Raises:
            ValueError: the documents have no bytes, so there is no mean.
        """
        total, scored = 0.0, 0
        for document in heldout:
            total -= np.log2(self.probabilities(document)).sum()
            scored += document.size
        if not scored:
            raise ValueError("heldout has no bytes")
        return float(total / scored)


def xz_bits(heldout: Iterable[np.ndarray]) -> float:
    """Return the bits per byte to which `xz -9`, which sees no other data, compresses the concatenated
    held-out documents.

    Raises:
        ValueError: `heldout` has no bytes.
    """
    raw = b"".join(np.asarray(document, np.uint8).tobytes() for document in heldout)
    if not raw:
        raise ValueError("heldout has no bytes")
    return 8 * len(lzma.compress(raw, preset=9)) / len(raw)


def byte_baselines(train: Iterable[np.ndarray], heldout: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the bits per byte that each baseline without a network reaches on the documents `heldout`, by
    name: "order-0", "order-2" and "xz -9"."""
    train = list(train)
    return {
        "order-0": ContextModel(train, 0).bits(heldout),
        "order-2": ContextModel(train, 2).bits(heldout),
        "xz -9": xz_bits(heldout),
    }


def _contexts(document: np.ndarray, order: int) -> np.ndarray:
    """Return one number for each byte of a document, uint8 [n], that has `order` bytes before it, as int32
    [n - order]: these bytes and the byte itself are the digits of the number in base 256, of which the byte
    itself is the lowest."""
    document = np.asarray(document)
    if document.dtype != np.uint8:
        raise ValueError(f"documents have dtype {document.dtype}, accepted: uint8")
    if document.size <= order:
        return np.zeros(0, np.int32)
    code = np.zeros(document.size - order, np.int32)
    for i in range(order + 1):
        code = code << 8 | document[i : document.size - order + i]
    return code


def _count(documents: Iterable[np.ndarray], order: int) -> list[np.ndarray]:
    """Return, for each order k up to `order`, how often each byte follows each context of k bytes in the
    documents: int64 [256 ** (k + 1)]."""
    tables = [np.zeros(256 ** (k + 1), np.int64) for k in range(order + 1)]
    pending: list[np.ndarray] = []

    def flush() -> None:
        for k, table in enumerate(tables):
            codes = [_contexts(document, k) for document in pending]
            if codes:
                table += np.bincount(np.concatenate(codes), minlength=table.size)
        pending.clear()

    for document in documents:
        pending.append(document)
        # A pass over the largest table costs as much as counting as many bytes, so several documents are
        # counted in one pass.
        if sum(d.size for d in pending) >= tables[-1].size:
            flush()
    flush()
    if not tables[0].any():
        raise ValueError("train has no bytes")
    return tables


class _Order:
    """The counts n(s, c) of each byte c after each context s of k bytes, for one k (the order), and the
    counts derived from them by which probabilities of this order are interpolated with those of the
    next lower order."""

    def __init__(self, counts: np.ndarray):
        self.counts = counts
        self.distinct = np.count_nonzero(counts.reshape(-1, 256), axis=-1)
        self.mass = counts.reshape(-1, 256).sum(-1) + self.distinct

    def interpolate(self, code: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return p(c | s) [n], the probability of each byte c of a document after its context s, the k
        bytes before it, from the counts of order k and from `lower` [n], the probabilities of order k - 1.

        `code` [n] is a number for (s, c) in base 256. If s did not occur in the counts, the probability is
        that of `lower`.
        """
        mass = self.mass[code >> 8]
        mixed = (self.counts[code] + self.distinct[code >> 8] * lower) / np.maximum(mass, 1)
        return np.where(mass > 0, mixed, lower)


def store_documents(store: TokenStore, num_rows: int | None = None) -> list[np.ndarray]:
    """Return the documents of a store of byte tokens, each uint8 [n], without separators.

    If the store names its separator, its rows are joined and split at separators; otherwise each row is a
    document.

    Args:
        store: a store of bytes.
        num_rows: read only so many rows, from the first; None reads all.

    Raises:
        ValueError: the store's tokens are not bytes.
    """
    encoder = store.attributes.get("encoder")
    if encoder != "bytes":
        raise ValueError(f"{store.path} has encoder {encoder!r}, accepted: 'bytes'")
    number = store.num_documents if num_rows is None else min(num_rows, store.num_documents)
    rows = store.read(np.arange(number), 0, store.length, vocab_size=1 << 16)
    parts = [rows.reshape(-1)] if "separator" in store.attributes else list(rows)
    documents = []
    for part in parts:
        cuts = np.flatnonzero(part >= 256)
        for document in np.split(part, cuts):
            document = document[document < 256].astype(np.uint8)
            if document.size:
                documents.append(document)
    return documents
