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
    """Document boundaries.

    Attributes:
        run: [B, T], document numbers.
        enters: [B, T], 1 where a token's document is that of the last token before its chunk, else 0.
        stays: [B, T], 1 where a token's document is that of its chunk's last token, else 0.
    """

    run: jax.Array
    enters: jax.Array
    stays: jax.Array


class Halving:
    """The decays of a chunk's 64 tokens in 64 key channels, as tiles [64, 64] with a row for each token.

    Sums over tokens are products with masks: a sum over rows in registers would use a buffer that all warpgroups share.
    """

    def __init__(self, parts, buffer, left, exclusive: bool, interpret, lowest: Any = None):
        """Bind buffers in shared memory.

        Args:
            parts: [2, 64, 64] bfloat16, for `split`.
            buffer: [64, 64] bfloat16, for operands.
            left: of `left_operand`.
            exclusive: whether tokens read before they write, as in `tiles.channel_decay`.
            interpret: parameters of the interpreter, or False.
            lowest: [2, 64] float32, for `check_range`.
        """
        self._parts, self._buffer, self._lowest = [parts.at[n] for n in range(2)], buffer, lowest
        self._left, self._exclusive, self._interpret = left, exclusive, interpret
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, SQUARE, layout=wg.LAYOUT)
        self.i, self.j = iota(0), iota(1)

    def accumulate(self, add, count: int = 1):
        """A list of `count` tiles: the products that `add` adds to references to zeros."""
        zeros = [jnp.zeros(SQUARE, _F32)] * count
        return wg.accumulate(add, *zeros, interpret=self._interpret)

    def split(self, x, parts=None):
        """Store x [64, 64] float32 as the sum of two bfloat16 tiles, in `parts` or in the buffers of this object."""
        high = x.astype(jnp.bfloat16)
        first, second = self._parts if parts is None else parts
        first[...] = high
        second[...] = (x - high.astype(_F32)).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def split_decay(self, log_decay):
        """`split` the log decay [64, 64] in base 2, as `factor` and `boundary_decay` require it."""
        self.split(jnp.maximum(log_decay, tiles.FLOOR) * _LOG2E)

    def sums(self, mask, fixed: bool = True):
        """`mask` [64, 64] times the tile last split. `fixed`: the compiler may know entries of the mask.

        Entries that it knows it writes to the registers of a left operand only after the product has begun (ptxas 13.0), so such a
        mask is an operand in shared memory.
        """
        ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
        if fixed:
            self._buffer[...] = ones
            plgpu.commit_smem()
            ones = self._buffer
        else:
            ones = self._left(ones)

        def add(out):
            for part in self._parts:
                plgpu.wgmma(out, ones, part)

        return self.accumulate(add)[0]

    def column_sums(self, parts=None):
        """The sum of each column of the tile last split (into `parts`), as a vector [64] in the layout of rows."""
        parts = self._parts if parts is None else parts
        ones = plgpu.layout_cast(jnp.ones(SQUARE, self._buffer.dtype), wg.LAYOUT)
        self._buffer[...] = ones
        plgpu.commit_smem()

        def add(out):
            for part in parts:
                plgpu.wgmma(out, part.transpose((1, 0)), self._buffer)

        return jnp.max(self.accumulate(add)[0], axis=1)  # all columns are the same

    def factor(self, level):
        """`tiles.channel_decay.factor` for blocks of 2^level rows."""
        half = lax.shift_left(1, level)
        # `tiles.channel_decay.in_factor` as an interval of columns: half as many instructions.
        i, start = self.i, self.i & -half
        later = (i & half) > 0
        first = jnp.where(later, start, i + 1)
        last = jnp.where(later, i - 1 if self._exclusive else i, start + (half - 1))
        return jnp.exp2(self.sums((self.j >= first) & (self.j <= last), fixed=False))

    def _load_split(self):
        """The tile last split."""
        return load(self._parts[0]).astype(_F32) + load(self._parts[1]).astype(_F32)

    def sums_from_start(self):
        """The log decay in base 2 from the chunk's start to the memory that each row reads, [64, 64]."""
        return self.sums(self._read_mask())

    def sums_to_write(self, sums, fraction):
        """`sums_from_start` with the fraction (0 to 1) of the row's own log decay that lies between its read and its write.

        Only if tokens read before they write is there a decay in between.
        """
        return sums + fraction * self._load_split() if self._exclusive else sums

    def check_range(self, *operands):
        """Return `sums_from_start`, and 1 if all rows are in range, else 0; `pairs_in_range` has which are.

        Args:
            operands: references to the tiles [64, 64] that decays will multiply.
        """
        penalty: Any = 0.0
        for tile in operands:
            size = jnp.max(jnp.abs(load(tile)), axis=1).astype(_F32)
            fits = ((size >= 2.0**-SIZE) & (size <= 2.0**SIZE)) | (size == 0)
            penalty += jnp.where(fits, 0.0, wg.NEVER)
        sums = self.sums_from_start()
        of_row, of_all = (self._lowest.at[n] for n in range(2))
        of_row[...] = jnp.min(sums, axis=1) + penalty
        plgpu.commit_smem()
        lowest = wg.spread_columns(plgpu.load(of_row, layout=wg.LAYOUT.reduce(0)), SQUARE)
        # The scalar is read from shared memory: computed in registers, it makes others spill.
        of_all[...] = jnp.min(lowest, axis=1)
        plgpu.commit_smem()
        return sums, (of_all[0] >= -RANGE).astype(jnp.int32)

    def pairs_in_range(self):
        """[64, 64], whether both rows of a pair are in range, which depends on no row after them."""
        of_row = wg.spread_rows(wg.load_rows(self._lowest.at[0]), SQUARE)
        of_column = plgpu.load(self._lowest.at[0], layout=wg.LAYOUT.reduce(0))
        return jnp.minimum(of_row, wg.spread_columns(of_column, SQUARE)) >= -RANGE

    def boundary_decay(self, from_start: bool):
        """The decay from the chunk's start to what each row reads, or from each row's write to the chunk's end, [64, 64]."""
        return jnp.exp2(self.sums(self._read_mask() if from_start else self.j > self.i))

    def _read_mask(self):
        """[64, 64], whether the decay of token j applies to the memory that token i reads."""
        return self.j < self.i if self._exclusive else self.j <= self.i

    def mask_to_level(self, level, x, both: bool = True):
        """x [64, 64] at the pairs of rows in two neighbouring blocks of 2^level rows, else 0.

        Args:
            level: the level.
            x: the tile.
            both: whether the row may be in either block; else only in the later one.
        """
        half = lax.shift_left(1, level)
        neighbour = (self.i ^ half) & -half
        if not both:
            neighbour = jnp.where((self.i & half) > 0, neighbour, -1)
        return jnp.where(neighbour == (self.j & -half), x, 0.0).astype(x.dtype)

    def later(self, level):
        """[64, 64], 1 in rows of the later block of each pair of blocks of 2^level rows, else 0."""
        return (lax.shift_right_logical(self.i, level) & 1).astype(_F32)

    def store_operand(self, level, of_later, of_earlier, factor):
        """Store `blend(level, of_later, of_earlier) * factor` in shared memory, and return the buffer."""
        x = self.blend(level, of_later, of_earlier)
        self._buffer[...] = (x.astype(_F32) * factor).astype(self._buffer.dtype)
        plgpu.commit_smem()
        return self._buffer

    def blend(self, level, of_later, of_earlier):
        """Rows of the later blocks from one tile, those of the earlier blocks from the other."""
        later = self.later(level).astype(of_later.dtype)
        return of_later * later + of_earlier * (1 - later)  # faster than a select


