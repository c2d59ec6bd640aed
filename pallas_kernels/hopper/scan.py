"""The scan over chunks that the delta rules' kernels share, on Mosaic GPU (Hopper).

A warpgroup has 64 value channels of a memory in registers, transposed: S [64, K], as a list of tiles [64, size], each with `size` of the K
key channels. It computes the chunks in order, and another warpgroup loads the inputs of the next ones. What a chunk does to S is the
caller's function `step`.

Up to K = 128 S is one tile, and is the left operand of a product in registers. With a larger S there are no registers for a copy in
bfloat16: its tiles of 64 key channels are then copied to shared memory, and are left operands from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import row_and_head
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.hopper.scan_plan import BLOCK, KEY_INPUTS, Call, Plan, make_plan

_F32, _BF16 = jnp.float32, jnp.bfloat16
_SQUARE = (CHUNK, CHUNK)
_TOKEN_ROWS = (
    "beta",
    "read_decay",
    "write_decay",
    "erase_decay",
)  # what the input `rows` contains, in this order


def zip_with_keys(S, others=None):
    """Return a list of pairs (slice of key channels, tile), one for each tile [64, size] of a memory S [64,
    K] that is divided along its key channels. With a list `others`, pair each slice with an item of it
    instead of the tile.
    """
    keys = (pl.ds(n * x.shape[1], x.shape[1]) for n, x in enumerate(S))
    return list(zip(keys, S if others is None else others, strict=False))


def decay_memory(chunk, S):
    """Return a memory S, a list of tiles [64, size] along its key channels, decayed by a whole chunk.

    `chunk` has references to the chunk's inputs by name. The decay is one per key channel if there is a `chunk_decay` [K], else the last
    number of `read_decay` [C], and 1 if there is neither.
    """
    if "chunk_decay" not in chunk:
        chunk_decay = chunk["read_decay"][CHUNK - 1] if "read_decay" in chunk else 1.0
        return [x * chunk_decay for x in S]
    vectors = (plgpu.load(chunk["chunk_decay"].at[keys], layout=wg.LAYOUT.reduce(0)) for keys, _ in zip_with_keys(S))  # fmt: skip
    return [
        x * wg.spread_columns(chunk_decay, x.shape)
        for chunk_decay, x in zip(vectors, S, strict=True)
    ]


def scan(
    step, arrays, initial, depth, tokens, outs, *, save, heads, reverse, interpret, parts: int = 1,
    checkpoints: int = 1, chunk_bounds=None,
):  # fmt: skip
    """Carry the memories of a delta rule over all chunks of their rows in one kernel, and return the outputs and the last memories.

    Args:
        step: called for each chunk as `step(chunk, S, left, operands, save_memory, store_outputs)`; it returns the next S.
            `chunk`: references to the chunk's inputs, by name, with `beta`, `read_decay`, `write_decay` and `erase_decay` [64], or the first of them, from `rows`.
            `S`: the memory, a list of tiles [64, size] along its key channels, with 64 value channels each.
            `left`: three buffers for left operands, which only the interpreter requires (else None).
            `operands(S)`: yields lists of (keys, left operand), as many as shared memory has buffers for, and whether they are the last.
            `save_memory(S)`: called once the products of the last operands have begun.
            `store_outputs(*values)`: stores the outputs [64 value channels, C], transposed.
        arrays: the inputs by name; None is left out: q, k, a, v and written [B, T, *, D], chunk_decay [B, heads, N * K] (the decays of the
            N chunks of a row), rows [B, heads, T * n] (n numbers per token), and any others [B, heads, T, C].
        initial: [B * S, heads * parts, K, V] float32; None is 0, or the identity if there is no v.
        depth: K, the number of key channels.
        tokens: shape and dtype of an output, [B, T, heads, V].
        outs: the outputs' names.
        save: also return S before each chunk.
        heads: the number of heads of the outputs.
        reverse: compute the chunks from the last to the first.
        interpret: parameters of the interpreter, or False.
        parts: the number of parts of each row, a divisor of its number of chunks N. All parts are computed at the same time, each from
            its initial memory.
        checkpoints: a divisor of N. If it is more than 1, the row is divided into that many equal parts, and the
            memory S before each of them is also returned; `parts` is then 1.
        chunk_bounds: [B, S + 1], the chunks at which those of a row's S memories begin and end, or None; `parts` is then 1.

    Returns:
        The outputs; if `save`, the transposed memories before each chunk [B, heads, N, V, K]; with
        `checkpoints` above 1, the checkpointed memories [B, heads * checkpoints, K, V]; and the memories after
        the last chunk [B * S, heads * parts, K, V].
    """
    inputs = {name: x for name, x in arrays.items() if x is not None}
    batch, length, _, width = tokens.shape
    count = length // CHUNK // parts
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    struct = jax.ShapeDtypeStruct
    outputs: dict[str, Any] = {name: tokens for name in outs}
    if save:
        outputs["states"] = struct((batch, heads, count * parts, width, depth), _BF16)
    if checkpoints > 1:
        outputs["checkpoints"] = struct((batch, heads * checkpoints, width, depth), _F32)
    outputs["last"] = struct((batch * runs, heads * parts, width, depth), _F32)
    programs = batch * runs * heads * parts
    call = Call(
        shapes={name: x.shape for name, x in inputs.items()}, outs=tuple(outs), length=length, heads=heads,
        depth=depth, count=count, parts=parts, checkpoints=checkpoints, reverse=reverse, save=save,
        from_zero=initial is None, interpret=interpret,
    )  # fmt: skip
    plan = make_plan(call, programs * (width // BLOCK), width // BLOCK, PROCESSORS)
    smem = _smem(call, plan)

    def kernel(refs):
        at = _position(call, plan, refs)
        with_smem(lambda buffers: _Warpgroup(call, plan, step, at, refs, buffers).compute(), smem)

    results = launch(
        kernel,
        inputs=inputs
        | dict(
            initial=None if initial is None else jnp.swapaxes(initial, -1, -2),
            chunk_bounds=chunk_bounds,
        ),
        outputs=outputs,
        grid=dict(row=programs, column=width // BLOCK // plan.groups),
        num_threads=plan.groups + 1,
        name="delta_rule_scan",
        interpret=interpret,
    )
    if checkpoints > 1:
        results["checkpoints"] = jnp.swapaxes(results["checkpoints"], -1, -2)
    *others, last = results.values()
    return *others, jnp.swapaxes(last, -1, -2)


def _smem(call: Call, plan: Plan) -> dict[str, Any]:
    """Return the types of a thread block's buffers in shared memory, by name, besides the buffers of its pipeline of inputs."""
    smem: Any = plgpu.SMEM
    tiles = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    return dict(
        tiles=tiles((plan.groups, plan.buffers, *_SQUARE)),
        saved=tiles((plan.groups, BLOCK, call.depth)) if call.save and not call.in_smem else None,
        left=[tiles((plan.groups, *_SQUARE))] * 3 if call.interpret else None,
    )


