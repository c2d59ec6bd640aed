"""Find the taps of a short convolution: for each token, the written tokens before it in its document."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.convolution.state import ShiftState
from lsm_jax.ops.core.segments import Tokens, read_tokens


def previous_tokens(
    contiguous: bool, x: Array, state: ShiftState, segment_ids, update_mask, width: int
) -> tuple[list[Array], Tokens, ShiftState]:
    """Return the taps of each token: the last written token before it in its document, the one before that,
    and so on.

    Args:
        contiguous: whether every token between two tokens of one document is written.
        x: [B, T, D], the inputs of the short convolution.
        state: the state before the call, with the last tokens of the call before.
        segment_ids: [B, T], the tokens' segment ids, or None.
        update_mask: [B, T], 0 for tokens that are not written, or None.
        width: the number of taps.

    Returns:
        `width` arrays [B, T, D], 0 where there is no such token; which tokens of the call are written, and
        their documents (`Tokens`); and the state after the call.
    """
    batch, length, channels = x.shape
    num_segments = state.tail.shape[1] if state.tail.ndim == 4 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    tail = state.tail.astype(x.dtype)
    if tokens.written is None:
        padded = jnp.concatenate([tail, x], axis=1)
        taps = [padded[:, width - d : width - d + length] for d in range(1, width + 1)]
        return taps, tokens, ShiftState(padded[:, length:], tokens.last_id)

    # A pointer is the index of a written token; -1 - i is the i-th newest token of the state, and `nothing`
    # is before those.
    nothing = -1 - width
    slots = 1 if num_segments is None else num_segments
    tails = tail.reshape(batch, slots * width, channels)
    x = jnp.where(tokens.written[..., None], x, 0)
    stored = jnp.concatenate([jnp.zeros_like(x[:, :1]), tails, x], axis=1)
    slot = jnp.zeros((batch, length), jnp.int32) if tokens.slot is None else tokens.slot
    previous, last = _pointers(tokens, slots, nothing)

    def previous_of(pointer):
        in_call = jnp.take_along_axis(previous, jnp.maximum(pointer, 0), axis=1)
        return jnp.where(pointer >= 0, in_call, jnp.maximum(pointer - 1, nothing))

    def fetch(pointer, slot):
        in_tail = jnp.where(pointer == nothing, 0, 1 + slot * width + width + pointer)
        index = jnp.where(pointer >= 0, 1 + slots * width + pointer, in_tail)
        return jax.vmap(lambda row, i: row[i])(stored, index)

    taps, pointer = [], previous
    if contiguous and tokens.slot is None:
        taps = _shifted_taps(x, tail, tokens)
    else:
        for _ in range(width):
            taps.append(fetch(pointer, slot))
            pointer = previous_of(pointer)
    newest = []
    for _ in range(width):
        newest.append(fetch(last, jnp.broadcast_to(jnp.arange(slots), last.shape)))
        last = previous_of(last)
    tail = jnp.stack(newest[::-1], axis=2)
    tail = tail[:, 0] if num_segments is None else tail
    return taps, tokens, ShiftState(tail, tokens.last_id)


def _shifted_taps(x: Array, tail: Array, tokens: Tokens) -> list[Array]:
    """Return the taps of a short convolution, the tokens 1, 2, ... places before each token, as shifted copies of x [B,
    T, D], before which lie the state's last tokens `tail`.

    This is right only for documents whose tokens are contiguous and all written.
    """
    width, length = tail.shape[1], x.shape[1]
    padded = jnp.concatenate([tail, x], axis=1)
    if tokens.run is None:
        return [padded[:, width - d : width - d + length] for d in range(1, width + 1)]
    run = jnp.pad(tokens.run, ((0, 0), (width, 0)))
    taps = []
    for distance in range(1, width + 1):
        shifted = slice(width - distance, width - distance + length)
        same_document = run[:, shifted] == tokens.run
        taps.append(jnp.where(same_document[..., None], padded[:, shifted], 0))
    return taps


def _pointers(tokens: Tokens, slots: int, nothing: int) -> tuple[Array, Array]:
    """Return the index of the last written token before each token in its document, [B, T], and of the last
    written token of each state, [B, S].

    An index of -1 - i means the i-th newest token of the state before the call, and `nothing` that there is
    no token.
    """
    assert tokens.written is not None
    length = tokens.written.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    if tokens.slot is not None:
        member = tokens.slot[:, :, None] == jnp.arange(slots)
        newest = jnp.where(member & tokens.written[:, :, None], index[:, None], -1)
        newest = jax.lax.cummax(newest, axis=1)
        before = jnp.concatenate([jnp.full_like(newest[:, :1], -1), newest[:, :-1]], axis=1)
        before = jnp.take_along_axis(before, tokens.slot[:, :, None], axis=2)[..., 0]
        return before, newest[:, -1]
    newest = jax.lax.cummax(jnp.where(tokens.written, index, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(newest[:, :1], -1), newest[:, :-1]], axis=1)
    last = newest[:, -1:]
    if tokens.run is not None:
        document = tokens.run

        def in_document(pointer, own_document):  # `nothing` for pointers to another document
            of_pointer = jnp.take_along_axis(document, jnp.maximum(pointer, 0), axis=1)
            of_pointer = jnp.where(pointer >= 0, of_pointer, 0)
            return jnp.where(of_pointer == own_document, pointer, nothing)

        before, last = in_document(before, document), in_document(last, document[:, -1:])
    return before, last