class Level:
    """The pairs of rows in two neighbouring blocks of 2^level rows.

    `Level` and `AllPairs` are steps with the same methods. Scores are the sum over steps of `step.mask(rows columnsᵀ)`. The gradient of
    the rows of a step is `factor * (step.mask(weights) columns)`, of which the fraction `later` belongs to the operand of later rows,
    and the rest to that of earlier rows.
    """

    def __init__(self, halving: Halving, level):
        self._halving, self._level = halving, level
        self.factor = halving.factor(level)

    @property
    def later(self):
        """[64, 64], 1 in rows of later blocks, else 0."""
        return self._halving.later(self._level)

    def mask(self, x, both: bool = True):
        """x at the pairs of this level, else 0; unless `both`, only where the row is in the later block."""
        return self._halving.mask_to_level(self._level, x, both)

    def rows(self, of_later, of_earlier):
        """Return the product's rows in float32, multiplied by the decay of the row's token: from `of_later` in later blocks, from
        `of_earlier` in earlier ones.
        """
        return self._halving.blend(self._level, of_later, of_earlier).astype(_F32) * self.factor

    columns = rows


class AllPairs:
    """All pairs of a chunk at once, with the methods of `Level`.

    A row is the later token of its pairs if `transposed` is 0, and the earlier one if it is 1. A pair's decay is the decay since the
    chunk's start of the later token, times the inverse of that of the earlier token, for rows in range. Both factors are multiplied by
    2^(RANGE / 2) or its inverse, so that they stay far from the ends of float32's exponents.
    """

    def __init__(self, halving: Halving, transposed, sums=None):
        """Bind the chunk's decays.

        Args:
            halving: the decays.
            transposed: 0 or 1; an int, or a float32 scalar.
            sums: `halving.sums_from_start()`. None computes them at each use, so that they occupy no registers in between.
        """
        self._halving, self._transposed, self._sums = halving, transposed, sums
        self._sign = 1.0 - 2.0 * transposed

    @property
    def later(self):
        """1 if a row is the later token of its pairs, else 0."""
        return 1.0 - self._transposed

    @property
    def factor(self):
        """The decay of the rows of the product, [64, 64]."""
        return self._decay(self._sign, 1.0 - self.later)

    @property
    def columns_factor(self):
        """The decay of the columns of the product, [64, 64]."""
        return self._decay(-self._sign, self.later)

    def mask(self, x, both: bool = True):
        """x below the diagonal, or above it if `transposed`, else 0."""
        del both
        distance = (self._halving.i - self._halving.j) * (1 - 2 * self._transposed)
        return jnp.where(distance > 0, x, 0.0).astype(x.dtype)

    def rows(self, of_later, of_earlier):
        """Return the product's rows in float32, multiplied by the decay of the row's token."""
        return _select(of_later, of_earlier, self.later) * self.factor

    def columns(self, of_later, of_earlier):
        """Return the product's columns in float32, multiplied by the decay of the column's token."""
        return _select(of_later, of_earlier, 1.0 - self.later) * self.columns_factor

    def _decay(self, sign, fraction):
        """The decay since the chunk's start, or its inverse if `sign` is -1, times 2^(±RANGE / 2); finite for rows out of range.

        `fraction` is that of `Halving.sums_to_write`.
        """
        sums = self._halving.sums_from_start() if self._sums is None else self._sums
        sums = self._halving.sums_to_write(sums, fraction) + RANGE / 2
        return jnp.exp2(jnp.minimum(sign * sums, RANGE / 2))


