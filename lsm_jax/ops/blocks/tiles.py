"""Tables of integers by which `lsm_jax.ops.blocks.selected` reads the queries that attend to one block of keys together.

All arrays are those of one row, and of one memory where queries are concerned: the caller maps over both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

_COMPARISONS = 1 << 21  # that may be in memory; if there are more, numbers are counted by a scatter


class Tiles(NamedTuple):
    """Queries in M tiles of C places; the queries of a tile attend to the same span of keys.

    Attributes:
        query: [M, C], the query in each place; the number of queries means none.
        span: [M], the span of keys of each tile; the number of spans for tiles without queries. None if tile n has span n.
        place: [Q, P], the places in M * C of each query; M * C or more means none.
    """

    query: Array
    span: Array | None
    place: Array


class Spans(NamedTuple):
    """Which tokens of a row are in N spans of J tokens.

    Attributes:
        token: [N, J], the token at each place; the row's length or more means none.
        places: [S, A], the places in N * J of each token, up to A of them; N * J or more means none.
    """

    token: Array
    places: Array


class Row(NamedTuple):
    """The places of a row's tokens in blocks of `size` written tokens of a document.

    Attributes:
        rank: [T], the number of written tokens of the query's document up to and with the query, less 1.
        first: [T], the number of the first complete block of each query's document.
        window: [T], the span in `windows` of each query.
        last: [T], the place in this span of the last written token up to and with the query.
        blocks: the complete blocks of all documents, in their order; None if they follow each other without gaps.
        windows: spans of one or more times `size` written tokens, each of which begins `size` tokens after the one before; None
            if a query's own block, or the last one of its window, is that of its number.
        queries: tiles of `size` queries, one for each window; None if queries are put in tiles by their windows.
    """

    rank: Array
    first: Array | None = None
    window: Array | None = None
    last: Array | None = None
    blocks: Spans | None = None
    windows: Spans | None = None
    queries: Tiles | None = None


def take(x: Array, index: Array, fill=0) -> Array:
    """Return the entries of x [P, ...] at `index` [...]; `fill` where an index is P or more."""
    return x.at[index].get(mode="fill", fill_value=fill)


def row_with_gaps(
    rank: Array, written: Array, size: int, before: int, start: Array | int, length: int, *,
    all_write: bool,
) -> Row:  # fmt: skip
    """Return the `Row` of the `length` queries from token `start` of a row whose S tokens are of several documents or not all
    written; `rank` and `written` [S] are as in `TokenPositions`.

    Complete blocks alone are numbered, of which there are at most S / `size`, however many documents there are. A query's
    own block, which need not be complete, is among the last `size` written tokens of the row, and its window among as many as it
    has: in one of the spans of `before` + 1 times `size` written tokens. If
    `all_write`, the queries are those of a complete row, and the outputs of tokens that are not written are not used: each
    window then has `size` queries.
    """
    tokens = len(rank)
    newest = jnp.cumsum(written, dtype=jnp.int32) - 1  # the number of the last written token
    ends = written & (rank % size == size - 1)
    done = jnp.cumsum(ends, dtype=jnp.int32)
    blocks = tokens // size
    order = _inverse(jnp.where(written, newest, tokens), tokens, jnp.arange(tokens), tokens)
    begin = _inverse(jnp.where(ends, done - 1, tokens), blocks, newest - size + 1, tokens)

    def token_of(number):
        return jnp.where(number < 0, tokens, take(order, number, tokens))

    complete = token_of(begin[:, None] + jnp.arange(size))
    block = done - ends
    place = newest - take(begin, block, tokens)
    place = jnp.where(written & (place >= 0) & (place < size), block * size + place, blocks * size)

    def of_queries(x):
        return jax.lax.dynamic_slice_in_dim(x, start, length)

    own, rank, done = (of_queries(x) for x in (newest, rank, done))
    windows = -(-length // size) if all_write else 2 + max(0, length - 2) // size
    # The first window begins with written token first * size.
    first = jnp.maximum(own[0], 0) // size - before
    number = (first + jnp.arange(windows))[:, None] * size + jnp.arange((before + 1) * size)
    earlier = jnp.arange(before, -1, -1)
    window = (newest // size - first)[:, None] - earlier
    known = written[:, None] & (window >= 0) & (window < windows)
    places = (window * (before + 1) + earlier) * size + (newest % size)[:, None]
    places = jnp.where(known, places, number.size)
    of_query = jnp.maximum(own, 0) // size - first - before
    queries = None
    if all_write:
        query = token_of(number[:, before * size :])
        queries = Tiles(query, None, jnp.where(written, newest, query.size)[:, None])
    return Row(
        rank=rank,
        first=done - (rank + 1) // size,
        window=of_query,
        last=own - (first + of_query) * size,
        blocks=Spans(complete, place[:, None]),
        windows=Spans(token_of(number), places),
        queries=queries,
    )


def consecutive_windows(length: int, size: int, before: int) -> Spans:
    """Return the spans of the `size` tokens of each block of a row and of those of the `before` blocks before it."""
    blocks = -(-length // size)
    token = (jnp.arange(blocks)[:, None] - before) * size + jnp.arange((before + 1) * size)
    earlier, number = jnp.arange(before, -1, -1), jnp.arange(length)[:, None]
    # A token is earlier in the windows of the next blocks.
    window = number // size + before - earlier
    places = (window * (before + 1) + earlier) * size + number % size
    return Spans(
        jnp.where((token >= 0) & (token < length), token, length),
        jnp.where(window < blocks, places, token.size),
    )


def places_of(span: Array, spans: int, size: int, chunk: int) -> tuple[Array, Array]:
    """Return the places of queries in M tiles of `size` places, for each query and span [Q, P], and the span of each tile, [M].

    Args:
        span: [Q, P], the spans of each query, all different; `spans` for none. Of the queries of one span, earlier ones come
            first, so that the place of a query in its tile does not depend on later queries.
        spans: the number of spans.
        size: queries in a tile.
        chunk: queries that are counted at a time, in arrays of `chunk` times `spans` numbers.
    """
    number, count = _numbers(span, spans, chunk)
    tiles = -(-count // size)
    ends = jnp.cumsum(tiles)
    total = span.size // size + min(spans, span.size)
    place = take((ends - tiles) * size, span) + number
    owner = _at_most(ends, total)
    return jnp.where(span < spans, place, total * size), owner


def map_chunks(function, chunk: int, *arrays: Array):
    """Return `function` of `chunk` queries at a time of arrays [Q, ...], the last of which are padded with zeros: results with
    a leading axis of chunks.
    """

    def split(x):
        x = jnp.pad(x, [(0, -len(x) % chunk)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    return jax.lax.map(lambda x: function(*x), tuple(map(split, arrays)))


def _numbers(span: Array, spans: int, chunk: int) -> tuple[Array, Array]:
    """Return how many earlier queries have the same span, for each query and span [Q, P], and the number of queries of each
    span, [N]; arguments are as in `places_of`.
    """

    def of_chunk(left):
        """Take `spans` - span, so that queries of padding have no span."""
        member = jnp.any(left[:, :, None] == spans - jnp.arange(spans), axis=1)
        count = jnp.cumsum(member, axis=0, dtype=jnp.int32)
        number = jnp.take_along_axis(count, jnp.minimum(spans - left, spans - 1), axis=1)
        return number - 1, count[-1]

    if chunk >= len(span):
        return of_chunk(spans - span)
    number, counts = map_chunks(of_chunk, chunk, spans - span)
    number = number.reshape(-1, span.shape[1])[: len(span)]
    of_query = jnp.arange(len(span))[:, None] // chunk
    before = (jnp.cumsum(counts, axis=0) - counts).reshape(-1)
    number += take(before, of_query * spans + jnp.minimum(span, spans - 1))
    return number, jnp.sum(counts, axis=0)


def queries_of(place: Array, tiles: int, size: int) -> Array:
    """Return the query of each place, [M, C]; Q, their number, for none; `place` [Q, P] is from `places_of`."""
    query = jnp.broadcast_to(jnp.arange(len(place), dtype=jnp.int32)[:, None], place.shape)
    return _inverse(place.reshape(-1), tiles * size, query.reshape(-1), len(place)).reshape(
        tiles, size
    )


def sum_tiles(x: Array, span: Array, spans: int, most: int) -> Array:
    """Return the sums [N, ...] of the arrays x [M, ...] of the tiles of each span; those of a span follow each other.

    Four consecutive ones are added at a time, so that work grows with the number of tiles, however different the numbers of
    tiles of spans are, and the order of additions is always the same.

    Args:
        x, span: the arrays, and the span of each, in ascending order; N for none.
        spans: N.
        most: the largest number of tiles that a span can have.
    """
    each = 4
    count = jnp.diff(_at_most(span, spans), prepend=0)
    begin = jnp.cumsum(count) - count
    while most > 1:
        runs = -(-count // each)
        ends = jnp.cumsum(runs)
        run = jnp.arange(len(x) // each + min(spans, len(x)))
        owner = _at_most(ends, len(run))
        first = take(begin, owner) + each * (run - take(ends - runs, owner))
        index = first[:, None] + jnp.arange(each)
        index = jnp.where(index < take(begin + count, owner)[:, None], index, len(x))
        x = jnp.sum(take(x, index), axis=1)
        begin, count, most = ends - runs, runs, -(-most // each)
    return take(x, jnp.where(count > 0, begin, len(x)))


def _at_most(x: Array, count: int) -> Array:
    """Return how many of the integers x [P], none of them negative, are at most n, for each n of [0, count)."""
    if count * len(x) <= _COMPARISONS:
        return jnp.sum(jnp.arange(count)[:, None] >= x, axis=1, dtype=jnp.int32)
    return jnp.cumsum(jnp.zeros(count, jnp.int32).at[x].add(1, mode="drop"), dtype=jnp.int32)


def _inverse(index: Array, size: int, x: Array, fill: int) -> Array:
    """Return an array of `size` integers with x [P] at `index` [P] and `fill` elsewhere; indices below `size` are unique."""
    # Those that are dropped get different indices, too: where all are unique, no atomic operation is needed.
    index = jnp.where(index < size, index, size + jnp.arange(len(index)))
    result = jnp.full(size, fill, jnp.int32)
    return result.at[index].set(x.astype(jnp.int32), mode="drop", unique_indices=True)
