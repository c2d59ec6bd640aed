"""Pairs of tokens in a chunk whose decay has a value for every key channel, for a warpgroup of Mosaic GPU (Hopper).

The score of a later token i and an earlier token j is Σ_c q_ic k_jc e^(b_i - b_j)_c, with b the inclusive sums of the log decay. Two
methods split e^(b_i - b_j) into a factor of the row i and one of the column j, so that scores are a matrix product:

- `Level`: the halving of `tiles.channel_decay`, which is exact for every decay. On each level the pairs are those of two neighbouring
  blocks of rows, and both factors are at most 1. A chunk of 64 tokens has 6 levels.
- `AllPairs`: e^b_i and e^-b_j, for all pairs at once. It is valid only if neither factor overflows or underflows in float32,
  for rows that are *in range*.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.tiles import channel_decay as tiles

CHUNK = 64
BLOCK = 64  # key channels that a warpgroup computes
SQUARE = (CHUNK, CHUNK)
LEVELS = len(tiles.levels(CHUNK))
# A row is in range if its decay since the chunk's start is at least 2^-RANGE, and if the largest entry of each operand is 0 or within
# 2^-SIZE and 2^SIZE. Factors are multiplied by 2^(RANGE / 2), so that they and their inverses are within 2^-50 and 2^50, and sums of
# products stay below 2^126.
RANGE, SIZE = 100.0, 60
_F32 = jnp.float32
_LOG2E = math.log2(math.e)


class Documents(NamedTuple):
    """The document boundaries of all rows, as the chunk kernels read them.

    Attributes:
        run: [B, T], the number of each token's document.
        enters: [B, T], 1 where a token's document is that of the last token before its chunk, else 0.
        stays: [B, T], 1 where a token's document is that of its chunk's last token, else 0.
    """

    run: jax.Array
    enters: jax.Array
    stays: jax.Array


class Halving:
    """Computes the decays between a chunk's 64 tokens in 64 key channels, as tiles [64, 64] with a row for each token and a column for
    each channel.

    Sums over tokens are computed as products with masks of zeros and ones, because a sum over rows in registers would use a buffer that
    all warpgroups share.
    """

    def __init__(
        self,
        parts,
        buffer,
        left,
        exclusive: bool,
        interpret,
        lowest: Any = None,
        columns: Any = None,
    ):
        """Store references to the buffers in shared memory with which the decays of one chunk are computed.

        Args:
            parts: [2, 64, 64] bfloat16, the two tiles into which `split` divides a float32 tile.
            buffer: [64, 64] bfloat16, for masks and other operands of matrix products.
            left: function from a tile in registers to the left operand of a matrix product, such as
                `left_operand` returns.
            exclusive: whether a token reads the memory before its decay and write, as in
                `tiles.channel_decay`.
            interpret: parameters of the interpreter, or False.
            lowest: [2 or 3, 64] float32, a buffer in which `check_range` stores each token's smallest sum of log
                decays since the chunk's start; None if it is not called.
            columns: [64] int32, a buffer with 0 to 63, from which the indices of columns are loaded wherever they are used, so that
                they occupy no registers in between; None computes them.
        """
        self.parts, self._buffer, self._lowest = [parts.at[n] for n in range(2)], buffer, lowest
        self._left, self._exclusive, self._interpret = left, exclusive, interpret
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, SQUARE, layout=wg.LAYOUT)
        self.i, self._j, self._columns = iota(0), iota(1), columns

    @property
    def j(self):
        """The index of each entry's column, a tile [64, 64] of integers."""
        if self._columns is None:
            return self._j
        columns = plgpu.load(self._columns, layout=wg.LAYOUT.reduce(0))
        if columns.dtype == jnp.bfloat16:
            columns = lax.bitcast_convert_type(columns, jnp.int16).astype(jnp.int32)
        return wg.spread_columns(columns, SQUARE)

    def in_range_decay(self, sums, sign: float = 1.0):
        """Return 2^(sums + RANGE / 2), or its inverse if `sign` is -1, for `sums` [64, 64] in range. The compiler does not know that two
        results are the same, so that they occupy no registers between their uses. `check_range` must have run before.
        """
        offset = jnp.where(
            self._lowest.at[1][0] > 0, 0.0, RANGE / 2
        )  # sums of log decays are at most 0
        return jnp.exp2(sign * (sums + offset))

    def accumulate(self, add, count: int = 1):
        """Return `count` tiles [64, 64] of sums of matrix products: `add` is called with a reference to zeros for each tile, to which it
        adds products.
        """
        zeros = [jnp.zeros(SQUARE, _F32)] * count
        return wg.accumulate(add, *zeros, interpret=self._interpret)

    def split(self, x, parts=None):
        """Store a float32 tile x [64, 64] in shared memory as two bfloat16 tiles whose sum is x to about 16
        bits, so that matrix products can read it. `parts` are the two buffers; None uses those given to
        `__init__`.
        """
        high = x.astype(jnp.bfloat16)
        first, second = self.parts if parts is None else parts
        first[...] = high
        second[...] = (x - high.astype(_F32)).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def split_decay(self, log_decay):
        """Store the log decay [64, 64], converted to base 2, as two bfloat16 tiles (see `split`), from which `factor` and `boundary_decay`
        compute decays.
        """
        self.split(in_base_2(log_decay))

    def sums(self, mask, fixed: bool = True):
        """Return the matrix product of a mask and the tile [64, 64] that `split` stored last: row i is the
        sum of the tile's rows j that row i of the mask selects, such as the sum of log decays between two
        tokens.

        Args:
            mask: [64, 64] bool, with a row for each sum and a column for each token.
            fixed: whether the compiler may know entries of the mask. Such a mask is a left operand in shared
                memory: in registers, the compiler (ptxas 13.0) would write the known entries only after the
                product has begun.
        """
        ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
        if fixed:
            self._buffer[...] = ones
            plgpu.commit_smem()
            ones = self._buffer
        else:
            ones = self._left(ones)

        def add(out):
            for part in self.parts:
                plgpu.wgmma(out, ones, part)

        return self.accumulate(add)[0]

    def column_sums(self, parts=None):
        """Return the sum over all 64 tokens of each column (key channel) of the tile that `split` stored last
        in the two buffers `parts`, as a vector [64] in registers, in the layout of one value for each row of
        a tile.
        """
        parts = self.parts if parts is None else parts
        ones = plgpu.layout_cast(jnp.ones(SQUARE, self._buffer.dtype), wg.LAYOUT)
        self._buffer[...] = ones
        plgpu.commit_smem()

        def add(out):
            for part in parts:
                plgpu.wgmma(out, part.transpose((1, 0)), self._buffer)

        return jnp.max(self.accumulate(add)[0], axis=1)  # all columns are the same

    def factor(self, level):
        """Return the decay factors [64, 64] of all tokens on one level of the halving, with blocks of 2^level tokens.

        A token in the later of two neighbouring blocks has the decay from its block's start to itself, and one in the earlier block the
        decay after itself to its block's end. The log decay must be the tile that `split_decay` stored last.
        """
        half = lax.shift_left(1, level)
        # `tiles.channel_decay.in_factor` as an interval of columns: half as many instructions.
        i, start = self.i, self.i & -half
        later = (i & half) > 0
        first = jnp.where(later, start, i + 1)
        last = jnp.where(later, i - 1 if self._exclusive else i, start + (half - 1))
        return jnp.exp2(self.sums((self.j >= first) & (self.j <= last), fixed=False))

    def _load_split(self):
        """Load a float32 tile [64, 64] from the two bfloat16 tiles in shared memory into which `split` divided it last: their sum."""
        return load(self.parts[0]).astype(_F32) + load(self.parts[1]).astype(_F32)

    def sums_from_start(self, block=CHUNK):
        """Return the sums [64, 64] of the log decay, in base 2, from the start of each token's block of `block` tokens, by default from
        the chunk's start, to the memory that the token reads. The log decay must be the tile that `split_decay` stored last.
        """
        if isinstance(block, int) and block == CHUNK:
            return self.sums(self._read_mask())
        return self.sums(self._read_mask() & ((self.i & -block) == (self.j & -block)))

    def sums_to_write(self, sums, fraction):
        """Return sums of the log decay [64, 64] from the chunk's start up to a point between each token's
        read and its write: `sums`, which `sums_from_start` returned, plus `fraction` (0 to 1) times the
        token's own log decay.

        This is so only if a token reads the memory before its decay (`exclusive`). Else no decay separates
        read and write, and `sums` is returned unchanged.
        """
        return sums + fraction * self._load_split() if self._exclusive else sums

    def check_range(self, *operands, block: int = CHUNK, slot: int = 0):
        """Check whether the decays of a chunk can be computed for all pairs of tokens at once (`AllPairs`), or for all pairs within
        blocks of `block` tokens, without overflow or underflow.

        Each token's smallest sum of log decays over its channels stays in shared memory, where
        `pairs_in_range` reads it. A very low number replaces it if an operand's entries in the token's row
        are too large or too small.

        Args:
            operands: references to the tiles [64, 64] that the decays will multiply, such as queries and
                keys.
            block: number of tokens of a block; the sums are those from a token's block's start.
            slot: the row of `lowest` with the result: 0, or 2 for a check by smaller blocks, in which a token that is in range by the
                first check is in range, too.

        Returns:
            The sums [64, 64] of `sums_from_start`, and 1 if all tokens are in range, else 0.
        """
        penalty: Any = 0.0
        for tile in operands:
            size = jnp.max(jnp.abs(load(tile)), axis=1).astype(_F32)
            fits = ((size >= 2.0**-SIZE) & (size <= 2.0**SIZE)) | (size == 0)
            penalty += jnp.where(fits, 0.0, wg.NEVER)
        sums = self.sums_from_start(block)
        of_row, of_all = (self._lowest.at[n] for n in (slot, 1))
        lowest = jnp.min(sums, axis=1) + penalty
        if slot:
            lowest = jnp.maximum(lowest, wg.load_rows(self._lowest.at[0]).astype(_F32))
        of_row[...] = lowest.astype(of_row.dtype)
        plgpu.commit_smem()
        lowest = wg.spread_columns(plgpu.load(of_row, layout=wg.LAYOUT.reduce(0)), SQUARE)
        # The scalar is read from shared memory: computed in registers, it makes others spill.
        of_all[...] = jnp.min(lowest, axis=1)
        plgpu.commit_smem()
        return sums, (of_all[0].astype(_F32) >= -RANGE).astype(jnp.int32)

    def pairs_in_range(self, slot=0):
        """Return, for each pair of a chunk's tokens, whether both are in range, [64, 64] bool: whether
        `AllPairs` computes their score without overflow or underflow. `check_range` must have run before with this `slot`.

        The result for a pair depends on no later token than the two.
        """
        lowest = self._lowest.at[slot]
        of_row = wg.spread_rows(wg.load_rows(lowest).astype(_F32), SQUARE)
        of_column = plgpu.load(lowest, layout=wg.LAYOUT.reduce(0)).astype(_F32)
        return jnp.minimum(of_row, wg.spread_columns(of_column, SQUARE)) >= -RANGE

    def boundary_decay(self, from_start: bool):
        """Return, for each token and channel, the decay from the chunk's start to the memory that the token reads (`from_start`), or from
        the token's write to the chunk's end, [64, 64]. The log decay must be the tile that `split_decay` stored last.
        """
        return jnp.exp2(self.sums(self._read_mask() if from_start else self.j > self.i))

    def _read_mask(self):
        """Return whether the decay of token j applies to the memory that token i reads, [64, 64]: j <= i, or j < i if tokens read before
        they write.
        """
        return self.j < self.i if self._exclusive else self.j <= self.i

    def mask_to_level(self, level, x, both: bool = True):
        """Return a tile x [64, 64] of pairs of tokens with 0 everywhere but at the pairs of one level of the halving: tokens in two
        neighbouring blocks of 2^level tokens.

        Args:
            level: the index of the level, 0 for blocks of one token.
            x: the tile, such as scores, with a row and a column for each token.
            both: whether the row's token may be in either block; else only in the later one.
        """
        half = lax.shift_left(1, level)
        neighbour = (self.i ^ half) & -half
        if not both:
            neighbour = jnp.where((self.i & half) > 0, neighbour, -1)
        return jnp.where(neighbour == (self.j & -half), x, 0.0).astype(x.dtype)

    def later(self, level):
        """Return a tile [64, 64] with 1 in the rows of tokens in the later of two neighbouring blocks of 2^level tokens, else 0."""
        return (lax.shift_right_logical(self.i, level) & 1).astype(_F32)

    def store_operand(self, level, of_later, of_earlier, factor):
        """Store the operand [64, 64] of one level's matrix products in shared memory, and return its buffer:
        each token's row of `of_later` if the token is in a later block of the level, else of `of_earlier`,
        times the token's decay factors on this level, `factor` [64, 64].
        """
        x = self.blend(level, of_later, of_earlier)
        self._buffer[...] = (x.astype(_F32) * factor).astype(self._buffer.dtype)
        plgpu.commit_smem()
        return self._buffer

    def blend(self, level, of_later, of_earlier):
        """Combine two tiles [64, 64] with a row for each token: of every two neighbouring blocks of 2^level tokens, the later one from
        `of_later` and the earlier one from `of_earlier`.
        """
        later = self.later(level).astype(of_later.dtype)
        return of_later * later + of_earlier * (1 - later)  # faster than a select


