"""The part of a kernel's arrays that one warpgroup of a Hopper kernel computes (row of the batch, head, chunk
and 64 key channels), and functions that load and store it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import CHUNK, SQUARE, load_by_row, same_document


def row_and_head(heads: int):
    """Return which row of the batch and which head this thread block computes, as two indices, from its index
    on the grid's axis "row", which counts pairs of both with the head changing fastest.
    """
    return lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)


def head_index(ref, head, heads: int):
    """Return which of the n heads of an array [B, T, n, ...], such as the keys, belongs to the head with
    index `head` of the `heads` heads of the output. `heads` is a multiple of n, and consecutive output heads
    use the same head of the array.
    """
    return lax.div(head * ref.shape[2], heads)


class Place(NamedTuple):
    """Where one chunk of one head is in the arrays of a kernel.

    Attributes:
        row: index of the row of the batch.
        h: index of the head among the outputs' heads.
        heads: number of the outputs' heads.
        n: index of the chunk in the row.
        tokens: slice of the row's tokens that are in the chunk.
    """

    row: Any
    h: Any
    heads: int
    n: Any
    tokens: Any


def place_of(index, heads: int, count: int) -> Place:
    """Return the chunk of one head that program `index` computes, as a `Place`. Programs count all rows of the batch, the `count` chunks
    of each row and the `heads` heads of each chunk; heads change fastest.
    """
    h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
    return Place(lax.div(index, heads * count), h, heads, n, pl.ds(n * CHUNK, CHUNK))


@dataclasses.dataclass(frozen=True)
class Block:
    """A chunk of one head in global memory, and the 64 key channels of it that a warpgroup computes.

    Attributes:
        refs: references to arrays in global memory, by name: inputs, with `g` for the log decay, outputs and, with documents, the fields of
            `Documents`.
        place: where the chunk is in these arrays.
        columns: slice of the key channels.
    """

    refs: dict[str, Any]
    place: Place
    columns: Any

    def head_tokens(self, name: str, *columns):
        """Return a reference [C, *] to this chunk's tokens in the input `name` [B, T, n, *], in the one of
        its n heads that this chunk's output head uses (see `head_index`). `columns` may be a slice of
        channels.
        """
        row, h, heads, _, tokens = self.place
        return self.refs[name].at[row, tokens, head_index(self.refs[name], h, heads), *columns]

    def keys(self, name: str):
        """Return a reference [C, 64] to this chunk's tokens and this warpgroup's 64 key channels in the input
        `name` [B, T, n, K], in the one of its n heads that this chunk's output head uses (see `head_index`).
        """
        return self.head_tokens(name, self.columns)

    def log_decay(self):
        """Load the log decays [C, 64] of this chunk's tokens, in the 64 key channels that the warpgroup computes, into registers."""
        return wg.load_global(self.keys("g"))

    def mask_documents(self, mask):
        """Return `mask` [C, C], a mask of pairs of this chunk's tokens such as i >= j, with False also at
        every pair of tokens of two documents.
        """
        if "run" not in self.refs:
            return mask
        return mask & same_document(self.refs["run"].at[self.place.row, self.place.tokens])

    def mask_rows(self, x, name: str):
        """Return x [C, 64], a tile with a row for each of this chunk's tokens, with 0 in the rows of tokens
        of some documents.

        With `name` "enters" these are all documents but that of the last token before the chunk; with
        "stays", all but that of the chunk's last token. If each row of the batch is one document, x is
        returned unchanged.
        """
        if "run" not in self.refs:
            return x
        flags = self.refs[name].at[self.place.row, self.place.tokens]
        return x * wg.spread_rows(load_by_row(flags), SQUARE)

    def store(self, name: str, buffer, x) -> None:
        """Store x [C, 64], this chunk's values in these 64 key channels, in the output `name` [B, T, h, K], in bfloat16, through a buffer
        in shared memory.
        """
        row, h, _, _, tokens = self.place
        buffer[...] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.refs[name].at[row, tokens, h, self.columns])