class _Position(NamedTuple):
    """Which memory a warpgroup of the scan computes, which of its value channels, and which chunks update it.

    Attributes:
        b: index of the row of the batch.
        h: index of the head.
        memory: the memory's two indices in the arrays [B * S, heads * parts, ...] of initial and of final
            memories.
        steps: the number of chunks that update the memory.
        chunk: a function that returns the index in the row of the n-th of these chunks.
        group: the warpgroup's index in its thread block.
        columns: the slice of the value channels that this warpgroup computes.
        block_columns: the slice of the value channels that all warpgroups of the thread block compute.
    """

    b: Any
    h: Any
    memory: tuple[Any, Any]
    steps: Any
    chunk: Callable[[Any], Any]
    group: Any
    columns: Any
    block_columns: Any


def _position(call: Call, plan: Plan, refs: dict[str, Any]) -> _Position:
    """Return which memory, value channels and chunks this warpgroup of the scan computes, from its indices in the grid. `refs` has
    `chunk_bounds` if rows have several memories.
    """
    heads, count, parts = call.heads, call.count, call.parts
    row, h = row_and_head(heads)
    memory = row, h
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), row, count, call.reverse)
    if parts > 1:
        head, part = (f(lax.axis_index("row"), parts) for f in (lax.div, lax.rem))
        b, h = lax.div(head, heads), lax.rem(head, heads)
        memory = b, h * parts + part
        chunk = lambda n: part * count + (count - 1 - n if call.reverse else n)  # noqa: E731
    group = lax.axis_index("group")
    columns = pl.ds((lax.axis_index("column") * plan.groups + group) * BLOCK, BLOCK)
    block_columns = pl.ds(lax.axis_index("column") * plan.groups * BLOCK, plan.groups * BLOCK)
    return _Position(b, h, memory, steps, chunk, group, columns, block_columns)


