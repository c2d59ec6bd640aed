"""The structure of the three Hopper kernels of attention with forget gates (the forward one, and the
gradients of the queries and of the keys): two warpgroups compute in a loop over the row's tokens, and a third
one loads these tokens.

A thread block computes one tile of 128 queries (or keys) of one head. Each of its first two warpgroups has 64
of them, the *resident* tokens, whose arrays stay in shared memory. Both loop over the same tiles of the row,
the *streamed* tokens. The third warpgroup copies the streamed tiles to shared memory, some steps ahead, into
one of `Schedule.stages` buffers. Two barriers per buffer say that its tiles have been loaded (`full`) and
that both warpgroups have used them (`empty`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.forgetting_attention.hopper.schedule import (
    ROWS,
    TILE,
    Position,
    Products,
    Schedule,
)
from pallas_kernels.hopper import launch as hopper_launch
from pallas_kernels.hopper import warpgroups as wg


class Traversal(NamedTuple):
    """The loop of one warpgroup of an attention kernel over tiles of streamed tokens (keys, if its resident
    tokens are queries; or conversely), the steps `start` to `stop` - 1, with the buffers and barriers that it
    uses.

    Attributes:
        group: the warpgroup's index, 0 or 1.
        start: the index of the first step.
        stop: the index of the last step + 1.
        schedule: the sizes of the loop's steps, and how it overlaps loads, products and exponentials.
        streamed: buffers in shared memory of the streamed inputs, by name, [stages, ...].
        full: one barrier for each stage, which completes when the stage's tiles have been loaded.
        empty: one barrier for each stage, which completes when both warpgroups have used the stage's tiles.
        wait_other: a function that waits until the other warpgroup calls it too, so that the two alternate; it does nothing where
            they do not alternate. All calls use the same function object, so that they share one jaxpr.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    group: Any
    start: Any
    stop: Any
    schedule: Schedule
    streamed: dict[str, Any]
    full: Any
    empty: Any
    wait_other: Callable[[], None]
    interpret: Any

    def stage(self, n):
        """Return the index of the buffer for the streamed tile of step n, among the `stages` buffers of each streamed input in
        shared memory.
        """
        return lax.rem(n - self.start, self.schedule.stages)

    def tiles(self, n) -> dict[str, Any]:
        """Return references to the buffers in shared memory with the tiles of the streamed inputs for step n, by the inputs'
        names.
        """
        stage = self.stage(n)
        return {name: buffer.at[stage] for name, buffer in self.streamed.items()}

    def wait_tiles(self, n) -> None:
        """Wait until all streamed tiles of step n, which the third warpgroup loads, are in shared memory."""
        plgpu.barrier_wait(self.full.at[self.stage(n)])

    def release_tiles(self, n) -> None:
        """Signal that this warpgroup has used the streamed tiles of step n; their buffers in shared memory may be overwritten
        once the other computing warpgroup has signalled it too.
        """
        plgpu.barrier_arrive(self.empty.at[self.stage(n)])

    def accumulate(self, products: Products, sums, carry, parts) -> Any:
        """Run all steps of a warpgroup's loop over the streamed tokens; return the sums of matrix products (such as the output,
        or the gradients of keys and values), and the values that the last step passes on.

        Args:
            products: the functions that compute one step of the loop.
            sums: the initial values of the sums, a list of arrays [64, D].
            carry: the values that each step receives from the step before, such as the largest score so far; these are for the
                first step.
            parts: consecutive ranges of steps, each as (first, last + 1, keyword arguments of `products.use`); a bound of None is
                the loop's own first step or last + 1.
        """
        deferred = self.schedule.deferred
        shape = (ROWS, self.schedule.size)
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.bfloat16), wg.LAYOUT)
        state = sums, carry, [zero] * len(sums) if deferred else []
        # The second warpgroup is half a step behind the first.
        pl.when(self.group == 1)(self.wait_other)
        if deferred:
            self.wait_tiles(self.start)
        for first, stop, options in parts:
            first = self.start if first is None else first
            stop = self.stop if stop is None else stop
            step = self._deferred_step if deferred else self._step
            state = lax.fori_loop(first, stop, functools.partial(step, products, options), state)
        sums, carry, operands = state
        if deferred:
            sums = self._add(products, self.stop - 1, operands, sums)
            self.release_tiles(self.stop - 1)
        pl.when(self.group == 0)(self.wait_other)
        return sums, carry

    def _step(self, products: Products, options, n, state):
        """Compute step n of a warpgroup's loop: its scores, the elementwise work on them, and the products that are added to the
        running sums.

        `state` is (sums, carry, []): the running sums and the values that a step receives from the step before. Return it after
        the step.
        """
        sums, carry, _ = state
        tiles = self.tiles(n)
        self.wait_tiles(n)

        def scores(*refs):
            products.scores(tiles, *refs)
            self.wait_other()

        values = wg.products_from_zero(scores, *products.shapes)
        operands, factor, carry = products.use(n, tiles, tuple(values), carry, **options)
        sums, operands = _scaled(sums, factor), _bfloat16(operands)
        self.wait_other()
        sums = self._add(products, n, operands, sums)
        self.release_tiles(n)
        return sums, carry, []

    def _deferred_step(self, products: Products, options, n, state):
        """Compute the scores of step n of a warpgroup's loop, and the elementwise work on them, while the products of step n - 1
        are added to the running sums.

        `state` is (sums, carry, operands): the running sums, the values that a step receives from the step before, and the left
        operands of the products of step n - 1. Return it after the step, with the operands of step n.
        """
        sums, carry, operands = state
        tiles = self.tiles(n)
        scores = functools.partial(products.scores, tiles)

        def use(*values):
            results = products.use(n, tiles, values, carry, **options)
            # The wait is here because the compiler moves exponentials past the wait for products, but not past a branch.
            pl.when(n + 1 < self.stop)(lambda: self.wait_tiles(n + 1))
            return results

        # The first step has operands of zeros, and multiplies its own tile by them.
        before = self.tiles(jnp.maximum(n - 1, self.start))
        add = functools.partial(products.add, before, operands)
        sums, results = wg.overlap(
            scores, products.shapes, add, sums, use, interpret=self.interpret
        )
        operands, factor, carry = results
        sums, operands = _scaled(sums, factor), _bfloat16(operands)
        pl.when(n > self.start)(lambda: self.release_tiles(n - 1))
        return sums, carry, operands

    def _add(self, products: Products, n, operands, sums):
        """Return a warpgroup's running `sums` (such as the output of its queries) plus the matrix products of the left operands
        `operands` with the streamed tiles of step n.
        """
        add = functools.partial(products.add, self.tiles(n), operands)
        return wg.accumulate(add, *sums, interpret=self.interpret)


