"""The tokens of `delta_memory` and `dplr_memory` on one device as one update `M -> Θ M + W`, Θ [K, K] a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.segments import read_tokens
from lsm_jax.ops.sequence import Update, emptied_by, ends_of_documents, newer_id
from lsm_jax.ops.states import DeltaState


def update_of(options, by_xla: Callable[..., Any], arguments: dict[str, Any]) -> Update:
    """This device's tokens as an update.

    Θ acts on each value channel alike, so it is what the identity matrix becomes as K more value channels, to which nothing
    is written; a document that begins among the tokens leaves nothing of it.

    Args:
        options: of the op's XLA form in chunks.
        by_xla: that form.
        arguments: the op's arrays on this device.
    """
    v, state, segment_ids = (arguments[name] for name in ("v", "state", "segment_ids"))
    key_dim, value_dim = state.memory.shape[-2:]
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    no_id = jnp.zeros_like(state.segment_id)
    tokens = read_tokens(segment_ids, None, no_id, num_segments)
    _, first_id = ends_of_documents(segment_ids, tokens.run)
    dtype = options.dtype
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=dtype), (*state.memory.shape[:-1], key_dim))
    start = jnp.concatenate([jnp.zeros_like(state.memory, dtype), identity], axis=-1)
    wide = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], key_dim), v.dtype)], axis=-1)
    given = arguments | {"v": wide, "state": DeltaState(start, no_id)}
    _, after = by_xla(options, **given)
    memory, transition = after.memory[..., :value_dim], after.memory[..., value_dim:]
    return Update(transition, DeltaState(memory, after.segment_id), None, first_id)


def advance(state: DeltaState, update: Update) -> DeltaState:
    """The state after an update."""
    state = emptied_by(state, update)
    kept = jnp.matmul(update.transition, state.memory, precision=jax.lax.Precision.HIGHEST)
    return DeltaState(kept + update.written.memory, newer_id(state, update))
