"""Positions of `attention`'s tokens in their documents, and the ring buffer of a state, in which a token is
stored at its position modulo the capacity.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.forget_gates import GateSum
from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.core.segments import Tokens, select


class TokenPositions(NamedTuple):
    """The document of each token of an `attention` call, the token's rank among the document's written
    tokens, and whether it is written.

    Attributes:
        document: [B, T], the index of each token's document, or of its segment's state.
        rank: [B, T], the number of written tokens of the document before the token, if the token is written;
            else that number minus 1.
        written: [B, T], whether the token is written.
    """

    document: Array
    rank: Array
    written: Array


def token_positions(
    tokens: Tokens, state: AttentionState, batch: int, length: int
) -> TokenPositions:
    """Return, for each token of a call of `attention`, its document, its rank among the written tokens, which continues
    after those that the state has counted, and whether it is written.
    """
    written = tokens.written
    if written is None:
        written = jnp.ones((batch, length), bool)
    if tokens.slot is not None:
        member = tokens.slot[:, :, None] == jnp.arange(state.keys.shape[1])
        count = state.count[:, None] + jnp.cumsum(member & written[:, :, None], axis=1)
        rank = jnp.take_along_axis(count, tokens.slot[:, :, None], axis=2)[..., 0] - 1
        return TokenPositions(tokens.slot, rank.astype(jnp.int32), written)
    if (
        tokens.written is None
    ):  # not by `cumsum`: XLA's compiler would spend seconds on the sum of constants
        count = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))
    else:
        count = jnp.cumsum(written, axis=1, dtype=jnp.int32)
    if tokens.run is None:
        return TokenPositions(jnp.zeros_like(count), count - 1 + state.count[:, None], written)
    starts = jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0
    before_document = jax.lax.cummax(jnp.where(starts, count - written, 0), axis=1)
    in_state = jnp.where(tokens.run == 0, state.count[:, None], 0)
    return TokenPositions(tokens.run, count - before_document - 1 + in_state, written)


def newest_sum(state: AttentionState) -> GateSum:
    """Return the sum of log forget gates up to the newest token of each document, 0 before any: [B, N], or [B, S, N]
    with one state per segment.
    """
    index = (state.count - 1) % state.keys.shape[-3]

    def newest(ring):
        value = jnp.take_along_axis(ring, index[..., None, None], axis=-2)[..., 0, :]
        return jnp.where(state.count[..., None] > 0, value, 0)

    return jax.tree.map(newest, state.log_forget)


def write_tokens(
    state: AttentionState, k, v, sums: GateSum | None, positions: TokenPositions, tokens: Tokens
) -> AttentionState:
    """Return the state of `attention` after the call's keys and values are written into its ring buffers.

    Tokens of an earlier document may stay in a ring: `count` says that they are not of the present
    document.
    """
    capacity = state.keys.shape[-3]
    batch = k.shape[0]
    keep = positions.written
    if tokens.slot is not None:
        slots = state.keys.shape[1]
        member = positions.document[:, :, None] == jnp.arange(slots)
        member = member & positions.written[:, :, None]
        count = state.count + jnp.sum(member, axis=1, dtype=jnp.int32)
        total = jnp.take_along_axis(count, positions.document, axis=1)
        offset = positions.document * capacity
    else:
        slots = 1
        keep = keep & (positions.document == positions.document[:, -1:])
        count = total = positions.rank[:, -1] + 1
        total = total[:, None]
        offset = 0
    keep = keep & (positions.rank >= total - capacity)
    index = jnp.where(keep, offset + positions.rank % capacity, slots * capacity)

    def write(ring, new):
        flat = ring.reshape(batch, slots * capacity, *new.shape[2:])
        store = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))
        return store(flat, index, new.astype(ring.dtype)).reshape(ring.shape)

    rings = (state.keys, state.values, state.log_forget)
    keys, values, log_forget = jax.tree.map(write, rings, (k, v, sums))
    return AttentionState(keys, values, count, tokens.last_id, log_forget)


def prepend_state(
    state: AttentionState, positions: TokenPositions, new: tuple
) -> tuple[TokenPositions, tuple]:
    """Return the positions of the state's tokens followed by those of the call's tokens, and likewise (keys,
    values, sums of log forget gates), of which `new` are the call's.
    """
    stored, rings = in_rings(state)

    def join(ring, new):
        return jnp.concatenate([ring.astype(new.dtype), new], axis=1)

    return jax.tree.map(join, stored, positions), jax.tree.map(join, rings, new)


def in_rings(state: AttentionState) -> tuple[TokenPositions, tuple]:
    """Return the positions [B, S C] of the tokens in a state's ring buffers, in the order of the places, and likewise (keys,
    values, sums of log forget gates); S is 1 with one state per row, whose tokens then have document 0.
    """
    batch, capacity = state.keys.shape[0], state.keys.shape[-3]
    slots = state.count[0].size
    newest = state.count.reshape(batch, slots, 1) - 1
    ranks = newest - (newest - jnp.arange(capacity)) % capacity  # below 0 where no token is stored
    ranks = ranks.reshape(batch, slots * capacity)
    documents = jnp.broadcast_to(jnp.repeat(jnp.arange(slots), capacity), ranks.shape)
    rings = (state.keys, state.values, state.log_forget)
    flat = lambda ring: ring.reshape(batch, slots * capacity, *ring.shape[state.count.ndim + 1 :])  # noqa: E731
    return TokenPositions(documents, ranks, ranks >= 0), jax.tree.map(flat, rings)


class StoredTokens(NamedTuple):
    """The tokens of a state with one state per row, from the oldest to the newest; places without a token come first.

    Attributes:
        keys: [B, C, G, K], 0 where there is no token.
        values: [B, C, G, V], likewise.
        sums: the sums of gates, [B, C, N], 0 where there is no token; None without gates.
        stored: [B, C], whether there is a token.
    """

    keys: Array
    values: Array
    sums: GateSum | None
    stored: Array


def stored_in_order(state: AttentionState) -> StoredTokens:
    """Return the keys, values and sums of log forget gates that the state's ring buffers store, from the
    oldest token to the newest.
    """
    capacity = state.keys.shape[1]
    place = jnp.arange(capacity)
    index = (state.count[:, None] + place) % capacity  # of the token with rank count - C + place
    stored = place >= capacity - state.count[:, None]

    def read(ring):
        get = lambda row, i: row.at[i].get(mode="promise_in_bounds", unique_indices=True)  # noqa: E731
        return select(stored, jax.vmap(get)(ring, index))

    keys, values, sums = jax.tree.map(read, (state.keys, state.values, state.log_forget))
    return StoredTokens(keys, values, sums, stored)
