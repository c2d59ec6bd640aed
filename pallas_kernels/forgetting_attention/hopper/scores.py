"""The scores' biases from the gates, the mask of the keys that a query does not see, and vectors in a
warpgroup's registers.

Scores are base-2 logarithms of weights. Query i and key j <= i have the score
`log2(e) (scale q_i . k_j + F_i - F_j)`, with F the sum of the log forget gates. F_i is the same for all keys
of a query and cancels in its softmax. Hence F_i is replaced by F_{i0}, with i0 the first query of the
warpgroup: the bias `F_{i0} - F_j` is small for nearby keys. It is exact, because F is the sum of two float32
numbers (high and low part).

For the keys of an earlier tile, whose last key is n, the bias is computed as `(F_{i0} - F_n) + (F_n - F_j)`.
Neither term is positive. The first is one number for each tile; the second is one number for each key,
computed before the kernel.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.forgetting_attention.bounds import Rows
from pallas_kernels.forgetting_attention.hopper.schedule import (
    ROWS,
    TILE,
    Position,
)
from pallas_kernels.hopper import warpgroups as wg

LOG2E = math.log2(math.e)


def query_arrays(rows: Rows, length: int) -> dict[str, jax.Array]:
    """Return the arrays from which a kernel computes a query's part of its scores, by name, for the `length`
    queries: the index of each query's document ("run"), and F, the running sum of the log forget gates, at
    the first of each warpgroup's 64 queries, as its high and low part ("first high", "first low").
    """
    arrays = {} if rows.run is None else {"run": rows.at_queries(rows.run, length)}
    if rows.gates is None:
        return arrays
    high, low = (rows.at_queries(x, length) for x in rows.gates)
    return arrays | {"first high": high[..., ::ROWS], "first low": low[..., ::ROWS]}


def key_biases(rows: Rows, queries: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the arrays, by name, from which forget gates' biases of the scores are computed, in a kernel
    whose warpgroups each have 64 queries and loop over tiles of keys.

    The bias of query i and key j is F_i - F_j, with F the running sum of the log forget gates; i0 is the
    first of a warpgroup's queries.

    Args:
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        queries: the number of queries of a row.

    Returns:
        Two dictionaries. The arrays of the first are loaded tile by tile: the index of each key's document
        ("run"), and `log2(e) (F_n - F_j)` with n the last key of the tile of key j ("fall"). Those of the
        second stay in global memory: `log2(e) (F_{i0} - F_j)` for the keys j in the tile with the warpgroup's
        queries ("diagonal"), and F at the last key of each tile ("last high", "last low").
    """
    streamed = {} if rows.run is None else {"run": rows.run}
    if rows.gates is None:
        return streamed, {}
    batch, heads, length = rows.gates[0].shape
    tiles = lambda x: x.reshape(batch, -1, x.shape[-1] // TILE, TILE)  # noqa: E731
    query_tiles = lambda x: tiles(rows.at_queries(x, queries))  # noqa: E731
    last = [tiles(x)[..., -1] for x in rows.gates]
    fall: Any = sum(tiles(x)[..., -1:] - tiles(x) for x in rows.gates)
    diagonal: Any = sum(
        query_tiles(x)[..., ::ROWS, None] - query_tiles(x)[..., None, :] for x in rows.gates
    )
    if rows.written is not None:
        fall = jnp.where(tiles(rows.written), fall, wg.NEVER)
        diagonal = jnp.where(query_tiles(rows.written)[..., None, :], diagonal, wg.NEVER)
    streamed["fall"] = (fall * LOG2E).reshape(batch, heads, length)
    diagonal = (diagonal * LOG2E).reshape(batch, heads, queries // ROWS, TILE)
    return streamed, {"diagonal": diagonal, "last high": last[0], "last low": last[1]}


class Biases:
    """The biases by which forget gates change the scores [queries, keys] of a warpgroup's 64 queries,
    computed step by step of its loop over keys.

    Attributes:
        first_last: F, the running sum of the log forget gates, at the last key of the first step's tile, as
            (high part, low part), or () without gates: the argument `last` of the first call of `at`.
    """

    def __init__(self, refs, position: Position, size: int, start):
        """Load F, the running sum of the log forget gates, at the warpgroup's first query and at the last key
        of the tile that the loop reads first.

        Args:
            refs: references to the arrays of `query_arrays` and `key_biases` in global memory.
            position: the row, the head and the queries of the warpgroup.
            size: the number of keys of a step.
            start: the index of the loop's first step.
        """
        self._refs, self._position, self._size = refs, position, size
        self._first_query: Any = None
        self.first_last: Any = ()
        if "first high" in refs:
            block = lax.div(position.first, ROWS)
            self._first_query = tuple(
                refs[f"first {x}"][position.b, position.h, block] for x in ("high", "low")
            )
            self.first_last = self._last_key(start)

    def _last_key(self, n):
        """Load from global memory F, the running sum of the log forget gates, as (high part, low part), at
        the last key of the tile that step n of the loop reads. The loop calls this one step ahead.
        """
        at, ref = self._position, self._refs["last high"]
        n = jnp.minimum(lax.div(n, TILE // self._size), ref.shape[2] - 1)
        return tuple(self._refs[f"last {x}"][at.b, at.h, n] for x in ("high", "low"))

    def at(self, n, tiles, last, masked: bool):
        """Return the biases that forget gates add to the scores of the warpgroup's queries with the keys of
        step n.

        Args:
            n: the index of the loop's step.
            tiles: references to the step's streamed arrays in shared memory, by name.
            last: F, the running sum of the log forget gates, at the last key of the step's tile, as (high
                part, low part).
            masked: whether the step's keys are in the same tile of the row as the warpgroup's queries.

        Returns:
            The bias of each key, [64, size] (None without gates); a number that is added to the bias of all
            keys; and F at the last key of the tile of step n + 1, the argument `last` of the next call.
        """
        if self._first_query is None:
            return None, 0.0, ()
        at, size, following = self._position, self._size, self._last_key(n + 1)
        if masked:
            keys = pl.ds(lax.rem(n, TILE // size) * size, size)
            ref = self._refs["diagonal"].at[at.b, at.h, lax.div(at.first, ROWS), keys]
            bias = plgpu.load(ref, layout=wg.LAYOUT.reduce(0), optimized=False)
            return wg.spread_columns(bias, (ROWS, size)), 0.0, following
        high, low = self._first_query
        shift = ((high - last[0]) + (low - last[1])) * LOG2E
        return wg.spread_columns(load_columns(tiles["fall"]), (ROWS, size)), shift, following


def add_bias(scores, scale: float, bias):
    """Return the base-2 logarithms of attention weights, `log2(e) scale scores + bias`, from the products
    `scores` of queries and keys, with the bias of the forget gates already times log2(e); a bias of None is
    0.
    """
    scores = scores * (scale * LOG2E)
    return scores if bias is None else scores + bias


def hide_unseen(
    scores, first_query, first_key, tiles, refs, at: Position, masked, window, keys_in_rows=False
):
    """Return attention scores with `NEVER` in place of those that a query does not see: of later keys, of
    keys of other documents, and of keys outside the window.

    Args:
        scores: the scores, [queries, keys], or [keys, queries] where `keys_in_rows`.
        first_query: the position in the row of the first of the scores' queries.
        first_key: the position in the row of the first of the scores' keys.
        tiles: references to the step's streamed arrays in shared memory, with the documents of the columns
            ("run") where rows have several.
        refs: references to arrays in global memory, with the documents of the rows of `scores`.
        at: the position of the warpgroup's resident tokens, the rows of `scores`.
        masked: whether some keys may be after some queries.
        window: the number of last tokens that a query sees, or None for all.
        keys_in_rows: whether the rows of `scores` are keys, and its columns queries.
    """
    shape = scores.shape
    if not (masked or window is not None or "run" in tiles):
        return scores

    def positions(axis, first):
        layout = wg.LAYOUT.reduce(1 - axis)
        return first + plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)

    row, column = (first_key, first_query) if keys_in_rows else (first_query, first_key)
    row, column = positions(0, row), wg.spread_columns(positions(1, column), shape)
    wide = lambda x: wg.spread_rows(x, shape)  # noqa: E731
    seen = wide(row) <= column if keys_in_rows else wide(row) >= column
    if window is not None:  # added to the rows, of which a thread has only two
        seen &= wide(row + window) > column if keys_in_rows else wide(row - window) < column
    if "run" in tiles:
        row_documents = wide(load_rows(refs["run"].at[at.b, at.tokens]))
        seen &= row_documents == wg.spread_columns(load_columns(tiles["run"]), shape)
    return jnp.where(seen, scores, wg.NEVER)


def zeros(shape):
    """Return an array of zeros of `shape` [64, columns] in a warpgroup's registers, in float32 and the layout
    of a matrix product's result.
    """
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), wg.LAYOUT)


def full_column(value: float):
    """Return a vector [64] with one number for each query (or key) of a warpgroup, all equal to `value`, in
    registers.
    """
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), wg.LAYOUT.reduce(1))


def load_columns(ref):
    """Load from shared memory a vector with one number for each column of a warpgroup's scores, such as the
    bias of each key, into registers.
    """
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(0))


def load_rows(ref):
    """Load from global memory a vector with one number for each of a warpgroup's 64 resident queries or keys,
    the rows of its scores, into registers.
    """
    return plgpu.load(ref, layout=wg.LAYOUT.reduce(1), optimized=False)


def partial_sums():
    """Return zeros [64, 8] in a warpgroup's registers: the initial value of the sums of each row of some
    arrays [64, n], to which `add_columns` adds an array's columns.
    """
    return zeros((ROWS, 8))


def add_columns(sums, x):
    """Add x [64, n], eight columns at a time, to `sums` [64, 8], partial sums of each row of such arrays;
    return the new partial sums.

    No thread requires numbers of other threads; the eight columns are summed once, after the loop.
    """
    for i in range(0, x.shape[1], 8):
        sums += x[:, i : i + 8]
    return sums
