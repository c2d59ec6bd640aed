"""The scan over chunks that the delta rules' kernels share, on Mosaic GPU (Hopper).

A warpgroup has 64 value channels of a memory in registers, transposed: S [64, K], in pieces [64, size] of the keys. It computes the
chunks in order, and another warpgroup loads the inputs of the next ones. What a chunk does to S is the caller's function `step`.

Up to K = 128 S is one piece, and is the left operand of a product in registers. A larger S leaves no registers for a copy in bfloat16:
its pieces of 64 keys are then copied to shared memory, and are left operands from there.
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
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK

_F32, _BF16 = jnp.float32, jnp.bfloat16
_SQUARE = (CHUNK, CHUNK)
_BLOCK = 64  # columns of the memory (value channels) that a warpgroup has
_LARGEST_IN_REGISTERS = 128  # K up to which the memory is a left operand in registers
_STAGES = 3  # chunks that are loaded or in use at once, if shared memory is large enough
_SMEM = 226 * 1024  # bytes of shared memory, of 227
_KEY_INPUTS = ("q", "k", "written", "reach")  # inputs that have K numbers for each token
_TOKEN_ROWS = ("beta", "enter", "leave")  # what the input `rows` contains, in this order


def zip_with_keys(S, others=None):
    """Pairs of the slice of keys of each piece of S [64, size], and the piece; or the piece of `others` in its place."""
    keys = (pl.ds(n * x.shape[1], x.shape[1]) for n, x in enumerate(S))
    return list(zip(keys, S if others is None else others, strict=False))


def decay_memory(chunk, S):
    """The pieces of S [64, size], decayed by a whole chunk: per key if `chunk` has `keep`, else by the last number of `enter`."""
    if "keep" not in chunk:
        keep = chunk["enter"][CHUNK - 1] if "enter" in chunk else 1.0
        return [x * keep for x in S]
    vectors = (plgpu.load(chunk["keep"].at[keys], layout=wg.LAYOUT.reduce(0)) for keys, _ in zip_with_keys(S))  # fmt: skip
    return [x * wg.spread_columns(keep, x.shape) for keep, x in zip(vectors, S, strict=True)]


def scan(
    step, given, initial, depth, tokens, outs, *, save, heads, reverse, interpret, parts: int = 1,
    checkpoints: int = 1, chunk_bounds=None,
):  # fmt: skip
    """Carry a memory over all chunks.

    Args:
        step: called for each chunk as `step(chunk, S, left, operands, save_memory, store_outputs)`; it returns the next S.
            `chunk`: references to the chunk's inputs, by name, with `beta`, `enter` and `leave` [64] from `rows`.
            `S`: a list of pieces [64, size].
            `left`: three buffers for left operands, which only the interpreter requires (else None).
            `operands(S)`: yields lists of (keys, left operand), as many as shared memory has buffers for, and whether they are the last.
            `save_memory(S)`: called once the products of the last operands have begun.
            `store_outputs(*values)`: stores the outputs [64 value channels, C], transposed.
        given: the inputs by name; None is left out: q, k, v, written and reach [B, T, *, D], keep [B, heads, N * K],
            rows [B, heads, T * n], and any others [B, heads, T, C].
        initial: [B * S, heads * parts, K, V] float32; None is 0, or the identity if there is no v.
        depth: K.
        tokens: shape and dtype of an output, [B, T, heads, V].
        outs: the outputs' names.
        save: also return S before each chunk.
        heads: of the outputs.
        reverse: compute the last chunk first.
        interpret: parameters of the interpreter, or False.
        parts: a divisor of N. All parts of the sequence are computed at the same time, each from its initial memory.
        checkpoints: a divisor of N. If more than 1, also return S at the beginning of each of so many parts; `parts` is then 1.
        chunk_bounds: [B, S + 1], the chunks at which those of a row's S memories begin and end, or None; `parts` is then 1.

    Returns:
        The outputs, the saved memories [B, heads, N, V, K] if `save`, those of the checkpoints [B, heads * checkpoints, K, V] if there
        are any, and the last ones [B * S, heads * parts, K, V].
    """
    inputs = {name: x for name, x in given.items() if x is not None}
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
    call = _Call(
        shapes={name: x.shape for name, x in inputs.items()}, outs=tuple(outs), length=length, heads=heads,
        depth=depth, count=count, parts=parts, checkpoints=checkpoints, reverse=reverse, save=save,
        from_zero=initial is None, interpret=interpret,
    )  # fmt: skip
    plan = _plan(call, programs * (width // _BLOCK), width // _BLOCK)
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
        grid=dict(row=programs, column=width // _BLOCK // plan.groups),
        num_threads=plan.groups + 1,
        name="delta_rule_scan",
        interpret=interpret,
    )
    if checkpoints > 1:
        results["checkpoints"] = jnp.swapaxes(results["checkpoints"], -1, -2)
    *others, last = results.values()
    return *others, jnp.swapaxes(last, -1, -2)


class _Call(NamedTuple):
    """Sizes and options of one call.

    Attributes:
        shapes: of the inputs that are loaded chunk by chunk, by name.
        outs: names of the outputs.
        length: T.
        heads: of the outputs.
        depth: K.
        count: chunks of a part.
        parts: of the sequence.
        checkpoints: memories that are returned, or 1.
        reverse: whether the last chunk is the first.
        save: whether S before each chunk is returned.
        from_zero: whether there is no initial memory.
        interpret: parameters of the interpreter, or False.
    """

    shapes: dict[str, tuple[int, ...]]
    outs: tuple[str, ...]
    length: int
    heads: int
    depth: int
    count: int
    parts: int
    checkpoints: int
    reverse: bool
    save: bool
    from_zero: bool
    interpret: Any

    @property
    def in_smem(self) -> bool:
        """Whether S is a left operand from shared memory, in pieces of 64 keys; else it is one, in registers."""
        return bool(self.interpret) or self.depth > _LARGEST_IN_REGISTERS

    @property
    def size(self) -> int:
        """Keys of a piece of S."""
        return _BLOCK if self.in_smem else self.depth

    @property
    def pieces(self) -> int:
        """Pieces of S."""
        return self.depth // self.size

    @property
    def row_count(self) -> int:
        """Vectors in `rows`."""
        return self.shapes["rows"][2] // self.length if "rows" in self.shapes else 0


class _Plan(NamedTuple):
    """The use of warpgroups and of shared memory.

    Attributes:
        groups: computing warpgroups of a thread block, which use the same loaded inputs: 1 or 2.
        buffers: [64, 64] buffers of a warpgroup.
        separate: whether every piece of S and every output has a buffer of its own.
        stages: chunks that are loaded or in use at once.
    """

    groups: int
    buffers: int
    separate: bool
    stages: int


def _plan(call: _Call, programs: int, blocks: int) -> _Plan:
    """Choose the plan for so many warpgroups, `blocks` of them for the columns of one memory."""
    # Two warpgroups of a block take 1.7 times as long as one that has a processor of its own. So two share a block if that fills all
    # processors less often, and if shared memory is large enough to load ahead.
    alone = 10 * pl.cdiv(programs, PROCESSORS) < 17 * pl.cdiv(programs, 2 * PROCESSORS)
    buffers, ahead = 2 if call.in_smem else max(1, len(call.outs)), min(2, call.count)
    share = blocks % 2 == 0 and not alone and _count_stages(call, 2, buffers) >= ahead
    groups = 2 if share else 1
    # One warpgroup alone may have buffers for all pieces of S at once, and for outputs, so that it does not wait for their copies.
    every = call.pieces + len(call.outs)
    separate = call.in_smem and groups == 1 and _count_stages(call, 1, every) >= ahead
    buffers = every if separate else buffers
    return _Plan(groups, buffers, separate, _count_stages(call, groups, buffers))


def _count_stages(call: _Call, groups: int, buffers: int) -> int:
    """The number of chunks whose inputs fit into shared memory, at most `_STAGES`, next to the buffers of the warpgroups."""
    sizes = dict.fromkeys(call.shapes, CHUNK) | dict.fromkeys(_KEY_INPUTS, call.depth)
    sizes |= dict(v=groups * _BLOCK, rows=8, keep=8)  # vectors are aligned to 1024 bytes
    chunk_bytes = sum(2 * CHUNK * sizes[name] for name in call.shapes)
    saved = call.depth * (call.save and not call.in_smem)
    buffer_bytes = 2 * groups * _BLOCK * (CHUNK * buffers + saved)
    return min(_STAGES, call.count, (_SMEM - buffer_bytes) // chunk_bytes)


def _smem(call: _Call, plan: _Plan) -> dict[str, Any]:
    """The shared memory of a thread block, next to that of its pipeline."""
    smem: Any = plgpu.SMEM
    tiles = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    return dict(
        tiles=tiles((plan.groups, plan.buffers, *_SQUARE)),
        saved=tiles((plan.groups, _BLOCK, call.depth)) if call.save and not call.in_smem else None,
        left=[tiles((plan.groups, *_SQUARE))] * 3 if call.interpret else None,
    )


class _Position(NamedTuple):
    """The memory that a warpgroup computes, and its chunks.

    Attributes:
        b: row of the batch.
        h: head.
        memory: the memory's indices in the first and the last memories.
        steps: number of its chunks.
        chunk: the index in the row of its n-th chunk.
        group: the warpgroup's index in its thread block.
        columns: the slice of its value channels.
        block_columns: the slice of the value channels of all warpgroups of the block.
    """

    b: Any
    h: Any
    memory: tuple[Any, Any]
    steps: Any
    chunk: Callable[[Any], Any]
    group: Any
    columns: Any
    block_columns: Any


def _position(call: _Call, plan: _Plan, refs: dict[str, Any]) -> _Position:
    """The position of this warpgroup in the grid."""
    heads, count, parts = call.heads, call.count, call.parts
    row, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
    memory = row, h
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), row, count, call.reverse)
    if parts > 1:
        head, part = (f(lax.axis_index("row"), parts) for f in (lax.div, lax.rem))
        b, h = lax.div(head, heads), lax.rem(head, heads)
        memory = b, h * parts + part
        chunk = lambda n: part * count + (count - 1 - n if call.reverse else n)  # noqa: E731
    group = lax.axis_index("group")
    columns = pl.ds((lax.axis_index("column") * plan.groups + group) * _BLOCK, _BLOCK)
    block_columns = pl.ds(lax.axis_index("column") * plan.groups * _BLOCK, plan.groups * _BLOCK)
    return _Position(b, h, memory, steps, chunk, group, columns, block_columns)


class _Warpgroup(NamedTuple):
    """The computation of one warpgroup.

    Attributes:
        call: the call.
        plan: its plan.
        step: the caller's function.
        at: the memory that it computes.
        refs: inputs and outputs in global memory, by name.
        smem: buffers of `_smem`, by name.
    """

    call: _Call
    plan: _Plan
    step: Callable
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def compute(self) -> None:
        """Carry the memory over its chunks."""
        pipeline: Any = plgpu.emit_pipeline_warp_specialized
        sources, specs = zip(*map(self.source, self.call.shapes), strict=True)
        pipeline(
            self.compute_chunk, grid=(self.at.steps,), in_specs=list(specs), max_concurrent_steps=self.plan.stages,
            num_compute_wgs=self.plan.groups, memory_registers=24 if self.call.in_smem else 40, wg_axis="group",
            compute_context=self.compute_all,
        )(*sources)  # fmt: skip

    def source(self, name: str) -> tuple[Any, Any]:
        """An input in global memory, and its block for each chunk."""
        call, at, shape = self.call, self.at, self.call.shapes[name]
        if name in ("v", *_KEY_INPUTS):
            source = self.refs[name].at[at.b, :, lax.div(at.h * shape[2], call.heads)]
            if name == "v":
                source = source.at[:, at.block_columns]
            block = (CHUNK, self.plan.groups * _BLOCK if name == "v" else call.depth)
        else:
            source = self.refs[name].at[at.b, at.h]
            vectors = dict(rows=call.row_count * CHUNK, keep=call.depth)
            block = (vectors[name],) if name in vectors else _SQUARE
        rest = (0,) * (len(block) - 1)
        transforms = wg.TILED if rest else ()
        return source, plgpu.BlockSpec(block, lambda n: (at.chunk(n), *rest), transforms=transforms)

    def compute_all(self, pipeline: Callable) -> None:
        """Run the pipeline from the initial memory, and store the last one."""
        call, at = self.call, self.at
        S = pipeline(tuple(self.initial(n) for n in range(0, call.depth, call.size)))
        for keys, piece in zip_with_keys(S):
            self.refs["last"].at[*at.memory, at.columns, keys][...] = piece
        plgpu.wait_smem_to_gmem(0)

    def initial(self, key: int):
        """The piece [64, size] of the initial memory from a key on."""
        call, at = self.call, self.at
        if not call.from_zero:
            keys = pl.ds(key, call.size)
            return wg.load_global(self.refs["initial"].at[*at.memory, at.columns, keys])
        shape = (_BLOCK, call.size)
        if "v" in call.shapes:
            return plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)
        i, j = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=wg.LAYOUT) for axis in (0, 1))
        return jnp.where(i + at.columns.start == j + key, 1.0, 0.0).astype(_F32)

    def compute_chunk(self, indices, *arguments) -> Any:
        """The memory after a chunk, from references to its inputs and the memory before it."""
        *loaded, S = arguments
        chunk: dict[str, Any] = dict(zip(self.call.shapes, loaded, strict=True))
        group = self.at.group
        if self.plan.groups > 1 and "v" in chunk:
            chunk["v"] = chunk["v"].at[:, pl.ds(group * _BLOCK, _BLOCK)]
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
        """Store S if chunk n is the first after a checkpoint."""
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
    """The copies of one chunk through shared memory: the functions that `step` calls.

    Attributes:
        warpgroup: the warpgroup.
        n: the chunk.
        buffers: the warpgroup's [64, 64] buffers.
    """

    warpgroup: _Warpgroup
    n: Any
    buffers: list[Any]

    def operands(self, S) -> Iterator[tuple[list[tuple[Any, Any]], bool]]:
        """Yield the pieces of S in bfloat16 as left operands, with their keys, and whether these are the last.

        Those in shared memory are also saved from there.
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
        """Where S before this chunk is saved, or some keys of it."""
        at = self.warpgroup.at
        return self.warpgroup.refs["states"].at[at.b, at.h, self.n, at.columns, *keys]

    def save_memory(self, S) -> None:
        """Start to save S before this chunk, unless `operands` has."""
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
        """Start to store this chunk's outputs [64 value channels, C]."""
        call, plan, at = self.warpgroup.call, self.warpgroup.plan, self.warpgroup.at
        if not values:
            return
        if call.in_smem:
            # Wait for all copies but this chunk's of pieces of S, if these have buffers of their own.
            later = call.pieces if plan.separate and call.save else 0
            plgpu.wait_smem_to_gmem(later, wait_read_only=True)
        free = self.buffers[call.pieces :] if plan.separate else self.buffers
        for buffer, value in zip(free, values, strict=False):
            buffer.transpose((1, 0))[...] = value.astype(_BF16)
        plgpu.commit_smem()
        for buffer, name in zip(free, call.outs, strict=False):
            target = self.warpgroup.refs[name].at[
                at.b, pl.ds(self.n * CHUNK, CHUNK), at.h, at.columns
            ]
            plgpu.copy_smem_to_gmem(buffer, target)
