"""Pack several documents into each row of a batch, by grain's packing.

Labels are shifted within a document before it is packed, so that no position predicts a token of another document.
`loss_mask` is 0 only at padding and in prompts.
"""

from __future__ import annotations

from typing import Any

import grain
import numpy as np
from grain import experimental as grain_packing

from lsm_jax.data.documents import Documents
from lsm_jax.data.tokenizers import Tokenizer

_BINS = 8  # rows that first-fit fills at the same time
_PADDING = -1  # label of padding between documents
_PROMPT = -2  # label of the tokens of a prompt


def document_tokens(
    documents: Documents,
    index: int,
    tokenizer: Tokenizer,
    *,
    bos_id: int | None,
    end_id: int | None,
    align: int = 1,
) -> dict[str, np.ndarray] | None:
    """Return the token ids and the labels of one piece of a document, int32 [n] each; None if it predicts
    no token.

    Args:
        documents: the pieces of all documents.
        index: number of the piece to tokenise.
        tokenizer: the tokenizer that encodes the piece's text.
        bos_id: id of the token to put in front of a document (BOS); None adds none.
        end_id: id that a document's last token predicts, its label; None: the last token predicts nothing.
        align: the piece is padded at its end to a multiple of this number of tokens.
    """
    piece = documents[index]
    ids = tokenizer.encode(piece.text)
    if not ids:
        return None
    start = [bos_id] if piece.begins and bos_id is not None else []
    end = [end_id] if piece.ends and end_id is not None else []
    prompt = tokenizer.encode(piece.prompt) if piece.prompt else []
    stream = np.array([*start, *prompt, *ids, *end], np.int32)
    if stream.size < 2:
        return None
    labels = stream[1:].copy()
    if prompt:
        labels[: len(start) + len(prompt) - 1] = _PROMPT
    padding = (0, -labels.size % align)
    return {
        "tokens": np.pad(stream[:-1], padding),
        "labels": np.pad(labels, padding, constant_values=_PADDING),
    }


class _CutToRows(grain.experimental.FlatMapTransform):
    """Cut the tokens and labels of each document that is longer than a row of a batch into consecutive
    parts of one row's length; the last may be shorter."""

    max_fan_out = 1 << 30

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        starts = range(0, len(element["tokens"]), self._length)
        return [{k: v[s : s + self._length] for k, v in element.items()} for s in starts]


def packed_rows(documents: grain.IterDataset, length: int, packing: str) -> grain.IterDataset:
    """Pack the tokens of documents into rows of `length` tokens, several documents to a row.

    Each piece of a document in a row is one segment. Segments are numbered from 1 in a row, positions from 0 in a segment.

    Args:
        documents: dicts of tokens and labels [n], of any length n.
        length: tokens in a row.
        packing: "concat" or "first_fit"; see `DataConfig`.
    """
    lengths = {"tokens": length, "labels": length}
    if packing == "concat":
        return grain_packing.ConcatThenSplitIterDataset(documents, length_struct=lengths)
    return grain_packing.FirstFitPackIterDataset(
        grain_packing.FlatMapIterDataset(documents, _CutToRows(length)),
        length_struct=lengths,
        num_packing_bins=_BINS,
        shuffle_bins=False,
    )


def stack_rows(rows: list[dict[str, Any]], num_rows: int) -> dict[str, np.ndarray]:
    """Stack packed rows of T tokens into a batch of arrays [num_rows, T]: tokens, labels, loss mask,
    segment ids and positions. Rows that are missing at the end are padding, with loss mask and segment id
    0."""

    def stack(name: str) -> np.ndarray:
        stacked = np.zeros((num_rows, len(rows[0][name])), np.int32)
        stacked[: len(rows)] = [row[name] for row in rows]
        return stacked

    labels, segment_ids = stack("labels"), stack("tokens_segment_ids")
    real = (segment_ids > 0) & (labels != _PADDING)
    predicted = real & (labels != _PROMPT)
    return {
        "tokens": stack("tokens"),
        "labels": np.where(predicted, labels, 0),
        "loss_mask": predicted.astype(np.float32),
        "segment_ids": np.where(real, segment_ids, 0),
        "positions": np.where(real, stack("tokens_positions"), 0),
    }
