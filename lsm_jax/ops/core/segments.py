"""Segment ids, masks and chunks: which tokens write, where a document begins, and how tokens are laid out in
chunks.

All ops share these conventions:

* Id 0 is padding: its update is the identity, and its output is 0.
* A token whose `update_mask` is 0 is an identity update too, but it still reads.
* With one state per row, a token begins a document if its id differs from the last nonzero id before it (the
  id that the state remembers included). The memory is reset before that token reads.
* With one state per segment, the tokens of id `s` use `state[:, s - 1]`: they form one sequence, wherever
  they are in the row. A token whose id has no state writes nothing, and its output is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tokens(NamedTuple):
    """Which tokens of a call are written, and the document and segment of each token. A field is None if it
    would have the same value for every token.

    Attributes:
        written: [B, T], False if the token's update is the identity (padding, or masked).
        real: [B, T], False on padding.
        run: [B, T], the number of documents that have begun in this call up to and with the token; 0
            continues the initial state. None with one state per segment.
        slot: [B, T], the index of the state of each token's segment (0 on padding). None with one state per
            row.
        known: [B, T], False if the id exceeds the number of states.
        last_id: [B], the last nonzero id, which the state remembers.
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
    """Return which tokens of a call are written, and which document and segment each belongs to, as `Tokens`, from
    segment ids and mask.

    Args:
        segment_ids: [B, T], or None for one document that continues.
        update_mask: [B, T] or None.
        state_id: [B], the last nonzero id that the state remembers.
        num_segments: S with one state per segment; None with one state per row.
    """
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
    """Return the last nonzero segment id at or before each token, [B, T]; before the first nonzero id, it is
    the id that the state remembers.
    """
    index = jnp.where(segment_ids != 0, jnp.arange(segment_ids.shape[1], dtype=jnp.int32), -1)
    latest = jax.lax.cummax(index, axis=1)
    ids = jnp.take_along_axis(segment_ids, jnp.maximum(latest, 0), axis=1)
    return jnp.where(latest >= 0, ids, state_id[:, None])


def select(keep: Bool[Array, "B T"] | None, x: Array) -> Array:
    """Return x [B, T, ...] where `keep` [B, T] is True, and 0 elsewhere, even if x is not finite there; x
    itself if `keep` is None.
    """
    if keep is None:
        return x
    return jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - 2)), x, 0)


def finish_output(tokens: Tokens, output: Array) -> Array:
    """Return an op's output with 0 on padding, and NaN for tokens whose segment has no state, since a
    compiled program cannot raise.
    """
    output = select(tokens.real, output)
    if tokens.known is None:
        return output
    known = tokens.known.reshape(tokens.known.shape + (1,) * (output.ndim - 2))
    return jnp.where(known, output, jnp.nan)


class Chunks(NamedTuple):
    """Where the T tokens of each row lie in N chunks of C tokens, and which segment each chunk belongs to.

    With one state per segment every segment starts at a chunk's boundary, so that a chunk belongs to one
    state.

    Attributes:
        size: C.
        count: N.
        source: [B, N * C], the token at each place (T or more means none), or None for the order of the call.
        place: [B, T], the place of each token (N * C or more means none), or None.
        run: [B, N, C], as in `Tokens`, or None.
        slot: [B, N], the index of the state that each chunk belongs to, or None.
        first: [B, N], True if the chunk is its segment's first, or None.
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
        """Arrange an array of tokens [B, T, ...] in N chunks of C tokens, [B, N, C, ...]; empty places of chunks are 0,
        which makes their update the identity.
        """
        batch, length = x.shape[:2]
        total = self.count * self.size
        if self.source is None:
            x = jnp.pad(x, [(0, 0), (0, total - length)] + [(0, 0)] * (x.ndim - 2))
        else:
            x = _take(x, self.source)
        return x.reshape(batch, self.count, self.size, *x.shape[2:])

    def join(self, x: Array, length: int) -> Array:
        """Reverse `split`: arrange an array of chunks [B, N, C, ...] as tokens in the order of the row, [B, T, ...],
        without the chunks' empty places.
        """
        x = x.reshape(x.shape[0], self.count * self.size, *x.shape[3:])
        if self.place is None:
            return x[:, :length]
        return _take(x, self.place)


def _take(x: Array, index: Array) -> Array:
    """Return the entries of x [B, P, ...] along P at `index` [B, *]; 0 where an index is P or more. No index
    below P occurs twice in a row of the batch, so that the gradient requires no sums.
    """

    def of_row(row, at):
        return row.at[at].get(mode="fill", fill_value=0, unique_indices=True)

    return jax.vmap(of_row)(x, index)


def cut_into_chunks(tokens: Tokens, length: int, size: int, num_segments: int | None) -> Chunks:
    """Return how the `length` tokens of each row are laid out in chunks of `size` tokens: in order, or, with one state
    per segment, so that a chunk contains tokens of one segment only.
    """
    count = -(-length // size)
    if tokens.slot is None:
        run = None
        if tokens.run is not None:
            run = jnp.pad(tokens.run, [(0, 0), (0, count * size - length)], mode="edge")
            run = run.reshape(-1, count, size)
        return Chunks(size, count, None, None, run, None, None, None)

    assert num_segments is not None and tokens.real is not None
    # A segment of n tokens has ceil(n / C) chunks, an empty segment one chunk: at most T // C + S chunks in all.
    count = length // size + num_segments
    member = tokens.slot[:, :, None] == jnp.arange(num_segments)  # [B, T, S]
    member = member & tokens.real[:, :, None]
    rank = jnp.take_along_axis(
        jnp.cumsum(member, axis=1, dtype=jnp.int32), tokens.slot[:, :, None], axis=2
    )[..., 0]
    tokens_of = jnp.sum(member, axis=1, dtype=jnp.int32)
    chunks_of = jnp.maximum(-(-tokens_of // size), 1)  # [B, S]
    end = jnp.cumsum(chunks_of, axis=1)
    start = end - chunks_of
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
