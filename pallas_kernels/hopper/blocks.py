"""The place of a warpgroup in the grid: the row, head and chunk that it computes, and the 64 key channels of the chunk."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import CHUNK, SQUARE, load_by_row, same_document


def row_and_head(heads: int):
    """The row of the batch and the head of this program; the grid's axis "row" counts both."""
    return lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)


def head_index(ref, head, heads: int):
    """The index in an array [B, T, n, ...] of the head that serves output head `head` of `heads`, a multiple of n."""
    return lax.div(head * ref.shape[2], heads)


class Place(NamedTuple):
    """A chunk of one head.

    Attributes:
        row: index of the row of the batch.
        h: index of the head of the outputs.
        heads: heads of the outputs.
        n: index of the chunk.
        tokens: slice of the chunk's tokens.
    """

    row: Any
    h: Any
    heads: int
    n: Any
    tokens: Any


def place_of(index, heads: int, count: int) -> Place:
    """The chunk that program `index` of rows x `count` chunks x `heads` computes; heads change fastest."""
    h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
    return Place(lax.div(index, heads * count), h, heads, n, pl.ds(n * CHUNK, CHUNK))


@dataclasses.dataclass(frozen=True)
class Block:
    """A chunk of one head in global memory, and the 64 key channels of it that a warpgroup computes.

    Attributes:
        refs: references to global memory by name: inputs, with `g` for the log decay, outputs and, with documents, the fields of
            `Documents`.
        place: the chunk.
        columns: slice of the key channels.
    """

    refs: dict[str, Any]
    place: Place
    columns: Any

    def head_tokens(self, name: str, *columns):
        """The reference [C, *] to an input [B, T, n, *], of the head that serves the output's head."""
        row, h, heads, _, tokens = self.place
        return self.refs[name].at[row, tokens, head_index(self.refs[name], h, heads), *columns]

    def keys(self, name: str):
        """The reference [C, 64] to an input [B, T, n, K], of the head that serves the output's head."""
        return self.head_tokens(name, self.columns)

    def log_decay(self):
        """The log decays [C, 64] in registers."""
        return wg.load_global(self.keys("g"))

    def mask_documents(self, mask):
        """`mask` [C, C], but False for two tokens of different documents."""
        if "run" not in self.refs:
            return mask
        return mask & same_document(self.refs["run"].at[self.place.row, self.place.tokens])

    def mask_rows(self, x, name: str):
        """x [C, 64] times the field `name` of `Documents`, "enters" or "stays"; x if there is one document."""
        if "run" not in self.refs:
            return x
        flags = self.refs[name].at[self.place.row, self.place.tokens]
        return x * wg.spread_rows(load_by_row(flags), SQUARE)

    def store(self, name: str, buffer, x) -> None:
        """Store x [C, 64] in an output [B, T, h, K] through a buffer in shared memory."""
        row, h, _, _, tokens = self.place
        buffer[...] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.refs[name].at[row, tokens, h, self.columns])
