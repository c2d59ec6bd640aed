"""Linear attention with a scalar decay on Mosaic TPU: one kernel forward, one backward, each a single pass over the tokens.

A program has the memories of up to eight heads in VMEM, in float32, and walks over the chunks; the tiles are column blocks of
the projections' own layout [B, T, heads * D], so that nothing is transposed. The mathematics is in `tiles`. Heads narrower than
128 lanes share a tile: as many as fill 128 columns, their memories on the diagonal of one matrix. Where the memories of such a
tile have one query and one key (Mamba2), they share those too; any other sharing of narrow heads is repeated in memory first.

The forward pass keeps the memory each chunk starts from, in v's dtype; the backward pass walks back over the chunks, reads those
and carries the gradient of the memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.memory_calls import NO_BONUS, TPU, MemoryCall
from pallas_kernels.requirements import Requirement
from pallas_kernels.tiles import scalar_decay as tiles
from pallas_kernels.tpu import row_layout
from pallas_kernels.tpu.row_layout import CHUNK

_HEADS = 8  # of one program
_BYTES = 2048  # of one token in one of a program's tiles
_WIDEST = 512  # columns of a tile whose heads are narrower than 128


class _Plan(NamedTuple):
    """How heads are laid out.

    Attributes:
        spread: whether q, k, v, decays and memories are given one head each for each head of the output first.
        count: memories a tile.
        keys: key heads a tile, `count` or 1.
        tile_count: tiles of memories a program.
        programs: programs a row of the batch.
        queries: query tiles, and so output tiles, a tile of memories.
        shared_q: tiles of memories a query tile.
        shared_k: tiles of memories a key tile.
    """

    spread: bool
    count: int
    keys: int
    tile_count: int
    programs: int
    queries: int = 1
    shared_q: int = 1
    shared_k: int = 1

    @property
    def rows(self) -> int:
        """Heads of a program, up to a multiple of 8."""
        return -(-self.tile_count * self.count // 8) * 8

    def heads(self, tile: int) -> tiles.Heads:
        return tiles.Heads(tile * self.count, self.count, self.keys)

    def sharing(self, name: str) -> tuple[int, int]:
        """Tiles of q, k, v or out to one of memories, and tiles of memories to one of those."""
        return dict(q=(self.queries, self.shared_q), k=(1, self.shared_k)).get(
            name, (self.queries if name == "out" else 1, 1)
        )

    def block(self, name: str) -> int:
        """Tiles of q, k, v or out that a program sees."""
        many, shared = self.sharing(name)
        return max(self.tile_count * many // shared, 1)


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
):  # fmt: skip
    """Output, final memory and residuals.

    Args:
        q: [B, T, H, K].
        k: [B, T, Hk, K].
        v: [B, T, G, V].
        log_decay: [B, T, G] float32, at most 0, or None.
        run: [B, T] int32, nondecreasing: how many documents have begun up to each token; 0 goes on from `initial`. Or None.
        initial: [B * S, G, K, V] float32. With S memories a row, run s goes on from memory s and begins on a chunk's border.
        scale: multiplies q.
        save: whether `backward` will follow; without it the residuals are None.
        interpret: False, True or `pltpu.InterpretParams`.

    Returns:
        The output [B, T, max(H, G), V] in v's dtype, the final memories in float32 as `initial`, and the memories that the chunks
        start from, as `backward` takes them.
    """
    layout = _Layout(q, k, v, runs=len(initial) // len(q))
    given = layout.inputs(q, k, v, log_decay, run)
    given["initial"] = (layout.from_heads(initial), layout.memories())
    outs = dict(out=layout.tokens("out"), final=layout.memories())
    if save:
        outs["states"] = layout.states()
    result = layout.call(_forward_kernel, given, outs, scale, interpret)
    output = result["out"].reshape(*q.shape[:2], -1, v.shape[3])
    final = layout.to_heads(result["final"])
    return output, final[:, :: final.shape[1] // v.shape[2]], result.get("states")


def backward(
    q, k, v, log_decay, run, initial, residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False
):  # fmt: skip
    """Gradients of q, k, v, log_decay and initial, from those of output and final memory.

    That of log_decay is None without one, or without `decay_gradient`. `residuals` are those of `forward`; None computes them
    again.
    """
    decay_gradient &= log_decay is not None
    if residuals is None:
        _, _, residuals = forward(
            q, k, v, log_decay, run, initial, scale=scale, interpret=interpret
        )
    layout = _Layout(q, k, v, runs=len(initial) // len(q), reverse=True)
    given = layout.inputs(q, k, v, log_decay, run)
    given["states"] = (residuals, layout.states())
    given["d_out"] = (d_output.astype(v.dtype).reshape(*q.shape[:2], -1), layout.tokens("out"))
    every = layout.memory_heads // v.shape[2]  # only the first output head hands on a final memory
    d_final = jnp.pad(d_final[:, :, None], [(0, 0)] * 2 + [(0, every - 1)] + [(0, 0)] * 2)
    d_final = d_final.reshape(len(d_final), -1, *d_final.shape[3:])
    given["d_final"] = (layout.from_heads(d_final), layout.memories())
    outs = dict(dq=layout.gradient("q"), dk=layout.gradient("k"), dv=layout.gradient("v"))
    outs["d_initial"] = layout.memories()
    if decay_gradient:
        outs["d_decay"] = layout.decays()
    result = layout.call(_backward_kernel, given, outs, scale, interpret)

    def gradient(name, x):
        parts = result[name].reshape(*x.shape[:2], -1, x.shape[3])
        return row_layout.sum_heads(parts, x.shape[2], axis=2).astype(x.dtype)

    d_decay = None
    if decay_gradient:
        rows = result["d_decay"][:, :, : layout.memory_heads // layout.plan.programs]
        rows = rows.reshape(v.shape[0], layout.memory_heads, v.shape[1])
        d_decay = jnp.moveaxis(row_layout.sum_heads(rows, v.shape[2], axis=1), 1, 2)
    d_initial = row_layout.sum_heads(layout.to_heads(result["d_initial"]), v.shape[2], axis=1)
    return gradient("dq", q), gradient("dk", k), gradient("dv", v), d_decay, d_initial


def _forward_kernel(plan: _Plan, scale: float, refs: dict, memory, first, last):
    @pl.when(first)
    def _():
        for t in range(plan.tile_count):
            memory[t] = tiles.unfold(refs["initial"][t], plan.heads(t))

    chunk = _chunk(refs, scale)
    for t in range(plan.tile_count):
        heads = plan.heads(t)
        k, v = _tile(plan, refs, "k", t), _tile(plan, refs, "v", t)
        before = memory[t]
        narrow = before.astype(v.dtype)
        if "states" in refs:
            refs["states"][t] = tiles.fold(before, heads).astype(v.dtype)
        scales = [tiles.weights(chunk, heads.first + h) for h in range(heads.count)]
        for r in range(plan.queries):
            out = tiles.read(_tile(plan, refs, "q", t, r), k, v, narrow, scales, chunk, heads)
            _store(refs["out"], t * plan.queries + r, out)
        memory[t] = tiles.write(k, v, before, chunk, heads)

    @pl.when(last)
    def _():
        for t in range(plan.tile_count):
            refs["final"][t] = tiles.fold(memory[t], plan.heads(t))


def _backward_kernel(plan: _Plan, scale: float, refs: dict, d_memory, first, last):
    @pl.when(first)
    def _():
        for t in range(plan.tile_count):
            d_memory[t] = tiles.unfold(refs["d_final"][t], plan.heads(t))

    chunk, decays = _chunk(refs, scale), "d_decay" in refs
    sums = dict(q={}, k={})  # of the tiles of memories that share one of q or k
    reads, writes, read_rows, totals = [], [], [], []

    def give(name, t, r, x):
        many, shared = plan.sharing(name)
        index = t // shared * many + r
        sums[name][index] = sums[name][index] + x if index in sums[name] else x
        if (t + 1) % shared == 0 or t + 1 == plan.tile_count:
            _store(refs["d" + name], index, sums[name].pop(index))

    for t in range(plan.tile_count):
        heads = plan.heads(t)
        k, v = _tile(plan, refs, "k", t), _tile(plan, refs, "v", t)
        before = tiles.unfold(refs["states"][t].astype(jnp.float32), heads).astype(v.dtype)
        scales = [tiles.weights(chunk, heads.first + h) for h in range(heads.count)]
        wrote = tiles.write_backward(k, v, before, d_memory[t], chunk, heads, decays=decays)
        dk, dv, d_before = wrote.k, wrote.v, wrote.memory
        columns, rows = [], []
        for r in range(plan.queries):
            q, d_out = _tile(plan, refs, "q", t, r), _tile(plan, refs, "d_out", t, r)
            got = tiles.read_backward(q, k, v, d_out, before, scales, chunk, heads, decays=decays)
            give("q", t, r, got.q)
            dk, dv, d_before = dk + got.k, dv + got.v, d_before + got.memory
            columns, rows = _added(columns, got.columns), _added(rows, got.rows)
        give("k", t, 0, dk)
        _store(refs["dv"], t, dv)
        d_memory[t] = d_before
        reads, writes = reads + columns, writes + wrote.columns
        read_rows, totals = read_rows + rows, totals + wrote.totals

    if decays:
        refs["d_decay"][...] = tiles.decay_gradient(reads, read_rows, writes, totals, chunk)

    @pl.when(last)
    def _():
        for t in range(plan.tile_count):
            refs["d_initial"][t] = tiles.fold(d_memory[t], plan.heads(t))


def _chunk(refs, scale: float) -> tiles.Chunk:
    log_decay, runs = (refs[name][...] if name in refs else None for name in ("log_decay", "runs"))
    return tiles.read_chunk(log_decay, runs, CHUNK, scale)


def _tile(plan: _Plan, refs, name: str, t: int, r: int = 0):
    """The tile of q, k, v or d_out that belongs to tile `t` of memories."""
    kind = "out" if name == "d_out" else name
    many, shared = plan.sharing(kind)
    width = refs[name].shape[1] // plan.block(kind)
    index = t // shared * many + r
    return refs[name][:, index * width : (index + 1) * width]


def _store(ref, index: int, x):
    width = x.shape[1]
    ref[:, index * width : (index + 1) * width] = x.astype(ref.dtype)


def _added(sums: list, more: list) -> list:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more


class _Layout:
    """The arrays of one call as the kernels take them, and what of each a program sees: (shape, block)."""

    def __init__(self, q, k, v, *, runs: int = 1, reverse: bool = False):
        plan = _plan(q, k, v)
        if plan is None:
            raise ValueError(f"linear_attention on TPU: no layout for heads {_heads(q, k, v)}")
        self.plan, self.reverse, self.dtype = plan, reverse, v.dtype
        self.runs, self.slots = runs, []  # memories a row, and whose each chunk is
        self.batch, self.length = q.shape[:2]
        self.key_dim, self.value_dim = q.shape[3], v.shape[3]
        self.memory_heads = plan.count * plan.tile_count * plan.programs

    def inputs(self, q, k, v, log_decay, run) -> dict:
        """What both kernels read: name -> (array, (shape, block))."""
        if self.plan.spread:
            q, k, v = (row_layout.repeat_heads(x, self.memory_heads, axis=2) for x in (q, k, v))
        given = {
            name: (x.reshape(self.batch, self.length, -1), self.tokens(name))
            for name, x in dict(q=q, k=k, v=v).items()
        }
        if log_decay is not None:
            rows = jnp.moveaxis(log_decay.astype(jnp.float32), 1, 2)
            rows = row_layout.repeat_heads(rows, self.memory_heads, axis=1)
            rows = rows.reshape(self.batch, self.plan.programs, -1, self.length)
            rows = jnp.pad(rows, [(0, 0), (0, 0), (0, self.plan.rows - rows.shape[2]), (0, 0)])
            given["log_decay"] = (rows, self.decays())
        if self.runs > 1:
            self.slots = [run[:, ::CHUNK].reshape(-1)]
        elif run is not None:
            rows = row_layout.document_rows(run)
            spec = pl.BlockSpec((None, 8, CHUNK), lambda b, j, n, *_: (b, 0, self._at(n)))
            given["runs"] = (rows, (jax.ShapeDtypeStruct(rows.shape, rows.dtype), spec))
        return given

    def call(self, kernel, given: dict, outs: dict, scale: float, interpret) -> dict:
        """Run `kernel` over batch, programs and chunks."""
        plan, names = self.plan, (*given, *outs)
        memory = (plan.tile_count, plan.keys * self.key_dim, plan.count * self.value_dim)

        def walk(*refs):
            slots, refs = refs[: len(self.slots)], refs[len(self.slots) :]
            named = dict(zip(names, refs, strict=False))
            kernel(plan, scale, named, refs[-1], *row_layout.first_and_last(slots, self._at))

        result = pl.pallas_call(
            walk,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.slots),
                grid=(self.batch, plan.programs, self.length // CHUNK),
                in_specs=[spec for _, (_, spec) in given.values()],
                out_specs=[spec for _, spec in outs.values()],
                scratch_shapes=[pltpu.VMEM(memory, jnp.float32)],
            ),
            out_shape=[shape for shape, _ in outs.values()],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(*self.slots, *(array for array, _ in given.values()))
        return dict(zip(outs, result, strict=True))

    def _at(self, n):
        return self.length // CHUNK - 1 - n if self.reverse else n

    def _width(self, name: str) -> int:
        plan = self.plan
        return plan.keys * self.key_dim if name in "qk" else plan.count * self.value_dim

    def tokens(self, name: str):
        """Of q, k, v or out, [B, T, heads * D]."""
        plan, width = self.plan, self._width(name)
        many, shared = plan.sharing(name)
        total = plan.programs * plan.tile_count * many // shared
        every = max(shared // plan.tile_count, 1)
        spec = pl.BlockSpec(
            (None, CHUNK, plan.block(name) * width),
            lambda b, j, n, *_: (b, self._at(n), lax.div(j, every)),
        )
        return jax.ShapeDtypeStruct((self.batch, self.length, total * width), self.dtype), spec

    def gradient(self, name: str):
        """As `tokens`; one part a program, in float32, where programs share a head of q or k."""
        plan, width = self.plan, self._width(name)
        if plan.sharing(name)[1] <= plan.tile_count:
            return self.tokens(name)
        spec = pl.BlockSpec((None, CHUNK, width), lambda b, j, n, *_: (b, self._at(n), j))
        shape = (self.batch, self.length, plan.programs * width)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def memories(self):
        """Of memories, [B * S, heads / n, K, n * V]."""
        plan = self.plan
        matrix = (self.key_dim, plan.count * self.value_dim)
        count = self.length // CHUNK

        def index(b, j, n, *slots):
            return row_layout.memory_of(b, self._at(n), slots, self.runs, count), j, 0, 0

        spec = pl.BlockSpec((None, plan.tile_count, *matrix), index)
        shape = (self.batch * self.runs, plan.programs * plan.tile_count, *matrix)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def states(self):
        """Of the memories that the chunks start from, [B, heads / n, N, K, n * V]."""
        (_, count, *matrix) = self.memories()[0].shape
        block = (None, self.plan.tile_count, None, *matrix)
        spec = pl.BlockSpec(block, lambda b, j, n, *_: (b, j, self._at(n), 0, 0))
        shape = (self.batch, count, self.length // CHUNK, *matrix)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def decays(self):
        """Of the decays, [B, programs, rows, T]."""
        plan = self.plan
        block = (None, None, plan.rows, CHUNK)
        spec = pl.BlockSpec(block, lambda b, j, n, *_: (b, j, 0, self._at(n)))
        shape = (self.batch, plan.programs, plan.rows, self.length)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def from_heads(self, memory):
        """[*, heads, K, V] -> [*, heads / n, K, n * V]."""
        memory = row_layout.repeat_heads(memory.astype(jnp.float32), self.memory_heads, axis=1)
        batch, count = len(memory), self.plan.count
        memory = memory.reshape(batch, -1, count, self.key_dim, self.value_dim)
        return jnp.moveaxis(memory, 2, 3).reshape(batch, -1, self.key_dim, count * self.value_dim)

    def to_heads(self, memory):
        """The reverse, but for repeated heads."""
        memory = memory.reshape(len(memory), -1, self.key_dim, self.plan.count, self.value_dim)
        memory = jnp.moveaxis(memory, 3, 2)
        return memory.reshape(len(memory), -1, self.key_dim, self.value_dim)


def _plan(q, k, v) -> _Plan | None:
    """The layout, or None where there is none."""
    key_dim, value_dim = q.shape[3], v.shape[3]
    query_heads, heads = q.shape[2], v.shape[2]
    per_query, per_key = max(heads // query_heads, 1), heads // k.shape[2]
    key_fill, value_fill = (tiles.LANES // math.gcd(tiles.LANES, d) for d in (key_dim, value_dim))

    def planned(spread, count, keys, total, **sharing):
        one = _Plan(spread, count, keys, 1, total, **sharing)
        width = max(keys * key_dim, count * value_dim) * jnp.dtype(v.dtype).itemsize
        most = min(_HEADS // count, _BYTES // width) // one.queries
        fits = [
            n
            for n in range(1, total + 1)
            if total % n == 0
            and n <= max(most, 1)
            and all(n % s == 0 or s % n == 0 for s in (one.shared_q, one.shared_k))
        ]
        return one._replace(tile_count=fits[-1], programs=total // fits[-1])

    if key_fill == value_fill == 1:
        queries = max(query_heads // heads, 1)
        sharing = dict(queries=queries, shared_q=per_query, shared_k=per_key)
        return planned(False, 1, 1, heads, **sharing)
    shared = math.gcd(per_query, per_key)
    count = heads if heads % value_fill else value_fill
    whole = key_fill == 1 or query_heads == k.shape[2] == 1
    if shared % count == 0 and whole and query_heads <= heads and count * value_dim <= _WIDEST:
        sharing = dict(shared_q=per_query // count, shared_k=per_key // count)
        return planned(False, count, 1, heads // count, **sharing)
    heads = max(query_heads, heads)
    count = max(key_fill, value_fill)
    count = heads if heads % count else count
    if count * max(key_dim, value_dim) > _WIDEST:
        return None
    return planned(True, count, count, heads // count)


def _heads(q, k, v) -> str:
    heads = f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads"
    return f"{heads} of K = {q.shape[3]}, V = {v.shape[3]}"


def _fills_tiles(call: MemoryCall) -> bool:
    return _plan(call.q, call.k, call.v) is not None


REQUIREMENTS = (
    NO_BONUS,
    *TPU,
    Requirement(
        "heads that fill 128 columns", _fills_tiles, lambda call: _heads(call.q, call.k, call.v)
    ),
)
