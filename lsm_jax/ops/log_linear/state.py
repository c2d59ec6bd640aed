"""The state that `log_linear_memory` carries from call to call: the memories of all levels."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LogLinearState(NamedTuple):
    """The state of `log_linear_memory` between calls: the memories of all levels, and how many tokens they contain.

    Attributes:
        memory: [B, G, L, K, V], or [B, S, G, L, K, V] with one state per segment; float32. The memories of all levels
            add up to that of the parent without levels.
        position: [B] or [B, S], the number of written tokens of the document so far.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    position: Int[Array, ...]
    segment_id: Int[Array, " B"]


def log_linear_state(
    batch_size: int,
    num_heads: int,
    num_levels: int,
    key_dim: int,
    value_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> LogLinearState:
    """Return the state of `log_linear_memory` before any token, for `num_heads` times `num_levels` memories in each of
    `batch_size` rows; each row has `num_segments` states, or one if that is None.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return LogLinearState(
        jnp.zeros((*rows, num_heads, num_levels, key_dim, value_dim), dtype),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
    )
