"""The state that `slstm_memory` carries from call to call: output, memory, normaliser and stabiliser."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class SLSTMState(NamedTuple):
    """The state of `slstm_memory` between calls, of arrays [B, G, K], or [B, S, G, K] with one state per segment; float32.

    Attributes:
        output: y, the output of the last written token.
        memory: c, divided by the exponential of the stabiliser.
        normalizer: n, likewise; 0 before any token.
        stabilizer: m.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    output: Float[Array, ...]
    memory: Float[Array, ...]
    normalizer: Float[Array, ...]
    stabilizer: Float[Array, ...]
    segment_id: Int[Array, " B"]


def slstm_state(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> SLSTMState:
    """Return an `SLSTMState` of zeros, for `num_heads` heads of `head_dim` channels in each of `batch_size` rows; each row has
    `num_segments` states, or one if that is None.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    zeros = jnp.zeros((*rows, num_heads, head_dim), dtype)
    return SLSTMState(zeros, zeros, zeros, zeros, jnp.zeros(batch_size, jnp.int32))
