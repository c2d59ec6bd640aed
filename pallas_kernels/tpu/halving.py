"""The halving of a chunk whose decay has a value for every channel, for Mosaic TPU; see `tiles_channels`.

Where blocks of `half` rows meet, a later row's factor is the decay from its block's first row to itself, an earlier row's the decay
after itself to its block's end. With p, s and t the sums up to a row, after it, and over the whole of its block, and x~ the rows of
x with neighbouring blocks exchanged, blocks of twice the size have

    p + t~ in later rows, else p        s + t~ in earlier rows, else s        t + t~

so that a level is a few additions of terms of one sign, and the decay's gradient is the same walk backwards: nothing is subtracted,
neither there nor here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pltpu
from pallas_kernels.tiles.channel_decay import FLOOR, levels
from pallas_kernels.tiles.scalar_decay import dot, iota

_F32 = jnp.float32
_SUBLANES = 8
_LOG2_E = 1.4426950408889634


class Masks(NamedTuple):
    """Of a chunk's pairs of tokens, and where its documents begin and end.

    Attributes:
        level: [C, C], on which level rows i and j meet; -1 where i = j.
        same: [C, C], whether they lie in one document; None if there is one.
        seen: [C, C], where also i >= j.
        enters: [C, 1] float32, 1 where a token's document is the one before the chunk, else 0.
        stays: [C, 1] float32, 1 where it is the chunk's last.
    """

    level: jax.Array
    same: jax.Array | None
    seen: jax.Array
    enters: jax.Array | None
    stays: jax.Array | None


class Decays(NamedTuple):
    """What the decays [C, D] of a chunk leave.

    Attributes:
        factors: [C, D] each, of the rows where they meet, level by level.
        enter: [C, D], of the memory where a token reads it.
        leave: [C, D], of what a token writes, at the chunk's end.
        keep: [1, D], of the memory, there.
    """

    factors: list[jax.Array]
    enter: jax.Array
    leave: jax.Array
    keep: jax.Array


def read_masks(runs, size: int) -> Masks:
    """From the [8, C] rows of `row_layout.document_rows`, or None."""
    i, j = iota(size, size, 0), iota(size, size, 1)
    level = jnp.full((size, size), -1, jnp.int32)
    for n, half in enumerate(levels(size)):
        level = jnp.where((i ^ j) >= half, n, level)
    if runs is None:
        return Masks(level, None, i >= j, None, None)
    turned = runs.T
    same = turned[:, :1] == runs[:1]
    return Masks(level, same, same & (i >= j), turned[:, 1:2], turned[:, 2:3])


def mirror(lower: jax.Array, upper: jax.Array, masks: Masks) -> jax.Array:
    """`lower` [C, C] below its diagonal, `upper` on it and above; 0 for pairs of two documents."""
    later = iota(len(lower), len(lower), 0) > iota(len(lower), len(lower), 1)
    both = jnp.where(later, lower, upper)
    return both if masks.same is None else jnp.where(masks.same, both, 0)


def chunk_decays(log_decay, masks: Masks, *, exclusive: bool = False) -> Decays:
    """Of decays [C, D]; `exclusive` leaves a token's own out of what it reads."""
    total = jnp.maximum(log_decay.astype(_F32), FLOOR) * _LOG2_E
    upto, after = jnp.zeros_like(total) if exclusive else total, jnp.zeros_like(total)
    factors = []
    for half in levels(len(total)):
        factors.append(jnp.exp2(_where_later(half, upto, after)))
        other = _exchanged(total, half)
        upto = upto + _where_later(half, other, 0.0)
        after = after + _where_later(half, 0.0, other)
        total = total + other
    enter, leave, keep = jnp.exp2(upto), jnp.exp2(after), jnp.exp2(total[:1])
    if masks.enters is not None and masks.stays is not None:
        enter, leave = enter * masks.enters, leave * masks.stays
        keep = keep * masks.enters[-1:]
    return Decays(factors, enter, leave, keep)


def operands(of_later, of_earlier, decays: Decays, dtype) -> list[jax.Array]:
    """Each level's tile [C, D]: the later rows from one tile in float32, the earlier from the other, decayed."""
    return [
        (_where_later(2**n, of_later, of_earlier) * factor).astype(dtype)
        for n, factor in enumerate(decays.factors)
    ]


def scores(tiles: list[jax.Array], masks: Masks) -> jax.Array:
    """[C, C], where i and j meet the inner product of row i with row j; 0 where i = j."""
    result = jnp.zeros((len(tiles[0]),) * 2, _F32)
    for n, x in enumerate(tiles):
        result = jnp.where(masks.level >= n, dot(x, x, "nt"), result)
    return result