def _select(x, y, first):
    """x if `first` is 1, y if it is 0, in float32."""
    if isinstance(first, float):
        return (x if first else y).astype(_F32)
    first = first.astype(x.dtype)
    return (x * first + y * (1 - first)).astype(_F32)


def power_of_two(x):
    """The largest power of two that is at most x >= 0 (float32), and its inverse.

    It is at least 2^-126 and at most 2^126 for every x, so that both are normal numbers.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    bits = jnp.minimum(jnp.maximum(bits, 1 << 23), 253 << 23)
    return tuple(lax.bitcast_convert_type(n, _F32) for n in (bits, (254 << 23) - bits))


def load(ref):
    """Load a tile from shared memory."""
    return plgpu.load(ref, layout=wg.LAYOUT)


def load_float32(ref):
    """Load a tile from shared memory, in float32."""
    return load(ref).astype(_F32)


def load_by_row(ref):
    """Load a vector from global memory, one value for each row of a tile."""
    return wg.load_global(ref, wg.LAYOUT.reduce(1))


def load_by_column(ref):
    """Load a vector [64] from global memory as a tile [64, 64] whose rows are the vector."""
    return lax.broadcast_in_dim(wg.load_global(ref, wg.LAYOUT.reduce(0)), SQUARE, [1])


def same_document(run):
    """[64, 64], whether two tokens of a chunk belong to one document; `run` [64] in global memory has their documents' numbers."""
    return wg.spread_rows(load_by_row(run), SQUARE) == load_by_column(run)


def left_operand(buffer, interpret: Any):
    """Return a function that makes a [64, 64] bfloat16 tile the left operand of a product.

    On the card that is the tile itself. The interpreter has left operands in shared memory only, in `buffer`.
    """

    def left(x):
        if not interpret:
            return x
        buffer[...] = x
        plgpu.commit_smem()
        return buffer

    return left
