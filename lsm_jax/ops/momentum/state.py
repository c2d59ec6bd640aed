"""The state that `momentum_memory` carries from call to call: the memory and the momentum of its steps."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class MomentumState(NamedTuple):
    """The state of `momentum_memory` between calls: memory and momentum, and the segment id of the last token.

    Attributes:
        memory: [B, G, K, V], or [B, S, G, K, V] with one state per segment; float32.
        momentum: the decayed sum of gradients, in the shape of the memory; float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    momentum: Float[Array, ...]
    segment_id: Int[Array, " B"]


def momentum_state(
    batch_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> MomentumState:
    """Return a `MomentumState` of zeros, for `num_heads` memories in each of `batch_size` rows; each row has
    `num_segments` states, or one if that is None.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    zeros = jnp.zeros((*rows, num_heads, key_dim, value_dim), dtype)
    return MomentumState(zeros, zeros, jnp.zeros(batch_size, jnp.int32))