class Level:
    """One step of the computation of a chunk's scores: the pairs of tokens in two neighbouring blocks of 2^level tokens.

    `Level` and `AllPairs` are steps with the same methods. Scores are the sum over steps of `step.mask(rows columnsᵀ)`. With `weights`
    [64, 64] the symmetric gradient of the scores, the gradient of the rows of a step is `factor * (step.mask(weights) columns)`, of which
    the fraction `later` belongs to the operand of later tokens, and the rest to that of earlier tokens.
    """

    def __init__(self, halving: Halving, level):
        self._halving, self._level = halving, level
        self.factor = halving.factor(level)

    @property
    def later(self):
        """A tile [64, 64] with 1 in the rows of tokens in the later of two neighbouring blocks of this level,
        else 0. The gradient of the level's operand times this tile is the gradient of the later tokens'
        input, such as q.
        """
        return self._halving.later(self._level)

    def mask(self, x, both: bool = True):
        """Return x, a tile [64, 64] over pairs of tokens such as scores, with 0 at all pairs but those of
        this level: tokens in two neighbouring blocks. Without `both`, only pairs whose row's token is in the
        later block are selected.
        """
        return self._halving.mask_to_level(self._level, x, both)

    def rows(self, of_later, of_earlier):
        """Return the operand [64, 64] float32 of the matrix product that computes this level's scores: each
        token's row of `of_later` (such as queries) if the token is in a later block, else of `of_earlier`
        (such as keys), times the token's decay factors.
        """
        return self._halving.blend(self._level, of_later, of_earlier).astype(_F32) * self.factor

    columns = rows


