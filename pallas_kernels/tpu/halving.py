"""Pairs of tokens in a chunk whose decay has a value for every channel, for Mosaic TPU: the halving of `tiles.channel_decay`.

On the level of blocks of `half` tokens, pairs are formed of neighbouring blocks. The decay factor of a token in the later block is the
decay from its block's first token to itself; that of a token in the earlier block is the decay after itself to its block's end. Let p be
the sums of the log decay from a block's start up to each token, s those after each token to the block's end, t those over the whole
block, and t~ the array t with neighbouring blocks exchanged. Blocks of twice the size then have

    p + t~ for tokens in the later block, p in the earlier;  s + t~ for tokens in the earlier block, s in the later;  t + t~

so that a level is a few additions of terms of one sign. The gradient of the decay reverses these steps. Nothing is ever subtracted.
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
    """Which pairs of a chunk's C tokens are computed on which level of the halving, and which belong to one document.

    Attributes:
        level: [C, C], the index of the level on which tokens i and j are a pair; -1 where i = j.
        same: [C, C], whether tokens i and j belong to one document; None if the chunk has only one.
        seen: [C, C], whether token i reads token j: as `same`, and i >= j.
        enters: [C, 1] float32, 1 where a token's document is that of the last token before the chunk, else 0; None as for `same`.
        stays: [C, 1] float32, 1 where a token's document is that of the chunk's last token, else 0; None as for `same`.
    """

    level: jax.Array
    same: jax.Array | None
    seen: jax.Array
    enters: jax.Array | None
    stays: jax.Array | None


class Decays(NamedTuple):
    """The decay factors of one chunk of C tokens in D channels, computed from its log decays.

    Attributes:
        factors: for each level of the halving [C, D], the factors by which the operands of the level's products are multiplied. A
            level pairs neighbouring blocks of tokens: a token of the later block has the decay from its block's start to itself,
            a token of the earlier block the decay after itself to its block's end.
        read_decay: [C, D], the decay of the memory before the chunk in what each token reads.
        write_decay: [C, D], the decay of each token's write in the memory after the chunk.
        chunk_decay: [1, D], the decay of the memory over the whole chunk.
    """

    factors: list[jax.Array]
    read_decay: jax.Array
    write_decay: jax.Array
    chunk_decay: jax.Array


def read_masks(runs, size: int) -> Masks:
    """Return the masks of a chunk of `size` = C tokens: the level of the halving on which each pair of tokens is computed, and
    the document boundaries, from `runs` [8, C], the chunk's part of the result of `row_layout.document_rows`. If `runs` is
    None, all tokens belong to one document.
    """
    i, j = iota(size, size, 0), iota(size, size, 1)
    level = jnp.full((size, size), -1, jnp.int32)
    for n, half in enumerate(levels(size)):
        level = jnp.where((i ^ j) >= half, n, level)
    if runs is None:
        return Masks(level, None, i >= j, None, None)
    columns = runs.T
    same = columns[:, :1] == runs[:1]
    return Masks(level, same, same & (i >= j), columns[:, 1:2], columns[:, 2:3])


def mirror(lower: jax.Array, upper: jax.Array, masks: Masks) -> jax.Array:
    """Combine two matrices [C, C] over pairs of a chunk's tokens: entries below the diagonal from `lower`, those on and above it from
    `upper`, and 0 at pairs of two documents.
    """
    later = iota(len(lower), len(lower), 0) > iota(len(lower), len(lower), 1)
    both = jnp.where(later, lower, upper)
    return both if masks.same is None else jnp.where(masks.same, both, 0)


def chunk_decays(log_decay, masks: Masks, *, exclusive: bool = False) -> Decays:
    """Compute the decay factors of one chunk on all levels of the halving and at its boundaries, from its log decays [C, D]. If
    `exclusive`, a token reads before its own decay.
    """
    total = jnp.maximum(log_decay.astype(_F32), FLOOR) * _LOG2_E
    upto, after = jnp.zeros_like(total) if exclusive else total, jnp.zeros_like(total)
    factors = []
    for half in levels(len(total)):
        factors.append(jnp.exp2(_where_later(half, upto, after)))
        other = _exchanged(total, half)
        upto = upto + _where_later(half, other, 0.0)
        after = after + _where_later(half, 0.0, other)
        total = total + other
    read_decay, write_decay, chunk_decay = jnp.exp2(upto), jnp.exp2(after), jnp.exp2(total[:1])
    if masks.enters is not None and masks.stays is not None:
        read_decay, write_decay = read_decay * masks.enters, write_decay * masks.stays
        chunk_decay = chunk_decay * masks.enters[-1:]
    return Decays(factors, read_decay, write_decay, chunk_decay)


def operands(of_later, of_earlier, decays: Decays, dtype) -> list[jax.Array]:
    """Return, for each level of the halving, the operand [C, D] of the level's products, in `dtype`, times the level's decay
    factors: its rows are those of `of_later` (such as the queries) for tokens in later blocks, and those of `of_earlier` (such
    as the keys) for tokens in earlier blocks, both [C, D] float32.
    """
    return [
        (_where_later(2**n, of_later, of_earlier) * factor).astype(dtype)
        for n, factor in enumerate(decays.factors)
    ]


def scores(tiles: list[jax.Array], masks: Masks) -> jax.Array:
    """Return the decayed scores of a chunk's pairs of tokens, [C, C] float32: for tokens i and j the inner product of their rows in
    `tiles[n]`, the operand (`operands`) of the level n on which they are a pair; 0 where i = j.
    """
    result = jnp.zeros((len(tiles[0]),) * 2, _F32)
    for n, x in enumerate(tiles):
        result = jnp.where(masks.level >= n, dot(x, x, "nt"), result)
    return result


def cross_scores(of_later, of_earlier, decays: Decays, dtype) -> list[list[jax.Array]]:
    """Compute the decayed scores of a chunk's later tokens with its earlier tokens, for each of two arrays of the later tokens
    (such as queries) and each of one or two arrays of the earlier tokens (such as keys).

    The rows that a product does not require from one operand contain the other one, so that each level is a single product: the
    second operand of later tokens is in the rows of earlier blocks (below the first operand, where blocks have fewer than 8
    rows), and the second operand of earlier tokens is in the rows of later blocks.

    Args:
        of_later: two tiles [C, D] float32, of which each pair of tokens uses the row of its later token, such as queries.
        of_earlier: one or two tiles [C, D] float32, of which each pair of tokens uses the row of its earlier token, such as keys.
        decays: the decay factors of the chunk.
        dtype: the dtype of the products' operands.

    Returns:
        For each of `of_later`, a list with the scores [C, C] with each of `of_earlier`: they are valid below the diagonal; the
        rest is undefined.
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
            both = pairs[:size], pairs[size:] if half < _SUBLANES else _exchanged(pairs, half)
            for result, x in zip(results, both, strict=True):
                result[e] = _select_level(half, x, result[e]) if n else x
    return results


