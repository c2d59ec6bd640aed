"""Short convolutions and token shifts where several devices have consecutive parts of each row: each needs the last
tokens of the device before.
"""

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
from lsm_jax.ops.core.chunk_scans import per_chunk
from lsm_jax.ops.core.segments import Tokens, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    unless_restarted,
)
from lsm_jax.parallel import sum_along


def in_sequence(axis: str, function: Callable[..., Any], static: Static, **arguments: Any) -> Any:
    """Compute a short convolution or token shift on one of several devices that have consecutive parts of each row: the
    outputs of its tokens, and the state after the whole row.
    """
    options = static.options
    x, state = arguments["x"], arguments["state"]
    ids, mask = arguments["segment_ids"], arguments["update_mask"]
    width = state.tail.shape[-2]
    no_gaps = options.contiguous or (ids is None and mask is None)
    if not no_gaps or state.tail.ndim == 4 or x.shape[1] < width:
        update = _update(x, state, ids, mask)
        return resume(axis, function, (static,), arguments, update, _advance)
    # The taps are then tokens of this device and of the device before it, whose last tokens are the state.
    devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    send_to_next = functools.partial(
        jax.lax.ppermute, axis_name=axis, perm=[(i, i + 1) for i in range(devices - 1)]
    )
    tokens = read_tokens(ids, mask, jnp.zeros_like(state.segment_id), None)
    tail, last_id = _last_tokens(x, width, ids, tokens)
    received_id = state.segment_id if last_id is None else send_to_next(last_id)
    received = ShiftState(send_to_next(tail), received_id)
    entering = jax.tree.map(
        lambda a, b: jnp.where(device == 0, a.astype(b.dtype), b), state, received
    )
    output, after = function(static, **(arguments | {"state": entering}))
    last = jnp.full(x.shape[:1], devices - 1)
    if tokens.written is not None:
        # The last device with a written token; device 0 if there is none, where the state has not changed.
        last = jax.lax.pmax(jnp.where(jnp.any(tokens.written, axis=1), device, 0), axis)
    final = jax.tree.map(
        lambda a: sum_along(axis, jnp.where(per_chunk(device == last, a), a, 0)), after
    )
    return output, final


def _last_tokens(x, width: int, ids, tokens: Tokens) -> tuple[Array, Array | None]:
    """Return the last `width` tokens of a device's part of each row, 0 for tokens of a document before the
    row's last one, and the segment id of the part's last token (0 if it is not written). In each row every
    token between two tokens of one document is written.
    """
    tail = x[:, -width:]
    if tokens.written is None:
        return tail, None
    written = tokens.written[:, -width:]
    if tokens.run is None:
        return select(written, tail), None
    same_document = tokens.run[:, -width:] == tokens.run[:, -1:]
    keep = written & written[:, -1:] & same_document
    return select(keep, tail), jnp.where(written[:, -1], ids[:, -1], 0)


def _update(x, state: ShiftState, segment_ids, update_mask) -> Update:
    """Return the effect of this device's tokens on the state of a short convolution or token shift, as one
    update: its transition is the number of these tokens that enter each tail (at most the tail's width).
    """
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
        member = tokens.slot[..., None] == jnp.arange(num_segments)
        counted = member & counted[..., None]
    count = jnp.minimum(jnp.sum(counted, axis=1, dtype=jnp.int32), width)
    return Update(count, written, *ends_of_documents(segment_ids, tokens.run))


def _advance(state: ShiftState, update: Update) -> ShiftState:
    """Return the state of a short convolution after one device's tokens: the last tokens of the row, taken
    from the state before and from `update`, which contains the state after these tokens if none come before
    them.
    """
    state = emptied_by(state, update)
    width = state.tail.shape[-2]
    before = unless_restarted(update, state.tail)
    both = jnp.concatenate([before, update.written.tail], axis=-2)
    count = update.transition[..., None]
    index = count + jnp.arange(width)
    index = jnp.where(index < width, index, index + width - count)
    tail = jnp.take_along_axis(both, index[..., None], axis=-2)
    return ShiftState(tail, newer_id(state, update))
