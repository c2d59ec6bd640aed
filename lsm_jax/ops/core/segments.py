"""Which tokens write, where a document begins, and the layout of tokens in chunks.

The conventions of every op live here, once:

* id 0 is padding: an identity update, whose output is 0;
* a token whose `update_mask` is 0 is an identity update too, but it still reads;
* with one state a row, a token whose id differs from the last nonzero id before it (the state's own included) begins a
  document: the memory is reset ahead of its read;
* with one state a segment, id `s` owns `state[:, s - 1]`: its tokens form one sequence, wherever they stand in the row. An id
  without a state writes nothing, and its output is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tokens(NamedTuple):
    """What each token does to the memory. A field is None where it is trivial, so that the plain case costs nothing.

    Attributes:
        written: [B, T], False where the update is the identity (padding, or masked).
        real: [B, T], False on padding.
        run: [B, T], how many documents have begun in this call up to this token; 0 continues the initial state.
            None where one state a segment is kept.
        slot: [B, T], the state's index of each token's segment (0 on padding); None where one state a row is kept.
        known: [B, T], False where the id exceeds the number of states.
        last_id: [B], the last nonzero id, for the state to remember.
    """

    written: Bool[Array, "B T"] | None
    real: Bool[Array, "B T"] | None
    run: Int[Array, "B T"] | None
    slot: Int[Array, "B T"] | None
    known: Bool[Array, "B T"] | None
    last_id: Int[Array, " B"]


def read_tokens(
    segment_ids: Int[Array, "B T"] | None,
    update_mask: Array | None,
    state_id: Int[Array, " B"],
    num_segments: int | None,
) -> Tokens:
    """Resolve ids and mask against what the state remembers."""
    mask = None if update_mask is None else update_mask != 0
    if segment_ids is None:
        return Tokens(mask, None, None, None, None, state_id)
    real = segment_ids != 0
    written = real if mask is None else real & mask
    filled = carry_ids_forward(segment_ids, state_id)
    last_id = filled[:, -1]
    if num_segments is not None:
        slot = jnp.clip(segment_ids - 1, 0, num_segments - 1)
        known = (segment_ids >= 0) & (segment_ids <= num_segments)
        return Tokens(written & known, real, None, slot, known, last_id)
    before = jnp.concatenate([state_id[:, None], filled[:, :-1]], axis=1)
    begins = real & (before != 0) & (segment_ids != before)
    return Tokens(written, real, jnp.cumsum(begins, axis=1, dtype=jnp.int32), None, None, last_id)


def carry_ids_forward(
    segment_ids: Int[Array, "B T"], state_id: Int[Array, " B"]
) -> Int[Array, "B T"]:
    """The last nonzero id at or before each token; before the first one, the state's."""
    where = jnp.where(segment_ids != 0, jnp.arange(segment_ids.shape[1], dtype=jnp.int32), -1)
    latest = jax.lax.cummax(where, axis=1)
    found = jnp.take_along_axis(segment_ids, jnp.maximum(latest, 0), axis=1)
    return jnp.where(latest >= 0, found, state_id[:, None])


def select(keep: Bool[Array, "B T"] | None, x: Array) -> Array:
    """`x` where `keep`, 0 elsewhere, even where `x` is not finite."""
    if keep is None:
        return x
    return jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - 2)), x, 0)


def finish_output(tokens: Tokens, output: Array) -> Array:
    """Zero the padding; poison tokens whose segment has no state, since an array cannot raise."""
    output = select(tokens.real, output)
    if tokens.known is None:
        return output
    known = tokens.known.reshape(tokens.known.shape + (1,) * (output.ndim - 2))
    return jnp.where(known, output, jnp.nan)


class Chunks(NamedTuple):
    """Where a call's tokens stand when cut into N chunks of C.

    With one state a segment every segment starts on a chunk border, so that a chunk belongs to one state.

    Attributes:
        size: C.
        count: N.
        source: [B, N * C], the token each place holds (T or more: none), or None for the order of the call.
        place: [B, T], the place of each token (N * C or more: none), or None.
        run: [B, N, C], as in `Tokens`, or None.
        slot: [B, N], the state each chunk belongs to, or None.
        first: [B, N], True where a chunk is its segment's first, or None.
        last: [B, S], the last chunk of each segment, -1 for a segment without tokens, or None.
    """

    size: int
    count: int
    source: Array | None
    place: Array | None
    run: Array | None
    slot: Array | None
    first: Array | None
    last: Array | None

    def split(self, x: Array) -> Array:
        """[B, T, ...] -> [B, N, C, ...], empty places 0 (an identity update)."""
        batch, length = x.shape[:2]
        total = self.count * self.size
        if self.source is None:
            x = jnp.pad(x, [(0, 0), (0, total - length)] + [(0, 0)] * (x.ndim - 2))
        else:
            x = _take(x, self.source)
        return x.reshape(batch, self.count, self.size, *x.shape[2:])

    def join(self, x: Array, length: int) -> Array:
        """[B, N, C, ...] -> [B, T, ...]."""
        x = x.reshape(x.shape[0], self.count * self.size, *x.shape[3:])
        if self.place is None:
            return x[:, :length]
        return _take(x, self.place)


def _take(x: Array, index: Array) -> Array:
    """x [B, P, ...] at index [B, *], 0 beyond P. No number comes twice, so that nothing is to be added up in the gradient."""

    def of_row(row, at):
        return row.at[at].get(mode="fill", fill_value=0, unique_indices=True)

    return jax.vmap(of_row)(x, index)


def cut_into_chunks(tokens: Tokens, length: int, size: int, num_segments: int | None) -> Chunks:
    """Lay `length` tokens out in chunks of `size`."""
    count = -(-length // size)
    if tokens.slot is None:
        run = None
        if tokens.run is not None:
            run = jnp.pad(tokens.run, [(0, 0), (0, count * size - length)], mode="edge")
            run = run.reshape(-1, count, size)
        return Chunks(size, count, None, None, run, None, None, None)

    assert num_segments is not None and tokens.real is not None
    # A segment of n tokens takes ceil(n / C) chunks, an empty one a chunk; over all segments at most T // C + S of them.
    count = length // size + num_segments
    member = tokens.slot[:, :, None] == jnp.arange(num_segments)  # [B, T, S]
    member = member & tokens.real[:, :, None]
    rank = jnp.take_along_axis(
        jnp.cumsum(member, axis=1, dtype=jnp.int32), tokens.slot[:, :, None], axis=2
    )[..., 0]
    tokens_of = jnp.sum(member, axis=1, dtype=jnp.int32)
    taken = jnp.maximum(-(-tokens_of // size), 1)  # [B, S] chunks a segment takes
    end = jnp.cumsum(taken, axis=1)
    start = end - taken
    place = jnp.take_along_axis(start, tokens.slot, axis=1) * size + rank - 1
    token = jnp.arange(length, dtype=jnp.int32)
    place = jnp.where(tokens.real, place, count * size + token)
    none = length + jnp.arange(count * size, dtype=jnp.int32)
    source = jax.vmap(lambda index: none.at[index].set(token, mode="drop"))(place)
    chunk = jnp.arange(count)
    slot = jnp.sum(end[:, None] <= chunk[:, None], axis=-1, dtype=jnp.int32)
    slot = jnp.minimum(slot, num_segments - 1)
    first = jnp.take_along_axis(start, slot, axis=1) == chunk
    last = jnp.where(tokens_of > 0, end - 1, -1)
    return Chunks(size, count, source, place, None, slot, first, last)
