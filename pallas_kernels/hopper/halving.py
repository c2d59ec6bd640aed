"""The halving of a chunk whose decay has a value for every key channel, for a warpgroup of Mosaic GPU; see `tiles_channels`."""

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
BLOCK = 64  # columns that a warpgroup holds
SQUARE = (CHUNK, CHUNK)
LEVELS = len(tiles.levels(CHUNK))
# Of `AllPairs`: how many bits a decay may take from one end of a chunk to the other, and within 2^-SIZE and 2^SIZE what it
# multiplies. Decays and their inverses, both less half the reach, are within 2^-50 and 2^50: sums of products keep to 2^126.
RANGE, SIZE = 100.0, 60
_F32 = jnp.float32
_LOG2E = math.log2(math.e)

PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,  # all warpgroups would share it: no sums over rows of registers
    # The layout inference of the other semantics finds no solution here (jax 0.11.2).
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


class Documents(NamedTuple):
    """Where documents begin: `run` [B, T], and 1 where a token's is the one before its chunk, or the chunk's last, else 0."""

    run: jax.Array
    enters: jax.Array
    stays: jax.Array


class Halving:
    """For the 64 columns of a warpgroup: sums of rows by products with masks, and what the levels make of them.

    A sum over rows in registers would go through a buffer in shared memory that all warpgroups use at once.
    """

    def __init__(self, parts, buffer, left, exclusive: bool, interpret, lowest: Any = None):
        """Take buffers in shared memory.

        Args:
            parts: [2, 64, 64] bfloat16.
            buffer: [64, 64] bfloat16.
            left: `left_operand`.
            exclusive: as in `tiles_channels`.
            interpret: parameters of the interpreter, or False.
            lowest: [2, 64] float32, for `reach`.
        """
        self._parts, self._room, self._lowest = [parts.at[n] for n in range(2)], buffer, lowest
        self._left, self._exclusive, self._interpret = left, exclusive, interpret
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, SQUARE, layout=wg.LAYOUT)
        self.i, self.j = iota(0), iota(1)

    def accumulate(self, add, count: int = 1):
        """[64, 64] tiles, what `add` adds to references to zeros."""
        zeros = [jnp.zeros(SQUARE, _F32)] * count
        return wg.accumulate(add, *zeros, interpret=self._interpret)

    def split(self, x, parts=None):
        """Keep x [64, 64] float32 in two bfloat16 parts, in other buffers if they are given."""
        high = x.astype(jnp.bfloat16)
        first, second = self._parts if parts is None else parts
        first[...] = high
        second[...] = (x - high.astype(_F32)).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def split_decay(self, log_decay):
        """`split` in units of log 2, as `factor` and `border` take it."""
        self.split(jnp.maximum(log_decay, tiles.FLOOR) * _LOG2E)

    def sums(self, mask, fixed: bool = True):
        """`mask` [64, 64] times the tile last split; `fixed` if the compiler knows entries of the mask.

        What is known it would not write to the registers of a left operand before the product begins (ptxas 13.0), so that goes
        through shared memory.
        """
        ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
        if fixed:
            self._room[...] = ones
            plgpu.commit_smem()
            ones = self._room
        else:
            ones = self._left(ones)

        def add(out):
            for part in self._parts:
                plgpu.wgmma(out, ones, part)

        return self.accumulate(add)[0]

    def column_sums(self, parts=None):
        """Of the tile last split (into `parts`), a vector by row."""
        parts = self._parts if parts is None else parts
        ones = plgpu.layout_cast(jnp.ones(SQUARE, self._room.dtype), wg.LAYOUT)
        self._room[...] = ones
        plgpu.commit_smem()

        def add(out):
            for part in parts:
                plgpu.wgmma(out, part.transpose((1, 0)), self._room)

        return jnp.max(self.accumulate(add)[0], axis=1)  # all columns are the same

    def factor(self, level):
        """`tiles_channels.factor`; `level` is the logarithm of its blocks' rows."""
        half = lax.shift_left(1, level)
        # `tiles.spans` as an interval of columns, which takes half the instructions.
        i, start = self.i, self.i & -half
        later = (i & half) > 0
        first = jnp.where(later, start, i + 1)
        last = jnp.where(later, i - 1 if self._exclusive else i, start + (half - 1))
        return jnp.exp2(self.sums((self.j >= first) & (self.j <= last), fixed=False))

    def _own(self):
        """The tile last split."""
        return load(self._parts[0]).astype(_F32) + load(self._parts[1]).astype(_F32)

    def sums_from_start(self):
        """Sums of the tile last split from the chunk's beginning to what each row reads, in bits."""
        return self.sums(self._upto())

    def to_write(self, sums, share):
        """`sums_from_start` a `share` of the way to what each row writes: only where it reads before is that further."""
        return sums + share * self._own() if self._exclusive else sums

    def check_range(self, *tiles):
        """`sums_from_start`, and 1 if all rows can go to `AllPairs`, else 0; which can is kept for `pairs_in_range`.

        They can within `RANGE` of the chunk's beginning, and where their largest entries in `tiles` are within `SIZE`, or 0.
        """
        apart: Any = 0.0
        for tile in tiles:
            size = jnp.max(jnp.abs(load(tile)), axis=1).astype(_F32)
            fits = ((size >= 2.0**-SIZE) & (size <= 2.0**SIZE)) | (size == 0)
            apart += jnp.where(fits, 0.0, wg.NEVER)
        since = self.sums_from_start()
        of_row, of_all = (self._lowest.at[n] for n in range(2))
        of_row[...] = jnp.min(since, axis=1) + apart
        plgpu.commit_smem()
        lowest = wg.spread_columns(plgpu.load(of_row, layout=wg.LAYOUT.reduce(0)), SQUARE)
        # A scalar is read from there: one made of registers has others spill.
        of_all[...] = jnp.min(lowest, axis=1)
        plgpu.commit_smem()
        return since, (of_all[0] >= -RANGE).astype(jnp.int32)

    def pairs_in_range(self):
        """Whether the later row of each pair is; it looks at no row after."""
        of_row = wg.spread_rows(wg.load_rows(self._lowest.at[0]), SQUARE)
        of_column = plgpu.load(self._lowest.at[0], layout=wg.LAYOUT.reduce(0))
        return jnp.minimum(of_row, wg.spread_columns(of_column, SQUARE)) >= -RANGE

    def boundary_decay(self, later: bool):
        """What is left of the memory at each row (`later`), or of each row at the chunk's end."""
        return jnp.exp2(self.sums(self._upto() if later else self.j > self.i))

    def _upto(self):
        return self.j < self.i if self._exclusive else self.j <= self.i

    def mask_to_level(self, level, x, both: bool = True):
        """x where rows and columns stand in blocks that meet, the rows in the later one if not in `both`, else 0."""
        half = lax.shift_left(1, level)
        met = (self.i ^ half) & -half
        if not both:
            met = jnp.where((self.i & half) > 0, met, -1)
        return jnp.where(met == (self.j & -half), x, 0.0).astype(x.dtype)

    def later(self, level):
        """1 in rows of later blocks, 0 in the others."""
        return (lax.shift_right_logical(self.i, level) & 1).astype(_F32)

    def store_operand(self, level, of_later, of_earlier, factor):
        """The level's tile in shared memory: rows of the later blocks from one tile, of the others from the other, decayed."""
        x = self.blend(level, of_later, of_earlier)
        self._room[...] = (x.astype(_F32) * factor).astype(self._room.dtype)
        plgpu.commit_smem()
        return self._room

    def blend(self, level, of_later, of_earlier):
        """Rows of the later blocks from one tile, of the others from the other."""
        later = self.later(level).astype(of_later.dtype)
        return of_later * later + of_earlier * (1 - later)  # quicker than to select