def level_products(weights, tiles: list[jax.Array], masks: Masks) -> list[jax.Array]:
    """Return, for each level n of the halving, the matrix product [C, D] of `weights` [C, C], set to 0 except at the level's
    pairs of tokens, with `tiles[n]`, the level's operand. If `weights` is the symmetric gradient of the scores, it is the
    operand's gradient.
    """
    return [
        dot(jnp.where(masks.level == n, weights, 0).astype(x.dtype), x) for n, x in enumerate(tiles)
    ]


def decay_terms(tiles: list[jax.Array], products: list[jax.Array]) -> list[jax.Array]:
    """Return, for each level of the halving, its operand (`tiles`) times the operand's gradient (`products`, as `level_products` returns
    them), [C, D] float32: the `terms` of `decay_gradient`.
    """
    return [x.astype(_F32) * product for x, product in zip(tiles, products, strict=True)]


def operand_gradient(products: list[jax.Array], decays: Decays, *, later: bool) -> jax.Array:
    """Return the gradient [C, D] of `of_later` (such as the queries) if `later`, else of `of_earlier` (such as the keys): the two
    arrays from which `operands` computes the operands of a chunk's levels. `products` has the gradient [C, D] of each level's
    operand.
    """
    result = jnp.zeros_like(products[0])
    for n, (product, factor) in enumerate(zip(products, decays.factors, strict=True)):
        decayed = product * factor
        result += _where_later(2**n, *((decayed, 0.0) if later else (0.0, decayed)))
    return result


def decay_gradient(
    terms, of_read_decay, of_write_decay, of_chunk_decay, *, exclusive: bool = False
):
    """Return the gradient of a chunk's log decays, [C, D], from those of its decay factors.

    Args:
        terms: [C, D] float32 for each level of the halving, the level's decay factors times their gradients (`decay_terms`).
        of_read_decay: [C, D], the decay of the memory before the chunk in what each token reads, times the gradient of this
            decay.
        of_write_decay: [C, D], the decay of each token's write up to the chunk's end, times the gradient of this decay.
        of_chunk_decay: [1, D], the decay of the memory over the whole chunk, times the gradient of this decay.
        exclusive: whether a token reads before its own decay, as in the call of `chunk_decays`.
    """
    upto, after = of_read_decay, of_write_decay
    total = jnp.where(iota(len(upto), 1, 0) == 0, of_chunk_decay, 0.0)
    for n, term in reversed(list(enumerate(terms))):
        total += _exchanged(total + _where_later(2**n, upto, after), 2**n)
        upto = upto + _where_later(2**n, term, 0.0)
        after = after + _where_later(2**n, 0.0, term)
    return total if exclusive else total + upto


def _select_level(half: int, x, finer):
    """Combine two matrices [C, C] of scores of a chunk's pairs of tokens: x where the row's token is in a later block of `half`
    tokens and the column's token in an earlier one, and elsewhere `finer`, the scores computed from smaller blocks.
    """
    selected = jnp.where(iota(1, len(x), 1) & half == 0, x, finer)
    return _where_later(half, selected, finer)


def _exchanged(x, half: int):
    """Return a tile x [C, D], with a row for each token, in which neighbouring blocks of `half` rows have exchanged places: row i of the
    result is x's row i ^ half.
    """
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
    """Combine two tiles with a row for each token: of every two neighbouring blocks of `half` rows, the result has the later
    block of `of_later` and the earlier one of `of_earlier`. One of the two tiles may be a number.
    """
    size = max(jnp.shape(of_later), jnp.shape(of_earlier))[0]
    return jnp.where(iota(size, 1, 0) & half > 0, of_later, of_earlier)
