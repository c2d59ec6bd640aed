"""The tokens before each token of a document."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.convolution.state import ShiftState
from lsm_jax.ops.core.segments import Tokens, read_tokens


def previous_tokens(
    contiguous: bool, x: Array, state: ShiftState, segment_ids, update_mask, width: int
) -> tuple[list[Array], Tokens, ShiftState]:
    """For each token the written ones 1, 2, ..., `width` before it in its document, each [B, T, D]."""
    batch, length, channels = x.shape
    num_segments = state.tail.shape[1] if state.tail.ndim == 4 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    tail = state.tail.astype(x.dtype)
    if tokens.written is None:
        padded = jnp.concatenate([tail, x], axis=1)
        taps = [padded[:, width - d : width - d + length] for d in range(1, width + 1)]
        return taps, tokens, ShiftState(padded[:, length:], tokens.last_id)

    # Follow pointers to the previous written token. -1 - i is the i-th newest of the tail; `nothing` is before that.
    nothing = -1 - width
    slots = 1 if num_segments is None else num_segments
    tails = tail.reshape(batch, slots * width, channels)
    x = jnp.where(tokens.written[..., None], x, 0)
    held = jnp.concatenate([jnp.zeros_like(x[:, :1]), tails, x], axis=1)
    slot = jnp.zeros((batch, length), jnp.int32) if tokens.slot is None else tokens.slot
    previous, last = _pointers(tokens, slots, nothing)

    def follow(pointer):
        behind = jnp.take_along_axis(previous, jnp.maximum(pointer, 0), axis=1)
        return jnp.where(pointer >= 0, behind, jnp.maximum(pointer - 1, nothing))

    def fetch(pointer, slot):
        in_tail = jnp.where(pointer == nothing, 0, 1 + slot * width + width + pointer)
        place = jnp.where(pointer >= 0, 1 + slots * width + pointer, in_tail)
        return jax.vmap(lambda row, index: row[index])(held, place)

    taps, pointer = [], previous
    if contiguous and tokens.slot is None:
        taps = _shifted(x, tail, tokens)
    else:
        for _ in range(width):
            taps.append(fetch(pointer, slot))
            pointer = follow(pointer)
    newest = []
    for _ in range(width):
        newest.append(fetch(last, jnp.broadcast_to(jnp.arange(slots), last.shape)))
        last = follow(last)
    tail = jnp.stack(newest[::-1], axis=2)
    tail = tail[:, 0] if num_segments is None else tail
    return taps, tokens, ShiftState(tail, tokens.last_id)


def _shifted(x: Array, tail: Array, tokens: Tokens) -> list[Array]:
    """The tokens 1, 2, ... before each, 0 ahead of its document's first; all between are written."""
    width, length = tail.shape[1], x.shape[1]
    padded = jnp.concatenate([tail, x], axis=1)
    if tokens.run is None:
        return [padded[:, width - d : width - d + length] for d in range(1, width + 1)]
    run = jnp.pad(tokens.run, ((0, 0), (width, 0)))
    taps = []
    for distance in range(1, width + 1):
        piece = slice(width - distance, width - distance + length)
        own = run[:, piece] == tokens.run
        taps.append(jnp.where(own[..., None], padded[:, piece], 0))
    return taps


def _pointers(tokens: Tokens, slots: int, nothing: int) -> tuple[Array, Array]:
    """The index of the written token before each, [B, T], and of the last one of each state, [B, S]."""
    assert tokens.written is not None
    length = tokens.written.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    if tokens.slot is not None:
        own = tokens.slot[:, :, None] == jnp.arange(slots)
        newest = jnp.where(own & tokens.written[:, :, None], index[:, None], -1)
        newest = jax.lax.cummax(newest, axis=1)
        before = jnp.concatenate([jnp.full_like(newest[:, :1], -1), newest[:, :-1]], axis=1)
        before = jnp.take_along_axis(before, tokens.slot[:, :, None], axis=2)[..., 0]
        return before, newest[:, -1]
    newest = jax.lax.cummax(jnp.where(tokens.written, index, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(newest[:, :1], -1), newest[:, :-1]], axis=1)
    last = newest[:, -1:]
    if tokens.run is not None:
        runs = tokens.run

        def within(pointer, run):  # keep to the document; its first token has nothing before it
            found = jnp.take_along_axis(runs, jnp.maximum(pointer, 0), axis=1)
            found = jnp.where(pointer >= 0, found, 0)
            return jnp.where(found == run, pointer, nothing)

        before, last = within(before, runs), within(last, runs[:, -1:])
    return before, last
