"""The loop that the Hopper kernels of grouped products have in common: a thread block computes output tiles of 128 rows one
after another, each a sum of matrix products over steps.

A third warpgroup loads the operands of the steps, across the ends of tiles, so that those of the next tile arrive while a
tile is stored. Each of two warpgroups computes 64 rows of a tile. It releases a step's operands when the products of the
following step have begun, so that the tensor cores always have work, and the first warpgroup begins `LEAD` steps earlier,
so that one of the two computes products while the other one stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg

ROWS = 128
"""Rows of an output tile."""
HALF = 64  # rows of a warpgroup
DEPTH = 64  # size of the summed axis in one step, of 16-bit numbers
STAGES = 4  # steps whose operands are being loaded or are in use
LEAD = 1
"""Steps by which the first warpgroup begins before the second one; less than the number of stages."""
SLOTS = 2  # buffers of a warpgroup for 64 columns of the output


def depth_of(x: Any) -> int:
    """Return the size of the summed axis in one step for operands of x's dtype: 128 bytes of it."""
    return 2 * DEPTH // jnp.dtype(x.dtype).itemsize


class Tile(NamedTuple):
    """One tile of a kernel's output, 128 rows of a sum of matrix products over steps.

    Attributes:
        steps: the number of steps of the sum, each over `depth_of` rows or columns of the operands.
        operands: `operands(step)` returns references to the operands of a step in global memory, one for each of the
            kernel's operand buffers.
        store: called by each warpgroup with its index, the sums of its 64 rows, one for each accumulator, in float32, and
            the result of `begin`.
        begin: called by each warpgroup with its index, before the sum; returns what `store` receives.
    """

    steps: Any
    operands: Callable[[Any], tuple[Any, ...]]
    store: Callable[[Any, list[Any], Any], None]
    begin: Callable[[Any], Any] = lambda group: None


class Loop(NamedTuple):
    """A kernel's loop over output tiles.

    Attributes:
        multiply: `multiply(totals, half, *operands)` adds to the accumulators `totals` the products of one step's operands
            in shared memory, for the rows `half` of the tile.
        blocks: the shapes of a step's operands.
        widths: the number of columns of each accumulator.
        dtypes: the dtypes of a step's operands.
    """

    multiply: Callable[..., None]
    blocks: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    dtypes: tuple[Any, ...]

    def scratch(self) -> dict[str, Any]:
        """Return the types of the buffers and barriers in shared memory that `run` requires, by name."""
        smem: Any = plgpu.SMEM
        operands = {
            f"operand {i}": smem(
                (STAGES, *shape), dtype=dtype, transforms=wg.smem_transforms(dtype)
            )
            for i, (shape, dtype) in enumerate(zip(self.blocks, self.dtypes, strict=True))
        }
        return operands | dict(
            loaded=plgpu.Barrier(num_arrivals=len(self.blocks), num_barriers=STAGES),
            used=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            leads=plgpu.Barrier(num_arrivals=1),
        )

    def run(self, tile: Callable[[Any], Tile], count: Any, smem: dict[str, Any]) -> None:
        """Compute output tiles, divided among the GPU's processors.

        Args:
            tile: `tile(index)` returns the output tile with that index.
            count: the number of output tiles.
            smem: the buffers and barriers of `scratch`.
        """
        group, processor = lax.axis_index("group"), lax.axis_index("processor")
        processors = lax.axis_size("processor")
        turns = lax.div(count, processors)
        mine = turns + (_place(processor, processors, turns) < lax.rem(count, processors))

        def for_tiles(body):
            def of_tile(turn, position):
                index = turn * processors + _place(processor, processors, turn)
                return body(tile(index), position)

            return lax.fori_loop(0, mine, of_tile, jnp.int32(0))

        def wait_for_use(position, _):
            plgpu.barrier_wait(smem["used"].at[lax.rem(position, STAGES)])

        @pl.when(group < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            if LEAD:
                pl.when(group == 1)(lambda: plgpu.barrier_wait(smem["leads"]))
            steps = for_tiles(lambda tile, position: self._compute(tile, position, group, smem))
            if LEAD:
                short = (group == 0) & (steps < LEAD)
                pl.when(short)(lambda: plgpu.barrier_arrive(smem["leads"]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(group == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            steps = for_tiles(lambda tile, position: self._load(tile, position, smem))
            lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, wait_for_use, None)

    def _operands(self, smem, slot) -> list[Any]:
        return [smem[f"operand {i}"].at[slot] for i in range(len(self.blocks))]

    def _load(self, tile: Tile, position, smem):
        """Load the operands of a tile's steps, each when its buffers are free. `position` is the number of steps before the
        tile's first one; returns that of the next tile.
        """

        def step(k, position):
            slot = lax.rem(position, STAGES)
            pl.when(position >= STAGES)(lambda: plgpu.barrier_wait(smem["used"].at[slot]))
            for source, buffer in zip(tile.operands(k), self._operands(smem, slot), strict=True):
                plgpu.copy_gmem_to_smem(source, buffer, smem["loaded"].at[slot])
            return position + 1

        return lax.fori_loop(0, tile.steps, step, position)

    def _compute(self, tile: Tile, position, group, smem):
        """Compute and store this warpgroup's rows of a tile; `position` and the result are those of `_load`."""
        half = pl.ds(group * HALF, HALF)
        begun = tile.begin(group)

        def release(position):
            plgpu.barrier_arrive(smem["used"].at[lax.rem(position, STAGES)])

        def sum_steps(*totals):
            def step(k, position):
                slot = lax.rem(position, STAGES)
                plgpu.barrier_wait(smem["loaded"].at[slot])
                self.multiply(totals, half, *self._operands(smem, slot))
                plgpu.wgmma_wait(len(totals))  # the products of the step before have finished
                pl.when(k > 0)(lambda: release(position - 1))
                if LEAD:
                    leads = (group == 0) & (position == LEAD - 1)
                    pl.when(leads)(lambda: plgpu.barrier_arrive(smem["leads"]))
                return position + 1

            end = lax.fori_loop(0, tile.steps, step, position)
            sums = [total[...] for total in totals]
            pl.when(tile.steps > 0)(lambda: release(end - 1))
            return sums, end

        accumulators = (plgpu.ACC((HALF, width), jnp.float32) for width in self.widths)
        sums, end = pl.run_scoped(sum_steps, *accumulators)
        tile.store(group, sums, begun)
        return end


def _place(processor, processors: int, turn):
    """Return which tile a processor computes of those that all processors compute in one turn: in every second turn in the
    opposite order, so that tiles of falling length are divided evenly.
    """
    return jnp.where(lax.rem(turn, 2) == 0, processor, processors - 1 - processor)


def store_columns(y: Any, out: Any, buffers: Any) -> None:
    """Copy a warpgroup's 64 rows y of an output tile to `out` in global memory, by way of its `buffers` in shared memory,
    each for 64 columns.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i in range(y.shape[1] // HALF):
        buffer, columns = buffers.at[i % SLOTS], pl.ds(i * HALF, HALF)
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        buffer[...] = y[:, i * HALF : (i + 1) * HALF]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out.at[:, columns])