def cross_scores(of_later, of_earlier, decays: Decays, dtype) -> list[list[jax.Array]]:
    """`scores` of each of two tiles of later rows with each of one or two of earlier, [C, C] below the diagonal, anything above.

    A level is one product: of few rows with both tiles of later rows below each other, of more with the second in place of the
    first's earlier rows; and with the second tile of earlier rows in place of the first's later ones.
    """
    size = len(of_later[0])
    results: list[list[Any]] = [[None] * len(of_earlier) for _ in of_later]
    for n, factor in enumerate(decays.factors):
        half = 2**n
        later, earlier = ([x * factor for x in tiles] for tiles in (of_later, of_earlier))
        right = earlier[0]
        if len(earlier) > 1:
            right = _where_later(half, _exchanged(earlier[1], half), right)
        if half < _SUBLANES:
            left = jnp.concatenate(later)
        else:
            left = _where_later(half, later[0], _exchanged(later[1], half))
        pairs = dot(left.astype(dtype), right.astype(dtype), "nt")
        for e in range(len(earlier)):
            if e:
                pairs = pltpu.roll(pairs, size - half, 1)
            own = pairs[:size], pairs[size:] if half < _SUBLANES else _exchanged(pairs, half)
            for result, x in zip(results, own, strict=True):
                result[e] = _met(half, x, result[e]) if n else x
    return results


def level_products(weights, tiles: list[jax.Array], masks: Masks) -> list[jax.Array]:
    """Each level's part of `weights` [C, C] times its tile, [C, D]."""
    return [
        dot(jnp.where(masks.level == n, weights, 0).astype(x.dtype), x) for n, x in enumerate(tiles)
    ]


def decay_terms(tiles: list[jax.Array], products: list[jax.Array]) -> list[jax.Array]:
    """Of `decay_gradient`."""
    return [x.astype(_F32) * product for x, product in zip(tiles, products, strict=True)]


def operand_gradient(products: list[jax.Array], decays: Decays, *, later: bool) -> jax.Array:
    """The gradient of `operands` in what its later rows come from, or its earlier ones, from those of the tiles."""
    result = jnp.zeros_like(products[0])
    for n, (product, factor) in enumerate(zip(products, decays.factors, strict=True)):
        own = product * factor
        result += _where_later(2**n, *((own, 0.0) if later else (0.0, own)))
    return result


def decay_gradient(terms, of_enter, of_leave, of_keep, *, exclusive: bool = False):
    """Of the decays, [C, D].

    Args:
        terms: [C, D] float32 each, every level's factors times their gradients: tiles of `operands` times what `spread` gives them.
        of_enter: [C, D], `enter` times its gradient.
        of_leave: [C, D], `leave` times its gradient.
        of_keep: [1, D], `keep` times its gradient.
        exclusive: as for `resolve`.
    """
    upto, after = of_enter, of_leave
    total = jnp.where(iota(len(upto), 1, 0) == 0, of_keep, 0.0)
    for n, own in reversed(list(enumerate(terms))):
        total += _exchanged(total + _where_later(2**n, upto, after), 2**n)
        upto = upto + _where_later(2**n, own, 0.0)
        after = after + _where_later(2**n, 0.0, own)
    return total if exclusive else total + upto


def _met(half: int, own, finer):
    """`own` [C, C] in later rows where blocks of `half` rows meet, and `finer` where smaller ones do."""
    met = jnp.where(iota(1, len(own), 1) & half == 0, own, finer)
    return _where_later(half, met, finer)


def _exchanged(x, half: int):
    """Rows i ^ half of x [C, D]."""
    size, width = x.shape
    if half >= _SUBLANES:
        blocks = [x[n * half : (n + 1) * half] for n in range(size // half)]
        return jnp.concatenate([blocks[n ^ 1] for n in range(len(blocks))])
    x = x.reshape(-1, _SUBLANES, width)
    below = pltpu.roll(x, half, 1)  # row i - half
    if 2 * half < _SUBLANES:
        above = pltpu.roll(x, _SUBLANES - half, 1)
        later = lax.broadcasted_iota(jnp.int32, (1, _SUBLANES, 1), 1) & half > 0
        below = jnp.where(later, below, above)
    return below.reshape(size, width)


def _where_later(half: int, of_later, of_earlier):
    """Rows of the later blocks from one tile, of the earlier ones from the other; either may be a number."""
    size = max(jnp.shape(of_later), jnp.shape(of_earlier))[0]
    return jnp.where(iota(size, 1, 0) & half > 0, of_later, of_earlier)
