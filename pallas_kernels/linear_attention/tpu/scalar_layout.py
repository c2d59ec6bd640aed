"""The arrays of linear attention with a scalar decay as its TPU kernels require them, and the heads that a program computes.

A tile has n memories of [K, V] side by side: its keys are [C, keys * K], its values [C, n * V], and its memories the blocks on the
diagonal of one matrix [keys * K, n * V]. Heads of 128 or 256 channels have a tile each. Narrower heads share a tile, as many as
fill 128 columns, with a key each (keys = n). If the memories of such a tile have one query and one key (Mamba2), the tile has these
once (keys = 1). If narrow heads share queries or keys in any other way, these are repeated in global memory first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.tiles import scalar_decay as tiles
from pallas_kernels.tpu import row_layout
from pallas_kernels.tpu.row_layout import CHUNK

HEADS = 8  # of one program, at most
_BYTES = 2048  # of one token in all of a program's tiles of one kind, at most
_WIDEST = 512  # columns of a tile whose heads are narrower than 128


class Plan(NamedTuple):
    """How the heads of a call of linear attention with a scalar decay are put into tiles, and the tiles into programs of the TPU
    kernel.

    Attributes:
        repeated: whether q, k, v, decays and memories are first repeated to one head for each head of the output.
        count: number of memories [K, V] that are side by side in a tile, n.
        keys: number of key heads of a tile, n or 1.
        tile_count: number of tiles of memories that a program computes.
        programs: number of programs for each row of the batch.
        queries: number of tiles of queries, and so of outputs, for each tile of memories.
        shared_q: number of tiles of memories that share a tile of queries.
        shared_k: number of tiles of memories that share a tile of keys.
    """

    repeated: bool
    count: int
    keys: int
    tile_count: int
    programs: int
    queries: int = 1
    shared_q: int = 1
    shared_k: int = 1

    @property
    def rows(self) -> int:
        """The number of rows of a program's block of log decays: the number of its memories, rounded up to a multiple of 8."""
        return -(-self.tile_count * self.count // 8) * 8

    def heads(self, tile: int) -> tiles.Heads:
        """Return which of a program's memories are in the tile with the index `tile`, as `tiles.Heads`."""
        return tiles.Heads(tile * self.count, self.count, self.keys)

    def sharing(self, name: str) -> tuple[int, int]:
        """Return two numbers for the array `name` (q, k, v or out): how many of its tiles each tile of memories uses, and how
        many tiles of memories use the same tile of it.
        """
        return dict(q=(self.queries, self.shared_q), k=(1, self.shared_k)).get(
            name, (self.queries if name == "out" else 1, 1)
        )

    def block(self, name: str) -> int:
        """Return the number of tiles of the array `name` (q, k, v or out) that one program loads or stores."""
        many, shared = self.sharing(name)
        return max(self.tile_count * many // shared, 1)


class Layout:
    """The shapes of the arrays of one call of linear attention with a scalar decay on TPU, and the blocks of them that a program
    reads.

    Most methods return an array's shape and the `BlockSpec` of a program's block of it.

    Attributes:
        plan: how heads are put into tiles and programs.
        batch: number of rows, B.
        length: number of tokens of a row, T.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        memory_heads: number of memories for each row, with those that are repeated.
        dtype: dtype of q, k, v and the output.
        runs: S, the number of memories of a row, each of which is continued by one document.
        slots: with S > 1, a list with the array [B * N] of the memory that each chunk updates; else empty.
        reverse: whether the last chunk is computed first.
    """

    def __init__(self, q, k, v, *, runs: int = 1, reverse: bool = False):
        plan = plan_heads(q, k, v)
        if plan is None:
            raise ValueError(
                f"linear_attention on TPU requires heads that fill 128 columns, not {describe_heads(q, k, v)}"
            )
        self.plan, self.reverse, self.dtype = plan, reverse, v.dtype
        self.runs, self.slots = runs, []
        self.batch, self.length = q.shape[:2]
        self.key_dim, self.value_dim = q.shape[3], v.shape[3]
        self.memory_heads = plan.count * plan.tile_count * plan.programs

    def inputs(self, q, k, v, log_decay, run) -> dict:
        """Return the inputs that the forward and the backward kernel of linear attention with a scalar decay both read, as {name:
        (array, (shape, block))}.

        They are q, k, v, the log decays (unless None) and the document numbers `run` (unless None).
        """
        if self.plan.repeated:
            q, k, v = (row_layout.repeat_heads(x, self.memory_heads, axis=2) for x in (q, k, v))
        inputs = {
            name: (x.reshape(self.batch, self.length, -1), self.tokens(name))
            for name, x in dict(q=q, k=k, v=v).items()
        }
        if log_decay is not None:
            rows = jnp.moveaxis(log_decay.astype(jnp.float32), 1, 2)
            rows = row_layout.repeat_heads(rows, self.memory_heads, axis=1)
            rows = rows.reshape(self.batch, self.plan.programs, -1, self.length)
            rows = jnp.pad(rows, [(0, 0), (0, 0), (0, self.plan.rows - rows.shape[2]), (0, 0)])
            inputs["log_decay"] = (rows, self.decays())
        if self.runs > 1:
            self.slots = [run[:, ::CHUNK].reshape(-1)]
        elif run is not None:
            rows = row_layout.document_rows(run)
            spec = pl.BlockSpec((None, 8, CHUNK), lambda b, j, n, *_: (b, 0, self._at(n)))
            inputs["runs"] = (rows, (jax.ShapeDtypeStruct(rows.shape, rows.dtype), spec))
        return inputs

    def call(self, kernel, inputs: dict, outs: dict, scale: float, interpret) -> dict:
        """Run `kernel` for each row of the batch, program and chunk, and return its outputs by name.

        Args:
            kernel: called as `kernel(plan, scale, refs, memory, first, last)`, with references by name, the memories in VMEM, and
                whether the chunk is the first or last that updates them.
            inputs: the arrays that the kernel reads and their layouts, {name: (array, (shape, block))}.
            outs: the layouts of the arrays that the kernel writes, {name: (shape, block)}.
            scale: the factor by which the queries q are multiplied.
            interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.
        """
        plan, names = self.plan, (*inputs, *outs)
        memory = (plan.tile_count, plan.keys * self.key_dim, plan.count * self.value_dim)

        def chunk(*refs):
            slots, refs = refs[: len(self.slots)], refs[len(self.slots) :]
            named = dict(zip(names, refs, strict=False))
            kernel(plan, scale, named, refs[-1], *row_layout.first_and_last(slots, self._at))

        result = pl.pallas_call(
            chunk,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.slots),
                grid=(self.batch, plan.programs, self.length // CHUNK),
                in_specs=[spec for _, (_, spec) in inputs.values()],
                out_specs=[spec for _, spec in outs.values()],
                scratch_shapes=[pltpu.VMEM(memory, jnp.float32)],
            ),
            out_shape=[shape for shape, _ in outs.values()],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(*self.slots, *(array for array, _ in inputs.values()))
        return dict(zip(outs, result, strict=True))

    def _at(self, n):
        """Return the index, in the row, of the n-th chunk in the order of computation; it begins with the last chunk if
        `reverse`.
        """
        return self.length // CHUNK - 1 - n if self.reverse else n

    def _width(self, name: str) -> int:
        """Return the number of columns of a tile of q, k, v or out (`name`)."""
        plan = self.plan
        return plan.keys * self.key_dim if name in "qk" else plan.count * self.value_dim

    def tokens(self, name: str):
        """Return the shape [B, T, heads * D] of q, k, v or out (`name`) and the `BlockSpec` of a program's block of it for one
        chunk.
        """
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
        """Return the shape of the gradient of q, k or v (`name`) and the `BlockSpec` of a program's block of it for one chunk.

        The shape is that of the input or, if programs share a head, in float32 with a term for each program, which the caller adds
        up.
        """
        plan, width = self.plan, self._width(name)
        if plan.sharing(name)[1] <= plan.tile_count:
            return self.tokens(name)
        spec = pl.BlockSpec((None, CHUNK, width), lambda b, j, n, *_: (b, self._at(n), j))
        shape = (self.batch, self.length, plan.programs * width)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def memories(self):
        """Return the shape [B * S, heads / n, K, n * V] of the memories before or after all chunks, with the n memories of a tile
        side by side, and the `BlockSpec` of the memories of one program.
        """
        plan = self.plan
        matrix = (self.key_dim, plan.count * self.value_dim)
        count = self.length // CHUNK

        def index(b, j, n, *slots):
            return row_layout.memory_of(b, self._at(n), slots, self.runs, count), j, 0, 0

        spec = pl.BlockSpec((None, plan.tile_count, *matrix), index)
        shape = (self.batch * self.runs, plan.programs * plan.tile_count, *matrix)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def states(self):
        """Return the shape [B, heads / n, N, K, n * V] of the saved memories, one before each of N chunks, with the n memories of
        a tile side by side, and the `BlockSpec` of those of one chunk and program.
        """
        (_, count, *matrix) = self.memories()[0].shape
        block = (None, self.plan.tile_count, None, *matrix)
        spec = pl.BlockSpec(block, lambda b, j, n, *_: (b, j, self._at(n), 0, 0))
        shape = (self.batch, count, self.length // CHUNK, *matrix)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def decays(self):
        """Return the shape of the log decays or their gradient, [B, programs, rows, T], and the `BlockSpec` of one chunk and
        program.

        A program's rows are its memories, rounded up to a multiple of 8.
        """
        plan = self.plan
        block = (None, None, plan.rows, CHUNK)
        spec = pl.BlockSpec(block, lambda b, j, n, *_: (b, j, 0, self._at(n)))
        shape = (self.batch, plan.programs, plan.rows, self.length)
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def from_heads(self, memory):
        """Return memories [*, heads, K, V] in the shape that the kernels require, with the n memories of a tile side by side, [*,
        heads / n, K, n * V]; memories that several heads share are repeated first.
        """
        memory = row_layout.repeat_heads(memory.astype(jnp.float32), self.memory_heads, axis=1)
        batch, count = len(memory), self.plan.count
        memory = memory.reshape(batch, -1, count, self.key_dim, self.value_dim)
        return jnp.moveaxis(memory, 2, 3).reshape(batch, -1, self.key_dim, count * self.value_dim)

    def to_heads(self, memory):
        """Return a kernel's memories, of which the n memories of a tile are side by side, [*, heads / n, K, n * V], as [*, heads,
        K, V]; memories that `from_heads` has repeated remain repeated.
        """
        memory = memory.reshape(len(memory), -1, self.key_dim, self.plan.count, self.value_dim)
        memory = jnp.moveaxis(memory, 3, 2)
        return memory.reshape(len(memory), -1, self.key_dim, self.value_dim)


def plan_heads(q, k, v) -> Plan | None:
    """Return the plan of how the heads of q, k and v are put into tiles of 128 columns or more and into programs; None if they fit
    no tile.
    """
    key_dim, value_dim = q.shape[3], v.shape[3]
    query_heads, heads = q.shape[2], v.shape[2]
    per_query, per_key = max(heads // query_heads, 1), heads // k.shape[2]
    key_fill, value_fill = (tiles.LANES // math.gcd(tiles.LANES, d) for d in (key_dim, value_dim))

    def fill_programs(repeated, count, keys, total, **sharing):
        one = Plan(repeated, count, keys, 1, total, **sharing)
        width = max(keys * key_dim, count * value_dim) * jnp.dtype(v.dtype).itemsize
        most = min(HEADS // count, _BYTES // width) // one.queries
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
        return fill_programs(False, 1, 1, heads, **sharing)
    common = math.gcd(per_query, per_key)  # memories that have one query and one key
    count = heads if heads % value_fill else value_fill
    aligned = key_fill == 1 or query_heads == k.shape[2] == 1
    if common % count == 0 and aligned and query_heads <= heads and count * value_dim <= _WIDEST:
        sharing = dict(shared_q=per_query // count, shared_k=per_key // count)
        return fill_programs(False, count, 1, heads // count, **sharing)
    heads = max(query_heads, heads)
    count = max(key_fill, value_fill)
    count = heads if heads % count else count
    if count * max(key_dim, value_dim) > _WIDEST:
        return None
    return fill_programs(True, count, count, heads // count)


def describe_heads(q, k, v) -> str:
    """Return the numbers of query, key and value heads and their channels in words, for error messages."""
    heads = f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads"
    return f"{heads} of K = {q.shape[3]}, V = {v.shape[3]}"
