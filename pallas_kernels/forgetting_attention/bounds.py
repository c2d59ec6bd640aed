"""The ranges of key tiles that attention with forget gates must compute for each tile of queries, and
conversely. The kernels skip all other tiles: those of other documents, outside the window, or whose weight
the gates make negligible.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NEVER = -1e30  # its exponential is 0
LOG_NEGLIGIBLE = -10.0  # keys that together weigh less than the exponential of this are skipped
_F32 = jnp.float32


class Rows(NamedTuple):
    """The arrays with an entry for each token that attention kernels read besides queries, keys and values:
    the forget gates, the documents, and which tokens are keys.

    Attributes:
        gates: F, the running sum of the log forget gates, as its high and its low part, each [B, H, T]
            float32; None without gates.
        run: [B, T] int32, the index of each token's document, not decreasing along T; None for one document.
        written: [B, T] bool, whether each token is a key; requires `gates`. None if all are.
        places: [2] int32, the positions in the row at which the first and the second half of the queries
            begin, multiples of a tile; the second is after the first half's end. None where all tokens of the
            row are queries.
    """

    gates: tuple[jax.Array, jax.Array] | None
    run: jax.Array | None
    written: jax.Array | None = None
    places: jax.Array | None = None

    def at_queries(self, x: jax.Array, length: int, axis: int = -1) -> jax.Array:
        """Return the entries of x, an array with the row's T tokens along `axis`, at the positions of the
        `length` queries: all of them, or the two halves that begin at `places`.
        """
        if self.places is None:
            return x
        halves = [
            lax.dynamic_slice_in_dim(x, self.places[i], length // 2, axis=axis) for i in range(2)
        ]
        return jnp.concatenate(halves, axis=axis)


class Bounds(NamedTuple):
    """Which tiles of queries see which tiles of keys; tiles of both have the same number of tokens, and N is
    their number in a row.

    Attributes:
        first: [B, H, N] int32, for each tile of queries: the first tile of keys that at least one of its
            queries sees.
        first_common: [B, H, N] int32, for each tile of queries: the first tile of keys, at least `first`,
            that the gates hide from none of these queries.
        last: [B, H, N] int32, for each tile of keys: the last tile of queries that sees it.
        first_of_query: [B, H, T] int32, for each query: the first tile of keys that the gates do not hide
            from it; None without pruning.
        diagonal: [B, H, N] int32, for each tile of queries: the tile of keys with the same tokens; None where
            it has the same index.
        begin: [B, H, N] int32, for each tile of keys: the first tile of queries with the same or later
            tokens, or the last tile if there is none; None where it has the same index. `last` is not less
            than it.
    """

    first: jax.Array
    first_common: jax.Array
    last: jax.Array
    first_of_query: jax.Array | None
    diagonal: jax.Array | None = None
    begin: jax.Array | None = None


def find_bounds(
    q, k, rows: Rows, *, scale: float, window: int | None, prune: bool, tile_size: int = 128
) -> Bounds:
    """Return, as `Bounds`, which tiles of keys each tile of queries must compute: those that neither
    documents, the window nor the gates hide.

    Gates hide tiles by adaptive computation pruning (arXiv 2504.06949), applied to each query alone, so that
    no query depends on a later one. Let n be the last key of a tile. The score of query i with any key up to
    n is at most `scale |q_i| max_{j <= n} |k_j| + F_i - F_n`, with F the running sum of the log forget gates.
    The sum of query i's weights is at least the weight of key i, whose score is `scale q_i . k_i`. Where the
    bound is less than that score by at least `10 + log T`, all keys up to n together weigh less than e^-10 of
    the sum (`LOG_NEGLIGIBLE`), and the tile is hidden.

    Args:
        q: [B, Q, H, D] queries.
        k: [B, T, G, D] keys.
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        scale: the factor by which the scores q . k are multiplied.
        window: the number of last tokens that a query sees, or None for all.
        prune: whether tiles of keys that the gates make negligible are hidden.
        tile_size: the number of queries, or of keys, in a tile.
    """
    batch, length, heads, _ = q.shape
    at_queries = functools.partial(rows.at_queries, length=length)
    count, tile = length // tile_size, jnp.arange(k.shape[1] // tile_size)
    place = at_queries(jnp.arange(k.shape[1]))[::tile_size] // tile_size
    seen = place[:, None] >= tile  # [queries, keys]
    if window is not None:
        seen &= place[:, None] * tile_size - (tile * tile_size + tile_size - 1) < window
    seen = jnp.broadcast_to(seen, (batch, 1, count, len(tile)))
    if rows.run is not None:
        of_query = at_queries(rows.run)[:, ::tile_size]
        seen &= of_query[:, None, :, None] <= rows.run[:, None, None, tile_size - 1 :: tile_size]
    first = jnp.broadcast_to(jnp.argmax(seen, axis=-1), (batch, heads, count))
    first_of_query, first_common = None, first
    if prune and rows.gates is not None:
        wide = lambda x: jnp.moveaxis(x.astype(_F32), 2, 1)  # noqa: E731
        spread = lambda x: jnp.repeat(wide(x), heads // k.shape[2], axis=1)  # noqa: E731
        queries, keys = wide(q), spread(k)
        self_score = jnp.sum(queries * spread(at_queries(k, axis=1)), axis=-1) * scale
        norm = lambda x: jnp.sqrt(jnp.sum(x * x, axis=-1))  # noqa: E731
        max_key = jnp.max(norm(keys).reshape(batch, heads, len(tile), tile_size), axis=-1)
        max_key = lax.cummax(max_key, axis=2)[:, :, None] * scale
        high, low = (
            at_queries(x)[..., None] - x[:, :, None, tile_size - 1 :: tile_size] for x in rows.gates
        )
        excess = norm(queries)[..., None] * max_key + (high + low) - self_score[..., None]
        # Only these tiles end before the query's token.
        earlier = tile < jnp.repeat(place, tile_size)[:, None]
        hidden = (excess < LOG_NEGLIGIBLE - math.log(k.shape[1])) & earlier
        if rows.written is not None:  # a token that is not a key is not in its own sum
            hidden &= at_queries(rows.written)[:, None, :, None]
        first_of_query = jnp.sum(hidden, axis=-1, dtype=jnp.int32)
        by_tile = first_of_query.reshape(batch, heads, count, tile_size)
        first = jnp.maximum(first, jnp.min(by_tile, axis=-1))
        first_common = jnp.maximum(first, jnp.max(by_tile, axis=-1))
    meets = (first[..., None] <= tile) & (tile <= place[:, None])
    last = jnp.max(jnp.where(meets, jnp.arange(count)[:, None], 0), axis=-2)
    first, first_common, last = (x.astype(jnp.int32) for x in (first, first_common, last))
    bounds = Bounds(first, first_common, last, first_of_query)
    if rows.places is None:
        return bounds
    begin = jnp.minimum(jnp.searchsorted(place, tile), count - 1)
    diagonal, begin = (
        jnp.broadcast_to(x.astype(jnp.int32), (batch, heads, len(x))) for x in (place, begin)
    )
    return bounds._replace(last=jnp.maximum(bounds.last, begin), diagonal=diagonal, begin=begin)


def key_arrays(rows: Rows) -> dict[str, jax.Array]:
    """Return the arrays from which a kernel computes a key's part of its scores, by name: the index of the
    key's document ("run", [B, T]), and F, the running sum of the log forget gates, as its high and its low
    part ("high" and "low", [B, H, T]).

    A token that is not a key has a very large F, so that its score is less than all others.
    """
    arrays = {} if rows.run is None else {"run": rows.run}
    if rows.gates is None:
        return arrays
    high, low = rows.gates
    if rows.written is not None:
        is_key = rows.written[:, None]
        high, low = jnp.where(is_key, high, -NEVER), jnp.where(is_key, low, 0)
    return arrays | {"high": high, "low": low}
