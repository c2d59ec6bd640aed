"""The state that `path_attention` carries from call to call: that of `attention`, with keys that each token changes."""

from __future__ import annotations

import jax.numpy as jnp

from lsm_jax.ops.attention.state import AttentionState, attention_state


def path_attention_state(
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
    """Return an empty `AttentionState` of `path_attention` for documents of up to `capacity` tokens.

    Its keys are those at the last token, multiplied by the matrices of all tokens after their own; they are in float32,
    since every token changes them. Arguments are as in `attention_state`; `dtype` is that of the values.
    """
    state = attention_state(
        batch_size, capacity, num_kv_heads, key_dim, value_dim,
        num_segments=num_segments, forget_heads=forget_heads, dtype=dtype,
    )  # fmt: skip
    return state._replace(keys=state.keys.astype(jnp.promote_types(dtype, jnp.float32)))
