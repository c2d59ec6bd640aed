"""The kernel of linear attention with a scalar decay, on Mosaic GPU (Hopper): a scan over chunks that reads and updates memories.

A warpgroup has a tile [D, 64] of a memory S [D, V] in registers and computes

    out_i = read_decay_i x_i S + sum_j exp(cum_i - cum_j) (x_i . y_j) z_j  (j <= i),        S <- chunk_decay S + sum_j (write_decay_j y_j)ᵀ z_j

for one chunk after another, where x read the memory, y and z are the keys and values of the writes, and cum are sums of the log decay
from the chunk's start. Another warpgroup loads the next chunks. Some calls divide a chunk's work among warpgroups otherwise (`scalar_roles`). Where tokens write with factors of their own, cum_j is that of the
writes, with a skip, skip z_i is added to out_i, and where a token is several rows, j <= i compares tokens. Two warpgroups of a thread
block use the same x and y: they have columns of one memory or, where heads of 64 columns are paired, the memories of two heads that
share x and y. If D is more than 128, each slice of 128 rows of S is computed by itself, and the outputs of the slices are added at the
end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper import scalar_roles
from pallas_kernels.linear_attention.hopper.decay_sums import HEADS
from pallas_kernels.linear_attention.hopper.scalar_plan import (
    BLOCK,
    Call,
    Decays,
    chunks_of_interval,
    count_groups,
    pairs,
)
from pallas_kernels.linear_attention.hopper.scalar_roles_plan import Scan, fit_together
from pallas_kernels.linear_attention.hopper.scalar_weights import SQUARE, times_rows, token_weights

ROLES: bool | None = None
"""Whether the warpgroups of a thread block do different parts of a chunk (`scalar_roles`), where that scan supports the call; None: as
`_ran_by_roles` says."""
_DEPTH = 128  # rows of the memory that a warpgroup has, at most
_STAGES = 3  # chunks that are loaded or in use at once
_TILE = CHUNK, BLOCK
_F32 = jnp.float32


def scalar_scan(x, y, z, decay: Decays, **options: Any) -> list[jax.Array]:
    """Carry memories through all chunks of a row: compute a scan that `scan_of` describes; return its results."""
    (results,) = run_scans(scan_of(x, y, z, decay, **options))
    return results


def run_scans(*scans: Scan, together: bool = False) -> list[list[jax.Array]]:
    """Compute scans that `scan_of` describes; return the results of each. If `together`, they have one launch where processors are left over
    for the thread blocks of all of them.
    """
    if together and all(x.by_roles for x in scans) and fit_together(scans):
        results = scalar_roles.roles_scans(*scans)
    else:
        results = [
            scalar_roles.roles_scans(scan)[0] if scan.by_roles else _launch(scan) for scan in scans
        ]
    for scan, arrays in zip(scans, results, strict=True):
        if "out" in arrays:
            arrays["out"] = row_layout.sum_heads(arrays["out"], scan.call.heads)
    return [list(arrays.values()) for arrays in results]


def scan_of(
    x, y, z, decay: Decays, *, heads: int, initial=None, read_scale: float = 1.0,
    write_scale: float = 1.0, reverse: bool = False, partner=None, save_states: bool = False,
    states=None, chunk_bounds=None, skip=None, rank: int = 1, paired: bool = False, each_chunk: bool = False,
    return_sums: bool = False, interpret: Any = False,
) -> Scan:  # fmt: skip
    """Return a scan that carries memories S [D, V] with a scalar decay through all chunks of a row. Its results are what tokens read from
    them and the last memories.

    For token i and the tokens j <= i of its chunk, out_i = read_decay_i x_i S + sum_j exp(cum_i - cum_j) (x_i . y_j) z_j; then S <-
    chunk_decay S + sum_j (write_decay_j y_j)ᵀ z_j. So x are queries, y keys and z values, or, in the backward pass, other arrays in
    their place.

    Args:
        x: [B, T, *, D], what reads the memory; None computes no output, only the memories.
        y: [B, T, *, D], the keys of what is written.
        z: [B, T, *, V], the values of what is written.
        decay: the decays of G heads, and the tokens' documents.
        heads: number of heads of the output; a multiple of G and of the numbers of heads of x, y and z.
        initial: [B * S, heads, D, V] float32, S before the first chunk (if `reverse`, after the last); None is 0.
        read_scale: the factor by which the output is multiplied.
        write_scale: the factor by which the writes are multiplied, also those that the same chunk reads.
        reverse: whether to compute the last chunk first; a token then reads its own and later tokens.
        partner: [B, T, *, V], an array whose inner product with the unrounded output is returned for each token: [B, heads, D /
            128 * V / 64, T], with terms that the caller adds over the third axis. None returns none.
        save_states: whether to return also the memory at the start of each interval of `chunks_of_interval(N)` chunks, [B, heads,
            intervals, D, V].
        states: S saved by another scan, [B, heads, intervals, D, V]; also return the inner products of its rows with those of
            this scan's S at the start of each interval, [B, heads, V / 64, intervals, D]. This scan must then be `reverse`, in
            which S at the start of an interval is S after the interval's first chunk.
        chunk_bounds: [B, S + 1], the chunks at which a row's S memories begin and end, of `row_layout.split_runs`; None for one
            memory per row. With them every chunk is an interval.
        skip: [heads] float32; each head's number times z is added to its output. With `partner`, also return each token's inner product
            of z with it, in the layout of the other inner products: the sum of the first V / 64 terms. Each slice of D repeats these
            terms. None adds nothing.
        rank: number of consecutive rows of x, y and z that are one token, each of which reads all of them; a divisor of 64.
        paired: whether a thread block computes two consecutive heads that share x and y, if V is 64 and there are such.
        each_chunk: whether every chunk is an interval.
        return_sums: whether to return also the sums that this scan computes from log decays: [B, heads, T], up to each token of its chunk,
            and the exponential of the sum after it. It must not be `reverse`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        A scan whose results are the output [B, T, heads, V] if x is given; S after the last chunk that is computed, [B * S, heads, D, V] float32; then the
        inner products with `partner`, the saved memories, the inner products with `states`, those of z with `partner`, and the two arrays of
        sums, if they are requested.
    """
    batch, length, _, all_rows = y.shape
    width, count = z.shape[-1], length // CHUNK
    depth = min(all_rows, _DEPTH)
    slices, blocks = all_rows // depth, width // BLOCK
    interval = 1 if each_chunk or chunk_bounds is not None else chunks_of_interval(count)
    intervals = count // interval
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    read, write = ("write_decay", "read_decay") if reverse else ("read_decay", "write_decay")
    vectors: dict[str, Any] = dict(write_decay=getattr(decay, write))
    if x is not None:
        vectors |= dict(read_decay=getattr(decay, read), cum=decay.cum, run=decay.run)
        vectors |= dict(write_cum=decay.write_cum)
    chunk_decay = decay.chunk_decay
    if decay.run is None and decay.cum is not None:
        # The kernel computes these from the sums, so that XLA does not store them.
        vectors |= {"cum": decay.cum, "write_decay" if reverse else "read_decay": None}
        chunk_decay = None
    sums: tuple[str, ...] = ()
    if decay.log_decay is not None:
        sums = "cum", "read_decay" if reverse else "write_decay"
    streams = {n: a for n, a in (dict(x=x, y=y, z=z) | vectors).items() if a is not None}
    paired = (
        paired
        and x is not None
        and decay.read_decay is not None
        and decay.read_decay.shape[1] == heads
        and pairs(x, y, z, heads)
    )
    others = dict(
        log_decay=decay.log_decay, chunk_decay=chunk_decay, initial=initial, partner=partner, states=states,
        chunk_bounds=chunk_bounds, skip=skip,
    )  # fmt: skip
    groups = 2 if paired else count_groups(blocks, batch * runs * heads * slices)
    call = Call(
        shapes={n: a.shape for n, a in (streams | others).items() if a is not None}, streams=(*streams, *sums), sums=sums,
        heads=heads, depth=depth, slices=slices, blocks=blocks, count=count, interval=interval, groups=groups, paired=paired, reverse=reverse,
        save_states=save_states, read_scale=read_scale, write_scale=write_scale, rank=rank, interpret=interpret,
    )  # fmt: skip
    struct: Any = jax.ShapeDtypeStruct
    if paired:
        streams["z"] = z.reshape(batch, length, heads // 2, 2 * width)
    outputs = dict(
        out=None if x is None else struct((batch, length, heads * slices, width), z.dtype),
        last=struct((batch * runs, heads, all_rows, width), _F32),
        dots=None if partner is None else struct((batch, heads, slices * blocks, length), _F32),
        saved=struct((batch, heads, intervals, all_rows, width), z.dtype) if save_states else None,
        products=None if states is None else struct((batch, heads, blocks, intervals, all_rows), _F32),
        skip_dots=None if skip is None or partner is None else struct((batch, heads, slices * blocks, length), _F32),
        stored_cum=struct((batch, heads, length), _F32) if return_sums else None,
        stored_decay=struct((batch, heads, length), _F32) if return_sums else None,
    )  # fmt: skip
    roles = _ran_by_roles(call, decay) if ROLES is None else ROLES
    roles |= bool(sums) or (x is None and save_states)  # the scan by columns does neither
    return Scan(call, streams | others, outputs, roles and scalar_roles.supports(call))


def adds_decays(q, k, v, log_decay) -> bool:
    """Return whether scans of these arrays (or their shapes), with one document and one memory a row, can compute the sums of their decays
    themselves: as many heads of each array, as many key as value channels, 64 or 128, and a multiple of 8 heads.
    """
    sizes = {x.shape[2:] for x in (q, k, v)}
    plain = log_decay is not None and log_decay.dtype == _F32 and ROLES is not False
    return plain and len(sizes) == 1 and v.shape[3] in (64, 128) and v.shape[2] % HEADS == 0


def _ran_by_roles(call: Call, decay: Decays) -> bool:
    """Return whether a card has run such a call by roles: with a decay, one row a token, and either as many heads of each array and as many key as
    value channels, 64 or 128 (128 with several memories a row; docs/kernels.jsonl), or, with factors of writes and one memory, Mamba2's sizes: keys
    and queries of 128 channels that all heads share, and values of 64 (docs/writes.jsonl). Several documents with one memory have not run.
    """
    if decay.cum is None or decay.run is not None or call.rank > 1:
        return False
    sizes = {call.shapes[name][2:] for name in ("x", "y", "z") if name in call.shapes}
    documents = "chunk_bounds" in call.shapes
    if decay.write_cum is not None or "skip" in call.shapes or call.paired:
        return not documents and sizes == {(1, 128), (call.heads, 64)}
    return len(sizes) == 1 and sizes <= {
        (call.heads, 128),
        *([] if documents else [(call.heads, 64)]),
    }


def _launch(scan: Scan) -> dict[str, jax.Array]:
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
    return dict(
        memory=tiles((call.groups, call.depth, BLOCK)),
        written=tiles((call.groups, *_TILE)),
        out=tiles((call.groups, *_TILE)),
        weights=tiles((call.groups, *SQUARE)) if call.interpret else None,
    )


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
            self.compute_chunk, grid=(self.at.steps,), in_specs=list(specs), max_concurrent_steps=min(_STAGES, call.count),
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
        memory, written = (self.smem[name].at[at.group] for name in ("memory", "written"))
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
        written[...] = writes.astype(written.dtype)
        if "x" not in chunk:
            plgpu.commit_smem()
            write = lambda S: plgpu.wgmma(S, y.transpose((1, 0)), written)  # noqa: E731
            (S,) = wg.accumulate(write, decayed, interpret=call.interpret)
            return S, *ahead
        memory[...] = S.astype(memory.dtype)
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
            plgpu.wgmma(carried, chunk["x"], memory)
            plgpu.wgmma(S, y.transpose((1, 0)), written)

        scores, carried, S = wg.accumulate(
            products, jnp.zeros(SQUARE, _F32), jnp.zeros(_TILE, _F32), decayed, interpret=call.interpret,
        )  # fmt: skip
        if "states" in self.refs:
            pl.when(starts)(lambda: self.store_products(n, S))
        weights = self.weigh(scores, chunk, written.dtype)
        carried = times_rows(carried, chunk, "read_decay", call.read_scale)
        (out,) = wg.accumulate(
            lambda out: plgpu.wgmma(out, weights, z), carried, interpret=call.interpret
        )
        self.store_output(tokens, out, z)
        return S, *ahead

    def save_state(self, n, memory) -> None:
        """Start to store the memory S [D, 64] before chunk n, the first chunk of an interval, for the backward pass."""
        at = self.at
        interval = lax.div(n, self.call.interval)
        target = self.refs["saved"].at[at.b, at.h, interval, at.rows, at.columns]
        plgpu.copy_smem_to_gmem(memory, target)

    def store_products(self, n, S) -> None:
        """Store, for each of the D rows of the memory's gradient S [D, 64], its inner product with the same row of the memory
        that another scan has saved at the start of chunk n.

        The sum of these products is a term of the log decay's gradient.
        """
        at = self.at
        interval = lax.div(n, self.call.interval)
        state = wg.load_global(self.refs["states"].at[at.b, at.h, interval, at.rows, at.columns])
        products = jnp.sum(S * state.astype(_F32), axis=1)
        self.refs["products"].at[at.b, at.h, at.column, interval, at.rows][...] = products

    def weigh(self, scores, chunk, dtype):
        """Return the decayed scores of one chunk as the left operand of a product, [64, 64]: `scores`, the products x_i . y_j of
        what reads the memory and of the keys, times the decay from token j to token i, and 0 where token i does not read token
        j.

        `chunk` has references to the chunk's inputs by name.
        """
        call = self.call
        weights = token_weights(chunk, call.reverse, call.read_scale * call.write_scale, call.rank)
        weights = (scores * weights).astype(dtype)
        if call.interpret:  # the interpreter requires left operands in shared memory
            buffer = self.smem["weights"].at[self.at.group]
            buffer[...] = weights
            weights = buffer
            plgpu.commit_smem()
        return weights

    def store_output(self, tokens, out, z) -> None:
        """Start to store what the chunk's tokens read, `out` [64 tokens, 64 value channels], plus the skip times z, a reference to the
        chunk's values.

        If the scan is called with `partner`, also store each token's inner product of `out` with that array, before `out` is
        rounded and the skip is added, and, if there is a skip, that of z.
        """
        call, at = self.call, self.at
        buffer = self.smem["out"].at[at.group]
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
        buffer[...] = out.astype(buffer.dtype)
        plgpu.commit_smem()
        target = self.refs["out"].at[at.b, tokens, at.h * call.slices + at.slice, at.columns]
        plgpu.copy_smem_to_gmem(buffer, target)
