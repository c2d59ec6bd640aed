"""A short causal convolution with the SiLU and the normalisation that follow it, forward and backward, on Mosaic GPU (Hopper).

A warpgroup processes a block of consecutive tokens, with some channels of each in its registers: the row of channels of each token
is read once, and the rows of the W - 1 tokens before it, and the partial sums of their gradients, stay in registers. Shared memory
is not used. The rows of the next few tokens are loaded before those of the current ones are used.

With documents the tokens are processed in `order`, in which a row's padding comes last, so that the tokens before a token are the
ones that it sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_LANES, _WARPS = 32, 4
_VECTORS = (8, 4, 2)  # channels that a thread may hold
_AHEAD = 4  # tokens whose rows are loaded ahead, and of an unrolled step
_EPSILON = 1e-6
MULTIPLE = 16
"""The number of tokens must be a multiple of this."""


def thread_channels(channels: int, head_dim: int | None) -> int | None:
    """Channels of a thread, such that a warp has whole heads; None where no number is possible."""
    for size in _VECTORS:
        if channels % (_LANES * _WARPS * size):
            continue
        if head_dim is None or (head_dim % size == 0 and _LANES * size % head_dim == 0):
            return size
    return None


def block_tokens(batch: int, length: int, columns: int) -> int:
    """Tokens of a warpgroup: as many as possible with four blocks for each processor, since tokens at a block's boundary are read
    twice."""
    sizes = [s for s in (128, 64, 32, 16) if length % s == 0]
    enough = [s for s in sizes if batch * (length // s) * columns >= 4 * PROCESSORS]
    return (enough or sizes[-1:])[0]


REQUIREMENTS = (
    Requirement(
        "x in bfloat16",
        lambda c: c.x.dtype == jnp.bfloat16,
        lambda c: jnp.dtype(c.x.dtype).name,
    ),
    Requirement(
        "a weight of 2 to 4 rows",
        lambda c: 2 <= c.weight.shape[0] <= 4,
        lambda c: str(c.weight.shape[0]),
    ),
    Requirement(
        "a multiple of 256 channels, in heads that fit into the channels of a warp",
        lambda c: thread_channels(c.x.shape[2], c.head_dim) is not None,
        lambda c: f"{c.x.shape[2]}" + ("" if c.head_dim is None else f" in heads of {c.head_dim}"),
    ),
)


def unsupported(call) -> str | None:
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


class _Layout(NamedTuple):
    """How the work of a call is divided among blocks.

    Attributes:
        batch: B.
        length: T.
        total: D.
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
    def of(cls, x, weight, head_dim: int | None) -> _Layout:
        batch, length, total = x.shape
        size = thread_channels(total, head_dim)
        assert size is not None
        channels = _LANES * _WARPS * size
        dim = channels // _WARPS if head_dim is None else head_dim
        tokens = block_tokens(batch, length, total // channels)
        return cls(batch, length, total, weight.shape[0], channels, tokens, dim)

    @property
    def heads(self) -> int:
        """Heads of all channels."""
        return self.total // self.dim

    @property
    def grid(self) -> dict[str, int]:
        return dict(
            column=self.total // self.channels, block=self.length // self.tokens, row=self.batch
        )

    def by_head(self, x) -> jax.Array | None:
        """[..., D] -> [..., heads, dim]; None for None."""
        return None if x is None else x.reshape(*x.shape[:-1], self.heads, self.dim)

    def inputs(self, x, weight, bias, tail, order, run, dy=None) -> dict[str, jax.Array | None]:
        """The kernels' inputs by name; absent ones are None."""
        bias = None if bias is None else bias[None]
        named = dict(x=x, weight=weight, tail=tail, bias=bias, dy=dy)
        return {name: self.by_head(a) for name, a in named.items()} | dict(order=order, run=run)


class _Block:
    """The tokens and channels of a warpgroup, and how they are loaded."""

    def __init__(self, refs: dict[str, Any], layout: _Layout):
        self.refs, self.length, self.width = refs, layout.length, layout.width
        self.b, self.block = lax.axis_index("row"), lax.axis_index("block")
        heads = layout.channels // layout.dim
        self.columns = pl.ds(lax.axis_index("column") * heads, heads)
        self.layout = channel_rows(heads, layout.dim, _WARPS)
        self.shape = (heads, layout.dim)
        self.start = self.block * layout.tokens

    def load(self, ref) -> Any:
        """The block's channels of a row, [heads, dim]."""
        return plgpu.load(ref.at[self.columns], layout=self.layout, optimized=False)

    def store(self, x, name: str, *index: Any) -> None:
        """Write the block's channels of a row of an output."""
        ref = self.refs[name].at[*index, self.columns]
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.layout)

    def position(self, token):
        """The position in memory of a token that is counted in `order`."""
        return self.refs["order"][self.b, token] if "order" in self.refs else token

    def document(self, token) -> Any:
        """The document of the token, -1 for padding; None where a row has only one."""
        return self.refs["run"][self.b, token] if "run" in self.refs else None

    def row(self, name: str, token) -> Any:
        return self.load(self.refs[name].at[self.b, self.position(token)])

    def weights(self) -> list[Any]:
        """The rows of the weight by distance: the first multiplies the current token."""
        return [
            self.load(self.refs["weight"].at[self.width - 1 - d]).astype(_F32)
            for d in range(self.width)
        ]

    def bias(self) -> Any:
        return self.load(self.refs["bias"].at[0]).astype(_F32) if "bias" in self.refs else None

    def before(self) -> tuple[list[Any], list[Any]]:
        """The rows before the block by distance from 1, and their documents."""
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
        """Set a row to 0 on padding, and the rows before it where they are of another document.

        Returns:
            The row, the rows before it, and for each of these whether it is of the same document (None without documents).
        """
        if document is None:
            return row, before, [None] * len(before)
        same: list[Any] = [d == document for d in documents]
        visible = [jnp.where(s, x, 0.0) for s, x in zip(same, before, strict=True)]
        return jnp.where(document >= 0, row, 0.0), visible, same

    def sum_heads(self, x):
        """The sum over each head, in every channel of it."""
        total = lax.broadcast_in_dim(jnp.sum(x, axis=1), self.shape, [0])
        return plgpu.layout_cast(total, self.layout)


