"""The tiles of the streamed `chunk_backward` (`streamed_chunk_backward`): sizes of a call, buffers in shared memory, and the loads into them
by one warpgroup, while others use what is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SQUARE
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import Place, head_index

BLOCK = 64
"""Key or value channels of one tile."""
_FEWEST_STAGES = 4  # pairs of tiles loaded or in use with which the kernel is used
_VALUES = ("missing", "d_out", "dv")
_F32, _BF16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes and options of a call.

    Attributes:
        batch: number of rows of the batch.
        chunks: number of chunks of a row.
        heads: number of heads of the gradient of the output.
        slices: number of slices of value channels.
        width: number of value channels of a slice.
        depth: number of key channels, K.
        stages: number of pairs of tiles in the ring.
        scale: the factor by which the queries q are multiplied.
        decay_gradient: whether the gradient of the log decay is computed.
        erase: "decayed" or "undecayed", the memory that keys read.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    batch: int
    chunks: int
    heads: int
    slices: int
    width: int
    depth: int
    stages: int
    scale: float
    decay_gradient: bool
    erase: str
    interpret: Any

    @property
    def programs(self) -> int:
        """The number of programs: one for each chunk, head and slice of value channels."""
        return self.batch * self.chunks * self.heads * self.slices

    @property
    def columns(self) -> int:
        """The number of blocks of 64 key channels."""
        return self.depth // BLOCK

    @property
    def rows(self) -> int:
        """The number of blocks of 64 value channels of a slice."""
        return self.width // BLOCK


class Smem(NamedTuple):
    """Buffers in shared memory of a thread block that computes the gradients of one chunk and head of the delta rule; tiles are bfloat16.

    C is the number of tokens of a chunk, S the memory before it and dS' the gradient of the memory after it.

    Attributes:
        values: the errors x of the memory's predictions (`missing`), the gradients of the output and of v, [V / 64, C, 64] each.
        ring: [stages, 2, 64, 64], pairs of tiles: of q and k, or of S and dS'.
        read: [C, C], the gradient A of the scores of queries with keys.
        gradients: [2, C, 64], the gradients of q and of k on the way to global memory; before that, the second has E.
        vectors: two [C] float32, of the first and of the second warpgroup, for a value of each token.
        of_reads: [C] float32, the terms of the gradient of beta through the scores of queries with keys.
        of_erases: [C] float32, the terms of the log decay's gradient that the second warpgroup computes.
        values_loaded: the barriers at which 64 channels of `values` are loaded.
        values_used: the barrier at which both warpgroups have used `values`.
        loaded: the barriers at which a pair of tiles is loaded, one for each stage of the ring.
        used: the barriers at which both warpgroups have used a pair of tiles, one for each stage.
        read_stored: the barrier at which `read` and `of_reads` are complete.
        erases_stored: the barrier at which `of_erases` is complete, and the second warpgroup has used `read` and `of_reads`.
        left: two [C, C] for the interpreter, which reads left operands from shared memory; else None.
    """

    values: dict[str, Any]
    ring: Any
    read: Any
    gradients: Any
    vectors: list[Any]
    of_reads: Any
    of_erases: Any
    values_loaded: Any
    values_used: Any
    loaded: Any
    used: Any
    read_stored: Any
    erases_stored: Any
    left: list[Any]


def pair_count(depth: int, width: int) -> int:
    """Return how many pairs of tiles one chunk and head has, for K = `depth` and slices of `width` value channels."""
    columns, rows = depth // BLOCK, width // BLOCK
    return columns * (rows + 2)


def stage_count(depth: int, width: int, memory: int) -> int:
    """Return how many pairs of tiles the ring of a thread block has, with `memory` bytes of shared memory for the thread block; 0 if this
    kernel does not fit. It divides the number of pairs, so that each chunk begins at the same place of the ring.
    """
    tile, count = 2 * BLOCK * BLOCK, pair_count(depth, width)
    small = 4 * 1024  # vectors, barriers, the buffer for sums over columns
    other = 3 * tile * (width // BLOCK) + 3 * tile + small
    most = min(count, (memory - other) // (2 * tile))
    return next((n for n in range(most, _FEWEST_STAGES - 1, -1) if count % n == 0), 0)


def smem_types(sizes: Sizes) -> Smem:
    """Return the types of the buffers in shared memory of a thread block."""
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    vector = smem((CHUNK,), _F32)
    rows, stages = sizes.rows, sizes.stages
    return Smem(
        values={name: tile((rows, *SQUARE)) for name in _VALUES},
        ring=tile((stages, 2, *SQUARE)),
        read=tile(SQUARE),
        gradients=tile((2, *SQUARE)),
        vectors=[vector] * 2,
        of_reads=vector,
        of_erases=vector,
        values_loaded=plgpu.Barrier(num_arrivals=len(_VALUES), num_barriers=rows),
        values_used=plgpu.Barrier(num_arrivals=2),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        read_stored=plgpu.Barrier(num_arrivals=1),
        erases_stored=plgpu.Barrier(num_arrivals=1),
        left=[tile(SQUARE)] * 2 if sizes.interpret else [None] * 2,
    )


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one chunk and head, in one slice of its value channels: their places in global and in shared memory, and their loads.

    Pairs of tiles have numbers, in the order in which they are loaded: first those of q and k, one for each 64 key channels; then for each
    64 key channels those of the memory, one for each 64 value channels, and q and k of these channels.

    Attributes:
        refs: references to inputs and outputs in global memory, by name.
        smem: the buffers of the thread block in shared memory.
        sizes: sizes and options of the call.
        place: where the chunk and head are.
        piece: index of the slice of value channels.
    """

    refs: dict[str, Any]
    smem: Smem
    sizes: Sizes
    place: Place
    piece: Any

    def number(self, column, row: int):
        """Return the number of the pair of tiles of the memory in 64 key channels (`column`) and 64 value channels (`row`); after the last
        row, of the pair of q and k in these key channels.
        """
        return self.sizes.columns + column * (self.sizes.rows + 1) + row

    def result(self, name: str):
        """Return a reference to the chunk's tokens in an output, for this head and slice of value channels."""
        row, h, _, _, tokens = self.place
        return self.refs[name].at[row, tokens, h * self.sizes.slices + self.piece]

    def load(self, turn) -> None:
        """Load all inputs, each when its buffer is free. `turn` counts the thread block's programs."""
        for column in range(self.sizes.columns):
            self.load_tokens(turn, column, column)
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(self.smem.values_used))
        for row in range(self.sizes.rows):
            self.load_values(row)

        def load_column(column, _):
            for row in range(self.sizes.rows):
                self.load_memory(turn, self.number(column, row), column, row)
            self.load_tokens(turn, self.number(column, self.sizes.rows), column)

        lax.fori_loop(0, self.sizes.columns, load_column, None)

    def load_pair(self, turn, number, sources) -> None:
        """Start to load the pair of tiles with this number from two references to global memory."""
        stage = lax.rem(number, self.sizes.stages)
        again = (turn > 0) | (number >= self.sizes.stages)
        pl.when(again)(lambda: plgpu.barrier_wait(self.smem.used.at[stage]))
        for place, source in enumerate(sources):
            to = self.smem.ring.at[stage, place]
            plgpu.copy_gmem_to_smem(source, to, self.smem.loaded.at[stage])

    def load_tokens(self, turn, number, column) -> None:
        """Start to load the queries and keys in 64 key channels as the pair of tiles with this number."""
        row, h, heads, _, tokens = self.place
        channels = pl.ds(column * BLOCK, BLOCK)
        refs = (self.refs[name] for name in ("q", "k"))
        sources = [x.at[row, tokens, head_index(x, h, heads), channels] for x in refs]
        self.load_pair(turn, number, sources)

    def load_memory(self, turn, number, column, row: int) -> None:
        """Start to load a tile of the memory before the chunk and the same one of the gradient of the memory after it."""
        b, h, _, n, _ = self.place
        at = b, h, n, self.value_channels(row), pl.ds(column * BLOCK, BLOCK)
        self.load_pair(turn, number, [self.refs[name].at[at] for name in ("states", "d_states")])

    def load_values(self, row: int) -> None:
        """Start to load the errors of the memory's predictions and the gradients of the output and of v in 64 value channels."""
        b, h, _, _, tokens = self.place
        for name in _VALUES:
            source = self.refs[name].at[b, tokens, h, self.value_channels(row)]
            to = self.smem.values[name].at[row]
            plgpu.copy_gmem_to_smem(source, to, self.smem.values_loaded.at[row])

    def value_channels(self, row: int):
        """Return the slice of the 64 value channels with index `row` in this slice of value channels."""
        return pl.ds(self.piece * self.sizes.width + row * BLOCK, BLOCK)

    def wait(self, number):
        """Return a reference to the pair of tiles with this number, after waiting until it is loaded."""
        stage = lax.rem(number, self.sizes.stages)
        plgpu.barrier_wait(self.smem.loaded.at[stage])
        return self.smem.ring.at[stage]

    def release(self, number) -> None:
        """Give the pair of tiles with this number free, as far as this warpgroup uses it."""
        plgpu.barrier_arrive(self.smem.used.at[lax.rem(number, self.sizes.stages)])
