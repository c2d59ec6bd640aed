"""The scan of linear attention with a scalar decay by columns, on Mosaic GPU (Hopper): each warpgroup carries 64 columns of a memory.

A warpgroup has a tile [D, 64] of a memory S [D, V] in registers and computes what `scalar_scan` defines for one chunk after another.
Another warpgroup loads the next chunks. Two warpgroups of a thread block use the same x and y: they have columns of one memory or, where
heads of 64 columns are paired, the memories of two heads that share x and y.

An exact scan (`Call.terms` of 2 or 3) computes in products of bfloat16 what those of float32 would: weights, memories and decayed writes are each
the sum of so many terms (`warpgroups.split_terms`), with a product for each, and the output is stored in float32, from registers. The inputs x, y
and z are numbers of bfloat16 in all scans, and saved memories have two terms at most.
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
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK, Call
from pallas_kernels.linear_attention.hopper.scalar_roles_plan import Scan
from pallas_kernels.linear_attention.hopper.scalar_weights import SQUARE, times_rows, token_weights

_STAGES = 3  # chunks that are loaded or in use at once
_PLACES = "", "_low", "_lowest"  # ends of the names of the buffers of the terms
_TILE = CHUNK, BLOCK
_F32 = jnp.float32


def columns_scan(scan: Scan) -> dict[str, jax.Array]:
    """Compute a scan by columns: each warpgroup carries 64 columns of a memory through all chunks. Return the outputs by name."""
    call, inputs, outputs, _ = scan
    smem = _smem(call, inputs["z"].dtype)

    def kernel(refs):
        at = _position(call, refs)
        with_smem(lambda buffers: _Warpgroup(call, at, refs, buffers).compute(), smem)

    return launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=call.grid(outputs["last"].shape[0]),
        num_threads=call.groups + 1,
        name="linear_attention_scalar_scan",
        interpret=call.interpret,
    )  # fmt: skip


class _Position(NamedTuple):
    """The rows and columns of a memory S [D, V], and its chunks, that one warpgroup of `scalar_scan` computes.

    Attributes:
        row: index of the memory in [B * S], b * S + s.
        h: index of the head.
        first: index of the first head that the thread block computes.
        b: index of the row in the batch.
        steps: number of chunks that this memory passes through.
        chunk: function from n to the index, in the row, of the n-th chunk to be computed.
        group: the warpgroup's index in its thread block.
        slice: index of the slice of the memory's rows (key channels).
        rows: that slice of the memory's rows.
        column: index of the 64 columns of the memory (value channels).
        columns: the slice of these columns.
        block_columns: the slice of the columns that all warpgroups of the thread block compute.
        chunk_decay: reference to the decay of the memory over each of the row's chunks, or None if the kernel computes it.
        skip: the factor of z in the output of this warpgroup, or None.
    """

    row: Any
    h: Any
    first: Any
    b: Any
    steps: Any
    chunk: Callable[[Any], Any]
    group: Any
    slice: Any
    rows: Any
    column: Any
    columns: Any
    block_columns: Any
    chunk_decay: Any
    skip: Any


def _position(call: Call, refs: dict[str, Any]) -> _Position:
    """Return the rows and columns of a memory, and the chunks, that this warpgroup of `scalar_scan` computes, from its index in the
    grid.
    """
    heads = call.heads // 2 if call.paired else call.heads
    row, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), row, call.count, call.reverse)
    group, index = lax.axis_index("group"), lax.axis_index("slice")
    first, column = h, lax.axis_index("column") * call.groups + group
    if call.paired:  # the warpgroup that loads has index 2, and no head
        first, column = 2 * h, lax.axis_index("column")
        h = first + jnp.minimum(group, 1)
    rows = pl.ds(index * call.depth, call.depth)
    columns = pl.ds(column * BLOCK, BLOCK)
    block_columns = pl.ds(lax.axis_index("column") * call.groups * BLOCK, call.groups * BLOCK)
    chunk_decay = None
    if "chunk_decay" in refs:
        chunk_decay = refs["chunk_decay"].at[b, call.input_head("chunk_decay", h)]
    skip = refs["skip"][h] if "skip" in refs else None
    if skip is not None and call.slices > 1:  # the outputs of all slices are added
        skip = jnp.where(index == 0, skip, 0.0)
    return _Position(
        row, h, first, b, steps, chunk, group, index, rows, column, columns, block_columns, chunk_decay, skip
    )  # fmt: skip


def _smem(call: Call, dtype) -> dict[str, Any]:
    """Return the types of the shared-memory buffers of a thread block of `scalar_scan`, besides those into which its pipeline loads
    inputs.
    """
    smem: Any = plgpu.SMEM
    tiles = functools.partial(smem, dtype=dtype, transforms=wg.TILED)
    memory, written = tiles((call.groups, call.depth, BLOCK)), tiles((call.groups, *_TILE))
    weights = tiles((call.groups, *SQUARE)) if call.interpret else None
    buffers = dict(
        memory=memory, written=written, out=tiles((call.groups, *_TILE)), weights=weights
    )
    if call.terms > 1:  # the output is stored from registers
        buffers["out"] = None
    for place in _PLACES[1 : call.terms]:
        buffers |= {f"{n}{place}": buffers[n] for n in ("memory", "written", "weights")}
    return buffers


def _stages(call: Call) -> int:
    """Return how many chunks are loaded or in use at once: as many as shared memory has room for beside the other buffers."""
    full = call.terms > 1 and call.groups * call.depth > 128
    return min(_STAGES - full, call.count)


class _Warpgroup(NamedTuple):
    """The computation of one warpgroup of `scalar_scan`: it carries a tile [D, 64] of one memory through the chunks.

    Attributes:
        call: sizes and options of the scan.
        at: which tile of which memory, and which chunks, the warpgroup computes.
        refs: inputs and outputs in global memory, by name.
        smem: buffers of the thread block in shared memory, as `_smem` returns them, by name.
    """

    call: Call
    at: _Position
    refs: dict[str, Any]
    smem: dict[str, Any]

    def compute(self) -> None:
        """Carry a tile [D, 64] of a memory through all of its chunks: run the pipeline in which another warpgroup loads the
        inputs of one chunk after another.
        """
        call = self.call
        sources, specs = zip(*map(self.source, call.streams), strict=True)
        pipeline: Any = plgpu.emit_pipeline_warp_specialized
        pipeline(
            self.compute_chunk, grid=(self.at.steps,), in_specs=list(specs), max_concurrent_steps=_stages(call),
            num_compute_wgs=call.groups, memory_registers=40, wg_axis="group", compute_context=self.compute_all,
        )(*sources)  # fmt: skip

    def source(self, name: str) -> tuple[Any, Any]:
        """Return, for the input `name` of the scan, a reference to the row, head and channels of it in global memory that this
        warpgroup's tile of a memory uses, and the `BlockSpec` of what is loaded for each chunk.
        """
        at, source = self.at, self.refs[name]
        if self.call.paired and name not in ("x", "y", "z", "run"):
            spec = plgpu.BlockSpec((2, CHUNK), lambda n: (0, at.chunk(n)))
            return source.at[at.b, pl.ds(at.first, 2)], spec
        if name not in ("x", "y", "z"):
            index = (at.b,) if name == "run" else (at.b, self.call.input_head(name, at.h))
            return source.at[index], plgpu.BlockSpec((CHUNK,), lambda n: (at.chunk(n),))
        columns = self.call.groups * BLOCK if name == "z" else self.call.depth
        head = self.call.input_head(name, at.first)
        head = lax.div(at.first, 2) if self.call.paired and name == "z" else head
        source = source.at[at.b, :, head]
        block = plgpu.BlockSpec((CHUNK, columns), lambda n: (at.chunk(n), 0), transforms=wg.TILED)
        return source.at[:, at.block_columns if name == "z" else at.rows], block

    def compute_all(self, pipeline: Callable) -> None:
        """Carry this warpgroup's tile [D, 64] of a memory from its initial value (or 0) through all chunks, and store the tile
        after the last chunk.

        `pipeline` runs `compute_chunk` for one chunk after another and returns the last tile.
        """
        at = self.at
        if "initial" in self.refs:
            S = wg.load_global(self.refs["initial"].at[at.row, at.h, at.rows, at.columns])
        else:
            S = plgpu.layout_cast(jnp.zeros((self.call.depth, BLOCK), _F32), wg.LAYOUT)
        ahead = () if at.chunk_decay is None else (at.chunk_decay[at.chunk(0)],)
        S, *_ = pipeline((S, *ahead))
        self.refs["last"].at[at.row, at.h, at.rows, at.columns][...] = S
        plgpu.wait_smem_to_gmem(0)

    def compute_chunk(self, indices, *arguments) -> Any:
        """Return the memory S [D, 64] after one chunk and, if decays of chunks are an input, the one of the next chunk; store what the
        chunk's tokens read.

        `indices` has the chunk's index in the order of computation; `arguments` are references to the chunk's inputs and, last, a tuple of
        S before the chunk and the decay over the chunk.
        """
        call, at = self.call, self.at
        *loaded, (S, *ahead) = arguments
        chunk = dict(zip(call.streams, loaded, strict=True))
        if call.paired:
            others = {n: a for n, a in chunk.items() if n not in ("x", "y", "z", "run")}
            chunk |= {n: a.at[at.group] for n, a in others.items()}
        n = at.chunk(indices[0])
        tokens = pl.ds(n * CHUNK, CHUNK)
        y, z = chunk["y"], chunk["z"]
        if call.groups > 1:
            z = z.at[:, pl.ds(at.group * BLOCK, BLOCK)]
        if ahead:
            (chunk_decay,) = ahead
            # Loading a scalar from global memory is slow, so that it is loaded a chunk ahead.
            ahead = (at.chunk_decay[at.chunk(jnp.minimum(indices[0] + 1, at.steps - 1))],)
        else:
            chunk_decay = jnp.exp(chunk["cum"][CHUNK - 1]) if "cum" in chunk else None
        decayed = S if chunk_decay is None else S * chunk_decay
        writes = times_rows(
            plgpu.load(z, layout=wg.LAYOUT).astype(_F32), chunk, "write_decay", call.write_scale
        )
        written = self.store_operand("written", writes)
        if "x" not in chunk:
            plgpu.commit_smem()

            def write(S):
                for term in written:
                    plgpu.wgmma(S, y.transpose((1, 0)), term)

            (S,) = wg.accumulate(write, decayed, interpret=call.interpret)
            return S, *ahead
        memory = self.store_operand("memory", S)
        plgpu.commit_smem()
        # With intervals of one chunk the condition is always true. A constant would let the loads below run before the products.
        starts: Any = True
        if call.interval > 1:
            starts = lax.rem(n, call.interval) == 0
        elif chunk_decay is not None:
            starts = chunk_decay >= 0.0
        if call.save_states:
            pl.when(starts)(lambda: self.save_state(n, memory))

        def products(scores, carried, S):
            plgpu.wgmma(scores, chunk["x"], y.transpose((1, 0)))
            for term in memory:
                plgpu.wgmma(carried, chunk["x"], term)
            for term in written:
                plgpu.wgmma(S, y.transpose((1, 0)), term)

        scores, carried, S = wg.accumulate(
            products, jnp.zeros(SQUARE, _F32), jnp.zeros(_TILE, _F32), decayed, interpret=call.interpret,
        )  # fmt: skip
        if "states" in self.refs:
            pl.when(starts)(lambda: self.store_products(n, S))
        weights = self.weigh(scores, chunk)
        carried = times_rows(carried, chunk, "read_decay", call.read_scale)

        def read(out):
            for term in weights:
                plgpu.wgmma(out, term, z)

        (out,) = wg.accumulate(read, carried, interpret=call.interpret)
        self.store_output(tokens, out, z)
        return S, *ahead

    def store_operand(self, name: str, tile) -> list[Any]:
        """Store a float32 tile in the buffer `name` as an operand of products in bfloat16; return references to the terms whose sum it is: one, or
        two or three of an exact scan.
        """
        stored = []
        for place, term in zip(_PLACES, wg.split_terms(tile, self.call.terms), strict=False):
            stored.append(self.smem[f"{name}{place}"].at[self.at.group])
            stored[-1][...] = term
        return stored

    def save_state(self, n, memory) -> None:
        """Start to store the memory S [D, 64] before chunk n, the first chunk of an interval, for the backward pass: the first two of the terms
        `memory`.
        """
        at = self.at
        interval = lax.div(n, self.call.interval)
        for name, term in zip(("saved", "saved_low"), memory, strict=False):
            target = self.refs[name].at[at.b, at.h, interval, at.rows, at.columns]
            plgpu.copy_smem_to_gmem(term, target)

    def store_products(self, n, S) -> None:
        """Store, for each of the D rows of the memory's gradient S [D, 64], its inner product with the same row of the memory
        that another scan has saved at the start of chunk n.

        The sum of these products is a term of the log decay's gradient.
        """
        at = self.at
        interval = lax.div(n, self.call.interval)
        index = at.b, at.h, interval, at.rows, at.columns
        state = wg.load_global(self.refs["states"].at[index])
        products = jnp.sum(S * state.astype(_F32), axis=1)
        if "states_low" in self.refs:
            low = wg.load_global(self.refs["states_low"].at[index])
            products += jnp.sum(S * low.astype(_F32), axis=1)
        self.refs["products"].at[at.b, at.h, at.column, interval, at.rows][...] = products

    def weigh(self, scores, chunk) -> list[Any]:
        """Return the decayed scores of one chunk as the left operands of products, one to three terms [64, 64]: `scores`, the products x_i . y_j of
        what reads the memory and of the keys, times the decay from token j to token i, and 0 where token i does not read token
        j.

        `chunk` has references to the chunk's inputs by name.
        """
        call = self.call
        weights = token_weights(chunk, call.reverse, call.read_scale * call.write_scale, call.rank)
        if not call.interpret:
            return list(wg.split_terms(scores * weights, call.terms))
        # The interpreter requires left operands in shared memory.
        stored = self.store_operand("weights", scores * weights)
        plgpu.commit_smem()
        return stored

    def store_output(self, tokens, out, z) -> None:
        """Start to store what the chunk's tokens read, `out` [64 tokens, 64 value channels], plus the skip times z, a reference to the
        chunk's values.

        If the scan is called with `partner`, also store each token's inner product of `out` with that array, before `out` is
        rounded and the skip is added, and, if there is a skip, that of z.
        """
        call, at = self.call, self.at
        skipped = None if at.skip is None else plgpu.load(z, layout=wg.LAYOUT).astype(_F32)
        if "partner" in self.refs:
            partner = self.refs["partner"].at[
                at.b, tokens, call.input_head("partner", at.h), at.columns
            ]
            partner = wg.load_global(partner).astype(_F32)
            dots = jnp.sum(out * partner, axis=1)
            index = at.slice * call.blocks + at.column
            self.refs["dots"].at[at.b, at.h, index, tokens][...] = dots
            if skipped is not None:
                skip_dots = jnp.sum(skipped * partner, axis=1)
                self.refs["skip_dots"].at[at.b, at.h, index, tokens][...] = skip_dots
        if at.skip is not None and skipped is not None:
            out += at.skip * skipped
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if call.terms == 1:
            buffer = self.smem["out"].at[at.group]
            buffer[...] = out.astype(buffer.dtype)
        plgpu.commit_smem()  # also ahead of the next chunk's arrival where this one was read
        target = self.refs["out"].at[at.b, tokens, at.h * call.slices + at.slice, at.columns]
        if call.terms > 1:
            target[...] = out
        else:
            plgpu.copy_smem_to_gmem(self.smem["out"].at[at.group], target)
