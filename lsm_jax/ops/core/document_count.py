"""Number the documents of each row from the first one on, from call to call: two documents with the same segment id get
different numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import read_tokens
from lsm_jax.ops.core.shared_rows import Update, begins, ends_of_documents, newer_id, resume
from lsm_jax.parallel import TOKENS, over_mesh


class DocumentCount(NamedTuple):
    """The number of documents in each row so far, which the numbering of the next call continues.

    Attributes:
        count: [B], the number of documents that have begun after the first.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    count: Int[Array, " B"]
    segment_id: Int[Array, " B"]


def number_documents(
    segment_ids: Int[Array, "B T"], state: DocumentCount
) -> tuple[Int[Array, "B T"], DocumentCount]:
    """Number the documents of each row: the number of documents that have begun up to each token, and the
    state after.

    A document begins where the id differs from the last nonzero one, as for every op.

    Args:
        segment_ids: [B, T] integers, 0 for padding.
        state: the state to continue from.

    Raises:
        ValueError: segment_ids is not an integer array [B, T].
    """
    op = "number_documents"
    checks.check_rows(op, len(state.count), jnp.shape(segment_ids)[-1], segment_ids, None)
    axes = dict(segment_ids=TOKENS[:2], state=("batch",))
    return over_mesh(
        _number, dict(segment_ids=segment_ids, state=state), {},
        axes=axes, out_axes=(TOKENS[:2], "state"), in_sequence=_in_sequence,
    )  # fmt: skip


def _number(segment_ids, state: DocumentCount) -> tuple[Array, DocumentCount]:
    """Number each token's document within its row, [B, T], on one device that has complete rows, and return the numbers
    with the count after the last token.
    """
    tokens = read_tokens(segment_ids, None, state.segment_id, None)
    assert tokens.run is not None
    run = tokens.run + state.count[:, None]
    return run, DocumentCount(run[:, -1], tokens.last_id)


def _in_sequence(axis, function, segment_ids, state):
    """Number each token's document within its row, [B, T], on one of several devices that have consecutive parts of
    each row, and return the numbers with the count after the whole row.
    """
    empty = DocumentCount(jnp.zeros_like(state.count), jnp.zeros_like(state.segment_id))
    run, written = function(segment_ids, empty)
    _, first_id = ends_of_documents(segment_ids, run)
    update = Update((), written, None, first_id)
    return resume(axis, function, (), dict(segment_ids=segment_ids, state=state), update, _advance)


def _advance(state: DocumentCount, update: Update) -> DocumentCount:
    """Return the count of documents in each row [B] after one device's tokens: the count before these tokens
    plus the number of documents that begin among them, the first token's included.
    """
    count = state.count + begins(state, update) + update.written.count
    return DocumentCount(count, newer_id(state, update))
