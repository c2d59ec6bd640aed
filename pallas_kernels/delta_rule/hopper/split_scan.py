"""The forward scan of the delta rule in which one warpgroup computes the outputs beside those that carry the memory, on Mosaic GPU (Hopper).

Only what the memory after a chunk depends on is computed one thing after another. One or two warpgroups of a thread block carry 64 value
channels of the memory S each, transposed: errors of the chunk's tokens, the triangular system, writes, memory. They put S, in bfloat16, and the
writes u into shared memory, from which another warpgroup computes the outputs `scale e^b ⊙ (q S) + P u` of all these channels, while they begin
the next chunk. It may also compute the scores P, which nothing but a derivative reads again. The last warpgroup loads the inputs of later chunks.

It has the results of `scan.scan_forward` for memories of up to 128 key channels of which none but the last is stored.
`pallas_kernels.tiles.delta` has the formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SQUARE, SolvedChunks
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import head_index
from pallas_kernels.hopper.launch import launch

BLOCK = 64
"""Value channels of a memory in one warpgroup."""
_WIDEST = 128  # key channels up to which a memory is a left operand in registers
_SMEM = 226 * 1024  # bytes of shared memory of a thread block
_STAGES = 3  # chunks that are loaded or in use at once, if shared memory is large enough
# By the number of warpgroups that carry memories: registers of a thread of such a warpgroup, of the one of the outputs (None: those with which
# it begins), and of the one that loads.
_REGISTERS = {1: (240, 200, 40), 2: (176, None, 32)}
_F32, _BF16 = jnp.float32, jnp.bfloat16
_FACTORS = "beta", "read_decay", "write_decay", "erase_decay"


def fits(depth: int, width: int) -> bool:
    """Return whether the kernel accepts K = `depth` key channels and V = `width` value channels."""
    return depth <= _WIDEST and width % BLOCK == 0 and _stages(depth, 1) > 1


def _stages(depth: int, carrying: int) -> int:
    """Return how many chunks a thread block loads at once, with this number of warpgroups that carry memories; 0 or 1 is too few."""
    tile = 2 * CHUNK * BLOCK
    columns = depth // BLOCK
    loaded = (2 * columns + carrying + 2) * tile + 1536
    exchanged = carrying * (columns + 3) * tile + 2048
    return min(_STAGES, (_SMEM - exchanged) // loaded)


class _Sizes(NamedTuple):
    """Sizes and options of a call.

    Attributes:
        heads: number of heads of the output.
        depth: number of key channels, K.
        carrying: number of warpgroups of a thread block that carry memories.
        stages: number of chunks that are loaded or in use at once.
        count: number of chunks in each part of a row.
        parts: number of parts of a row.
        factors: how many of beta and the decays `rows` has.
        numbers: how many numbers of each token `rows` has.
        documents: whether the last of these is the number of the token's document.
        scored: whether the scores are computed here.
        from_zero: whether the memories begin as zeros.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the interpreter, or False.
    """

    heads: int
    depth: int
    carrying: int
    stages: int
    count: int
    parts: int
    factors: int
    numbers: int
    documents: bool
    scored: bool
    from_zero: bool
    scale: float
    interpret: Any

    @property
    def width(self) -> int:
        """The number of value channels of a thread block."""
        return self.carrying * BLOCK

    @property
    def row_pieces(self) -> list[Any]:
        """The slices of a chunk's `rows` that are loaded one by one: a load has at most 256 numbers."""
        ends = [0, *{CHUNK * self.factors, CHUNK * self.numbers}]
        ends.sort()
        return [pl.ds(a, b - a) for a, b in zip(ends, ends[1:], strict=False)]


