"""The state of `attention`: keys and values in a ring."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.forget_gates import GateSum


class AttentionState(NamedTuple):
    """Keys and values of the document so far, in a ring of C places: the token of rank r stands at r % C.

    Attributes:
        keys: [B, C, G, K], or [B, S, C, G, K] with one state a segment.
        values: [B, C, G, V] or [B, S, C, G, V].
        count: [B] or [B, S], how many tokens the document has written.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
        log_forget: with forget gates, the sum of the document's log gates up to and with each token: high and low part
            [B, C, N] or [B, S, C, N] each, float32, N the output's heads. None without.
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
    """An empty `AttentionState` for documents of up to `capacity` tokens; a sliding window needs only its own length.

    `forget_heads` is the number of forget gates, one a head of the output; None is for attention without.
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
