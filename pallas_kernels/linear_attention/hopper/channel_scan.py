"""The scan over chunks of linear attention with a decay per key channel, on Mosaic GPU (Hopper).

A warpgroup has 64 value channels of a memory S [K, V] in registers, [K, 64]. With queries decayed from the chunk's start (`read`),
keys decayed to its end (`written`) and the chunk's decayed scores, it computes

    out = read S + scores values,    S <- chunk_decay S + writtenᵀ values

for one chunk after another, while another warpgroup loads the next chunks. Two warpgroups of a thread block use the same inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
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
        key_slices: number of slices of key channels; each is a head of `written`, and several consecutive ones have the same values. The
            slices of a head's value channels are consecutive heads of `values`, and of each head of `written`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The output [B, T, h, V] if `read` is given; S after the last chunk that is computed, [B * S, h, K, V] float32; and, if
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
    call = _Call(
        shapes={name: x.shape for name, x in streams.items()}, heads=heads, depth=depth, count=count,
        groups=1 if blocks % 2 else 2, reverse=reverse, save=save, from_zero=initial is None,
        key_slices=key_slices, interpret=interpret,
    )  # fmt: skip
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
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
            out=None if read is None else struct((batch, length, heads, width), values.dtype),
            last=struct((batch * runs, heads, depth, width), _F32),
            saved=struct((batch, heads, count, depth, width), values.dtype) if save else None,
        ),
        grid=dict(row=batch * runs * heads, column=blocks // call.groups),
        num_threads=call.groups + 1,
        reduction_scratch_bytes=0,
        name="linear_attention_channel_scan",
        interpret=interpret,
    )
    return list(results.values())


class _Call(NamedTuple):
    """Sizes and options of one call of `channel_scan`, which carries memories [K, V] through the chunks of all rows.

    Attributes:
        shapes: shapes of the inputs that are loaded chunk by chunk, by name.
        heads: number of heads of the output, h.
        depth: number of key channels, K.
        count: number of chunks of a row, N.
        groups: number of warpgroups of a thread block that compute, each 64 value channels.
        reverse: whether the last chunk is computed first.
        save: whether the memory before each chunk is returned.
        from_zero: whether the memory before the first chunk is 0, since there is no initial memory.
        key_slices: number of slices of key channels, with the same values.
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
        pipeline(
            self.compute_chunk, grid=(self.at.steps,), in_specs=list(specs), max_concurrent_steps=min(_STAGES, call.count),
            num_compute_wgs=call.groups, memory_registers=40, wg_axis="group", compute_context=self.compute_all,
        )(*sources)  # fmt: skip

    def source(self, name: str) -> tuple[Any, Any]:
        """Return, for the input `name` of the scan, a reference to the row and head of it in global memory that this warpgroup's
        memory uses, and the `BlockSpec` of the tile that is loaded for each chunk.
        """
        call, at, source = self.call, self.at, self.refs[name]
        if name in ("scores", "chunk_decay"):
            source = source.at[at.b, lax.div(at.h * call.shapes["written"][2], call.heads)]
        else:
            source = source.at[at.b, :, call.input_head(name, at.h)]
        if name == "chunk_decay":
            return source, plgpu.BlockSpec((call.depth,), lambda n: (at.chunk(n),))
        columns = dict(scores=CHUNK, values=call.groups * BLOCK).get(name, call.depth)
        source = source.at[:, at.block_columns] if name == "values" else source
        block = plgpu.BlockSpec((CHUNK, columns), lambda n: (at.chunk(n), 0), transforms=wg.TILED)
        return source, block

    def compute_all(self, pipeline: Callable) -> None:
        """Carry this warpgroup's memory [K, 64] from its initial value (or 0) through all chunks, and store the memory after the
        last chunk.

        `pipeline` runs `compute_chunk` for one chunk after another, from the memory that it is called with, and returns the last
        memory.
        """
        call, at = self.call, self.at
        if call.from_zero:
            S = plgpu.layout_cast(jnp.zeros((call.depth, BLOCK), _F32), wg.LAYOUT)
        else:
            S = wg.load_global(self.refs["initial"].at[at.row, at.h, :, at.columns])
        self.refs["last"].at[at.row, at.h, :, at.columns][...] = pipeline(S)
        plgpu.wait_smem_to_gmem(0)

    def compute_chunk(self, indices, *arguments) -> Any:
        """Return the memory [K, 64] after one chunk, and store the chunk's output.

        `indices` has the chunk's index in the order of computation; `arguments` are references to the chunk's inputs and, last,
        the memory before the chunk.
        """
        call, at = self.call, self.at
        *loaded, S = arguments
        chunk = dict(zip(call.shapes, loaded, strict=True))
        n = at.chunk(indices[0])
        written, values = chunk["written"], chunk["values"]
        if call.groups > 1:
            values = values.at[:, pl.ds(at.group * BLOCK, BLOCK)]
        memory, out_buffer = (self.smem[name].at[at.group] for name in ("memory", "out"))
        self.copy_memory(n, S, memory)
        S = S * wg.spread_rows(wg.load_rows(chunk["chunk_decay"]), (call.depth, BLOCK))
        write = lambda S: plgpu.wgmma(S, written.transpose((1, 0)), values)  # noqa: E731
        if not call.with_output:
            return wg.accumulate(write, S, interpret=call.interpret)[0]
        scores = chunk["scores"].transpose((1, 0)) if call.reverse else chunk["scores"]

        def products(out, S):
            plgpu.wgmma(out, scores, values)
            plgpu.wgmma(out, chunk["read"], memory)
            write(S)

        zeros = jnp.zeros(_TILE, _F32)
        out, S = wg.accumulate(products, zeros, S, interpret=call.interpret)
        plgpu.wait_smem_to_gmem(1 if call.save else 0, wait_read_only=True)
        out_buffer[...] = out.astype(out_buffer.dtype)
        plgpu.commit_smem()
        target = self.refs["out"].at[at.b, pl.ds(n * CHUNK, CHUNK), at.h, at.columns]
        plgpu.copy_smem_to_gmem(out_buffer, target)
        return S

    def copy_memory(self, n, S, buffer) -> None:
        """Copy the memory S [K, 64] before chunk n to a buffer in shared memory, from which products read it; if `save`, also store
        it.
        """
        call, at = self.call, self.at
        if call.save:
            # Wait for all copies but the output's, which began after the memory's.
            plgpu.wait_smem_to_gmem(1 if call.with_output else 0, wait_read_only=True)
        if call.save or call.with_output:
            buffer[...] = S.astype(buffer.dtype)
            plgpu.commit_smem()
        if call.save:
            target = self.refs["saved"].at[at.b, at.h, n, :, at.columns]
            plgpu.copy_smem_to_gmem(buffer, target)
