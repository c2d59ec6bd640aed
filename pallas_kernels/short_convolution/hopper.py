"""A short causal convolution with what follows it, forward and backward, on Mosaic GPU (Hopper).

A warpgroup walks over a stretch of tokens with some channels of each in its registers: a token's row is read once, the rows before it
and what they still wait for of their gradients are carried along. Shared memory has no part in it. The rows of the next few tokens
are asked for before those of the present ones are used.

With documents the tokens are walked over in `order`, in which a row's padding comes last; so what is before a token is what it sees.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu

_F32 = jnp.float32
_LANES, _WARPS = 32, 4
VECTORS, GROUP = (8, 4, 2), 4
EPSILON = 1e-6
MULTIPLE = 16
"""What the number of tokens is a multiple of."""


def vector(channels: int, head_dim: int | None) -> int | None:
    """Channels of a thread, with whole heads in a warp; None where no number is possible."""
    for size in VECTORS:
        if channels % (_LANES * _WARPS * size):
            continue
        if head_dim is None or (head_dim % size == 0 and _LANES * size % head_dim == 0):
            return size
    return None


def stretch(batch: int, length: int, columns: int) -> int | None:
    """Tokens of a warpgroup: as many as leave the card four blocks a processor, since a stretch's borders are read twice."""
    sizes = [s for s in (128, 64, 32, 16) if length % s == 0]
    enough = [s for s in sizes if batch * (length // s) * columns >= 4 * PROCESSORS]
    return (enough or sizes[-1:] or [None])[0]


def reason(x, weight, head_dim: int | None) -> str | None:
    """What this backend takes in place of these arguments (arrays or their shapes), or None."""
    if x.dtype != jnp.bfloat16:
        return f"x in bfloat16, not {x.dtype}"
    if not 2 <= weight.shape[0] <= 4:
        return f"weight of 2 to 4 rows, not {weight.shape[0]}"
    if vector(x.shape[2], head_dim) is None:
        of = "" if head_dim is None else f" in heads of {head_dim}"
        return f"multiples of 256 channels, with whole heads in a warp, not {x.shape[2]}{of}"
    return None


class _Walk:
    """What both kernels share: the block's place, and how a token's row is read."""

    def __init__(self, refs, shape, channels, size, head_dim, width):
        self.refs, self.length, self.width, self.size = refs, shape[1], width, size
        self.b, self.block = lax.axis_index("row"), lax.axis_index("block")
        heads = channels // head_dim
        self.columns = pl.ds(lax.axis_index("column") * heads, heads)
        self.layout = channel_rows(heads, head_dim, _WARPS)
        self.shape = (heads, head_dim)
        self.start = self.block * size

    def read(self, ref) -> Any:
        """The block's channels of a row, [heads, head_dim]."""
        return plgpu.load(ref.at[self.columns], layout=self.layout, optimized=False)

    def place(self, token):
        """Where the token is."""
        return self.refs["order"][self.b, token] if "order" in self.refs else token

    def run(self, token) -> Any:
        """The document of the token, -1 for padding; None where there is one alone."""
        return self.refs["run"][self.b, token] if "run" in self.refs else None

    def row(self, name, token) -> Any:
        return self.read(self.refs[name].at[self.b, self.place(token)])

    def weights(self) -> list[Any]:
        """By distance."""
        return [
            self.read(self.refs["weight"].at[self.width - 1 - d]).astype(_F32)
            for d in range(self.width)
        ]

    def bias(self) -> Any:
        return self.read(self.refs["bias"].at[0]).astype(_F32) if "bias" in self.refs else None

    def before(self) -> tuple[list[Any], list[Any]]:
        """The rows before the block by distance from 1, and their documents."""
        rows, runs = [], []
        first = self.block == 0
        for d in range(1, self.width):
            token = jnp.maximum(self.start - d, 0)
            tail = self.read(self.refs["tail"].at[self.b, self.width - 1 - d]).astype(_F32)
            row = jnp.where(first, tail, self.row("x", token).astype(_F32))
            if "run" in self.refs:
                runs.append(jnp.where(first, 0, self.run(token)))
                row = jnp.where(runs[-1] >= 0, row, 0.0)
            rows.append(row)
        return rows, runs

    def own(self, row, before, run, runs) -> tuple[Any, list[Any], list[Any]]:
        """The row, 0 on padding, and those before it, 0 where they are another document's; and which are its own."""
        if run is None:
            return row, before, [None] * len(before)
        same: list[Any] = [r == run for r in runs]
        kept = [jnp.where(s, x, 0.0) for s, x in zip(same, before, strict=True)]
        return jnp.where(run >= 0, row, 0.0), kept, same

    def sum_heads(self, x):
        """Over each head, in every channel of it."""
        total = lax.broadcast_in_dim(jnp.sum(x, axis=1), self.shape, [0])
        return plgpu.layout_cast(total, self.layout)


def _convolve(weights, bias, taps):
    total = weights[0] * taps[0]
    for w, tap in zip(weights[1:], taps[1:], strict=True):
        total += w * tap
    return total if bias is None else total + bias


def _sigmoid(x):
    # Of the approximations at hand the only quotient that is no division.
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def forward(
    x, weight, bias, tail, order, run, *, head_dim: int | None, silu: bool, interpret: Any = False
):  # fmt: skip
    """The output, [B, T, D]; the arguments are `api`'s."""
    named, call, out = _call("forward", x, weight, bias, tail, order, run, head_dim, None)
    channels, size, dim, group = call

    def kernel(*refs):
        refs = dict(zip([*named, "y"], refs, strict=True))
        walk = _Walk(refs, x.shape, channels, size, dim, weight.shape[0])
        weights, bias = walk.weights(), walk.bias()

        def ask(first):
            tokens = [jnp.minimum(first + i, walk.length - 1) for i in range(group)]
            return [walk.row("x", t) for t in tokens], [walk.run(t) for t in tokens]

        def step(index, carry):
            rows, runs, before, before_runs = carry
            first = walk.start + index * group
            following = ask(first + group)
            for i in range(group):
                raw = rows[i].astype(_F32)
                row, taps, _ = walk.own(raw, before, runs[i], before_runs)
                y = _convolve(weights, bias, [row, *taps])
                if silu:
                    y = y * _sigmoid(y)
                if head_dim is not None:
                    y = y * lax.rsqrt(walk.sum_heads(y * y) + EPSILON)
                if runs[i] is not None:
                    y = jnp.where(runs[i] >= 0, y, 0.0)
                to = refs["y"].at[walk.b, walk.place(first + i), walk.columns]
                _write(to, y, walk.layout)
                before = [row, *before[:-1]]
                before_runs = [runs[i], *before_runs[:-1]]
            return *following, before, before_runs if "run" in refs else []

        lax.fori_loop(0, size // group, step, (*ask(walk.start), *walk.before()))

    return _launch(kernel, named, out, x.shape, channels, size, interpret).reshape(x.shape)


def backward(
    x, weight, bias, tail, order, run, dy, *, head_dim: int | None, silu: bool,
    interpret: Any = False,
):  # fmt: skip
    """Gradients of x, weight, bias (None without one) and tail."""
    named, call, out = _call("backward", x, weight, bias, tail, order, run, head_dim, dy)
    channels, size, dim, group = call
    width = weight.shape[0]

    def kernel(*refs):
        refs = dict(zip([*named, "dx", "d_weight", "d_tail"], refs, strict=True))
        walk = _Walk(refs, x.shape, channels, size, dim, width)
        weights, bias = walk.weights(), walk.bias()
        zero = weights[0] * 0.0

        def ask(first, count=group):
            tokens = [jnp.minimum(first + i, walk.length - 1) for i in range(count)]
            rows = [(walk.row("x", t), walk.row("dy", t)) for t in tokens]
            return rows, [walk.run(t) for t in tokens]

        def token(rows, run, inside, counted, before, waiting, before_runs, sums):
            """One token: what it gives its row and those before it; returns the oldest, which waits for no more."""
            raw, dy = (r.astype(_F32) for r in rows)
            row, taps, same = walk.own(raw, before, run, before_runs)
            taps = [row, *taps]
            y = _convolve(weights, bias, taps)
            if inside is not None:
                dy = jnp.where(inside, dy, 0.0)
            if run is not None:
                dy = jnp.where(run >= 0, dy, 0.0)
            share: Any = _sigmoid(y) if silu else None
            if head_dim is not None:
                value = y * share if silu else y
                norm = lax.rsqrt(walk.sum_heads(value * value) + EPSILON)
                dy = norm * (dy - value * (norm * norm * walk.sum_heads(dy * value)))
            if silu:
                dy = dy * (share * (1.0 + y * (1.0 - share)))
            given = dy if counted is None else jnp.where(counted, dy, 0.0)
            sums = [s + given * tap for s, tap in zip(sums, [*taps, 1.0][: len(sums)], strict=True)]
            waiting = [zero, *waiting]
            for d in range(width):
                part = dy if not d or same[d - 1] is None else jnp.where(same[d - 1], dy, 0.0)
                waiting[d] = waiting[d] + weights[d] * part
            before_runs = [] if run is None else [run, *before_runs[:-1]]
            return waiting[-1], [row, *before[:-1]], waiting[:-1], before_runs, sums

        before, before_runs = walk.before()
        state = before, [zero] * (width - 1), before_runs, [zero] * (width + (bias is not None))
        first = walk.block == 0
        rows, runs = ask(walk.start, width - 1)
        for i in range(
            width - 1
        ):  # what becomes of the rows before the block is theirs to say, but of the tail's
            done, *state = token(rows[i], runs[i], None, first, *state)

            @pl.when(first)
            def _(done=done, i=i):
                _write(refs["d_tail"].at[walk.b, i, walk.columns], done, walk.layout)

        begin = walk.start + width - 1

        def step(index, carry):
            rows, runs, *state = carry
            start = begin + index * group
            following = ask(start + group)
            for i in range(group):
                at = start + i
                done, *state = token(rows[i], runs[i], at < walk.length, None, *state)
                to = walk.place(at - (width - 1))
                _write(refs["dx"].at[walk.b, to, walk.columns], done, walk.layout)
            return *following, *state

        *_, sums = lax.fori_loop(0, size // group, step, (*ask(begin), *state))
        for index, total in enumerate(sums):
            at = index if index == width else width - 1 - index
            _write(refs["d_weight"].at[walk.b, walk.block, at, walk.columns], total, walk.layout)

    dx, parts, d_tail = _launch(kernel, named, out, x.shape, channels, size, interpret)
    sums = jnp.sum(parts, axis=(0, 1)).reshape(parts.shape[2], -1)
    d_weight = sums[:width].astype(weight.dtype)
    d_bias = None if bias is None else sums[width].astype(bias.dtype)
    return dx.reshape(x.shape), d_weight, d_bias, d_tail.reshape(tail.shape)


def _write(ref, x, layout) -> None:
    ref[...] = plgpu.layout_cast(x.astype(ref.dtype), layout)


def _call(kind, x, weight, bias, tail, order, run, head_dim, dy):
    """The inputs by name, cut into heads; how the work is cut; the outputs' shapes."""
    batch, length, total = x.shape
    size = vector(total, head_dim)
    assert size is not None
    channels = _LANES * _WARPS * size
    dim = channels // _WARPS if head_dim is None else head_dim
    tokens = stretch(batch, length, total // channels)
    assert tokens is not None
    heads = lambda a: a.reshape(*a.shape[:-1], total // dim, dim)  # noqa: E731
    named = dict(x=heads(x), weight=heads(weight), tail=heads(tail))
    if bias is not None:
        named["bias"] = heads(bias[None])
    if dy is not None:
        named["dy"] = heads(dy)
    if run is not None:
        named |= dict(order=order, run=run)
    struct = jax.ShapeDtypeStruct
    out: Any = struct(named["x"].shape, x.dtype)
    if kind == "backward":
        rows = weight.shape[0] + (bias is not None)
        sums = struct((batch, length // tokens, rows, total // dim, dim), _F32)
        out = [out, sums, struct(named["tail"].shape, tail.dtype)]
    return named, (channels, tokens, dim, GROUP), out


def _launch(kernel, named, out, shape, channels, size, interpret):
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(shape[2] // channels, shape[1] // size, shape[0]),
        grid_names=("column", "block", "row"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*named.values())
