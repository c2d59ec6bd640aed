"""The state that `attention` carries from call to call: the keys and values of a document's tokens, in a ring buffer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.forget_gates import GateSum
from lsm_jax.ops.core.chunk_scans import per_chunk


class AttentionState(NamedTuple):
    """The keys and values of the document so far, in a ring buffer with a capacity of C tokens.

    The r-th written token of the document, counted from 0, is stored at index r % C.

    Attributes:
        keys: [B, C, G, K], or [B, S, C, G, K] with one state per segment.
        values: [B, C, G, V] or [B, S, C, G, V].
        count: [B] or [B, S], the number of written tokens of the document.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
        log_forget: with forget gates, the inclusive sum of the document's log gates at each token: its two
            parts, each [B, C, N] or [B, S, C, N], float32, N the output's heads. None without gates.
    """

    keys: Float[Array, ...]
    values: Float[Array, ...]
    count: Int[Array, ...]
    segment_id: Int[Array, " B"]
    log_forget: GateSum | None = None


def attention_state(
    batch_size: int,
    capacity: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    forget_heads: int | None = None,
    dtype=jnp.float32,
) -> AttentionState:
    """Return an empty `AttentionState` for documents of up to `capacity` tokens; attention with a window
    requires a capacity of only `window` tokens.

    `forget_heads` is the number of forget gates, one per head of the output; None is for attention without
    gates.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    sums = None
    if forget_heads is not None:
        wide = jnp.promote_types(dtype, jnp.float32)
        sums = GateSum(*(jnp.zeros((*rows, capacity, forget_heads), wide) for _ in range(2)))
    return AttentionState(
        jnp.zeros((*rows, capacity, num_kv_heads, key_dim), dtype),
        jnp.zeros((*rows, capacity, num_kv_heads, value_dim), dtype),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
        sums,
    )


def without_free_places(state: AttentionState) -> AttentionState:
    """Return the state with 0 in the places of its ring buffers that contain no token of the document."""
    stored = jnp.arange(state.keys.shape[-3]) < state.count[..., None]
    arrays = (state.keys, state.values, state.log_forget)
    keys, values, sums = jax.tree.map(lambda x: jnp.where(per_chunk(stored, x), x, 0), arrays)
    return state._replace(keys=keys, values=values, log_forget=sums)