class AllPairs:
    """All pairs of a chunk's tokens as a single step of the computation of its scores, with the methods of `Level`; valid for tokens in
    range, whose factors neither overflow nor underflow.

    In a tile of pairs, the row's token is the later one if `transposed` is 0, and the earlier one if it is 1. A pair's decay is the decay
    since the chunk's start of the later token, times the inverse of that of the earlier token. Both factors are multiplied by 2^(RANGE /
    2) or its inverse, so that they stay far from the ends of float32's exponents.
    """

    def __init__(self, halving: Halving, transposed, sums=None):
        """Store the decays of one chunk, and choose which token of a pair is the later one.

        Args:
            halving: the `Halving` that computes the chunk's decays.
            transposed: 0 if the row's token of a pair is the later one, 1 if it is the earlier one; an int,
                or a float32 scalar.
            sums: the result of `halving.sums_from_start()`. None computes it at each use, so that it occupies
                no registers in between.
        """
        self._halving, self._transposed, self._sums = halving, transposed, sums
        self._sign = 1.0 - 2.0 * transposed

    @property
    def later(self):
        """The fraction of the rows' gradient that belongs to the operand of later tokens, such as q: 1 if the
        row's token is the later one of every pair, 0 if it is the earlier one.
        """
        return 1.0 - self._transposed

    @property
    def factor(self):
        """The decay factors [64, 64] of tokens as rows of a tile of pairs: each token's decay since the
        chunk's start, or its inverse if the rows' tokens are the earlier ones; scaled by 2^(±RANGE / 2).
        """
        return self._decay(self._sign, 1.0 - self.later)

    @property
    def columns_factor(self):
        """The decay factors [64, 64] of tokens as columns of a tile of pairs: the inverse of each token's
        decay since the chunk's start, or the decay itself if the columns' tokens are the later ones; scaled
        by 2^(±RANGE / 2).
        """
        return self._decay(-self._sign, self.later)

    def mask(self, x, both: bool = True):
        """Return x, a tile [64, 64] over pairs of tokens such as scores, with 0 where the row's token is not
        the later one of the pair: on and above the diagonal. If `transposed`, the row's token must be the
        earlier one, and 0 is on and below the diagonal.

        `both` has no effect; `Level.mask` has the same argument.
        """
        del both
        distance = (self._halving.i - self._halving.j) * (1 - 2 * self._transposed)
        return jnp.where(distance > 0, x, 0.0).astype(x.dtype)

    def rows(self, of_later, of_earlier):
        """Return the left operand [64, 64] float32 of the matrix product that computes the scores of all
        pairs of tokens: `of_later` (such as queries), or `of_earlier` if `transposed`, times each token's
        decay factors.
        """
        return _select(of_later, of_earlier, self.later) * self.factor

    def columns(self, of_later, of_earlier):
        """Return the right operand [64, 64] float32 of the matrix product that computes the scores of all
        pairs of tokens: `of_earlier` (such as keys), or `of_later` if `transposed`, times each token's decay
        factors.
        """
        return _select(of_later, of_earlier, 1.0 - self.later) * self.columns_factor

    def _decay(self, sign, fraction):
        """Return each token's decay since the chunk's start, or its inverse if `sign` is -1, times
        2^(±RANGE / 2), [64, 64]. It is finite even for tokens that are not in range.

        If a token reads the memory before its decay, `fraction` (0 to 1) of the token's own log decay is
        included: 0 is the decay up to its read, 1 up to its write.
        """
        sums = self._halving.sums_from_start() if self._sums is None else self._sums
        sums = self._halving.sums_to_write(sums, fraction) + RANGE / 2
        return jnp.exp2(jnp.minimum(sign * sums, RANGE / 2))