class _Smem(NamedTuple):
    """Buffers in shared memory of a thread block; tiles are bfloat16.

    Attributes:
        q: [stages, C, K], queries.
        k: [stages, C, K], keys.
        v: [stages, C, width], values.
        inverse: [stages, C, C], inverses of the triangular systems.
        scores: [stages, C, C], scores of queries with keys; None if they are computed here.
        rows: [stages, C * n] float32, beta and the decays of tokens.
        memory: [width, K], the transposed memory before a chunk.
        writes: [2, width, C], the transposed writes of a chunk and what their rounding left.
        out: [C, width], the output on the way to global memory.
        loaded: the barriers at which a stage's inputs are loaded.
        used: the barriers at which the warpgroups have used a stage's inputs.
        memory_stored: the barrier at which `memory` is complete.
        memory_used: the barrier at which the outputs' warpgroup has used `memory`.
        writes_stored: the barrier at which `writes` is complete.
        writes_used: the barrier at which the outputs' warpgroup has used `writes`.
        left: [carrying + 1, 2, 64, C] for the interpreter, which reads left operands from shared memory; else None.
    """

    q: Any
    k: Any
    v: Any
    inverse: Any
    scores: Any
    rows: Any
    memory: Any
    writes: Any
    out: Any
    loaded: Any
    used: Any
    memory_stored: Any
    memory_used: Any
    writes_stored: Any
    writes_used: Any
    left: Any


def _smem_types(sizes: _Sizes) -> _Smem:
    """Return the types of the buffers in shared memory of a thread block."""
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    stages, carrying, depth, width = sizes.stages, sizes.carrying, sizes.depth, sizes.width
    barrier = plgpu.Barrier
    return _Smem(
        q=tile((stages, CHUNK, depth)),
        k=tile((stages, CHUNK, depth)),
        v=tile((stages, CHUNK, width)),
        inverse=tile((stages, *SQUARE)),
        scores=None if sizes.scored else tile((stages, *SQUARE)),
        rows=smem((stages, CHUNK * sizes.numbers), _F32),
        memory=tile((width, depth)),
        writes=tile((2, width, CHUNK)),
        out=tile((CHUNK, width)),
        loaded=barrier(
            num_arrivals=4 + (not sizes.scored) + len(sizes.row_pieces), num_barriers=stages
        ),
        used=barrier(num_arrivals=carrying + 1, num_barriers=stages),
        memory_stored=barrier(num_arrivals=carrying),
        memory_used=barrier(num_arrivals=1),
        writes_stored=barrier(num_arrivals=carrying),
        writes_used=barrier(num_arrivals=1),
        left=tile((carrying + 1, 2, BLOCK, CHUNK)) if sizes.interpret else None,
    )


