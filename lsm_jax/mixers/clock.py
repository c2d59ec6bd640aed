"""Positions of tokens in their documents: a clock counts them, and is carried from call to call."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.core.segments import carry_ids_forward, read_tokens
from lsm_jax.ops.core.shared_rows import Update, emptied_by, ends_of_documents, newer_id, resume
from lsm_jax.parallel import over_mesh


class Clock(NamedTuple):
    """The position of each row's next token in its document, from which the positions of the next call continue.

    Attributes:
        position: int32 [B], the position of the row's next token if it continues the document.
        segment_id: int32 [B], the last nonzero segment id seen, 0 before any.
    """

    position: jax.Array
    segment_id: jax.Array


def fresh_clock(batch_size: int) -> Clock:
    """Return the clock, which counts the positions of tokens in their documents, as it is before any token: position 0
    in each of the `batch_size` rows.
    """
    return Clock(jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, jnp.int32))


def advance(
    clock: Clock,
    shape: tuple[int, ...],
    segment_ids: jax.Array | None,
    update_mask: jax.Array | None,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, Clock]:
    """Return the positions [B, T] of a call's tokens in their documents, and the clock after the call.

    A document begins where the segment id differs from the last nonzero one, as for every op. Padding and
    tokens whose `update_mask` is 0 are not counted.

    Args:
        clock: the clock before the call.
        shape: (B, T).
        segment_ids: [B, T], or None for one document that continues.
        update_mask: [B, T], or None.
        positions: [B, T], the positions if they are known; None counts them.
    """
    live = jnp.ones(shape, jnp.int32)
    if update_mask is not None:
        live = live * (update_mask != 0)
    elif shape[1] > 1:  # XLA would count constants as it compiles, in seconds
        live = jax.lax.optimization_barrier(live)
    batched = dict(live=live, segment_ids=segment_ids, positions=positions, state=clock)
    by_token = ("batch", "sequence")
    axes = dict.fromkeys(batched, by_token) | {"state": ("batch",)}
    return over_mesh(
        _advance, batched, {}, axes=axes, out_axes=(by_token, "state"), in_sequence=_in_sequence
    )


def _in_sequence(axis, function, **arguments):
    """Return the positions of one device's tokens in their documents and the clock after the complete row,
    where several devices have consecutive parts of each row.

    Each device computes the clock after its tokens as if none came before them. From these clocks of the
    earlier devices follows the clock that its tokens continue from.
    """
    segment_ids, live, given = (arguments[n] for n in ("segment_ids", "live", "positions"))
    empty = jax.tree.map(jnp.zeros_like, arguments["state"])
    _, written = function(**(arguments | {"state": empty}))
    if given is not None:  # only the last position matters
        update = Update(~jnp.any(live != 0, axis=1), written, None, None)
    else:
        run = (
            None
            if segment_ids is None
            else read_tokens(segment_ids, None, empty.segment_id, None).run
        )
        restarts, first_id = ends_of_documents(segment_ids, run)
        goes_on = jnp.ones_like(empty.position, bool) if restarts is None else ~restarts
        update = Update(goes_on, written, None, first_id)
    return resume(axis, function, (), arguments, update, _add_clocks)


def _add_clocks(clock: Clock, update: Update) -> Clock:
    """Return the clock after one device's tokens, which contains the position of the row's next token in its
    document.

    `update` contains the clock that these tokens return if none come before them, and whether the document
    before them continues to their end.
    """
    clock = emptied_by(clock, update)
    position = jnp.where(update.transition, clock.position, 0) + update.written.position
    return Clock(position, newer_id(clock, update))


def _advance(live, segment_ids, positions, state: Clock) -> tuple[jax.Array, Clock]:
    """Return the positions [B, T] of tokens in their documents and the clock after them, on one device with complete
    rows; `live` [B, T] is 1 where a token is counted and else 0.
    """
    clock = state
    if segment_ids is None:
        base, last_id = -clock.position[:, None], clock.segment_id
    else:
        real = segment_ids != 0
        live = live * real
        filled = carry_ids_forward(segment_ids, clock.segment_id)
        before = jnp.concatenate([clock.segment_id[:, None], filled[:, :-1]], axis=1)
        begins = real & (before != 0) & (segment_ids != before)
        earlier = jnp.cumsum(live, axis=1) - live
        base = jax.lax.cummax(jnp.where(begins, earlier, -clock.position[:, None]), axis=1)
        last_id = filled[:, -1]
    count = jnp.cumsum(live, axis=1)
    if positions is None:
        positions = count - live - base
        following = count[:, -1] - base[:, -1]
    else:
        place = jnp.where(live != 0, jnp.arange(live.shape[1]), -1).max(axis=1)
        given = jnp.take_along_axis(positions, jnp.maximum(place, 0)[:, None], axis=1)[:, 0] + 1
        following = jnp.where(place >= 0, given, clock.position)
    return positions, Clock(following.astype(jnp.int32), last_id.astype(jnp.int32))
