"""How a warpgroup of a short convolution's Hopper kernels loads the tokens of its block, four at a time: from shared memory, to which they
are copied some steps before, or from global memory into registers, the next four while the current four are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.short_convolution.hopper.block import Block, Layout
from pallas_kernels.short_convolution.hopper.tilings import AHEAD


class Four(NamedTuple):
    """Four tokens that are loaded.

    Attributes:
        rows: for each token a list of its tiles of the arrays that are loaded; empty if they are in shared memory.
        seen: for each token how many tokens before it it sees (`Block.seen`).
    """

    rows: list[Any]
    seen: list[Any]


class Loads:
    """The loads of a block's tokens. A kernel calls `begin` first, then for each step `wait`, `take` for each four tokens of the step, and
    `release`; then `after` if it needs the tokens after the block.

    Attributes:
        block: the block of tokens and channels.
        names: the names of the arrays that are loaded, "x" or "x" and "dy".
        smem: the buffers in shared memory and barriers of `Layout.scratch`, by name, or None.
        stages: the number of steps in shared memory at a time, 0 for loads into registers.
        step: the number of tokens of a step.
        steps: the number of steps of a block.
    """

    def __init__(self, block: Block, layout: Layout, smem: Any):
        self.block, self.names, self.smem = block, layout.names, smem
        self.stages, self.step = layout.stages, layout.step
        self.steps = layout.tokens // layout.step

    def begin(self) -> None:
        """Begin to copy the block's first steps to shared memory."""
        for index in range(min(self.stages, self.steps)):
            self._copy(index)

    def first(self) -> Four:
        """Load what `take` requires with the block's first tokens."""
        return self._load(self.block.start)

    def wait(self, index) -> None:
        """Wait until the tokens of a step are in shared memory."""
        if self.stages:
            plgpu.barrier_wait(self.smem["loaded"].at[self._slot(index)])

    def take(self, index, part: int, ahead: Four) -> tuple[Four, Four]:
        """Return four tokens of a step, and what is loaded ahead of the next four.

        Args:
            index: the index of the step in the block.
            part: the index of the four tokens in the step.
            ahead: what was loaded ahead of these tokens.
        """
        following = self._load(self.block.start + index * self.step + (part + 1) * AHEAD)
        if not self.stages:
            return ahead, following
        slot, tokens = self._slot(index), range(part * AHEAD, (part + 1) * AHEAD)
        rows = [[self._copied(name, slot, i) for name in self.names] for i in tokens]
        return Four(rows, ahead.seen), following

    def release(self, index) -> None:
        """Begin to copy, to the place of a step that is computed, the tokens of a later one."""
        if not self.stages:
            return

        @pl.when(index + self.stages < self.steps)
        def _():
            plgpu.commit_smem()  # all warps have loaded the step from shared memory
            self._copy(index + self.stages)

    def after(self, count: int, ahead: Four) -> Four:
        """Load `count` tokens after the block, at most 4; `ahead` is what was loaded ahead of them."""
        rows = ahead.rows or self._rows(self.block.start + self.steps * self.step, count)
        return Four(rows[:count], ahead.seen[:count])

    def _slot(self, index):
        slot = lax.rem(jnp.int32(index), jnp.int32(self.stages))
        return self.block.group * self.stages + slot

    def _copy(self, index) -> None:
        slot, start = self._slot(index), self.block.start + index * self.step
        for name in self.names:
            source = self.block.at(name, pl.ds(start, self.step))
            plgpu.copy_gmem_to_smem(source, self.smem[name].at[slot], self.smem["loaded"].at[slot])

    def _copied(self, name: str, slot, i: int):
        block = self.block
        token = (slot, i) if block.rows == 1 else (slot, slice(None), i)
        return plgpu.load(self.smem[name].at[*token], layout=block.layout, optimized=False)

    def _load(self, first) -> Four:
        block = self.block
        tokens = [jnp.minimum(first + i, block.length - 1) for i in range(AHEAD)]
        rows = [] if self.stages else self._rows(first, AHEAD)
        return Four(rows, [block.seen(t) for t in tokens])

    def _rows(self, first, count: int) -> list[Any]:
        block = self.block
        tokens = [jnp.minimum(first + i, block.length - 1) for i in range(count)]
        return [[block.row(name, t) for name in self.names] for t in tokens]
