"""The place of each token in its document and in the ring of the state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.forget_gates import GateSum
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.core.segments import Tokens


class Places(NamedTuple):
    """Where tokens stand: a document each, and a rank among its written tokens; [B, T]."""

    document: Array
    rank: Array
    written: Array


def place_tokens(tokens: Tokens, state: AttentionState, batch: int, length: int) -> Places:
    """The places of a call's tokens, after those that the state holds."""
    written = tokens.written
    if written is None:
        written = jnp.ones((batch, length), bool)
    if tokens.slot is not None:
        own = tokens.slot[:, :, None] == jnp.arange(state.keys.shape[1])
        seen = state.count[:, None] + jnp.cumsum(own & written[:, :, None], axis=1)
        rank = jnp.take_along_axis(seen, tokens.slot[:, :, None], axis=2)[..., 0] - 1
        return Places(tokens.slot, rank.astype(jnp.int32), written)
    if tokens.written is None:  # a sum of constants, which XLA's compiler adds up for seconds
        seen = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))
    else:
        seen = jnp.cumsum(written, axis=1, dtype=jnp.int32)
    if tokens.run is None:
        return Places(jnp.zeros_like(seen), seen - 1 + state.count[:, None], written)
    begins = jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0
    base = jax.lax.cummax(jnp.where(begins, seen - written, 0), axis=1)
    carried = jnp.where(tokens.run == 0, state.count[:, None], 0)
    return Places(tokens.run, seen - base - 1 + carried, written)


def newest_sum(state: AttentionState) -> GateSum:
    """The gates' sum with the newest token of each document, 0 before any: [B, N] or [B, S, N]."""
    place = (state.count - 1) % state.keys.shape[-3]

    def newest(ring):
        own = jnp.take_along_axis(ring, place[..., None, None], axis=-2)[..., 0, :]
        return jnp.where(state.count[..., None] > 0, own, 0)

    return jax.tree.map(newest, state.log_forget)


def remember(
    state: AttentionState, k, v, sums: GateSum | None, places: Places, tokens: Tokens
) -> AttentionState:
    """Write the tokens into the rings; what a new document does not overwrite, its count hides."""
    capacity = state.keys.shape[-3]
    batch = k.shape[0]
    keep = places.written
    if tokens.slot is not None:
        slots = state.keys.shape[1]
        own = (places.document[:, :, None] == jnp.arange(slots)) & places.written[:, :, None]
        count = state.count + jnp.sum(own, axis=1, dtype=jnp.int32)
        total = jnp.take_along_axis(count, places.document, axis=1)
        offset = places.document * capacity
    else:
        slots = 1
        keep = keep & (places.document == places.document[:, -1:])
        count = total = places.rank[:, -1] + 1
        total = total[:, None]
        offset = 0
    keep = keep & (places.rank >= total - capacity)
    index = jnp.where(keep, offset + places.rank % capacity, slots * capacity)

    def write(ring, new):
        flat = ring.reshape(batch, slots * capacity, *new.shape[2:])
        put = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))
        return put(flat, index, new.astype(ring.dtype)).reshape(ring.shape)

    rings = (state.keys, state.values, state.log_forget)
    keys, values, log_forget = jax.tree.map(write, rings, (k, v, sums))
    return AttentionState(keys, values, count, tokens.last_id, log_forget)


def after_held(state: AttentionState, places: Places, new: tuple) -> tuple[Places, tuple]:
    """The call's places, keys, values and sums after those that the state holds."""
    batch, capacity = new[0].shape[0], state.keys.shape[-3]
    slots = state.count[0].size
    newest = state.count.reshape(batch, slots, 1) - 1
    ranks = newest - (newest - jnp.arange(capacity)) % capacity  # below 0 where nothing was written
    ranks = ranks.reshape(batch, slots * capacity)
    documents = jnp.broadcast_to(jnp.repeat(jnp.arange(slots), capacity), ranks.shape)
    held = Places(documents, ranks, ranks >= 0)

    def join(ring, new):
        ring = ring.reshape(batch, slots * capacity, *new.shape[2:])
        return jnp.concatenate([ring.astype(new.dtype), new], axis=1)

    rings = (state.keys, state.values, state.log_forget)
    return jax.tree.map(join, held, places), jax.tree.map(join, rings, new)
