"""Products of a few tokens with a matrix on Mosaic GPU (Hopper), together with what stands in front of them and behind them.

A thread block computes 4 or 8 results, one or two in each of its four warps, whose threads have the channels side by side. It loads its
part of the matrix, then the tokens, of which every block computes the norm again: they are a few KB, and the launch of a kernel of its own
would take longer. Shared memory is not used.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32, _BF16 = jnp.float32, jnp.dtype(jnp.bfloat16)
_WARPS = 4
_WIDTH = 256  # channels of a tile, 8 in each thread of a warp
_MOST_CHANNELS = 6144  # whose weights a thread has in 96 registers
_MOST_ROWS = 8

IN_BFLOAT16 = Requirement(
    "x and the matrix in bfloat16",
    lambda c: c.x.dtype == _BF16 and c.matrix.dtype == _BF16,
    lambda c: f"{jnp.dtype(c.x.dtype).name} and {jnp.dtype(c.matrix.dtype).name}",
)
REQUIREMENTS = (
    IN_BFLOAT16,
    Requirement(
        f"a multiple of {_WIDTH} channels, up to {_MOST_CHANNELS:,}, and heads of such a multiple",
        lambda c: c.head % _WIDTH == 0 and c.x.shape[1] % c.head == 0 and c.x.shape[1] <= _MOST_CHANNELS,
        lambda c: f"{c.x.shape[1]:,} channels and heads of {c.head:,}",
    ),
    Requirement(
        f"parts whose widths are multiples of {_WARPS}",
        lambda c: all(width % _WARPS == 0 for width in c.widths),
        lambda c: f"widths {c.widths}",
    ),
    Requirement(f"at most {_MOST_ROWS} rows", lambda c: c.x.shape[0] <= _MOST_ROWS, lambda c: str(c.x.shape[0])),
)  # fmt: skip


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `row_product` does not meet, or None if it supports the call."""
    return first_unmet(REQUIREMENTS, call)


def _groups(widths: tuple[int, ...], channels: int) -> int:
    """Return how many results a warp computes: two where the blocks are enough for the card and the weights fit into few registers."""
    two = all(width % (2 * _WARPS) == 0 for width in widths)
    many = sum(widths) >= 2 * _WARPS * 2 * PROCESSORS
    return 2 if two and many and channels <= 2048 else 1


def _silu(x):
    root = lax.rsqrt(1.0 + jnp.exp(-x))  # the sigmoid without a division
    return x * (root * root)