class Level:
    """The pairs of rows of two blocks that meet on a level: the later one's row and the earlier one's, in either order.

    One of two kinds of steps, of which `AllPairs` is the other. Scores are the sum of `step.mask(rows columnsᵀ)`; of
    `factor * (step.mask(weights) columns)` the share `later` is gradient of what later rows hold, the rest of what earlier ones do.
    """

    def __init__(self, halving: Halving, at):
        self._halving, self._at = halving, at
        self.factor = halving.factor(at)

    @property
    def later(self):
        """1 in rows of later blocks, 0 in the others."""
        return self._halving.later(self._at)

    def mask(self, x, both: bool = True):
        """x where a row and a column meet, the row in the later block if not in `both`, else 0."""
        return self._halving.mask_to_level(self._at, x, both)

    def rows(self, of_later, of_earlier):
        """What later and earlier rows hold, decayed as rows of the product, in float32."""
        return self._halving.blend(self._at, of_later, of_earlier).astype(_F32) * self.factor

    columns = rows


class AllPairs:
    """All pairs of a chunk at once, as `Level`; rows are the later ones of a pair (`turned` 0) or the earlier ones (1).

    A pair's decay is that since the chunk's beginning, of the later row, times its inverse, of the earlier row: for rows within
    `RANGE`, and each half of it off, so that both factors stay far from the ends of an exponent.
    """

    def __init__(self, halving: Halving, turned, since=None):
        """`since` is `halving.sums_from_start()`; without it that is made where it is used, lest it take registers in between."""
        self._halving, self._turned, self._since = halving, turned, since
        self._sign = 1.0 - 2.0 * turned

    @property
    def later(self):
        """Whether a row is the later one of its pairs."""
        return 1.0 - self._turned

    @property
    def factor(self):
        """Of what is a row of the product."""
        return self._decay(self._sign, 1.0 - self.later)

    @property
    def columns_factor(self):
        """Of what is a column."""
        return self._decay(-self._sign, self.later)

    def mask(self, x, both: bool = True):
        """x below the diagonal, `turned` above it."""
        del both
        behind = (self._halving.i - self._halving.j) * (1 - 2 * self._turned)
        return jnp.where(behind > 0, x, 0.0).astype(x.dtype)

    def rows(self, of_later, of_earlier):
        """As of `Level`."""
        return _either(of_later, of_earlier, self.later) * self.factor

    def columns(self, of_later, of_earlier):
        """The same, decayed as columns."""
        return _either(of_later, of_earlier, 1.0 - self.later) * self.columns_factor

    def _decay(self, sign, share):
        """Since the chunk's beginning, or its inverse by sign, `share` of the way to what is written; finite beyond reach."""
        since = self._halving.sums_from_start() if self._since is None else self._since
        sums = self._halving.to_write(since, share) + RANGE / 2
        return jnp.exp2(jnp.minimum(sign * sums, RANGE / 2))