def _select(x, y, first):
    """Return one of two tiles in float32: x if `first` is 1, y if it is 0. `first` is a Python number, or a scalar in registers that the
    kernel knows only as it runs.
    """
    if isinstance(first, float):
        return (x if first else y).astype(_F32)
    first = first.astype(x.dtype)
    return (x * first + y * (1 - first)).astype(_F32)


def in_base_2(log_decay):
    """Return a natural log decay as a logarithm in base 2; one below `tiles.FLOOR` (-128) counts as that."""
    return jnp.maximum(log_decay, tiles.FLOOR) * _LOG2E


def power_of_two(x):
    """Return, for each entry of x >= 0 (float32), the largest power of two that is at most x, and its
    inverse, as a pair of arrays: factors that scale without rounding.

    For every x, the power is between 2^-126 and 2^126, so that it and its inverse are normal numbers.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    bits = jnp.minimum(jnp.maximum(bits, 1 << 23), 253 << 23)
    return tuple(lax.bitcast_convert_type(n, _F32) for n in (bits, (254 << 23) - bits))


def load(ref):
    """Load a tile from a reference to shared memory into registers, in the layout that matrix products of a warpgroup use."""
    return plgpu.load(ref, layout=wg.LAYOUT)


def load_float32(ref):
    """Load a tile from a reference to shared memory into registers as float32, in the layout that matrix products of a warpgroup use."""
    return load(ref).astype(_F32)


def load_by_row(ref):
    """Load a vector from a reference to global memory into registers, in the layout of one value for each row of a tile."""
    return wg.load_global(ref, wg.LAYOUT.reduce(1))


def load_by_column(ref):
    """Load a vector [64] from a reference to global memory as a tile [64, 64] in registers, every row of which is the vector."""
    return lax.broadcast_in_dim(wg.load_global(ref, wg.LAYOUT.reduce(0)), SQUARE, [1])


def same_document(run):
    """Return whether two tokens of a chunk belong to one document, [64, 64] bool. `run` is a reference [64]
    to global memory with the number of each token's document.
    """
    return wg.spread_rows(load_by_row(run), SQUARE) == load_by_column(run)


def left_operand(buffer, interpret: Any):
    """Return a function that makes a [64, 64] bfloat16 tile in registers the left operand of a matrix product.

    On the card that is the tile itself. The interpreter has left operands in shared memory only, so that the function stores the tile in
    `buffer` and returns that.
    """

    def left(x):
        if not interpret:
            return x
        buffer[...] = x
        plgpu.commit_smem()
        return buffer

    return left