class _Tokens:
    """The tokens of one row in front of the product, in tiles of `_WIDTH` channels, each the same in all warps."""

    def __init__(self, kind: str, eps: float, refs: dict[str, Any], row: int, channels: int):
        self.kind, self.eps, self.refs, self.row, self.channels = kind, eps, refs, row, channels
        self.layout = channel_rows(_WARPS, _WIDTH, _WARPS)
        self.shape = _WARPS, _WIDTH

    def spread(self, x, axis: int = 1):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, [axis]), self.layout)

    def load(self, name: str, place: int):
        """Load `_WIDTH` channels of an array from `place` on, in float32."""
        ref = self.refs[name]
        ref = ref if name == "scale" else ref.at[self.row]
        ref = ref.at[pl.ds(place, _WIDTH)]
        return plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(_F32)

    def root(self, tiles: list[Any]):
        """Return 1 / sqrt(mean(x²) + eps) over the channels of these tiles, as a tile."""
        square = tiles[0] * tiles[0]
        for x in tiles[1:]:
            square += x * x
        total = jnp.sum(self.spread(square), axis=1)
        root = lax.rsqrt(total * (1 / (len(tiles) * _WIDTH)) + self.eps)
        return self.spread(root, 0)

    def tiles(self) -> list[Any]:
        """Return the tokens as tiles [4, _WIDTH] in float32, rounded to bfloat16."""
        places = range(0, self.channels, _WIDTH)
        x = [self.load("x", place) for place in places]
        if self.kind == "Norm":
            root = self.root(x)
            x = [self.spread(a) * root * self.spread(self.load("scale", p)) for a, p in zip(x, places, strict=True)]  # fmt: skip
        elif self.kind == "GatedNorm":
            head = self.refs["scale"].shape[0]
            each = head // _WIDTH
            roots = [self.root(x[i : i + each]) for i in range(0, len(x), each)]
            gates = [_silu(self.load("gate", p)) for p in places]
            x = [
                self.spread(a) * roots[i // each] * self.spread(self.load("scale", p % head)) * self.spread(gates[i])
                for i, (a, p) in enumerate(zip(x, places, strict=True))
            ]  # fmt: skip
        else:
            return [self.spread(a) for a in x]
        return [a.astype(_BF16).astype(_F32) for a in x]


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 7, 8, 9))
def products(
    kind: str,
    eps: float,
    interpret: Any,
    x,
    matrix,
    arrays: dict[str, Any],
    added,
    widths,
    swiglu,
    dtype,
) -> tuple[jax.Array, ...]:
    """Compute the products of x [B, I] with the matrix [F, I] in parts of these widths on a Hopper GPU.

    Args:
        kind: what stands in front, the name of a class of `api`, or "".
        eps: of a norm.
        interpret: parameters of the interpreter, or False.
        x: the tokens.
        matrix: the matrix.
        arrays: the arrays of what stands in front, by name.
        added: what is added to the product, or None.
        widths: of the parts.
        swiglu: whether the first of two parts is a gate of the second, and their product the only result.
        dtype: of the results.
    """
    (rows, channels), groups = x.shape, 2 if swiglu else _groups(widths, x.shape[1])
    size = _WARPS if swiglu else groups * _WARPS  # results of a block
    apart = widths[0] if swiglu else _WARPS  # from the results of one group to those of the next
    widths = widths[:1] if swiglu else widths

    def kernel(refs):
        start = lax.axis_index("block") * size
        layout = channel_rows(_WARPS, _WIDTH, _WARPS)

        def weights(group, place):
            ref = refs["matrix"].at[pl.ds(start + group * apart, _WARPS), pl.ds(place, _WIDTH)]
            return plgpu.load(ref, layout=layout, optimized=False)

        places = range(0, channels, _WIDTH)
        loaded = [[weights(group, p) for p in places] for group in range(groups)]
        for row in range(rows):
            tiles = _Tokens(kind, eps, refs, row, channels).tiles()
            sums = []
            for of_group in loaded:
                total = of_group[0].astype(_F32) * tiles[0]
                for w, tile in zip(of_group[1:], tiles[1:], strict=True):
                    total += w.astype(_F32) * tile
                sums.append(jnp.sum(total, axis=1))
            if swiglu:
                gate, up = (y.astype(x.dtype).astype(_F32) for y in sums)
                sums = [_silu(gate) * up]
            for group, y in enumerate(sums):
                store(refs, row, start, group * _WARPS, y)

    def store(refs, row, start, group, y):
        layout = channel_rows(_WARPS, _WIDTH, _WARPS).reduce(1)
        if added is not None:
            ref = refs["added"].at[row, pl.ds(start + group, _WARPS)]
            more = plgpu.load(ref, layout=layout, optimized=False).astype(_F32)
            y = y.astype(x.dtype).astype(_F32) + more
        before = 0
        for part, width in enumerate(widths):

            @pl.when((start >= before) & (start < before + width))
            def _(part=part, before=before):
                ref = refs[f"part{part}"].at[row, pl.ds(start - before + group, _WARPS)]
                ref[...] = plgpu.layout_cast(y.astype(ref.dtype), layout)

            before += width

    results = launch(
        kernel,
        inputs=dict(x=x, matrix=matrix, added=added)
        | {n: a.astype(_F32) if n == "scale" else a for n, a in arrays.items()},
        outputs={
            f"part{i}": jax.ShapeDtypeStruct((rows, width), dtype) for i, width in enumerate(widths)
        },
        grid=dict(block=sum(widths) // size),
        auto_barriers=False,
        name="row_product",
        interpret=interpret,
    )
    return tuple(results[f"part{i}"] for i in range(len(widths)))
