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
    thread_channels,
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
        length: T, the number of tokens of a row.
        total: D, the number of all channels.
        width: W, the number of rows of the weight.
        channels: the number of channels of a block.
        tokens: the number of tokens of a block.
        dim: the number of channels of a head, or of a warp where heads are not normalised.
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
        """Return the sizes and blocks of a call of `short_convolution` with tokens x [B, T, D], weight [W,
        D], and heads of `head_dim` channels that are normalised (None: not normalised).
        """
        batch, length, total = x.shape
        size = thread_channels(total, head_dim)
        assert size is not None
        channels = LANES * WARPS * size
        dim = channels // WARPS if head_dim is None else head_dim
        tokens = block_tokens(batch, length, total // channels)
        return cls(batch, length, total, weight.shape[0], channels, tokens, dim)

    @property
    def heads(self) -> int:
        """The number of heads (of `dim` channels) into which all D channels are divided."""
        return self.total // self.dim

    @property
    def grid(self) -> dict[str, int]:
        """The kernels' grid: one warpgroup for each block of channels, block of tokens and row of the batch."""
        return dict(
            column=self.total // self.channels, block=self.length // self.tokens, row=self.batch
        )

    def by_head(self, x) -> jax.Array | None:
        """Reshape x [..., D] to [..., heads, dim], with the channels divided into heads; return None for
        None.
        """
        return None if x is None else x.reshape(*x.shape[:-1], self.heads, self.dim)

    def inputs(self, x, weight, bias, tail, order, run, dy=None) -> dict[str, jax.Array | None]:
        """Return the inputs of the convolution's kernels by name, with the channels D of tokens, weight,
        bias, tail and dy (the output's gradient) reshaped to [heads, dim]; absent ones are None.
        """
        bias = None if bias is None else bias[None]
        named = dict(x=x, weight=weight, tail=tail, bias=bias, dy=dy)
        return {name: self.by_head(a) for name, a in named.items()} | dict(order=order, run=run)


class Block:
    """One warpgroup's part of a short convolution's kernel, a block of consecutive tokens and of channels: the functions that
    load and store its arrays.

    A row is one token's channels, [heads, dim]. Tokens are counted in `order`, in which padding comes last.

    Attributes:
        refs: references to the arrays in global memory, by name.
        length: T, the number of tokens of a row of the batch.
        width: W, the number of rows of the weight.
        b: the index of the row in the batch.
        block: the index of the warpgroup's block of tokens in its row.
        columns: the slice of the heads that the warpgroup computes.
        layout: how one token's channels [heads, dim] are distributed over the warpgroup's registers.
        shape: the shape of one token's channels that the warpgroup computes, (heads, dim).
        start: the index, in `order`, of the block's first token.
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
        """Load into registers, from a reference to one token's channels (or one row of the weight), the
        channels that this warpgroup computes, [heads, dim].
        """
        return plgpu.load(ref.at[self.columns], layout=self.layout, optimized=False)

    def store(self, x, name: str, *index: Any) -> None:
        """Store x [heads, dim], one token's values in the channels that this warpgroup computes, at `index`
        of the output `name` in global memory.
        """
        ref = self.refs[name].at[*index, self.columns]
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.layout)

    def position(self, token):
        """Return the position in x and dy of a token that is counted in the order of processing, in which
        padding comes last.
        """
        return self.refs["order"][self.b, token] if "order" in self.refs else token

    def document(self, token) -> Any:
        """Load the index of the document of a token, -1 for padding; None where each row of the batch is one
        document.
        """
        return self.refs["run"][self.b, token] if "run" in self.refs else None

    def row(self, name: str, token) -> Any:
        """Load one token's values of the array `name`, the tokens "x" or the output's gradient "dy", in the
        channels that this warpgroup computes, [heads, dim].
        """
        return self.load(self.refs[name].at[self.b, self.position(token)])

    def weights(self) -> list[Any]:
        """Load the W rows of the convolution's weight, [heads, dim] each in float32, as a list by distance:
        the first multiplies the current token.
        """
        return [
            self.load(self.refs["weight"].at[self.width - 1 - d]).astype(_F32)
            for d in range(self.width)
        ]

    def bias(self) -> Any:
        """Load the convolution's bias in the channels that this warpgroup computes, [heads, dim] float32;
        None if there is none.
        """
        return self.load(self.refs["bias"].at[0]).astype(_F32) if "bias" in self.refs else None

    def before(self) -> tuple[list[Any], list[Any]]:
        """Load the values of x at the W - 1 tokens before the block, [heads, dim] each, the nearest first,
        and the indices of their documents (an empty list if each row of the batch is one document). Before
        the first block they are the tail.
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
        """Set to 0 the values of x at a token that is padding, and those of each token before it that belongs
        to another document, so that the convolution does not see them.

        Args:
            row: the token's values of x, [heads, dim].
            before: the values of x at the W - 1 tokens before it, [heads, dim] each, the nearest first.
            document: the index of the token's document, -1 for padding, or None where each row of the batch is one document.
            documents: the indices of the documents of the tokens before it.

        Returns:
            The token's values, those of the tokens before it, and for each of these tokens whether it belongs
            to the token's document (None without documents).
        """
        if document is None:
            return row, before, [None] * len(before)
        same: list[Any] = [d == document for d in documents]
        visible = [jnp.where(s, x, 0.0) for s, x in zip(same, before, strict=True)]
        return jnp.where(document >= 0, row, 0.0), visible, same

    def sum_heads(self, x):
        """Return the sums of x [heads, dim] over the channels of each head, broadcast over these channels to
        [heads, dim].
        """
        total = lax.broadcast_in_dim(jnp.sum(x, axis=1), self.shape, [0])
        return plgpu.layout_cast(total, self.layout)


def convolve(weights, bias, taps):
    """Return a short convolution at one token, [heads, dim]: the sum of `taps`, the values of x at the token
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