class _Warpgroup(NamedTuple):
    """One warpgroup's computation in the scan: it carries 64 value channels of one memory over all chunks
    that update it.

    Attributes:
        call: the sizes and options of the scan.
        plan: how a thread block uses warpgroups and shared memory.
        step: the caller's function that computes one chunk.
        at: which memory, value channels and chunks the warpgroup computes.
        refs: references to inputs and outputs in global memory, by name.
        smem: references to the buffers of `_smem` in shared memory, by name.
    """

    call: Call
    plan: Plan
    step: Callable
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def compute(self) -> None:
        """Carry the warpgroup's memory over all chunks that update it, in a pipeline in which another warpgroup loads the inputs of later
        chunks.
        """
        pipeline: Any = plgpu.emit_pipeline_warp_specialized
        sources, specs = zip(*map(self.source, self.call.shapes), strict=True)
        pipeline(
            self.compute_chunk, grid=(self.at.steps,), in_specs=list(specs), max_concurrent_steps=self.plan.stages,
            num_compute_wgs=self.plan.groups, memory_registers=24 if self.call.in_smem else 40, wg_axis="group",
            compute_context=self.compute_all,
        )(*sources)  # fmt: skip

    def source(self, name: str) -> tuple[Any, Any]:
        """Return how the scan's pipeline loads the input `name` chunk by chunk: a reference in global memory
        to the input's values for this memory, and the specification of the block that is loaded for each
        chunk.
        """
        call, at, shape = self.call, self.at, self.call.shapes[name]
        if name in ("v", *KEY_INPUTS):
            source = self.refs[name].at[at.b, :, lax.div(at.h * shape[2], call.heads)]
            if name == "v":
                source = source.at[:, at.block_columns]
            block = (CHUNK, self.plan.groups * BLOCK if name == "v" else call.depth)
        else:
            source = self.refs[name].at[at.b, at.h]
            vectors = dict(rows=call.row_count * CHUNK, chunk_decay=call.depth)
            block = (vectors[name],) if name in vectors else _SQUARE
        rest = (0,) * (len(block) - 1)
        transforms = wg.TILED if rest else ()
        return source, plgpu.BlockSpec(block, lambda n: (at.chunk(n), *rest), transforms=transforms)

    def compute_all(self, pipeline: Callable) -> None:
        """Run the pipeline over all chunks that update this warpgroup's memory, and store the memory after
        the last one. `pipeline` is a function from the memory before the first chunk to the memory after the
        last chunk.
        """
        call, at = self.call, self.at
        S = pipeline(tuple(self.initial(n) for n in range(0, call.depth, call.size)))
        for keys, piece in zip_with_keys(S):
            self.refs["last"].at[*at.memory, at.columns, keys][...] = piece
        plgpu.wait_smem_to_gmem(0)

    def initial(self, key: int):
        """Return one tile [64, size] of the initial memory S [64, K], the tile whose first key channel is
        `key`: loaded from global memory, or of zeros if there is no initial memory, or of the identity if
        also the scan has no values.
        """
        call, at = self.call, self.at
        if not call.from_zero:
            keys = pl.ds(key, call.size)
            return wg.load_global(self.refs["initial"].at[*at.memory, at.columns, keys])
        shape = (BLOCK, call.size)
        if "v" in call.shapes:
            return plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)
        i, j = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=wg.LAYOUT) for axis in (0, 1))
        return jnp.where(i + at.columns.start == j + key, 1.0, 0.0).astype(_F32)

    def compute_chunk(self, indices, *arguments) -> Any:
        """Compute one chunk of the scan: call the caller's `step` with the chunk's inputs and the memory
        before the chunk, and return the memory after the chunk.

        Args:
            indices: the index of the pipeline's step, as a sequence of one number.
            *arguments: references to the chunk's inputs in shared memory; the last one is the memory before
                the chunk, tiles [64, size].
        """
        *loaded, S = arguments
        chunk: dict[str, Any] = dict(zip(self.call.shapes, loaded, strict=True))
        group = self.at.group
        if self.plan.groups > 1 and "v" in chunk:
            chunk["v"] = chunk["v"].at[:, pl.ds(group * BLOCK, BLOCK)]
        for index in range(self.call.row_count):
            chunk[_TOKEN_ROWS[index]] = chunk["rows"].at[pl.ds(index * CHUNK, CHUNK)]
        n = self.at.chunk(indices[0])
        self.store_checkpoint(n, S)
        tiles = self.smem["tiles"]
        buffers = [tiles.at[group, index] for index in range(self.plan.buffers)]
        copies = _Copies(self, n, buffers)
        left = [buffer.at[group] for buffer in self.smem.get("left", ())] or [None] * 3
        return self.step(chunk, S, left, copies.operands, copies.save_memory, copies.store_outputs)

    def store_checkpoint(self, n, S) -> None:
        """Store the memory S before chunk n of the row in the output of checkpointed memories, if one of the equal parts between
        checkpoints begins at chunk n.
        """
        call, at = self.call, self.at
        if call.checkpoints == 1:
            return
        stride = call.count // call.checkpoints

        @pl.when(lax.rem(n, stride) == 0)
        def _():
            checkpoint = at.b, at.h * call.checkpoints + lax.div(n, stride), at.columns
            for keys, piece in zip_with_keys(S):
                self.refs["checkpoints"].at[*checkpoint, keys][...] = piece


