"""Which tiles of queries and keys see each other: documents, the window and the gates hide the others, which the kernels skip."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NEVER = -1e30  # its exponential is 0
LEAST = -10.0  # keys that together weigh less than exp(LEAST) are skipped
_F32 = jnp.float32


class Rows(NamedTuple):
    """The arrays that the kernels read for each token, besides q, k and v.

    Attributes:
        gates: sums of the log forget gates, [B, H, T] float32 twice: their high and low parts; None without gates.
        run: [B, T] int32, the document of each token, not decreasing along T, or None.
        written: [B, T] bool, which tokens are keys; requires `gates`. None is all.
        places: [2] int32, the tokens at which the first and the second half of the queries begin, multiples of a tile, the second
            after the first half's end; None where all tokens of the row are queries.
    """

    gates: tuple[jax.Array, jax.Array] | None
    run: jax.Array | None
    written: jax.Array | None = None
    places: jax.Array | None = None

    def at_queries(self, x: jax.Array, length: int, axis: int = -1) -> jax.Array:
        """Return the entries of an array along the row at the tokens of the `length` queries."""
        if self.places is None:
            return x
        halves = [
            lax.dynamic_slice_in_dim(x, self.places[i], length // 2, axis=axis) for i in range(2)
        ]
        return jnp.concatenate(halves, axis=axis)


class Bounds(NamedTuple):
    """Which tiles of queries and of keys, of one size, see each other.

    Attributes:
        first: [B, H, N] int32, the first tile of keys that one of a tile's queries sees.
        settled: [B, H, N] int32, the first that all of them see, if only gates hide keys.
        last: [B, H, N] int32, the last tile of queries that sees a tile of keys.
        of_row: [B, H, T] int32, the first tile that each query sees, if only gates hide keys; None without pruning.
        diagonal: [B, H, N] int32, the tile of keys that has the tokens of a tile of queries; None where both have the same number.
        begin: [B, H, N] int32, the first tile of queries at or after a tile of keys, or the last of all; None where both have the
            same number. `last` is not before it.
    """

    first: jax.Array
    settled: jax.Array
    last: jax.Array
    of_row: jax.Array | None
    diagonal: jax.Array | None = None
    begin: jax.Array | None = None


def find_bounds(
    q, k, rows: Rows, *, scale: float, window: int | None, prune: bool, tile_size: int = 128
) -> Bounds:
    """Find the tiles that neither a document, the window nor a gate hides.

    Gates: adaptive computation pruning (arXiv 2504.06949), but for each query alone, so that no query depends on a later one. The score
    of a key in tile n or before is at most |q_i| max|k| scale + F_i - F_n, with F_n the F of the tile's last key and the maximum over
    the keys up to it, while the score of query i with its own key is in its sum. Where the first is below the second by
    10 + log T, all keys up to tile n together weigh less than e^-10 (`LEAST`).
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
    of_row, settled = None, first
    if prune and rows.gates is not None:
        wide = lambda x: jnp.moveaxis(x.astype(_F32), 2, 1)  # noqa: E731
        spread = lambda x: jnp.repeat(wide(x), heads // k.shape[2], axis=1)  # noqa: E731
        queries, keys = wide(q), spread(k)
        of_itself = jnp.sum(queries * spread(at_queries(k, axis=1)), axis=-1) * scale
        norm = lambda x: jnp.sqrt(jnp.sum(x * x, axis=-1))  # noqa: E731
        most = jnp.max(norm(keys).reshape(batch, heads, len(tile), tile_size), axis=-1)
        most = lax.cummax(most, axis=2)[:, :, None] * scale
        high, low = (
            at_queries(x)[..., None] - x[:, :, None, tile_size - 1 :: tile_size] for x in rows.gates
        )
        beyond = norm(queries)[..., None] * most + (high + low) - of_itself[..., None]
        # Only these tiles end before the query's token.
        earlier = tile < jnp.repeat(place, tile_size)[:, None]
        hidden = (beyond < LEAST - math.log(k.shape[1])) & earlier
        if rows.written is not None:  # a token that is not a key is not in its own sum
            hidden &= at_queries(rows.written)[:, None, :, None]
        of_row = jnp.sum(hidden, axis=-1, dtype=jnp.int32)
        by_tile = of_row.reshape(batch, heads, count, tile_size)
        first = jnp.maximum(first, jnp.min(by_tile, axis=-1))
        settled = jnp.maximum(first, jnp.max(by_tile, axis=-1))
    meets = (first[..., None] <= tile) & (tile <= place[:, None])
    last = jnp.max(jnp.where(meets, jnp.arange(count)[:, None], 0), axis=-2)
    first, settled, last = (x.astype(jnp.int32) for x in (first, settled, last))
    bounds = Bounds(first, settled, last, of_row)
    if rows.places is None:
        return bounds
    begin = jnp.minimum(jnp.searchsorted(place, tile), count - 1)
    diagonal, begin = (
        jnp.broadcast_to(x.astype(jnp.int32), (batch, heads, len(x))) for x in (place, begin)
    )
    return bounds._replace(last=jnp.maximum(bounds.last, begin), diagonal=diagonal, begin=begin)


def key_arrays(rows: Rows) -> dict[str, jax.Array]:
    """Return the arrays that the scores need for each key; a token that is not a key has a sum of gates above all others."""
    arrays = {} if rows.run is None else {"run": rows.run}
    if rows.gates is None:
        return arrays
    high, low = rows.gates
    if rows.written is not None:
        is_key = rows.written[:, None]
        high, low = jnp.where(is_key, high, -NEVER), jnp.where(is_key, low, 0)
    return arrays | {"high": high, "low": low}
