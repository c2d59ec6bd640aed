"""The state that `selective_memory` carries from call to call: N numbers for each channel."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int


class SelectiveState(NamedTuple):
    """The state of `selective_memory` between calls: N numbers for each channel, and the segment id of the last token.

    Attributes:
        memory: [B, D, N], or [B, S, D, N] with one state per segment; float32, or complex64 if the memory
            is complex.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Inexact[Array, ...]
    segment_id: Int[Array, " B"]


def selective_state(
    batch_size: int,
    channels: int,
    state_size: int,
    *,
    is_complex: bool = False,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> SelectiveState:
    """Return the state of `selective_memory` before any token, a `SelectiveState` of zeros.

    Args:
        batch_size: B.
        channels: D.
        state_size: N, entries of the memory per channel.
        is_complex: whether the memory is complex.
        num_segments: states per row; None is one state per row.
        dtype: of a real memory, and of the real and imaginary parts of a complex one.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    dtype = jnp.result_type(dtype, jnp.complex64) if is_complex else dtype
    memory = jnp.zeros((*rows, channels, state_size), dtype)
    return SelectiveState(memory, jnp.zeros(batch_size, jnp.int32))
