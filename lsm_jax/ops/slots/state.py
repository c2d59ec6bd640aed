"""The state that `slot_memory` (gated slot attention) carries from call to call: keys and values of M slots."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class SlotState(NamedTuple):
    """The state of `slot_memory` between calls: the keys and the values of M slots, and the segment id of the last
    token.

    Attributes:
        keys: [B, G, K, M], or [B, S, G, K, M] with one state per segment; float32.
        values: [B, G, M, V] or [B, S, G, M, V]; float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    keys: Float[Array, ...]
    values: Float[Array, ...]
    segment_id: Int[Array, " B"]


def slot_state(
    batch_size: int,
    num_heads: int,
    num_slots: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> SlotState:
    """Return a `SlotState` of zeros, for `num_heads` pairs of memories in each of `batch_size` rows; each row has
    `num_segments` states, or one if that is None.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return SlotState(
        jnp.zeros((*rows, num_heads, key_dim, num_slots), dtype),
        jnp.zeros((*rows, num_heads, num_slots, value_dim), dtype),
        jnp.zeros(batch_size, jnp.int32),
    )
