"""Tables of integers by which `lsm_jax.ops.blocks.selected` reads the queries that attend to one block of keys together.

All arrays are those of one row, and of one memory where queries are concerned: the caller maps over both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class Tiles(NamedTuple):
    """Queries in M tiles of C places; the queries of a tile attend to the same span of keys.

    Attributes:
        query: [M, C], the query in each place; its number or more means none.
        span: [M], the span of keys of each tile; the number of spans for tiles without queries.
        place: [P], the place in M * C of each pair of a query and a span; M * C or more means none.
    """

    query: Array
    span: Array
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
    """What the tokens of a row are to blocks of `size` written tokens of a document.

    Attributes:
        rank: [T], the number of written tokens of the query's document up to and with the query, less 1.
        first: [T], the number of the first complete block of each query's document.
        window: [T], the span in `windows` of each query.
        last: [T], the place in this span of the last written token up to and with the query.
        blocks: the complete blocks of all documents, in their order; None if they follow each other without gaps.
        windows: spans of two times `size` written tokens, each of which begins `size` tokens after the one before; None if
            a query's own block is that of its number.
    """

    rank: Array
    first: Array | None = None
    window: Array | None = None
    last: Array | None = None
    blocks: Spans | None = None
    windows: Spans | None = None


def take(x: Array, index: Array, fill=0) -> Array:
    """Return the entries of x [P, ...] at `index` [...]; `fill` where an index is P or more."""
    return x.at[index].get(mode="fill", fill_value=fill)


def row_with_gaps(rank: Array, written: Array, size: int, start: Array, length: int) -> Row:
    """Return the `Row` of the `length` queries from token `start` of a row whose S tokens are of several documents or not all
    written; `rank` and `written` [S] are as in `TokenPositions`.

    Complete blocks alone are numbered, of which there are at most S / `size`, however many documents there are. A query's
    own block, which need not be complete, is among the last `size` written tokens of the row, in one of the windows.
    """
    tokens = len(rank)
    count = jnp.cumsum(written, dtype=jnp.int32)
    newest = count - 1  # the newest written token, as numbered among written ones
    ends = written & (rank % size == size - 1)
    done = jnp.cumsum(ends, dtype=jnp.int32)
    order = jnp.argsort(~written, stable=True).astype(jnp.int32)  # the token with each number

    def token_of(number):
        return jnp.where((number >= 0) & (number < count[-1]), take(order, number, tokens), tokens)

    inside = jnp.arange(size)
    blocks = tokens // size
    end = jnp.argsort(~ends, stable=True)[:blocks]
    begin = jnp.where(jnp.arange(blocks) < done[-1], newest[end] - size + 1, tokens)
    block = done - ends
    place = newest - take(begin, block, tokens)
    place = jnp.where(written & (place >= 0) & (place < size), block * size + place, blocks * size)
    complete = Spans(token_of(begin[:, None] + inside), place[:, None])

    def of_queries(x):
        return jax.lax.dynamic_slice_in_dim(x, start, length)

    own = of_queries(newest)
    windows = 2 + max(0, length - 2) // size
    first = jnp.maximum(own[0], 0) // size - 1  # the first window begins with token first * size
    begin = (first + jnp.arange(windows)) * size
    number = newest // size - first
    places = jnp.stack([number - 1, number], axis=1)
    of_two = jnp.stack([newest % size + size, newest % size], axis=1)
    in_window = written[:, None] & (places >= 0) & (places < windows)
    places = jnp.where(in_window, places * 2 * size + of_two, windows * 2 * size)
    spans = Spans(token_of(begin[:, None] + jnp.arange(2 * size)), places)
    window = jnp.maximum(own, 0) // size - first - 1
    rank, done = of_queries(rank), of_queries(done)
    last = own - (first + window) * size
    return Row(rank, done - (rank + 1) // size, window, last, complete, spans)


def tiles_of(span: Array, each: int, spans: int, size: int) -> Tiles:
    """Return tiles of `size` queries for pairs of a query and a span.

    Args:
        span: [P], the span of each pair, `spans` for none. There are `each` pairs for a query, and pairs of earlier queries
            come first: the place of a query in its tile then does not depend on later queries.
        each: the number of pairs of a query.
        spans: the number of spans.
        size: queries in a tile.
    """
    pairs = len(span)
    order = jnp.argsort(span, stable=True).astype(jnp.int32)
    counts = jnp.sum(span[:, None] == jnp.arange(spans), axis=0, dtype=jnp.int32)
    begins, tiles = jnp.cumsum(counts) - counts, -(-counts // size)
    ends = jnp.cumsum(tiles)
    tile = jnp.arange(pairs // size + min(spans, pairs), dtype=jnp.int32)
    owner = jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32)
    inside = (tile - take(ends - tiles, owner))[:, None] * size + jnp.arange(size)
    filled = inside < take(counts, owner)[:, None]
    place = jnp.arange(len(tile) * size, dtype=jnp.int32).reshape(inside.shape)
    # Empty places have different numbers, since all indices of the scatter are said to be unique.
    pair = jnp.where(filled, take(order, take(begins, owner)[:, None] + inside), pairs + place)
    places = jnp.full(pairs, place.size, jnp.int32)
    places = places.at[pair.reshape(-1)].set(place.reshape(-1), mode="drop", unique_indices=True)
    return Tiles(jnp.where(filled, pair // each, pairs), owner, places)