def _convolve(weights, bias, taps):
    total = weights[0] * taps[0]
    for w, tap in zip(weights[1:], taps[1:], strict=True):
        total += w * tap
    return total if bias is None else total + bias


def _sigmoid(x):
    # A square of `rsqrt`: the only quotient among the approximations that needs no division.
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def forward(
    x, weight, bias, tail, order, run, *, head_dim: int | None, silu: bool, interpret: Any = False
) -> jax.Array:
    """Return the output, [B, T, D].

    Args:
        x: [B, T, D] bfloat16, T a multiple of `MULTIPLE`.
        weight: [W, D].
        bias: [D] or None.
        tail: [B, W - 1, D], the tokens before the first.
        order: [B, T] int32, the positions of tokens in the order in which they are processed, padding last; None is their own order.
        run: [B, T] int32, the documents in that order, -1 for padding; None is one document.
        head_dim: as in `api.short_convolution`, also the rest.
        silu: whether SiLU is applied.
        interpret: parameters of the interpreter, or False.
    """
    layout = _Layout.of(x, weight, head_dim)

    def kernel(refs):
        block = _Block(refs, layout)
        weights, bias = block.weights(), block.bias()

        def load_rows(first):
            tokens = [jnp.minimum(first + i, block.length - 1) for i in range(_AHEAD)]
            return [block.row("x", t) for t in tokens], [block.document(t) for t in tokens]

        def step(index, carry):
            rows, documents, before, documents_before = carry
            first = block.start + index * _AHEAD
            following = load_rows(first + _AHEAD)
            for i in range(_AHEAD):
                raw = rows[i].astype(_F32)
                row, taps, _ = block.mask(raw, before, documents[i], documents_before)
                y = _convolve(weights, bias, [row, *taps])
                if silu:
                    y = y * _sigmoid(y)
                if head_dim is not None:
                    y = y * lax.rsqrt(block.sum_heads(y * y) + _EPSILON)
                if documents[i] is not None:
                    y = jnp.where(documents[i] >= 0, y, 0.0)
                block.store(y, "y", block.b, block.position(first + i))
                before = [row, *before[:-1]]
                documents_before = [documents[i], *documents_before[:-1]]
            return *following, before, documents_before if "run" in refs else []

        carry = (*load_rows(block.start), *block.before())
        lax.fori_loop(0, layout.tokens // _AHEAD, step, carry)

    inputs = layout.inputs(x, weight, bias, tail, order, run)
    outputs = dict(y=_struct_like(inputs["x"]))
    name = "short_convolution_forward"
    results = launch(
        kernel, inputs=inputs, outputs=outputs, grid=layout.grid, name=name, interpret=interpret
    )
    return results["y"].reshape(x.shape)


class _Pending(NamedTuple):
    """What the backward kernel carries from token to token.

    Attributes:
        before: the rows before the next token by distance from 1, 0 on padding.
        gradients: the partial sums of their gradients.
        documents: their documents, empty without.
        sums: partial sums of the gradients of the weight's rows by distance, then of the bias where there is one.
    """

    before: list[Any]
    gradients: list[Any]
    documents: list[Any]
    sums: list[Any]


class _Gradient(NamedTuple):
    """Gradients of one block of tokens, token by token.

    Attributes:
        block: the tokens and channels.
        weights: as in `_Block.weights`.
        bias: as in `_Block.bias`.
        zero: a row of zeros.
        silu: as in `backward`.
        normalized: whether heads are normalised.
    """

    block: _Block
    weights: list[Any]
    bias: Any
    zero: Any
    silu: bool
    normalized: bool

    def load_rows(self, first, count: int = _AHEAD) -> tuple[list[Any], list[Any]]:
        """The rows of x and dy of `count` tokens, and the tokens' documents."""
        block = self.block
        tokens = [jnp.minimum(first + i, block.length - 1) for i in range(count)]
        rows = [(block.row("x", t), block.row("dy", t)) for t in tokens]
        return rows, [block.document(t) for t in tokens]

    def token(self, rows, document, inside, counted, pending: _Pending) -> tuple[Any, _Pending]:
        """Add one token's contributions to the gradients of its row and of the rows before it.

        Args:
            rows: its x and dy.
            document: its document, or None.
            inside: whether the token exists; None is yes.
            counted: whether its contributions to weight and bias count in this block; None is yes.
            pending: before the token.

        Returns:
            The gradient of the oldest row, which is complete, and `pending` after the token.
        """
        block = self.block
        raw, dy = (r.astype(_F32) for r in rows)
        row, taps, same = block.mask(raw, pending.before, document, pending.documents)
        taps = [row, *taps]
        y = _convolve(self.weights, self.bias, taps)
        if inside is not None:
            dy = jnp.where(inside, dy, 0.0)
        if document is not None:
            dy = jnp.where(document >= 0, dy, 0.0)
        sigmoid: Any = _sigmoid(y) if self.silu else None
        if self.normalized:
            value = y * sigmoid if self.silu else y
            norm = lax.rsqrt(block.sum_heads(value * value) + _EPSILON)
            dy = norm * (dy - value * (norm * norm * block.sum_heads(dy * value)))
        if self.silu:
            dy = dy * (sigmoid * (1.0 + y * (1.0 - sigmoid)))
        d_counted = dy if counted is None else jnp.where(counted, dy, 0.0)
        factors = [*taps, 1.0][: len(pending.sums)]
        sums = [s + d_counted * x for s, x in zip(pending.sums, factors, strict=True)]
        gradients = [self.zero, *pending.gradients]
        for d in range(block.width):
            part = dy if not d or same[d - 1] is None else jnp.where(same[d - 1], dy, 0.0)
            gradients[d] = gradients[d] + self.weights[d] * part
        documents = [] if document is None else [document, *pending.documents[:-1]]
        before = [row, *pending.before[:-1]]
        return gradients[-1], _Pending(before, gradients[:-1], documents, sums)


def backward(
    x,
    weight,
    bias,
    tail,
    order,
    run,
    dy,
    *,
    head_dim: int | None,
    silu: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Return the gradients of x, weight, bias (None without one) and tail; the arguments are those of `forward`, and `dy` [B, T, D]."""
    layout = _Layout.of(x, weight, head_dim)
    width = layout.width

    def kernel(refs):
        block = _Block(refs, layout)
        weights, bias = block.weights(), block.bias()
        gradient = _Gradient(block, weights, bias, weights[0] * 0.0, silu, head_dim is not None)
        before, documents_before = block.before()
        sums = [gradient.zero] * (width + (bias is not None))
        pending = _Pending(before, [gradient.zero] * (width - 1), documents_before, sums)
        first = block.block == 0
        rows, documents = gradient.load_rows(block.start, width - 1)
        # The first W - 1 gradients that are complete are of rows before this block. The block before writes them; those of
        # the tail are written here.
        for i in range(width - 1):
            oldest, pending = gradient.token(rows[i], documents[i], None, first, pending)

            @pl.when(first)
            def _(oldest=oldest, i=i):
                block.store(oldest, "d_tail", block.b, i)

        second = block.start + width - 1

        def step(index, carry):
            rows, documents, pending = carry
            start = second + index * _AHEAD
            following = gradient.load_rows(start + _AHEAD)
            for i in range(_AHEAD):
                token = start + i
                inside = token < block.length
                oldest, pending = gradient.token(rows[i], documents[i], inside, None, pending)
                block.store(oldest, "dx", block.b, block.position(token - (width - 1)))
            return *following, pending

        carry = (*gradient.load_rows(second), pending)
        *_, pending = lax.fori_loop(0, layout.tokens // _AHEAD, step, carry)
        for index, total in enumerate(pending.sums):
            at = index if index == width else width - 1 - index
            block.store(total, "d_weight", block.b, block.block, at)

    inputs = layout.inputs(x, weight, bias, tail, order, run, dy)
    sums = (layout.batch, layout.grid["block"], width + (bias is not None))
    outputs = dict(
        dx=_struct_like(inputs["x"]),
        d_weight=jax.ShapeDtypeStruct((*sums, layout.heads, layout.dim), _F32),
        d_tail=_struct_like(inputs["tail"]),
    )
    name = "short_convolution_backward"
    results = launch(
        kernel, inputs=inputs, outputs=outputs, grid=layout.grid, name=name, interpret=interpret
    )
    rows = jnp.sum(results["d_weight"], axis=(0, 1)).reshape(sums[2], -1)
    d_weight = rows[:width].astype(weight.dtype)
    d_bias = None if bias is None else rows[width].astype(bias.dtype)
    return results["dx"].reshape(x.shape), d_weight, d_bias, results["d_tail"].reshape(tail.shape)


def _struct_like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
