"""How the Hopper kernels of short convolutions divide tokens and channels among warpgroups, with the
functions of one token's channels that the forward and the backward kernel compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from pallas_kernels.short_convolution.hopper.tilings import Tiling

_F32 = jnp.float32
SMEM_BYTES = 224 * 1024
"""Most shared memory of a thread block, in bytes."""
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
        step: the number of tokens that are copied to shared memory together, or loaded.
        stages: the number of these steps in shared memory at a time; 0 loads into registers.
        names: the names of the arrays that are copied to shared memory.
        sums: the number of tiles whose rows are added through shared memory, where a block has several.
        groups: the number of warpgroups of a thread block, with consecutive ones of the blocks of tokens of all rows.
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
    step: int
    stages: int
    names: tuple[str, ...]
    sums: int
    groups: int

    @classmethod
    def of(
        cls, x, weight, head_dim: int | None, order, tiling: Tiling, names: tuple[str, ...], sums: int = 0
    ) -> Layout:  # fmt: skip
        """Return the sizes and blocks of a call of `short_convolution` with tokens x [B, T, D], weight [W,
        D], heads of `head_dim` channels that are normalised (None: not normalised), the order of
        processing [B, T] (None: that of x), the kernel's tiling, the names of the arrays that it loads, and the number of tiles whose
        rows it adds. Of the tiling's stages there are so many as have room in shared memory, and at least 2.
        """
        batch, length, total = x.shape
        division = divide(x.shape, head_dim, order is not None, tiling.channels)
        assert division is not None
        size, rows, parts = division
        channels = LANES * WARPS * size // rows
        dim = LANES * size if head_dim is None else head_dim
        length //= parts
        grid_rows, columns = batch * parts // rows, total // channels
        tokens = block_tokens(grid_rows, length, columns, tiling.tokens, tiling.blocks)
        heads, step = channels // dim, min(tiling.step, tokens)
        width = weight.shape[0]
        # More channels of a thread than the tiling has take more registers than its groups leave.
        groups = tiling.groups if size <= tiling.channels else 1
        layout = cls(
            batch, length, total, width, tokens, heads, dim, rows, parts, step, tiling.stages, names, sums, groups
        )  # fmt: skip
        while layout.stages > 2 and layout.smem_bytes > SMEM_BYTES:
            layout = layout._replace(stages=layout.stages - 1)
        return layout

    @property
    def grid(self) -> dict[str, int]:
        """The kernels' grid: a thread block for `groups` of the blocks of tokens of all rows, and for each block of channels. It is one axis,
        since only one may have more than 65,535 thread blocks.
        """
        return dict(place=self.columns * -(-math.prod(self.blocks) // self.groups))

    @property
    def columns(self) -> int:
        """The number of blocks of channels."""
        return self.total // (self.heads * self.dim)

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of rows of the batch, or of groups of them, and of a row's blocks of tokens."""
        return self.batch * self.parts // self.rows, self.length // self.tokens

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of one token's channels in a block: [heads, dim], or [rows, dim] with the same channels of several rows."""
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

    def tails(self, x, tail) -> jax.Array:
        """Return the W - 1 tokens before each part, [B, parts * (W - 1), D]: `tail` [B, W - 1, D], and those of x [B, T, D] before the
        other parts.
        """
        if self.parts == 1:
            return tail
        cut = self._cut(x)[:, :-1, 1 - self.width :]
        return jnp.concatenate([tail, cut.reshape(self.batch, -1, self.total)], axis=1)

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
        bias, tail and dy (the output's gradient) divided among blocks, and of documents what `seen` returns; absent ones are None.
        """
        named = dict(x=x, tail=self.tails(x, tail), dy=dy)
        inputs = {name: self.by_row(self.by_head(a)) for name, a in named.items()}
        bias = None if bias is None else bias[None]
        inputs |= dict(weight=self.by_head(weight), bias=self.by_head(bias), order=order)
        return inputs | dict(seen=self.by_row(None if run is None else seen(run, self.width)))

    @property
    def smem_bytes(self) -> int:
        """The size of the buffers of `scratch`."""
        buffers = (x for name, x in (self.scratch() or {}).items() if name != "loaded")
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)

    def scratch(self) -> dict[str, Any] | None:
        """Return the types of the buffers in shared memory and barriers, by name: of the steps of the arrays `names` that are copied, and of
        `sums` tiles whose rows are added; None if there are none.
        """
        types: dict[str, Any] = {}
        if self.sums and self.rows > 1:
            types["sums"] = plgpu.SMEM((self.groups, self.sums, *self.tile), _F32)
        if self.stages:
            (first, dim), step, places = self.tile, self.step, self.groups * self.stages
            shape = (step, first, dim) if self.rows == 1 else (first, step, dim)
            for name in self.names:
                types[name] = plgpu.SMEM((places, *shape), jnp.bfloat16)
            types["loaded"] = plgpu.Barrier(num_arrivals=len(self.names), num_barriers=places)
        return types or None


class Block:
    """One warpgroup's part of a short convolution's kernel, a block of consecutive tokens and of channels: the functions that
    load and store its arrays.

    A tile is one token's channels, [heads, dim], or the same channels in several rows of the batch, [rows, dim]. Tokens are
    counted in `order`, in which padding comes last.

    Attributes:
        refs: references to the arrays in global memory, by name.
        length: T, the number of tokens of a row of the batch.
        width: W, the number of rows of the weight.
        rows: the number of rows of the batch that the warpgroup computes.
        b: the index of the row in the batch, or of the group of rows.
        block: the index of the warpgroup's block of tokens in its row.
        group: the index of the warpgroup in its thread block.
        exists: whether there is such a block, which the last warpgroups may not have; None means that there is.
        columns: the slice of the heads that the warpgroup computes, or the index of its head in all its rows.
        layout: how a tile is distributed over the warpgroup's registers.
        shape: the shape of a tile.
        start: the index, in `order`, of the block's first token.
    """

    def __init__(self, refs: dict[str, Any], layout: Layout):
        self.refs, self.length, self.width = refs, layout.length, layout.width
        self.group = lax.axis_index("group") if layout.groups > 1 else 0
        turn, column = _divide(lax.axis_index("place"), layout.columns)
        index, blocks = turn * layout.groups + self.group, math.prod(layout.blocks)
        self.b, self.block = _divide(index, layout.blocks[1])
        self.exists = None if blocks % layout.groups == 0 else index < blocks
        self.rows = layout.rows
        self.columns = column if self.rows > 1 else pl.ds(column * layout.heads, layout.heads)
        self.shape = layout.tile
        self.layout = channel_rows(*self.shape, WARPS)
        self.start = self.block * layout.tokens

    def run(self, body: Callable[[], None]) -> None:
        """Call `body`, which computes the block, if there is such a block."""
        if self.exists is None:
            body()
        else:
            pl.when(self.exists)(body)

    def at(self, name: str, token) -> Any:
        """Return the reference to a token's tile in an array of tokens, by the token's position in it."""
        rows = (self.b,) if self.rows == 1 else (self.b, slice(None))
        return self.refs[name].at[*rows, token, self.columns]

    def store(self, x, name: str, token: Any, among: Any = None) -> None:
        """Store the tile x as a token's values of the output `name` in global memory.

        Args:
            x: the tile.
            name: the name of the output.
            token: the token's position in it.
            among: the position of a token from which `token` is counted; the compiler then computes one address for several tokens.
        """
        if among is None:
            ref = self.at(name, token)
        else:
            tokens = self.at(name, pl.ds(among, token + 1))
            ref = tokens.at[token] if self.rows == 1 else tokens.at[:, token]
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.layout)

    def store_sums(self, tiles: list[Any], name: str, smem) -> None:
        """Store the block's sums of the gradients of weight and bias, a tile for each row of them, in the output `name`. The rows of a tile,
        in different warps, are added through the shared memory `smem` of `Layout.scratch`.
        """
        refs = [self.refs[name].at[self.b, self.block, i, self.columns] for i in range(len(tiles))]
        layout = self.layout
        if self.rows > 1:
            for i, tile in enumerate(tiles):
                smem["sums"][self.group, i] = plgpu.layout_cast(tile, layout)
            plgpu.commit_smem()
            layout = layout.reduce(0)
            tiles = [
                sum(
                    plgpu.load(smem["sums"].at[self.group, i, row], layout=layout, optimized=False)
                    for row in range(self.rows)
                )
                for i in range(len(tiles))
            ]
        for ref, tile in zip(refs, tiles, strict=True):
            ref[...] = plgpu.layout_cast(tile, layout)

    def position(self, token):
        """Return the position in x and dy of a token that is counted in the order of processing, in which
        padding comes last.
        """
        return self.refs["order"][self.b, token] if "order" in self.refs else token

    def seen(self, token) -> Any:
        """Load how many of the tokens before a token its convolution sums, -1 for padding (see `seen`): one number, or one for each row
        of a tile; None where each row of the batch is one document.
        """
        if "seen" not in self.refs:
            return None
        if self.rows == 1:
            return self.refs["seen"][self.b, token]
        ref = self.refs["seen"].at[self.b, :, token]
        return plgpu.load(ref, layout=self.layout.reduce(1), optimized=False)

    def at_least(self, seen, distance: int) -> Any:
        """Return whether `seen` is at least `distance`, in a form that selects entries of a tile."""
        if self.rows > 1:
            tile = lax.broadcast_in_dim(seen, self.shape, [0])
            seen = plgpu.layout_cast(tile, self.layout)
        return seen >= distance

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

    def before(self) -> list[Any]:
        """Load the values of x at the W - 1 tokens before the block, a tile each, the nearest first. Before the first block they
        are the tail.
        """
        rows = []
        for d in range(1, self.width):
            token = jnp.maximum(self.start - d, 0)
            tail = self._load(self.at("tail", self.width - 1 - d)).astype(_F32)
            row = self.row("x", token).astype(_F32)
            rows.append(jnp.where(self.block == 0, tail, row))
        return rows

    def mask(self, row, before, seen) -> tuple[Any, list[Any], list[Any]]:
        """Set to 0 the values of x at a token that is padding, and those of each token before it that its convolution does not sum.

        Args:
            row: the token's tile of x.
            before: the tiles of x at the W - 1 tokens before it, the nearest first.
            seen: how many of these are summed, -1 for padding, or None where each row of the batch is one document.

        Returns:
            The token's values, those of the tokens before it, and for each of these tokens whether it is summed
            (None without documents).
        """
        if seen is None:
            return row, before, [None] * len(before)
        summed: list[Any] = [self.at_least(seen, d) for d in range(1, self.width)]
        visible = [jnp.where(s, x, 0.0) for s, x in zip(summed, before, strict=True)]
        return jnp.where(self.at_least(seen, 0), row, 0.0), visible, summed

    def sum_heads(self, x):
        """Return the sums of a tile over the channels of each head, broadcast over these channels to a tile."""
        total = lax.broadcast_in_dim(jnp.sum(x, axis=1), self.shape, [0])
        return plgpu.layout_cast(total, self.layout)


def _divide(index, size: int) -> tuple[Any, Any]:
    return lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))


def seen(run, width: int) -> jax.Array:
    """Return how many of the W - 1 tokens before each token belong to its document without a gap, [B, T] int32, -1 for padding, from the
    index of each token's document, `run` [B, T], -1 for padding. The tokens before the first belong to document 0.
    """
    length = run.shape[1]
    padded = jnp.pad(run, [(0, 0), (width - 1, 0)])
    count, same = jnp.zeros_like(run), run >= 0
    for distance in range(1, width):
        start = width - 1 - distance
        same = same & (padded[:, start : start + length] == run)
        count = count + same
    return jnp.where(run >= 0, count, -1)


def convolve(weights, bias, taps):
    """Return a short convolution at one token, a tile: the sum of `taps`, the values of x at the token
    and at those before it, times the rows `weights`, both the nearest first, plus the bias (None is 0).
    """
    total = weights[0] * taps[0] if bias is None else bias + weights[0] * taps[0]
    for w, tap in zip(weights[1:], taps[1:], strict=True):
        total += w * tap
    return total


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
