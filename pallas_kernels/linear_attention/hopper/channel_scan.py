"""The scan over chunks of linear attention with a decay per key channel, on Mosaic GPU (Hopper).

A warpgroup has 64 value channels of a memory S [K, V] in registers, [K, 64]. With queries decayed from the chunk's start (`read`),
keys decayed to its end (`written`) and the chunk's decayed scores, it computes

    out = read S + scores values,    S <- chunk_decay S + writtenᵀ values

for one chunk after another, while another warpgroup loads the next chunks. Two warpgroups of a thread block use the same inputs.

With two slices of key channels a warpgroup has the memories of both, and adds their outputs in registers, where that needs no more rounds of
thread blocks than one slice in each (`_slices_together`); otherwise XLA adds the outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import BLOCK, CHUNK
from pallas_kernels.hopper.launch import launch, with_smem

_STAGES = 3  # chunks that are loaded or in use at once
_TILE = (CHUNK, BLOCK)
_F32 = jnp.float32


def channel_scan(
    read, written, values, scores, chunk_decay, *, initial=None, reverse: bool = False, save: bool = False,
    chunk_bounds=None, key_slices: int = 1, interpret: Any = False,
) -> list[jax.Array]:  # fmt: skip
    """Carry the memories S [K, V] of h heads through all chunks of a row, with a decay per key channel; return the output and the
    last memories.

    For each chunk, out = read S + scores values, and S <- chunk_decay S + writtenᵀ values. h is the largest number of heads of an
    argument; the numbers of heads of the others, written as *, divide it.

    Args:
        read: [B, T, *, K], the queries, decayed from the chunk's start; None, with `scores` None, returns no output.
        written: [B, T, *, K], the keys, decayed to the chunk's end.
        values: [B, T, *, V], the values that are written.
        scores: [B, *, T, 64], the decayed scores of each chunk's queries and keys, transposed by the kernel if `reverse`.
        chunk_decay: [B, *, N * K], the decay of each key channel over each of the N chunks.
        initial: [B * S, h, K, V] float32, S before the first chunk (if `reverse`, after the last); None is 0.
        reverse: whether to compute the last chunk first, as for gradients.
        save: whether to return also the memory before each chunk (if `reverse`, after it).
        chunk_bounds: [B, S + 1], the chunks at which a row's S memories begin and end, of `row_layout.split_runs`; None for one
            memory per row.
        key_slices: number of slices of key channels; each is a head of `written`, and several consecutive ones have the same values and one
            output, their sum. The slices of a head's value channels are consecutive heads of `values`, and of each head of `written`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The output [B, T, h / key_slices, V] if `read` is given; S after the last chunk that is computed, [B * S, h, K, V] float32; and, if
        `save`, S before each of the N chunks (after it, if `reverse`), [B, h, N, K, V].
    """
    batch, length, key_heads, depth = written.shape
    heads = max(key_heads, values.shape[2] * key_slices)
    width, count = values.shape[-1], length // CHUNK
    blocks = width // BLOCK
    streams = dict(
        read=read, written=written, values=values, scores=scores, chunk_decay=chunk_decay
    )
    streams = {name: x for name, x in streams.items() if x is not None}
    groups = 1 if blocks % 2 else 2
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    programs = batch * runs * heads * blocks // groups
    together = 1 if read is None else _slices_together(key_slices, programs)
    if together > 1:
        streams |= {n: _join_slices(n, streams[n], together) for n in streams if n != "values"}
    call = _Call(
        shapes={name: x.shape for name, x in streams.items()}, heads=heads // together, depth=depth, count=count,
        groups=groups, reverse=reverse, save=save, from_zero=initial is None,
        key_slices=key_slices // together, together=together, interpret=interpret,
    )  # fmt: skip
    struct: Any = jax.ShapeDtypeStruct
    buffer: Any = plgpu.SMEM
    tiles = functools.partial(buffer, dtype=values.dtype, transforms=wg.TILED)
    smem = dict(memory=tiles((call.groups, depth, BLOCK)), out=tiles((call.groups, *_TILE)))

    def kernel(refs):
        at = _position(call, refs)
        with_smem(lambda buffers: _Warpgroup(call, at, refs, buffers).compute(), smem)

    results = launch(
        kernel,
        inputs=streams | dict(initial=initial, chunk_bounds=chunk_bounds),
        outputs=dict(
            out=None if read is None else struct((batch, length, call.heads, width), values.dtype),
            last=struct((batch * runs, heads, depth, width), _F32),
            saved=struct((batch, heads, count, depth, width), values.dtype) if save else None,
        ),
        grid=dict(row=batch * runs * call.heads, column=blocks // call.groups),
        num_threads=call.groups + 1,
        reduction_scratch_bytes=0,
        name="linear_attention_channel_scan",
        interpret=interpret,
    )
    if read is not None and call.key_slices > 1:
        results["out"] = _add_slices(results["out"], call)
    return list(results.values())


def _slices_together(key_slices: int, programs: int) -> int:
    """Return how many slices of key channels a warpgroup computes, in registers at once: 2 of 2, or 1; three do not fit.

    It is 2 if twice the time of half the `programs` is no more than that of all, of which a processor has room for one at a time.
    """

    def rounds(programs):
        return -(-programs // PROCESSORS)

    return 2 if key_slices == 2 and 2 * rounds(programs // 2) <= rounds(programs) else 1


def _join_slices(name: str, x: jax.Array, slices: int) -> jax.Array:
    """Return the input `name`, in which the slices of a head are heads, with them side by side (`read`, `written`: [B, T, *, K * slices]) or
    one after another (`scores` [B, *, slices * T, 64], `chunk_decay` [B, *, slices * N * K]).
    """
    if name in ("read", "written"):
        return x.reshape(*x.shape[:2], -1, x.shape[3] * slices)
    return x.reshape(x.shape[0], -1, slices * x.shape[2], *x.shape[3:])


def _add_slices(out: jax.Array, call: _Call) -> jax.Array:
    """Return the outputs [B, T, h, V] of memories of slices of key channels, added in float32: [B, T, h / key_slices, V]."""
    batch, length, heads, width = out.shape
    pieces = heads // call.shapes["written"][2]  # of a head's value channels
    out = out.reshape(batch, length, heads // pieces, pieces * width)
    out = row_layout.sum_heads(out, heads // pieces // call.key_slices)
    return out.reshape(batch, length, -1, width)


class _Call(NamedTuple):
    """Sizes and options of one call of `channel_scan`, which carries memories [K, V] through the chunks of all rows.

    Attributes:
        shapes: shapes of the inputs that are loaded chunk by chunk, by name.
        heads: number of heads of the output.
        depth: number of key channels, K.
        count: number of chunks of a row, N.
        groups: number of warpgroups of a thread block that compute, each 64 value channels.
        reverse: whether the last chunk is computed first.
        save: whether the memory before each chunk is returned.
        from_zero: whether the memory before the first chunk is 0, since there is no initial memory.
        key_slices: number of slices of key channels, with the same values, whose outputs XLA adds.
        together: number of slices of key channels that a warpgroup computes, one after the other for each chunk; the slices of one of the
            `heads` are not heads of the inputs then, but of memories.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    shapes: dict[str, tuple[int, ...]]
    heads: int
    depth: int
    count: int
    groups: int
    reverse: bool
    save: bool
    from_zero: bool
    key_slices: int
    together: int
    interpret: Any

    @property
    def with_output(self) -> bool:
        """Whether the scan computes an output, that is, has queries (`read`); without them it only writes memories."""
        return "read" in self.shapes

    def input_head(self, name: str, h):
        """Return the index of the head of the input `name`, [B, T, *, ...], that the memory of head h uses."""
        if name == "values" and self.key_slices > 1:
            pieces = self.heads // self.shapes["written"][2]
            return lax.div(h, self.key_slices * pieces) * pieces + lax.rem(h, pieces)
        return lax.div(h * self.shapes[name][2], self.heads)

    def memory_head(self, h, part):
        """Return the index of the head of memories that has the slice `part` of the key channels that head h computes together."""
        if self.together == 1:
            return h
        pieces = self.heads // self.shapes["written"][2]
        return (lax.div(h, pieces) * self.together + part) * pieces + lax.rem(h, pieces)


