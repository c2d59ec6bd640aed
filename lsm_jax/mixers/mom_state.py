"""The state of a Mixture-of-Memories between calls: its memories, and the number of the document that each belongs to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops import DocumentCount, number_documents


class MoMState(NamedTuple):
    """The state of a Mixture-of-Memories between calls: its memories, and which documents they belong to.

    Attributes:
        memories: the inner op's state, with arrays [B, G, ...] for the G memories, the shared one last. Its
            segment ids are document numbers as counted in `document`: a memory that had no token of the
            current document has an earlier number.
        last_id: int32 [B], the last nonzero segment id seen, 0 before any.
        document: int32 [B], the number of documents begun so far, at least 1.
    """

    memories: Any
    last_id: jax.Array
    document: jax.Array


def check_memories(memory: Any, groups: int) -> None:
    """Raise ValueError unless a state of a Mixture-of-Memories has one state for each of its `groups`
    memories; the shapes of these states are checked by the inner mixer's op.
    """
    if not isinstance(memory, MoMState):
        raise ValueError(
            f"MoM: state.memory is a {type(memory).__name__}; accepted is a MoMState of init_state"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(memory.memories):
        if jnp.shape(leaf)[1:2] != (groups,):
            raise ValueError(
                f"MoM: state.memory.memories{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; accepted are "
                f"[B, {groups}, ...], one for each memory"
            )


def mark_document(
    memory: Any, tails: dict[str, Any], document: jax.Array
) -> tuple[Any, dict[str, Any]]:
    """Return the states of all memories and the tails of their convolutions, with arrays [B, G, ...], in
    which the segment ids are replaced by `document` [B], the number of each row's document.
    """
    ids = jnp.broadcast_to(document[:, None], jax.tree.leaves(memory)[0].shape[:2])
    tails = {name: tail._replace(segment_id=ids) for name, tail in tails.items()}
    return memory._replace(segment_id=ids), tails


def split_memories(tree: Any, groups: int) -> Any:
    """Separate the axes of rows and of memories: reshape all arrays of a pytree from [B * G, ...] to [B, G, ...], where
    G is `groups`.
    """
    return jax.tree.map(lambda s: s.reshape(-1, groups, *s.shape[1:]), tree)


def token_documents(
    x: jax.Array, segment_ids: jax.Array | None, memory: MoMState | None
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Number the documents that the tokens of a call belong to, within each row and on from the call before.

    Args:
        x: [B, T, D].
        segment_ids: [B, T], or None for one document that continues.
        memory: the state before the call, or None.

    Returns:
        The number of each token's document, [B, T], 0 on padding (None for one document without a state); and
        `last_id` and `document` of the state after the call.
    """
    batch, length = x.shape[:2]
    last_id = jnp.zeros(batch, jnp.int32) if memory is None else memory.last_id
    document = jnp.ones(batch, jnp.int32) if memory is None else memory.document
    if segment_ids is None:
        one = jnp.broadcast_to(document[:, None], (batch, length))
        return None if memory is None else one, last_id, document
    run, after = number_documents(segment_ids, DocumentCount(document, last_id))
    ids = jnp.where(segment_ids != 0, run, 0)
    return ids, after.segment_id.astype(jnp.int32), after.count


def positions_in_memory(
    counted: jax.Array, documents: jax.Array | None, memory: MoMState | None
) -> jax.Array:
    """Return the number of tokens of its document that each memory has received before each token, int32 [B, T, G].

    For a document that continues from `memory`, counting starts at the position that the inner op's state has
    in its mini-batch: only the remainder of the count by the mini-batch's size is used.

    Args:
        counted: bool [B, T, G], the tokens that update each memory.
        documents: [B, T], from `token_documents`.
        memory: the state before the call, or None.
    """
    before = jnp.cumsum(counted, axis=1, dtype=jnp.int32) - counted
    if documents is None:
        return before
    length = documents.shape[1]
    current = jnp.ones_like(documents[:, :1]) if memory is None else memory.document[:, None]
    latest = jax.lax.cummax(jnp.concatenate([current, documents], axis=1), axis=1)
    starts = latest[:, 1:] > latest[:, :-1]
    start = jax.lax.cummax(jnp.where(starts, jnp.arange(length), -1), axis=1)[..., None]
    earlier = jnp.zeros_like(before[:, 0])
    if memory is not None:
        state = memory.memories
        earlier = jnp.where(state.segment_id == memory.document[:, None], state.position, 0)
    of_document = before - jnp.take_along_axis(before, jnp.maximum(start, 0), axis=1)
    return jnp.where(start < 0, before + earlier[:, None], of_document)
