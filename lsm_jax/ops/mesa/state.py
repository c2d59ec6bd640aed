"""The state that `mesa_memory` carries from call to call: the decayed sums of products of keys with keys and values."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class MesaState(NamedTuple):
    """The state of `mesa_memory` between calls: two memories, and the segment id of the last token.

    Attributes:
        keys: [B, G, K, K], or [B, S, G, K, K] with one state per segment, the symmetric matrix of sums of β kᵀ k; float32.
        values: [B, G, K, V] or [B, S, G, K, V], the sums of β kᵀ v; float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    keys: Float[Array, ...]
    values: Float[Array, ...]
    segment_id: Int[Array, " B"]


def mesa_state(
    batch_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> MesaState:
    """Return a `MesaState` of zeros, for `num_heads` memories in each of `batch_size` rows; each row has `num_segments`
    states, or one if that is None.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return MesaState(
        jnp.zeros((*rows, num_heads, key_dim, key_dim), dtype),
        jnp.zeros((*rows, num_heads, key_dim, value_dim), dtype),
        jnp.zeros(batch_size, jnp.int32),
    )