class _Position(NamedTuple):
    """The memory, its 64 value channels and its chunks that one warpgroup of `channel_scan` computes.

    Attributes:
        row: index of the memory in [B * S], b * S + s.
        h: index of the head.
        b: index of the row in the batch.
        steps: number of chunks that this memory passes through.
        chunk: function from n to the index, in the row, of the n-th chunk to be computed.
        group: the warpgroup's index in its thread block.
        columns: the slice of the 64 value channels that this warpgroup computes.
        block_columns: the slice of the value channels that all warpgroups of its thread block compute.
    """

    row: Any
    h: Any
    b: Any
    steps: Any
    chunk: Callable[[Any], Any]
    group: Any
    columns: Any
    block_columns: Any


def _position(call: _Call, refs: dict[str, Any]) -> _Position:
    """Return the memory, the value channels and the chunks that this warpgroup of `channel_scan` computes, from its index in the
    grid.
    """
    row, h = lax.div(lax.axis_index("row"), call.heads), lax.rem(lax.axis_index("row"), call.heads)
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), row, call.count, call.reverse)
    group, groups = lax.axis_index("group"), call.groups
    columns = pl.ds((lax.axis_index("column") * groups + group) * BLOCK, BLOCK)
    block_columns = pl.ds(lax.axis_index("column") * groups * BLOCK, groups * BLOCK)
    return _Position(row, h, b, steps, chunk, group, columns, block_columns)