def _either(x, y, first):
    """x if `first` is 1, y if it is 0, in float32."""
    if isinstance(first, float):
        return (x if first else y).astype(_F32)
    first = first.astype(x.dtype)
    return (x * first + y * (1 - first)).astype(_F32)


def power_of_two(x):
    """The greatest that is not above x >= 0 in float32, and its inverse; of the least and the largest x one nearer to 1."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    bits = jnp.minimum(jnp.maximum(bits, 1 << 23), 253 << 23)
    return tuple(lax.bitcast_convert_type(n, _F32) for n in (bits, (254 << 23) - bits))


def load(ref):
    """A tile in shared memory."""
    return plgpu.load(ref, layout=wg.LAYOUT)


def load_by_row(ref):
    """A vector in global memory, one value for each row."""
    return wg.load_global(ref, wg.LAYOUT.reduce(1))


def run_by_chunk(kernel, named: dict[str, jax.Array], out_type, count: int, groups: int, interpret):
    """`kernel` once for each of `count` chunks, a block of `groups` warpgroups each."""
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(count,),
        grid_names=("chunk",),
        num_threads=groups,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*named.values())


def load_by_column(ref):
    """One for each column, as a tile."""
    return lax.broadcast_in_dim(wg.load_global(ref, wg.LAYOUT.reduce(0)), SQUARE, [1])


def same_document(run):
    """[64, 64], whether two tokens of a chunk belong to one document."""
    return wg.spread_rows(load_by_row(run), SQUARE) == load_by_column(run)


def left_operand(buffer, interpret: Any):
    """What makes a [64, 64] bfloat16 tile the left operand of a product: nothing, but in the interpreter, which has no such."""

    def left(x):
        if not interpret:
            return x
        buffer[...] = x
        plgpu.commit_smem()
        return buffer

    return left
