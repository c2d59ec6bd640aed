"""How the Hopper kernels of short convolutions divide tokens and channels among warpgroups, with the
functions of one token's channels that the forward and the backward kernel compute.
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
    divide,
)

_F32 = jnp.float32
AHEAD = 4
"""Tokens of an unrolled step, whose rows are loaded one step ahead."""
EPSILON = 1e-6
"""Added to the sum of squares of a head that is normalised."""


class Layout(NamedTuple):
    """The sizes of a call of `short_convolution`, and of the blocks of tokens and channels, of one warpgroup
    each, that it is divided into.

    Attributes:
        batch: B, the number of rows.
        length: the number of tokens of a row, or of a part of it.
        total: D, the number of all channels.
        width: W, the number of rows of the weight.
        tokens: the number of tokens of a block.
        heads: the number of heads of a block, each in one warp.
        dim: the number of channels of a head, or of a warp where heads are not normalised.
        rows: the number of rows of the batch of a block: 1, or the number of warps, each of which has another row.
        parts: the number of consecutive parts into which each row is cut, which the kernels compute as rows.
    """

    batch: int
    length: int
    total: int
    width: int
    tokens: int
    heads: int
    dim: int
    rows: int
    parts: int

    @classmethod
    def of(cls, x, weight, head_dim: int | None, order) -> Layout:
        """Return the sizes and blocks of a call of `short_convolution` with tokens x [B, T, D], weight [W,
        D], heads of `head_dim` channels that are normalised (None: not normalised), and the order of
        processing [B, T] (None: that of x).
        """
        batch, length, total = x.shape
        division = divide(batch, length, total, head_dim, order is not None)
        assert division is not None
        size, rows, parts = division
        channels = LANES * WARPS * size // rows
        dim = LANES * size if head_dim is None else head_dim
        length //= parts
        tokens = block_tokens(batch * parts // rows, length, total // channels)
        heads = channels // dim
        return cls(batch, length, total, weight.shape[0], tokens, heads, dim, rows, parts)

    @property
    def grid(self) -> dict[str, int]:
        """The kernels' grid: one warpgroup for each block of channels, block of tokens, and row of the batch (or
        several rows).
        """
        return dict(
            column=self.total // (self.heads * self.dim),
            block=self.length // self.tokens,
            row=self.batch * self.parts // self.rows,
        )

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of one token's channels in a block: [heads, dim], or [rows, dim] with one head of several rows."""
        return (self.heads if self.rows == 1 else self.rows, self.dim)

    def by_head(self, x) -> jax.Array | None:
        """Reshape x [..., D] to [..., D / dim, dim], with the channels divided into heads; return None for
        None.
        """
        return None if x is None else x.reshape(*x.shape[:-1], -1, self.dim)

    def by_row(self, x) -> jax.Array | None:
        """Reshape x [B, T, ...] to [B', rows, T', ...], where B' is the grid's number of rows and T' the number of tokens of a part; or to
        [B, T', ...] where a block has one row. Return None for None.
        """
        if x is None or self.rows == 1:
            return x
        return x.reshape(-1, self.rows, x.shape[1] // self.parts, *x.shape[2:])

    def tails(self, x, before) -> jax.Array:
        """Return the W - 1 tokens before each part, [B, parts * (W - 1), ...]: `before` [B, W - 1, ...], and those of x [B, T, ...] before
        the other parts.
        """
        cut = self._cut(x)[:, :-1, 1 - self.width :]
        return jnp.concatenate([before, cut.reshape(before.shape[0], -1, *x.shape[2:])], axis=1)

    def add_tails(self, dx, d_tails) -> tuple[jax.Array, jax.Array]:
        """Add the gradients of the tokens before each part, [B, parts * (W - 1), D], to those of x [B, T, D]; return these and the
        gradient of the tokens before the first, [B, W - 1, D].
        """
        if self.parts == 1:
            return dx, d_tails
        d_tails, cut = self._cut(d_tails), self._cut(dx)
        start = self.length - (self.width - 1)
        last = cut[:, :-1, start:].astype(_F32) + d_tails[:, 1:].astype(_F32)
        cut = lax.dynamic_update_slice(cut, last.astype(dx.dtype), (0, 0, start, 0))
        return cut.reshape(dx.shape), d_tails[:, 0]

    def _cut(self, x):
        return x.reshape(x.shape[0], self.parts, -1, *x.shape[2:])

    def inputs(self, x, weight, bias, tail, order, run, dy=None) -> dict[str, jax.Array | None]:
        """Return the inputs of the convolution's kernels by name, with the rows and channels of tokens, weight,
        bias, tail, documents and dy (the output's gradient) divided among blocks; absent ones are None.
        """
        tail_run = None
        if self.parts > 1:
            tail = self.tails(x, tail)
            if run is not None:
                tail_run = self.tails(run, jnp.zeros((self.batch, self.width - 1), run.dtype))
        named = dict(x=x, tail=tail, dy=dy)
        inputs = {name: self.by_row(self.by_head(a)) for name, a in named.items()}
        bias = None if bias is None else bias[None]
        inputs |= dict(weight=self.by_head(weight), bias=self.by_head(bias), order=order)
        return inputs | dict(run=self.by_row(run), tail_run=self.by_row(tail_run))


class Block:
    """One warpgroup's part of a short convolution's kernel, a block of consecutive tokens and of channels: the functions that
    load and store its arrays.

    A tile is one token's channels, [heads, dim], or those of one head in several rows of the batch, [rows, dim]. Tokens are
    counted in `order`, in which padding comes last.

    Attributes:
        refs: references to the arrays in global memory, by name.
        length: T, the number of tokens of a row of the batch.
        width: W, the number of rows of the weight.
        rows: the number of rows of the batch that the warpgroup computes.
        b: the index of the row in the batch, or of the group of rows.
        block: the index of the warpgroup's block of tokens in its row.
        columns: the slice of the heads that the warpgroup computes, or the index of its head in all its rows.
        layout: how a tile is distributed over the warpgroup's registers.
        shape: the shape of a tile.
        start: the index, in `order`, of the block's first token.
    """

    def __init__(self, refs: dict[str, Any], layout: Layout):
        self.refs, self.length, self.width = refs, layout.length, layout.width
        self.b, self.block = lax.axis_index("row"), lax.axis_index("block")
        column, self.rows = lax.axis_index("column"), layout.rows
        self.columns = column if self.rows > 1 else pl.ds(column * layout.heads, layout.heads)
        self.shape = layout.tile
        self.layout = channel_rows(*self.shape, WARPS)
        self.start = self.block * layout.tokens

    def at(self, name: str, token) -> Any:
        """Return the reference to a token's tile in an array of tokens, by the token's position in it."""
        rows = (self.b,) if self.rows == 1 else (self.b, slice(None))
        return self.refs[name].at[*rows, token, self.columns]

    def store(self, x, name: str, token: Any) -> None:
        """Store the tile x as a token's values of the output `name` in global memory."""
        ref = self.at(name, token)
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.layout)

    def store_sum(self, x, name: str, index: Any) -> None:
        """Store the tile x, the block's sum of a gradient of one row of the weight, or of the bias, at `index` of the output `name`."""
        ref = self.refs[name].at[self.b, self.block, index, self.columns]
        if self.rows == 1:
            ref[...] = plgpu.layout_cast(x, self.layout)
        else:
            ref[...] = plgpu.layout_cast(jnp.sum(x, axis=0), self.layout.reduce(0))

    def position(self, token):
        """Return the position in x and dy of a token that is counted in the order of processing, in which
        padding comes last.
        """
        return self.refs["order"][self.b, token] if "order" in self.refs else token

    def document(self, token, name: str = "run") -> Any:
        """Load the index of the document of a token, -1 for padding: one number, or one for each row of a tile; None where each row of the
        batch is one document.
        """
        if name not in self.refs:
            return None
        if self.rows == 1:
            return self.refs[name][self.b, token]
        ref = self.refs[name].at[self.b, :, token]
        return plgpu.load(ref, layout=self.layout.reduce(1), optimized=False)

    def spread(self, document) -> Any:
        """Return the documents of one token in a form that can be compared entry by entry with a tile."""
        if self.rows == 1:
            return document
        tile = lax.broadcast_in_dim(document, self.shape, [0])
        return plgpu.layout_cast(tile, self.layout)

    def row(self, name: str, token) -> Any:
        """Load one token's tile of the array `name`, the tokens "x" or the output's gradient "dy"."""
        return self._load(self.at(name, self.position(token)))

    def _load(self, ref) -> Any:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def _load_channels(self, name: str, index) -> Any:
        ref = self.refs[name].at[index, self.columns]
        if self.rows == 1:
            return self._load(ref).astype(_F32)
        x = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(_F32)
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, [1]), self.layout)

    def weights(self) -> list[Any]:
        """Load the W rows of the convolution's weight, a tile each in float32, as a list by distance:
        the first multiplies the current token.
        """
        return [self._load_channels("weight", self.width - 1 - d) for d in range(self.width)]

    def bias(self) -> Any:
        """Load the convolution's bias as a tile in float32; None if there is none."""
        return self._load_channels("bias", 0) if "bias" in self.refs else None

    def before(self) -> tuple[list[Any], list[Any]]:
        """Load the values of x at the W - 1 tokens before the block, a tile each, the nearest first,
        and the indices of their documents (an empty list if each row of the batch is one document). Before
        the first block they are the tail.
        """
        rows, documents = [], []
        first = self.block == 0
        for d in range(1, self.width):
            token = jnp.maximum(self.start - d, 0)
            tail = self._load(self.at("tail", self.width - 1 - d)).astype(_F32)
            row = jnp.where(first, tail, self.row("x", token).astype(_F32))
            if "run" in self.refs:
                known = self.document(self.width - 1 - d, "tail_run")
                known = 0 if known is None else known
                documents.append(jnp.where(first, known, self.document(token)))
                row = jnp.where(self.spread(documents[-1]) >= 0, row, 0.0)
            rows.append(row)
        return rows, documents

    def mask(self, row, before, document, documents) -> tuple[Any, list[Any], list[Any]]:
        """Set to 0 the values of x at a token that is padding, and those of each token before it that belongs
        to another document, so that the convolution does not see them.

        Args:
            row: the token's tile of x.
            before: the tiles of x at the W - 1 tokens before it, the nearest first.
            document: the index of the token's document, -1 for padding, or None where each row of the batch is one document.
            documents: the indices of the documents of the tokens before it.

        Returns:
            The token's values, those of the tokens before it, and for each of these tokens whether it belongs
            to the token's document (None without documents).
        """
        if document is None:
            return row, before, [None] * len(before)
        document = self.spread(document)
        same: list[Any] = [self.spread(d) == document for d in documents]
        visible = [jnp.where(s, x, 0.0) for s, x in zip(same, before, strict=True)]
        return jnp.where(document >= 0, row, 0.0), visible, same

    def sum_heads(self, x):
        """Return the sums of a tile over the channels of each head, broadcast over these channels to a tile."""
        total = lax.broadcast_in_dim(jnp.sum(x, axis=1), self.shape, [0])
        return plgpu.layout_cast(total, self.layout)


def convolve(weights, bias, taps):
    """Return a short convolution at one token, a tile: the sum of `taps`, the values of x at the token
    and at those before it, times the rows `weights`, both the nearest first, plus the bias (None is 0).
    """
    total = weights[0] * taps[0]
    for w, tap in zip(weights[1:], taps[1:], strict=True):
        total += w * tap
    return total if bias is None else total + bias


def sigmoid(x):
    """Return the logistic function of x, `1 / (1 + exp(-x))`, as the square of an `rsqrt`: an approximation
    that requires no division.
    """
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def struct_like(x) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the array x, as a `jax.ShapeDtypeStruct` that describes a kernel's
    output.
    """
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