class _Warpgroup(NamedTuple):
    """The computation of one warpgroup of `channel_scan`: it carries 64 value channels of one memory through the chunks.

    Attributes:
        call: sizes and options of the scan.
        at: which memory, value channels and chunks the warpgroup computes.
        refs: inputs and outputs in global memory, by name.
        smem: buffers in shared memory, for each of the thread block's warpgroups: `memory` [groups, K, 64] and `out` [groups, 64,
            64].
    """

    call: _Call
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def compute(self) -> None:
        """Carry 64 value channels of a memory through all of its chunks: run the pipeline in which another warpgroup loads the
        inputs of one chunk after another.
        """
        call = self.call
        sources, specs = zip(*map(self.source, call.shapes), strict=True)
        pipeline: Any = plgpu.emit_pipeline_warp_specialized
        slices = (call.together,) if call.together > 1 else ()
        pipeline(
            self.compute_chunk, grid=(self.at.steps, *slices), in_specs=list(specs), max_concurrent_steps=min(_STAGES, call.count),
            num_compute_wgs=call.groups, memory_registers=40, wg_axis="group", compute_context=self.compute_all,
        )(*sources)  # fmt: skip

    def source(self, name: str) -> tuple[Any, Any]:
        """Return, for the input `name` of the scan, a reference to the row and head of it in global memory that this warpgroup's
        memory uses, and the `BlockSpec` of the tile that is loaded for each chunk, and each slice of key channels.
        """
        call, at, source = self.call, self.at, self.refs[name]
        if name in ("scores", "chunk_decay"):
            source = source.at[at.b, lax.div(at.h * call.shapes["written"][2], call.heads)]
        else:
            source = source.at[at.b, :, call.input_head(name, at.h)]
        if name == "chunk_decay":
            return source, plgpu.BlockSpec(
                (call.depth,), lambda n, part=0: (part * call.count + at.chunk(n),)
            )
        columns = dict(scores=CHUNK, values=call.groups * BLOCK).get(name, call.depth)
        source = source.at[:, at.block_columns] if name == "values" else source

        def place(n, part=0):
            if name == "scores":
                return part * call.count + at.chunk(n), 0
            return at.chunk(n), 0 if name == "values" else part

        return source, plgpu.BlockSpec((CHUNK, columns), place, transforms=wg.TILED)

    def compute_all(self, pipeline: Callable) -> None:
        """Carry this warpgroup's memory [K, 64], or that of each slice of key channels, from its initial value (or 0) through all chunks, and
        store the memory after the last chunk.

        `pipeline` runs `compute_chunk` for one chunk after another, from the memories and the output that it is called with, and returns the
        last ones.
        """
        call, at = self.call, self.at
        heads = [call.memory_head(at.h, part) for part in range(call.together)]
        if call.from_zero:
            zeros = jnp.zeros((call.depth, BLOCK), _F32)
            memories = [plgpu.layout_cast(zeros, wg.LAYOUT) for _ in heads]
        else:
            initial = self.refs["initial"].at[at.row]
            memories = [wg.load_global(initial.at[h, :, at.columns]) for h in heads]
        out = [self.no_output()] if call.together > 1 else []
        memories, _ = pipeline((memories, out))
        for h, S in zip(heads, memories, strict=True):
            self.refs["last"].at[at.row, h, :, at.columns][...] = S
        plgpu.wait_smem_to_gmem(0)

    def no_output(self) -> Any:
        """Return a tile of zeros [64, 64], to which the outputs of slices of key channels are added."""
        return plgpu.layout_cast(jnp.zeros(_TILE, _F32), wg.LAYOUT)

    def compute_chunk(self, indices, *arguments) -> Any:
        """Return the memory [K, 64] after one chunk, and store the chunk's output.

        `indices` has the chunk's index in the order of computation and, of several slices of key channels, the slice's; `arguments` are
        references to the chunk's inputs and, last, the memories of the slices before the chunk, with this slice's first, and the sum of the
        outputs of the slices before it. They are returned with the next slice's first.
        """
        call, at = self.call, self.at
        *loaded, ((S, *others), partial) = arguments
        chunk = dict(zip(call.shapes, loaded, strict=True))
        n, part = at.chunk(indices[0]), indices[1] if call.together > 1 else 0
        written, values = chunk["written"], chunk["values"]
        if call.groups > 1:
            values = values.at[:, pl.ds(at.group * BLOCK, BLOCK)]
        memory = self.smem["memory"].at[at.group]
        # Loaded before the fence in `copy_memory`: not each slice, and not each scan, stores an output.
        decay = wg.load_rows(chunk["chunk_decay"])
        self.copy_memory(n, part, S, memory)
        S = S * wg.spread_rows(decay, (call.depth, BLOCK))
        write = lambda S: plgpu.wgmma(S, written.transpose((1, 0)), values)  # noqa: E731
        if not call.with_output:
            return wg.accumulate(write, S, interpret=call.interpret), []
        scores = chunk["scores"].transpose((1, 0)) if call.reverse else chunk["scores"]

        def products(out, S):
            plgpu.wgmma(out, scores, values)
            plgpu.wgmma(out, chunk["read"], memory)
            write(S)

        begin = partial[0] if partial else jnp.zeros(_TILE, _F32)
        out, S = wg.accumulate(products, begin, S, interpret=call.interpret)
        if call.together == 1:
            self.store_output(n, out)
            return [S], []
        is_last = part == call.together - 1
        pl.when(is_last)(lambda: self.store_output(n, out))
        return [*others, S], [jnp.where(is_last, self.no_output(), out)]

    def store_output(self, n, out) -> None:
        """Store the output [64, 64] of chunk n, by a copy that runs on."""
        call, at = self.call, self.at
        buffer = self.smem["out"].at[at.group]
        plgpu.wait_smem_to_gmem(1 if call.save else 0, wait_read_only=True)
        buffer[...] = out.astype(buffer.dtype)
        plgpu.commit_smem()
        target = self.refs["out"].at[at.b, pl.ds(n * CHUNK, CHUNK), at.h, at.columns]
        plgpu.copy_smem_to_gmem(buffer, target)

    def copy_memory(self, n, part, S, buffer) -> None:
        """Copy the memory S [K, 64] before chunk n, of a slice of key channels if there are several together, to a buffer in shared
        memory, from which products read it; if `save`, also store it.
        """
        call, at = self.call, self.at
        if call.save:
            # Wait for all copies but the output's, which began after the memory's; the slice before this one may have none.
            later = 1 if call.with_output and call.together == 1 else 0
            plgpu.wait_smem_to_gmem(later, wait_read_only=True)
        if call.save or call.with_output:
            buffer[...] = S.astype(buffer.dtype)
        plgpu.commit_smem()  # also without a copy: it orders the load of the decay before the next load into its buffer
        if call.save:
            target = self.refs["saved"].at[at.b, call.memory_head(at.h, part), n, :, at.columns]
            plgpu.copy_smem_to_gmem(buffer, target)
