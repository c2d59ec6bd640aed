"""The blocks of tokens and channels of the Hopper kernels, with the functions of a row that both kernels
compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import channel_rows, pl, plgpu
from pallas_kernels.short_convolution.hopper.requirements import (
    LANES,
    WARPS,
    block_tokens,
    thread_channels,
)

_F32 = jnp.float32
AHEAD = 4
"""Tokens of an unrolled step, whose rows are loaded one step ahead."""
EPSILON = 1e-6
"""Added to the sum of squares of a head that is normalised."""


class Layout(NamedTuple):
    """The sizes of a call and of the blocks that it is divided into.

    Attributes:
        batch: B.
        length: T.
        total: D, all channels.
        width: W, rows of the weight.
        channels: channels of a block.
        tokens: tokens of a block.
        dim: channels of a head, or of a warp where heads are not normalised.
    """

    batch: int
    length: int
    total: int
    width: int
    channels: int
    tokens: int
    dim: int

    @classmethod
    def of(cls, x, weight, head_dim: int | None) -> Layout:
        """The layout of a call with these arguments."""
        batch, length, total = x.shape
        size = thread_channels(total, head_dim)
        assert size is not None
        channels = LANES * WARPS * size
        dim = channels // WARPS if head_dim is None else head_dim
        tokens = block_tokens(batch, length, total // channels)
        return cls(batch, length, total, weight.shape[0], channels, tokens, dim)

    @property
    def heads(self) -> int:
        """The number of heads of all channels."""
        return self.total // self.dim

    @property
    def grid(self) -> dict[str, int]:
        """One warpgroup for each block of channels, block of tokens and row."""
        return dict(
            column=self.total // self.channels, block=self.length // self.tokens, row=self.batch
        )

    def by_head(self, x) -> jax.Array | None:
        """Reshape x [..., D] to [..., heads, dim]; return None for None."""
        return None if x is None else x.reshape(*x.shape[:-1], self.heads, self.dim)

    def inputs(self, x, weight, bias, tail, order, run, dy=None) -> dict[str, jax.Array | None]:
        """Return the kernels' inputs by name, with D reshaped to [heads, dim]; absent ones are None."""
        bias = None if bias is None else bias[None]
        named = dict(x=x, weight=weight, tail=tail, bias=bias, dy=dy)
        return {name: self.by_head(a) for name, a in named.items()} | dict(order=order, run=run)


class Block:
    """A warpgroup's block of tokens and channels, with its loads and stores.

    A row is one token's channels, [heads, dim]. Tokens are counted in `order`.

    Attributes:
        refs: references to global memory by name.
        length: T.
        width: W.
        b: the row of the batch.
        block: the index of the block of tokens.
        columns: the slice of heads.
        layout: the layout of a row in registers.
        shape: (heads, dim) of the block.
        start: the block's first token.
    """

    def __init__(self, refs: dict[str, Any], layout: Layout):
        self.refs, self.length, self.width = refs, layout.length, layout.width
        self.b, self.block = lax.axis_index("row"), lax.axis_index("block")
        heads = layout.channels // layout.dim
        self.columns = pl.ds(lax.axis_index("column") * heads, heads)
        self.layout = channel_rows(heads, layout.dim, WARPS)
        self.shape = (heads, layout.dim)
        self.start = self.block * layout.tokens

    def load(self, ref) -> Any:
        """Load the block's channels of a row, [heads, dim]."""
        return plgpu.load(ref.at[self.columns], layout=self.layout, optimized=False)

    def store(self, x, name: str, *index: Any) -> None:
        """Store x [heads, dim] as the block's channels of the row at `index` of an output."""
        ref = self.refs[name].at[*index, self.columns]
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.layout)

    def position(self, token):
        """The index of a token in the arrays of tokens."""
        return self.refs["order"][self.b, token] if "order" in self.refs else token

    def document(self, token) -> Any:
        """The index of the token's document, -1 for padding; None where rows have one document."""
        return self.refs["run"][self.b, token] if "run" in self.refs else None

    def row(self, name: str, token) -> Any:
        """Load the token's row of x or dy."""
        return self.load(self.refs[name].at[self.b, self.position(token)])

    def weights(self) -> list[Any]:
        """Load the rows of the weight by distance: the first multiplies the current token."""
        return [
            self.load(self.refs["weight"].at[self.width - 1 - d]).astype(_F32)
            for d in range(self.width)
        ]

    def bias(self) -> Any:
        """Load the bias; None if there is none."""
        return self.load(self.refs["bias"].at[0]).astype(_F32) if "bias" in self.refs else None

    def before(self) -> tuple[list[Any], list[Any]]:
        """Load the W - 1 rows before the block, the nearest first, and their documents (an empty list if rows
        have one document).
        """
        rows, documents = [], []
        first = self.block == 0
        for d in range(1, self.width):
            token = jnp.maximum(self.start - d, 0)
            tail = self.load(self.refs["tail"].at[self.b, self.width - 1 - d]).astype(_F32)
            row = jnp.where(first, tail, self.row("x", token).astype(_F32))
            if "run" in self.refs:
                documents.append(jnp.where(first, 0, self.document(token)))
                row = jnp.where(documents[-1] >= 0, row, 0.0)
            rows.append(row)
        return rows, documents

    def mask(self, row, before, document, documents) -> tuple[Any, list[Any], list[Any]]:
        """Set to 0 a token's row if it is padding, and each row before it that belongs to another document.

        Args:
            row: the token's row.
            before: the W - 1 rows before it, the nearest first.
            document: the token's document, or None.
            documents: the documents of the rows before it.

        Returns:
            The row, the rows before it, and for each of these whether it belongs to the token's document
            (None without documents).
        """
        if document is None:
            return row, before, [None] * len(before)
        same: list[Any] = [d == document for d in documents]
        visible = [jnp.where(s, x, 0.0) for s, x in zip(same, before, strict=True)]
        return jnp.where(document >= 0, row, 0.0), visible, same

    def sum_heads(self, x):
        """Sum x [heads, dim] over each head, and broadcast the sum over the head's channels."""
        total = lax.broadcast_in_dim(jnp.sum(x, axis=1), self.shape, [0])
        return plgpu.layout_cast(total, self.layout)


def convolve(weights, bias, taps):
    """Return the sum of the rows `taps` times `weights`, both by distance, plus the bias (None is 0)."""
    total = weights[0] * taps[0]
    for w, tap in zip(weights[1:], taps[1:], strict=True):
        total += w * tap
    return total if bias is None else total + bias


def sigmoid(x):
    """Return `1 / (1 + exp(-x))`, as the square of an `rsqrt`: an approximation that requires no division."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def struct_like(x) -> jax.ShapeDtypeStruct:
    """The shape and dtype of x."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
