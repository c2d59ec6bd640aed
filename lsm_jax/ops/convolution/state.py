"""The state that short convolutions and token shifts carry from call to call: the last tokens of each row."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class ShiftState(NamedTuple):
    """The state of a short convolution or token shift between calls: the last written tokens of each row, oldest first.

    Attributes:
        tail: [B, W - 1, D], or [B, S, W - 1, D] with one state per segment; 0 where there is no token.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    tail: Float[Array, ...]
    segment_id: Int[Array, " B"]


def shift_state(
    batch_size: int,
    width: int,
    channels: int,
    *,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> ShiftState:
    """Return a `ShiftState` of zeros for `width` remembered tokens (W - 1 for `short_convolution`, 1 for
    `token_shift`).
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    return ShiftState(jnp.zeros((*rows, width, channels), dtype), jnp.zeros(batch_size, jnp.int32))
