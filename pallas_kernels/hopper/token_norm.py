"""Norms over the channels of tokens on Mosaic GPU (Hopper): which thread block computes which tokens and channels, how they are loaded and
stored, and sums over the channels of a group.

A thread block computes consecutive tokens, and of each the same channels: whole heads of at most 256 channels, each in one warp, or
one wider group in up to four warpgroups, which exchange sums through shared memory. All values of a token are in registers; the next
tokens are loaded while the current ones are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch

_F32 = jnp.float32
_WARPS = 4  # of a warpgroup
_THREADS = 32 * _WARPS
AHEAD = 2
"""Tokens of a step at most, which are loaded one step ahead."""


class Tile(NamedTuple):
    """The channels of one token that a thread block computes.

    Attributes:
        rows: rows of a warpgroup's tile, a multiple of its 4 warps.
        width: channels of a row: a head or a group, or a warp's part of a wide group.
        warpgroups: that compute one group together; 1 if every row is a group.
        wide: whether a group consists of all rows of the thread block.
    """

    rows: int
    width: int
    warpgroups: int
    wide: bool

    @property
    def channels(self) -> int:
        """The number of channels of a token that a thread block computes."""
        return self.rows * self.width * self.warpgroups


def tile_of(total: int, group: int) -> Tile | None:
    """Return the tile for tokens of `total` channels in groups of `group` channels, or None if no tile is possible."""
    for size in (8, 4, 2):  # channels of a thread
        if total % (_THREADS * size) == 0 and group % size == 0 and 32 * size % group == 0:
            return Tile(_THREADS * size // group, group, 1, False)
    for size in (8, 4, 2):
        warpgroups, rest = divmod(group, _THREADS * size)
        if not rest and 1 <= warpgroups <= 4:
            return Tile(_WARPS, 32 * size, warpgroups, True)
    return None


class Layout(NamedTuple):
    """How the norm of all tokens is divided among thread blocks.

    Attributes:
        tokens: the number of tokens of all rows together.
        total: the number of channels of a token.
        group: the number of channels of a group.
        tile: the channels of a thread block.
        block: the number of consecutive tokens of a thread block; the last block may have fewer.
        ahead: the number of tokens of a step, which are loaded one step ahead.
    """

    tokens: int
    total: int
    group: int
    tile: Tile
    block: int
    ahead: int

    @classmethod
    def of(
        cls, x, group: int, *, ahead: int = AHEAD, ahead_of_four: int = AHEAD, blocks: int = 4
    ) -> Layout:
        """Return the layout for x [B, T, H, V] in groups of `group` heads.

        Args:
            x: an array, or its shape.
            group: consecutive heads that are normalised together.
            ahead: tokens of a step.
            ahead_of_four: the same for four warpgroups, a thread of which has 128 registers.
            blocks: thread blocks for each processor, or more, where blocks of 32 to 128 tokens allow it.
        """
        tokens, total = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
        group *= x.shape[3]
        tile = tile_of(total, group)
        assert tile is not None
        columns = total // tile.channels
        enough = [s for s in (128, 64, 32) if -(-tokens // s) * columns >= blocks * PROCESSORS]
        ahead = ahead_of_four if tile.warpgroups == 4 else ahead
        return cls(tokens, total, group, tile, (enough or [16])[0], ahead)

    @property
    def grid(self) -> dict[str, int]:
        """The grid of thread blocks: parts of a token's channels, and parts of the tokens."""
        return dict(column=self.total // self.tile.channels, block=-(-self.tokens // self.block))

    def cut(self, x):
        """Reshape x [B, T, H, V] to [tokens, rows, width], or [H, V] to [rows, width]; return None for None."""
        if x is None:
            return None
        return x.reshape(*(self.tokens,) * (x.ndim == 4), -1, self.tile.width)

    def launch(self, kernel, inputs, outputs, sums: int, name: str, interpret: Any):
        """Run a kernel that computes `sums` sums over channels for each token of a step."""
        tile = self.tile
        several: dict[str, Any] = {}
        if tile.wide:
            slots = (2, self.ahead * sums, _WARPS * tile.warpgroups)
            barrier = plgpu.Barrier(num_arrivals=tile.warpgroups)
            several = dict(
                num_threads=tile.warpgroups,
                scratch=dict(sums=plgpu.SMEM(slots, _F32), stored=barrier),
            )
        return launch(
            kernel, inputs=inputs, outputs=outputs, grid=self.grid, name=name, interpret=interpret, **several
        )  # fmt: skip


class Block:
    """One warpgroup's part of a kernel: the functions that load, store and sum its tiles."""

    def __init__(self, layout: Layout, refs: dict[str, Any], smem: dict[str, Any] | None):
        self.layout, self.refs, self.smem = layout, refs, smem
        tile = layout.tile
        self.warpgroup = lax.axis_index("group") if tile.wide else 0
        first = (lax.axis_index("column") * tile.warpgroups + self.warpgroup) * tile.rows
        self.rows = pl.ds(first, tile.rows)
        self.registers = channel_rows(tile.rows, tile.width, _WARPS)
        self.shape = (tile.rows, tile.width)
        self.index = lax.axis_index("block")
        self.start = self.index * layout.block

    def load(self, ref):
        """Load this warpgroup's tile of one token, or of an array without tokens, in its dtype."""
        return plgpu.load(ref.at[self.rows], layout=self.registers, optimized=False)

    def load_step(self, names, token) -> list[list[Any]]:
        """Load the arrays of these names at the tokens of the step that begins with `token`, or of the last step if it lies behind
        the end.
        """
        ahead = self.layout.ahead
        first = jnp.minimum(token, self.layout.tokens - ahead)
        return [[self.load(self.refs[n].at[first + i]) for n in names] for i in range(ahead)]

    def store(self, x, name: str, index) -> None:
        """Store this warpgroup's tile of one token, or of a block's sums, in the array `name`."""
        ref = self.refs[name].at[index, self.rows]
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.registers)

    def for_steps(self, names, step, carry):
        """Call `step(token, slot, arrays, carry)` for each step of `ahead` tokens, with the arrays of these names that were loaded
        one step before, and return the last carry. `slot` is 0 or 1 by turns.
        """
        ahead = self.layout.ahead
        count = jnp.minimum(self.layout.block, self.layout.tokens - self.start) // ahead

        def body(i, state):
            arrays, carry = state
            token = self.start + i * ahead
            following = self.load_step(names, token + ahead)
            return following, step(token, lax.rem(i, 2), arrays, carry)

        return lax.fori_loop(0, count, body, (self.load_step(names, self.start), carry))[1]

    def means(self, slot, tiles: list[Any]) -> list[Any]:
        """Return the mean of each tile over the channels of each group, broadcast to the tile's shape."""
        if self.smem is None:
            return [self._spread(jnp.sum(x, axis=1) * (1 / self.layout.group)) for x in tiles]
        return [self.spread(x) for x in self.group_means(slot, tiles)]

    def group_means(self, slot, tiles: list[Any]) -> list[Any]:
        """Return the mean of each tile over the channels of its group, which is the whole thread block's, as numbers."""
        assert self.smem is not None
        partial = [jnp.sum(x, axis=1) for x in tiles]
        sums, stored = self.smem["sums"], self.smem["stored"]
        mine = pl.ds(self.warpgroup * _WARPS, _WARPS)
        for i, x in enumerate(partial):
            sums[slot, i, mine] = x
        # The sums of the step before are in the other slot, so that no warpgroup overwrites what another still reads.
        plgpu.barrier_arrive(stored)
        plgpu.barrier_wait(stored)
        means = []
        for i in range(len(tiles)):
            total = sums[slot, i, 0]
            for warp in range(1, _WARPS * self.layout.tile.warpgroups):
                total += sums[slot, i, warp]
            means.append(total * (1 / self.layout.group))
        return means

    def spread(self, number):
        """Return a number broadcast to the shape of this warpgroup's tile."""
        return lax.broadcast(number, self.shape)

    def _spread(self, x):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, [0]), self.registers)