def split_scan_forward(
    q, k, v, solved: SolvedChunks, initial, *, heads: int, scale: float, parts: int = 1, documents: bool = False,
    chunk_bounds=None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Carry the delta rule's memory through the chunks of each row in order; return the output [B, T, heads, V] bfloat16 and the last memory
    of each part, in the shape of `initial`. The arguments are those of `scan.scan_forward`, of sizes that `fits` accepts. If `solved` has no
    scores, they are computed here; `documents` is then whether `solved.rows` has the numbers of documents.
    """
    batch, length, _, depth = k.shape
    width = v.shape[-1]
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    programs = batch * runs * heads * parts
    blocks = width // BLOCK
    # Two warpgroups of a thread block are taken to need 1.7 times as long as one, as in `scan_plan`.
    rounds = [pl.cdiv(programs * blocks, carrying * PROCESSORS) for carrying in (1, 2)]
    share = blocks % 2 == 0 and 10 * rounds[0] >= 17 * rounds[1] and _stages(depth, 2) > 1
    carrying = 2 if share else 1
    count, numbers = length // CHUNK // parts, solved.rows.shape[2] // length
    scored = solved.scores is None
    extra = 1 + documents if scored and numbers > 1 else 0
    sizes = _Sizes(
        heads=heads, depth=depth, carrying=carrying, stages=min(count, _stages(depth, carrying)), count=count, parts=parts,
        factors=numbers - extra, numbers=numbers, documents=documents, scored=scored, from_zero=initial is None, scale=scale, interpret=interpret,
    )  # fmt: skip

    def kernel(refs):
        types = {name: x for name, x in _smem_types(sizes)._asdict().items() if x is not None}

        def body(**buffers):
            _run(refs, _Smem(**dict.fromkeys(_Smem._fields) | buffers), sizes)

        pl.run_scoped(body, **types, collective_axes="group")

    struct = jax.ShapeDtypeStruct
    memory = batch * runs, heads * parts, width, depth
    results = launch(
        kernel,
        inputs=dict(q=q, k=k, v=v, **solved._asdict(), chunk_bounds=chunk_bounds)
        | dict(initial=None if initial is None else jnp.swapaxes(initial, -1, -2)),
        outputs=dict(out=struct((batch, length, heads, width), _BF16), last=struct(memory, _F32)),
        grid=dict(row=programs, column=blocks // carrying),
        num_threads=carrying + 2,
        name="delta_split_scan",
        interpret=interpret,
    )
    return results["out"], jnp.swapaxes(results["last"], -1, -2)


def _run(refs: dict[str, Any], smem: _Smem, sizes: _Sizes) -> None:
    """Compute this thread block's memories and outputs: the body of the kernel, with the axes "row", "column" and "group"."""
    group = lax.axis_index("group")
    program = _program(refs, smem, sizes, group)
    carry, read, load = _REGISTERS[sizes.carrying]

    @pl.when(group < sizes.carrying)
    def _():
        plgpu.set_max_registers(carry, action="increase")
        program.carry_memory()

    @pl.when(group == sizes.carrying)
    def _():
        if read is not None:
            plgpu.set_max_registers(read, action="increase")
        program.compute_outputs()

    @pl.when(group == sizes.carrying + 1)
    def _():
        plgpu.set_max_registers(load, action="decrease")
        program.load_inputs()


def _program(refs: dict[str, Any], smem: _Smem, sizes: _Sizes, group) -> _Program:
    """Return the program of this warpgroup, from its indices in the grid."""
    row, column = lax.axis_index("row"), lax.axis_index("column")
    head, part = lax.div(row, sizes.parts), lax.rem(row, sizes.parts)
    memory_row, h = lax.div(head, sizes.heads), lax.rem(head, sizes.heads)
    b, steps, chunk = wg.chunks_of_row(refs.get("chunk_bounds"), memory_row, sizes.count, False)
    first = part * sizes.count
    memory = memory_row, h * sizes.parts + part
    return _Program(
        refs, smem, sizes, b, h, memory, steps, lambda n: first + chunk(n), group, column * sizes.width
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Program:
    """The work of a thread block: some value channels of one memory, through the chunks that update it.

    Attributes:
        refs: references to inputs and outputs in global memory, by name.
        smem: the buffers in shared memory.
        sizes: sizes and options of the call.
        b: index of the row of the batch.
        h: index of the head.
        memory: the memory's two indices in the arrays of initial and last memories.
        steps: the number of chunks that update the memory.
        chunk: function that returns the index in the row of the n-th of these chunks.
        group: index of the warpgroup.
        column: the first value channel of the thread block.
    """

    refs: dict[str, Any]
    smem: _Smem
    sizes: _Sizes
    b: Any
    h: Any
    memory: tuple[Any, Any]
    steps: Any
    chunk: Any
    group: Any
    column: Any

    def load_inputs(self) -> None:
        """Load the inputs of all chunks, each when its buffers are free."""
        smem, sizes = self.smem, self.sizes
        heads = sizes.heads

        def load(n, _):
            stage, chunk = lax.rem(n, sizes.stages), self.chunk(n)
            pl.when(n >= sizes.stages)(lambda: plgpu.barrier_wait(smem.used.at[stage]))
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            names = ("inverse",) if sizes.scored else ("inverse", "scores")
            sources = {name: self.refs[name].at[self.b, self.h, tokens] for name in names}
            for name in ("k", "q", "v"):
                ref = self.refs[name]
                sources[name] = ref.at[self.b, tokens, head_index(ref, self.h, heads)]
            sources["v"] = sources["v"].at[:, pl.ds(self.column, sizes.width)]
            for name in ("k", "v", "q", *names):
                buffer = getattr(smem, name).at[stage]
                plgpu.copy_gmem_to_smem(sources[name], buffer, smem.loaded.at[stage])
            rows = self.refs["rows"].at[self.b, self.h]
            for piece in sizes.row_pieces:
                source = rows.at[pl.ds(chunk * CHUNK * sizes.numbers + piece.start, piece.size)]
                plgpu.copy_gmem_to_smem(source, smem.rows.at[stage, piece], smem.loaded.at[stage])

        lax.fori_loop(0, self.steps, load, None)
        for stage in range(sizes.stages):
            pl.when(stage < self.steps)(lambda stage=stage: plgpu.barrier_wait(smem.used.at[stage]))

    def factor(self, stage, name: str):
        """Return a reference [C] to beta or a decay of the chunk's tokens, or None where the call has no such factor, and it is 1."""
        if name == "erase_decay" and self.sizes.factors < len(_FACTORS):
            name = "read_decay"  # the keys read the decayed memory
        index = _FACTORS.index(name)
        return (
            None
            if index >= self.sizes.factors
            else self.smem.rows.at[stage, pl.ds(index * CHUNK, CHUNK)]
        )

    def columns(self, stage, name: str):
        """Return beta or a decay of the chunk's tokens as a tile [64, C] with a token's value in its column, or 1."""
        ref = self.factor(stage, name)
        if ref is None:
            return 1.0
        return wg.spread_columns(plgpu.load(ref, layout=wg.LAYOUT.reduce(0)), SQUARE)

    def carry_memory(self) -> None:
        """Carry 64 value channels of the memory through all chunks, and store the last memory."""
        smem, sizes = self.smem, self.sizes
        channels = pl.ds(self.column + self.group * BLOCK, BLOCK)
        shape = BLOCK, sizes.depth
        if sizes.from_zero:
            memory = plgpu.layout_cast(jnp.zeros(shape, _F32), wg.LAYOUT)
        else:
            memory = wg.load_global(self.refs["initial"].at[*self.memory, channels])
        memory = lax.fori_loop(0, self.steps, self.carry_through_chunk, memory)
        self.refs["last"].at[*self.memory, channels][...] = memory

        @pl.when(self.steps > 0)
        def _():
            plgpu.barrier_wait(smem.memory_used)
            plgpu.barrier_wait(smem.writes_used)

    def carry_through_chunk(self, n, memory):
        """Return the memory after the n-th chunk from the one before it, [64, K] float32; hand the memory before the chunk and the chunk's
        writes to the warpgroup that computes outputs.
        """
        smem, sizes = self.smem, self.sizes
        stage = lax.rem(n, sizes.stages)
        rows = pl.ds(self.group * BLOCK, BLOCK)
        stored = smem.memory.at[rows]
        buffers = [None] * 2 if smem.left is None else [smem.left.at[self.group, i] for i in (0, 1)]
        plgpu.barrier_wait(smem.loaded.at[stage])
        # Before the products begin: the compiler would wait for them before it changes the memory.
        before = memory.astype(_BF16)
        decay = self.factor(stage, "read_decay")
        decayed = memory if decay is None else memory * decay[CHUNK - 1]

        def store_memory():
            pl.when(n > 0)(lambda: plgpu.barrier_wait(smem.memory_used))
            stored[...] = before
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.memory_stored)

        def read(at_keys):
            if sizes.interpret:  # it reads the left operand from there
                store_memory()
            left = stored if sizes.interpret else before
            plgpu.wgmma(at_keys.ref, left, smem.k.at[stage].transpose((1, 0)))
            if not sizes.interpret:
                store_memory()
            v = smem.v.at[stage, :, rows].transpose((1, 0))
            v = plgpu.load(v, layout=wg.LAYOUT).astype(_F32)
            erase_decay = self.columns(stage, "erase_decay")
            return (v - at_keys.read() * erase_decay).astype(_BF16)

        errors = wg.with_accumulators(read, SQUARE, interpret=sizes.interpret)
        errors = wg.as_left(errors, buffers[0], sizes.interpret)

        def solve(x):
            plgpu.wgmma(x.ref, errors, smem.inverse.at[stage].transpose((1, 0)))
            beta, write_decay = (self.columns(stage, name) for name in ("beta", "write_decay"))
            exact = x.read() * beta
            return exact, (exact * write_decay).astype(_BF16)

        exact, leaving = wg.with_accumulators(solve, SQUARE, interpret=sizes.interpret)
        leaving = wg.as_left(leaving, buffers[1], sizes.interpret)

        def write(piece):
            plgpu.wgmma(piece.ref, leaving, smem.k.at[stage])
            pl.when(n > 0)(lambda: plgpu.barrier_wait(smem.writes_used))
            writes = wg.upper_half(exact)
            smem.writes.at[0, rows][...] = writes.astype(_BF16)
            # The rounding error of the writes would be the largest part of the output's error.
            smem.writes.at[1, rows][...] = (exact - writes).astype(_BF16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.writes_stored)
            return piece.read()

        memory = wg.with_accumulators(write, decayed, interpret=sizes.interpret)
        plgpu.barrier_arrive(smem.used.at[stage])
        return memory

    def compute_outputs(self) -> None:
        """Compute and store the outputs of all chunks."""
        lax.fori_loop(0, self.steps, lambda n, _: self.compute_output(n), None)
        plgpu.wait_smem_to_gmem(0)

    def compute_output(self, n) -> None:
        """Compute and store the output of the n-th chunk."""
        smem, sizes = self.smem, self.sizes
        stage = lax.rem(n, sizes.stages)
        shape = CHUNK, sizes.width
        plgpu.barrier_wait(smem.loaded.at[stage])

        def read(out):
            plgpu.wgmma(out, smem.q.at[stage], smem.memory.transpose((1, 0)))

        pairs = self.scores(stage) if sizes.scored else smem.scores.at[stage]
        plgpu.barrier_wait(smem.memory_stored)
        (out,) = wg.accumulate(read, jnp.zeros(shape, _F32), interpret=sizes.interpret)
        plgpu.barrier_arrive(smem.memory_used)
        decay = self.factor(stage, "read_decay")
        factor = sizes.scale
        if decay is not None:
            factor = wg.spread_rows(wg.load_rows(decay) * sizes.scale, shape)
        out = out * factor
        plgpu.barrier_wait(smem.writes_stored)

        def add(out):
            for part in (0, 1):
                writes = smem.writes.at[part].transpose((1, 0))
                plgpu.wgmma(out, pairs, writes)

        (out,) = wg.accumulate(add, out, interpret=sizes.interpret)
        plgpu.barrier_arrive(smem.writes_used)
        plgpu.barrier_arrive(smem.used.at[stage])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out[...] = out.astype(_BF16)
        plgpu.commit_smem()
        tokens = pl.ds(self.chunk(n) * CHUNK, CHUNK)
        target = self.refs["out"].at[self.b, tokens, self.h, pl.ds(self.column, sizes.width)]
        plgpu.copy_smem_to_gmem(smem.out, target)

    def scores(self, stage):
        """Return the chunk's decayed scores P of queries with keys, as the left operand of a product."""
        smem, sizes = self.smem, self.sizes
        number = lambda index: smem.rows.at[stage, pl.ds(index * CHUNK, CHUNK)]  # noqa: E731

        def multiply(scores):
            plgpu.wgmma(scores.ref, smem.q.at[stage], smem.k.at[stage].transpose((1, 0)))
            i, j = (
                plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=wg.LAYOUT) for axis in (0, 1)
            )
            seen = i >= j
            if sizes.documents:
                seen &= wg.row_differences(number(sizes.numbers - 1), SQUARE) == 0.0
            if sizes.numbers == 1:
                return jnp.where(seen, scores.read() * sizes.scale, 0.0).astype(_BF16)
            between = wg.row_differences(number(sizes.factors), SQUARE)
            weights = jnp.exp(jnp.where(seen, between, wg.NEVER)) * sizes.scale
            return (scores.read() * weights).astype(_BF16)

        scores = wg.with_accumulators(multiply, SQUARE, interpret=sizes.interpret)
        buffer = None if smem.left is None else smem.left.at[sizes.carrying, 0]
        return wg.as_left(scores, buffer, sizes.interpret)