class _Copies(NamedTuple):
    """Functions that copy one chunk's memory and outputs from registers through shared memory to global
    memory. The scan gives them to its caller's function `step`.

    Attributes:
        warpgroup: the warpgroup that computes the chunk.
        n: index of the chunk in the row.
        buffers: the warpgroup's [64, 64] buffers in shared memory.
    """

    warpgroup: _Warpgroup
    n: Any
    buffers: list[Any]

    def operands(self, S) -> Iterator[tuple[list[tuple[Any, Any]], bool]]:
        """Yield the tiles of the memory S in bfloat16 as left operands of products: lists of pairs (slice of the key channels, operand),
        and whether a list is the last.

        If the memory before each chunk is saved, the operands that are in shared memory are also saved from there.
        """
        call, separate = self.warpgroup.call, self.warpgroup.plan.separate
        if not call.in_smem:
            yield [(keys, piece.astype(_BF16)) for keys, piece in zip_with_keys(S)], True
            return
        operands = []
        for index, (keys, piece) in enumerate(zip_with_keys(S)):
            if not separate:
                # Wait for all copies but the last one, which is of the other buffer.
                plgpu.wait_smem_to_gmem(int(call.save or index == 0), wait_read_only=True)
            elif index == 0:
                plgpu.wait_smem_to_gmem(len(call.outs), wait_read_only=True)
            buffer = self.buffers[index if separate else (index + 1) % 2]
            buffer[...] = piece.astype(_BF16)
            operands.append((keys, buffer))
            if separate and index < len(S) - 1:
                continue
            plgpu.commit_smem()
            for keys, buffer in operands if call.save else ():
                plgpu.copy_smem_to_gmem(buffer, self.saved(keys))
            yield operands, index == len(S) - 1
            operands = []

    def saved(self, *keys):
        """Return a reference to the place in global memory where the memory before this chunk is saved,
        [64 value channels, K]; with `keys`, a slice of key channels, only to these channels of it.
        """
        at = self.warpgroup.at
        return self.warpgroup.refs["states"].at[at.b, at.h, self.n, at.columns, *keys]

    def save_memory(self, S) -> None:
        """Start to save the memory S before this chunk to global memory, unless `operands` has saved it already or no memory is saved.
        First wait until earlier copies have left shared memory.
        """
        call, at, smem = self.warpgroup.call, self.warpgroup.at, self.warpgroup.smem
        if call.in_smem:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if not call.save:
            return
        buffer = smem["saved"].at[at.group]
        for keys, piece in zip_with_keys(S):
            buffer.at[:, keys][...] = piece.astype(_BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.saved())

    def store_outputs(self, *values) -> None:
        """Start to store this chunk's outputs in global memory. `values` are the outputs in registers, one
        tile [64 value channels, C] each (transposed).
        """
        call, plan, at = self.warpgroup.call, self.warpgroup.plan, self.warpgroup.at
        if not values:
            return
        if call.in_smem:
            # Wait for all copies but this chunk's of tiles of S, if these have buffers of their own.
            later = call.pieces if plan.separate and call.save else 0
            plgpu.wait_smem_to_gmem(later, wait_read_only=True)
        free = self.buffers[call.pieces :] if plan.separate else self.buffers
        for buffer, value in zip(free, values, strict=False):
            buffer.transpose((1, 0))[...] = value.astype(_BF16)
        plgpu.commit_smem()
        # The first buffer's copy is the last, since the next chunk's first tile of S is for the second buffer (`operands`).
        for buffer, name in reversed(list(zip(free, call.outs, strict=False))):
            target = self.warpgroup.refs[name].at[
                at.b, pl.ds(self.n * CHUNK, CHUNK), at.h, at.columns
            ]
            plgpu.copy_smem_to_gmem(buffer, target)
