"""Short convolutions and token shifts where devices hold consecutive parts of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.run import Static
from lsm_jax.ops.convolution.state import ShiftState
from lsm_jax.ops.convolution.taps import previous_tokens
from lsm_jax.ops.core.segments import Tokens, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    unless_restarted,
)
from lsm_jax.ops.core.states import per_chunk
from lsm_jax.parallel import sum_along


def in_sequence(axis: str, function: Callable[..., Any], static: Static, **arguments: Any) -> Any:
    """The op on one of the devices that share a row."""
    options = static.options
    x, state = arguments["x"], arguments["state"]
    ids, mask = arguments["segment_ids"], arguments["update_mask"]
    width = state.tail.shape[-2]
    whole = ids is None and mask is None
    if not (whole or options.contiguous) or state.tail.ndim == 4 or x.shape[1] < width:
        update = _update(x, state, ids, mask)
        return resume(axis, function, (static,), arguments, update, _advance)
    # Nothing but the last tokens of the device before can be in reach.
    devices, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    onwards = functools.partial(
        jax.lax.ppermute, axis_name=axis, perm=[(i, i + 1) for i in range(devices - 1)]
    )
    tokens = read_tokens(ids, mask, jnp.zeros_like(state.segment_id), None)
    tail, newest = _newest(x, width, ids, tokens)
    before = ShiftState(onwards(tail), state.segment_id if newest is None else onwards(newest))
    entering = jax.tree.map(lambda a, b: jnp.where(here == 0, a.astype(b.dtype), b), state, before)
    output, after = function(static, **(arguments | {"state": entering}))
    last = jnp.full(x.shape[:1], devices - 1)
    if tokens.written is not None:
        # The last device that wrote; the first, where none did, still has the state.
        last = jax.lax.pmax(jnp.where(jnp.any(tokens.written, axis=1), here, 0), axis)
    final = jax.tree.map(
        lambda a: sum_along(axis, jnp.where(per_chunk(here == last, a), a, 0)), after
    )
    return output, final


def _newest(x, width: int, ids, tokens: Tokens) -> tuple[Array, Array | None]:
    """The last tokens of a row without gaps, 0 where they are not of its last one's document, and that one's id."""
    tail = x[:, -width:]
    if tokens.written is None:
        return tail, None
    live = tokens.written[:, -width:]
    if tokens.run is None:
        return select(live, tail), None
    own = live & live[:, -1:] & (tokens.run[:, -width:] == tokens.run[:, -1:])
    return select(own, tail), jnp.where(live[:, -1], ids[:, -1], 0)


def _update(x, state: ShiftState, segment_ids, update_mask) -> Update:
    """This device's tokens as an update: what it would remember, and of how many tokens."""
    width = state.tail.shape[-2]
    num_segments = state.tail.shape[1] if state.tail.ndim == 4 else None
    empty = jax.tree.map(jnp.zeros_like, state)
    _, tokens, written = previous_tokens(False, x, empty, segment_ids, update_mask, width)
    counted = tokens.written
    if counted is None:
        counted = jnp.ones(x.shape[:2], bool)
    if tokens.run is not None:
        counted = counted & (tokens.run == tokens.run[:, -1:])
    if tokens.slot is not None:
        own = tokens.slot[..., None] == jnp.arange(num_segments)
        counted = own & counted[..., None]
    count = jnp.minimum(jnp.sum(counted, axis=1, dtype=jnp.int32), width)
    return Update(count, written, *ends_of_documents(segment_ids, tokens.run))


def _advance(state: ShiftState, update: Update) -> ShiftState:
    """The last tokens of those held and those written."""
    state = emptied_by(state, update)
    width = state.tail.shape[-2]
    held = unless_restarted(update, state.tail)
    both = jnp.concatenate([held, update.written.tail], axis=-2)
    count = update.transition[..., None]
    place = count + jnp.arange(width)
    place = jnp.where(place < width, place, place + width - count)
    tail = jnp.take_along_axis(both, place[..., None], axis=-2)
    return ShiftState(tail, newer_id(state, update))
