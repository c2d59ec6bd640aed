"""Write keys and values into the state of `attention`, without attending to them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.attention.state import AttentionState, attention_state
from lsm_jax.ops.attention.token_positions import token_positions, write_tokens
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import read_tokens, select
from lsm_jax.parallel import TOKENS, over_mesh


def store_tokens(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G V"],
    *,
    initial_state: AttentionState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
) -> AttentionState:
    """Return the state that `attention` returns for these keys and values, without its output.

    Multi-head latent attention (arXiv 2405.04434) stores latents here, from which it computes the keys and values that it
    attends to.

    Args:
        k: [B, T, G, K] keys, or what is stored in their place.
        v: [B, T, G, V] values, or what is stored in their place.
        initial_state: the state to continue from; with keys [B, S, ...] there is one state per segment: the tokens of id s
            use state s - 1. None is an empty state, with a capacity of T tokens. A token beyond the capacity replaces the
            oldest one.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that are not written.

    Raises:
        ValueError: a shape or dtype is not accepted.
    """
    op = "store_tokens"
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, k, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    capacity = length
    if isinstance(initial_state, AttentionState) and jnp.ndim(initial_state.keys) >= 4:
        capacity = initial_state.keys.shape[-3]
    empty = functools.partial(
        attention_state, batch, capacity, heads, key_dim, value_dim, dtype=k.dtype
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    batched = dict(k=k, v=v, state=state, segment_ids=segment_ids, update_mask=update_mask)
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS)
    rows = ("batch",) if state.count.ndim == 1 else ("batch", None)
    axes["state"] = jax.tree.map(lambda _: (*rows, None, "heads"), state)._replace(
        count=rows, segment_id=("batch",)
    )
    return over_mesh(_store, batched, {}, axes=axes, out_axes="state")


def _store(k, v, state: AttentionState, segment_ids, update_mask) -> AttentionState:
    """Return the state with the new keys and values, on a device that has complete rows."""
    batch, length, heads, _ = v.shape
    num_segments = state.keys.shape[1] if state.keys.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    positions = token_positions(tokens, state, batch, length)
    k = select(tokens.written, checks.spread_keys(k, heads))
    return write_tokens(state, k, select(tokens.written, v), None, positions, tokens)