def _scaled(sums, factor):
    """Return the arrays `sums` [64, D] with each row multiplied by its entry of `factor` [64], by which a new
    maximum of the softmax rescales earlier weights; None is 1.
    """
    return sums if factor is None else [x * wg.spread_rows(factor, x.shape) for x in sums]


def _bfloat16(operands):
    return [x.astype(jnp.bfloat16) for x in operands]


class Warpgroup(NamedTuple):
    """The argument of the function with which one warpgroup of an attention kernel computes: its queries or keys (the resident
    tokens) in shared memory, its loop over the row's other tokens (the streamed tokens), and references to global memory.

    Attributes:
        at: the row, the head, and the position of the warpgroup's resident tokens.
        resident: references in shared memory to the values of the resident inputs at the warpgroup's 64
            tokens, by name.
        left: a buffer for the left operand of a product, which the interpreter requires; None on a GPU.
        traversal: the warpgroup's loop over tiles of the streamed tokens, with its buffers and barriers.
        refs: references to global memory, by the names of `Pipeline.in_global` and of the outputs.
    """

    at: Position
    resident: dict[str, Any]
    left: Any
    traversal: Traversal
    refs: dict[str, Any]


class Pipeline(NamedTuple):
    """An attention kernel in which two warpgroups, each with 64 queries (or keys), the resident tokens, loop over tiles of the
    row's keys (or queries), the streamed tokens, which a third warpgroup loads.

    Attributes:
        resident: the arrays of the resident tokens, [B, T, *, D], by name; each warpgroup has its tokens' values in shared
            memory.
        streamed: the arrays of the streamed tokens, [B, T, *, D], [B, H, T] or [B, T], by name; one tile is loaded for each step.
        in_global: arrays that the computation reads from global memory, by name.
        schedule: the sizes of the loop's steps, and how it overlaps loads, products and exponentials.
        begin: [B, H, T / 128], the first streamed tile of each resident tile; None is the tile of the same
            index.
        end: [B, H, T / 128], the last streamed tile of each resident tile; None is the tile of the same
            index.
        over_queries: if True, the resident tokens are keys, and the loop runs over the queries from the tile
            of the same tokens on; if False, the resident tokens are queries, and the loop runs over the keys
            up to the tile of the same tokens, which is `end`.
    """

    resident: Mapping[str, jax.Array]
    streamed: Mapping[str, jax.Array]
    in_global: Mapping[str, jax.Array]
    schedule: Schedule
    begin: jax.Array | None
    end: jax.Array | None
    over_queries: bool = False

    @property
    def heads(self) -> int:
        """The number of query heads of the attention, H: the largest number of heads of the kernel's inputs."""
        arrays = (*self.resident.values(), *self.streamed.values())
        return max(x.shape[2] for x in arrays if x.ndim == 4)

    @property
    def num_tiles(self) -> int:
        """The number of tiles of 128 resident tokens (queries or keys) in a row; each is computed by one
        thread block.
        """
        return next(iter(self.resident.values())).shape[1] // TILE

    def launch(
        self,
        compute: Callable[[Warpgroup], None],
        outputs: dict[str, jax.ShapeDtypeStruct],
        *,
        name: str,
        interpret: Any,
    ) -> dict[str, jax.Array]:
        """Run the attention kernel that this object describes on the GPU, with one thread block for each row, query head and tile
        of 128 resident tokens; return its output arrays by name.

        Args:
            compute: the function that each of the two computing warpgroups calls once.
            outputs: the shapes and dtypes of the output arrays, by name.
            name: the kernel's name in profiles.
            interpret: parameters of the Pallas interpreter, or False to compile the kernel.
        """
        inputs: dict[str, Any] = {f"resident {n}": x for n, x in self.resident.items()}
        inputs |= {f"streamed {n}": x for n, x in self.streamed.items()}
        inputs |= {f"global {n}": x for n, x in self.in_global.items()}
        batch = next(iter(self.resident.values())).shape[0]
        return hopper_launch.launch(
            lambda refs: self._kernel(refs, compute, outputs, interpret),
            inputs=inputs | dict(begin=self.begin, end=self.end),
            outputs=outputs,
            grid=dict(row=batch * self.heads, tile=self.num_tiles),
            num_threads=3,
            name=name,
            interpret=interpret,
        )

    def _kernel(self, refs, compute, outputs, interpret) -> None:
        """Run a thread block of the kernel: call `compute` in its first two warpgroups, each with its 64
        resident tokens in shared memory, and load the streamed tokens in the third. `refs` are references to
        global memory; `outputs` names the outputs.
        """
        row, group = lax.axis_index("row"), lax.axis_index("group")
        at, start, stop = self._position(refs, row, group)

        def body(smem):
            def wait_other():
                for barrier in smem["other"]:
                    plgpu.barrier_arrive(barrier)
                    plgpu.barrier_wait(barrier)

            traversal = Traversal(
                group,
                start,
                stop,
                self.schedule,
                smem["streamed"],
                smem["full"],
                smem["empty"],
                wait_other,
                interpret,
            )

            @pl.when(group < 2)
            def _():
                plgpu.set_max_registers(232, action="increase")
                resident = {name: buffer.at[group] for name, buffer in smem["resident"].items()}
                for name, buffer in resident.items():
                    source = self._tokens_of(refs[f"resident {name}"], at, at.tokens)
                    plgpu.copy_gmem_to_smem(source, buffer, smem["loaded"].at[group])
                plgpu.barrier_wait(smem["loaded"].at[group])
                left = smem["left"] and smem["left"][0].at[group]
                named = {name: refs[f"global {name}"] for name in self.in_global}
                named |= {name: refs[name] for name in outputs}
                compute(Warpgroup(at, resident, left, traversal, named))

            @pl.when(group == 2)
            def _():
                plgpu.set_max_registers(40, action="decrease")
                self._load(refs, at, traversal)

        hopper_launch.with_smem(body, self._smem(interpret))

    def _position(self, refs, row, group) -> tuple[Position, Any, Any]:
        """Return the position of a warpgroup's resident tokens, the index of the first step of its loop over the streamed tokens,
        and the index of the last step + 1. `row` is the thread block's index over batch and heads, `group` the index of the
        warpgroup in its thread block.
        """
        per_tile = TILE // self.schedule.size
        b, h = lax.div(row, self.heads), lax.rem(row, self.heads)
        # The thread blocks with the longest loops start first.
        tile = lax.axis_index("tile")
        tile = tile if self.over_queries else self.num_tiles - 1 - tile
        first = tile * TILE + group * ROWS
        begin, end = self.begin is not None, self.end is not None
        start = (refs["begin"][b, h, tile] if begin else tile) * per_tile
        stop = (refs["end"][b, h, tile] if end else tile) * per_tile + per_tile
        same = self.over_queries or not end
        in_row = first if same else refs["end"][b, h, tile] * TILE + group * ROWS
        return Position(b, h, tile, first, pl.ds(first, ROWS), in_row), start, stop

    def _tokens_of(self, ref, at: Position, tokens) -> Any:
        """Return a reference to the tokens `tokens` of an input in global memory, `ref` ([B, T, heads, D],
        [B, H, T] or [B, T]), in the batch's row and the head of the position `at`.
        """
        if len(ref.shape) == 4:
            return ref.at[at.b, tokens, lax.div(at.h * ref.shape[2], self.heads)]
        return ref.at[at.b, at.h, tokens] if len(ref.shape) == 3 else ref.at[at.b, tokens]

    def _load(self, refs, at: Position, traversal: Traversal) -> None:
        """Copy the tiles of the streamed inputs to shared memory, for all steps of the loop, each as soon as its buffer is free;
        then wait until both computing warpgroups have used the last tiles.
        """
        size, stages = self.schedule.size, self.schedule.stages
        start, stop = traversal.start, traversal.stop

        def load(n, _):
            stage = traversal.stage(n)

            @pl.when(n - start >= stages)
            def _():
                plgpu.barrier_wait(traversal.empty.at[stage])

            for name, buffer in traversal.streamed.items():
                source = self._tokens_of(refs[f"streamed {name}"], at, pl.ds(n * size, size))
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], traversal.full.at[stage])

        def wait(n, _):
            plgpu.barrier_wait(traversal.empty.at[traversal.stage(n)])

        lax.fori_loop(start, stop, load, None)
        lax.fori_loop(jnp.maximum(stop - stages, start), stop, wait, None)

    def _smem(self, interpret) -> dict[str, Any]:
        """Return the types of a thread block's buffers and barriers in shared memory, by name: buffers for the arrays of its 128
        resident tokens and for the streamed tiles of `stages` steps, and barriers that tell when these have been loaded and
        used.
        """
        size, stages = self.schedule.size, self.schedule.stages

        def buffer(x, *shape):
            if x.ndim == 4:
                return plgpu.SMEM((*shape, x.shape[-1]), x.dtype, transforms=wg.TILED)
            return plgpu.SMEM(shape, x.dtype)

        left: Any = [plgpu.SMEM((2, ROWS, size), jnp.bfloat16, transforms=wg.TILED)]
        return dict(
            resident={name: buffer(x, 2, ROWS) for name, x in self.resident.items()},
            streamed={name: buffer(x, stages, size) for name, x in self.streamed.items()},
            left=left if interpret else [],
            loaded=plgpu.Barrier(num_arrivals=len(self.resident), num_barriers=2),
            full=plgpu.Barrier(num_arrivals=len(self.streamed), num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            other=[plgpu.Barrier(num_arrivals=2)] if self.schedule.alternate else [],
        )
