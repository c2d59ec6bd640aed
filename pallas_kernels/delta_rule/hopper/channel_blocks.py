"""The chunk and the key channels that a warpgroup computes, for the chunk kernels of the delta rule with a decay per key channel."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import head_index
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import CHUNK, SQUARE, load_by_row, same_document

_BF16 = jnp.bfloat16


class Place(NamedTuple):
    """A chunk of one head.

    Attributes:
        b: index of the row.
        h: index of the head of the outputs.
        heads: heads of the outputs.
        n: index of the chunk.
        tokens: slice of the chunk's tokens.
    """

    b: Any
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
        refs: references to global memory by name: inputs, outputs and, with documents, the fields of
            `Documents`.
        place: the chunk.
        columns: slice of the key channels.
    """

    refs: dict[str, Any]
    place: Place
    columns: Any

    def keys(self, name: str):
        """The reference [C, 64] to an input [B, T, *, K], of the head that serves the output's head."""
        b, h, heads, _, tokens = self.place
        return self.refs[name].at[b, tokens, head_index(self.refs[name], h, heads), self.columns]

    def log_decay(self):
        """The log decays [C, 64] in registers."""
        return wg.load_global(self.keys("g"))

    def mask_documents(self, mask):
        """`mask` [C, C], but False for two tokens of different documents."""
        if "run" not in self.refs:
            return mask
        return mask & same_document(self.refs["run"].at[self.place.b, self.place.tokens])

    def mask_rows(self, x, name: str):
        """x [C, 64] times the field `name` of `Documents`, "enters" or "stays"; x if there is one document."""
        if "run" not in self.refs:
            return x
        flags = self.refs[name].at[self.place.b, self.place.tokens]
        return x * wg.spread_rows(load_by_row(flags), SQUARE)

    def store(self, name: str, buffer, x) -> None:
        """Store x [C, 64] in an output [B, T, h, K] through a buffer in shared memory."""
        b, h, _, _, tokens = self.place
        buffer[...] = x.astype(_BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.refs[name].at[b, tokens, h, self.columns])
