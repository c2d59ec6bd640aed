"""The arrays of the TPU kernels that have a tile for each head: their shapes, and the block of a program.

A program has the memories of up to four heads in VMEM and computes one chunk after another. Keys and values of a multiple of 128
channels are blocks of columns of [B, T, heads * D], so that nothing is transposed; others are [B, heads, T, D].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.tiles.scalar_decay import LANES
from pallas_kernels.tpu import row_layout

HEADS = 4  # of one program, at most
_BYTES = 2048  # of one token of a program's keys or values, at most
_F32 = jnp.float32


class Layout:
    """The arrays of one call. A "layout" is an array's shape and the `BlockSpec` of a program's block of it.

    Attributes:
        batch: B.
        length: T.
        chunk: C.
        heads: number of heads of the output; each has a memory.
        block: heads of a program.
        matrix: rows and columns of a memory.
        dtype: of q, k, v and the output.
    """

    def __init__(
        self, q, k, v, chunk: int, *, others=(), heads: int = HEADS, transposed: bool = False,
        runs: int = 1, reverse: bool = False,
    ):  # fmt: skip
        """Lay out a call.

        Args:
            q: [B, T, H, K].
            k: [B, T, Hk, K].
            v: [B, T, G, V].
            chunk: C.
            others: arrays [B, T, *, K] of other numbers of heads.
            heads: of a program at most.
            transposed: whether a memory is [V, K].
            runs: S, memories of a row, each of which consecutive chunks continue.
            reverse: whether the last chunk is the first.
        """
        self.batch, self.length = q.shape[:2]
        self.chunk, self.dtype, self.reverse = chunk, v.dtype, reverse
        self.key_dim, self.value_dim = q.shape[3], v.shape[3]
        self.transposed = transposed
        self.runs, self.slots = (
            runs,
            [],
        )  # with S > 1, `slots` has the memory [B * N] that each chunk updates
        self.matrix = (self.key_dim, self.value_dim)[:: -1 if transposed else 1]
        self.heads = max(q.shape[2], v.shape[2])
        width = max(self.matrix) * jnp.dtype(v.dtype).itemsize
        shared = [self.heads // x.shape[2] for x in (q, k, v, *others)]
        self.block = next(
            n
            for n in range(min(heads, max(_BYTES // width, 1)), 0, -1)
            if self.heads % n == 0 and all(n % s == 0 or s % n == 0 for s in shared)
        )

    def inputs(self, run: Any = None, rows=None, **tokens) -> dict:
        """The inputs of a kernel, as {name: (array, layout)}; None is left out.

        Args:
            run: [B, T], document numbers, or None.
            rows: arrays [B, T, heads] by name.
            tokens: arrays [B, T, heads, D] by name.
        """
        inputs = {}
        for name, x in tokens.items():
            if x is not None:
                inputs[name] = self.as_tokens(x), self.tokens(x.shape[2], x.shape[3], x.dtype)
        for name, x in (rows or {}).items():
            if x is not None:
                x = row_layout.repeat_heads(jnp.moveaxis(x.astype(_F32), 1, 2), self.heads, axis=1)
                inputs[name] = self.padded(x), self.rows()
        if self.runs > 1:
            self.slots = [run[:, :: self.chunk].reshape(-1)]
        elif run is not None:
            rows = row_layout.document_rows(run, self.chunk)
            spec = pl.BlockSpec((None, 8, self.chunk), lambda b, h, n, *_: (b, 0, self._at(n)))
            inputs["runs"] = rows, (jax.ShapeDtypeStruct(rows.shape, rows.dtype), spec)
        return inputs

    def call(self, kernel, inputs: dict, outs: dict, scale: float, interpret) -> dict:
        """Run `kernel` for each row of the batch, program and chunk, and return its outputs by name.

        The memory is carried from chunk to chunk, from the input "initial" to the output "final"; if `reverse`, its gradient, from
        "d_final" to "d_initial".

        Args:
            kernel: called as `kernel(layout, scale, refs, memory)`, with references by name and the memory in VMEM.
            inputs: {name: (array, layout)}.
            outs: {name: layout}.
            scale: multiplies q.
            interpret: False, True or `pltpu.InterpretParams`.
        """
        names = (*inputs, *outs)
        first, last = ("d_final", "d_initial") if self.reverse else ("initial", "final")

        def carried(*refs):
            slots, refs = refs[: len(self.slots)], refs[len(self.slots) :]
            named, memory = dict(zip(names, refs, strict=False)), refs[-1]
            begins, ends = row_layout.first_and_last(slots, self._at)

            @pl.when(begins)
            def _():
                memory[...] = named[first][...]

            kernel(self, scale, named, memory)

            @pl.when(ends)
            def _():
                named[last][...] = memory[...]

        result = pl.pallas_call(
            carried,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.slots),
                grid=(self.batch, self.heads // self.block, self.length // self.chunk),
                in_specs=[spec for _, (_, spec) in inputs.values()],
                out_specs=[spec for _, spec in outs.values()],
                scratch_shapes=[pltpu.VMEM((self.block, *self.matrix), _F32)],
            ),
            out_shape=[shape for shape, _ in outs.values()],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(*self.slots, *(array for array, _ in inputs.values()))
        return dict(zip(outs, result, strict=True))

    def tile_index(self, ref, h: int, size: int):
        """The index of the program's h-th head in a block of heads of `size` channels, each of which several heads may share."""
        if len(ref.shape) == 3:
            return h * ref.shape[0] // self.block
        index = h * (ref.shape[1] // size) // self.block
        return slice(None), slice(index * size, (index + 1) * size)

    def store(self, ref, h: int, x):
        """Store x as the h-th head of a block that has all the program's heads."""
        ref[self.tile_index(ref, h, x.shape[1])] = x.astype(ref.dtype)

    def as_tokens(self, x):
        """[B, T, heads, D] as [B, T, heads * D] or [B, heads, T, D], as the kernels require it."""
        aligned = x.shape[3] % LANES == 0
        return x.reshape(*x.shape[:2], -1) if aligned else jnp.moveaxis(x, 2, 1)

    def from_tokens(self, x, size: int):
        """An array of `as_tokens`, with heads of `size` channels, as [B, T, heads, D]."""
        return x.reshape(*x.shape[:2], -1, size) if x.ndim == 3 else jnp.moveaxis(x, 1, 2)

    def gradient(self, x, like):
        """A kernel's gradient of all heads, summed over the heads that share one of `like` [B, T, heads, D], in its shape and dtype."""
        terms = self.from_tokens(x, like.shape[3])
        return row_layout.sum_heads(terms, like.shape[2], axis=2).astype(like.dtype)

    def rows_gradient(self, x, heads: int):
        """A kernel's gradient of `rows`, summed so that `heads` heads remain, [B, T, heads]."""
        x = x[:, :, : self.block].reshape(self.batch, self.heads, -1)
        return jnp.moveaxis(row_layout.sum_heads(x, heads, axis=1), 1, 2)

    def gradient_tokens(self, like):
        """The layout of the gradient of `like` for all heads; float32 if several heads will be summed."""
        dtype = like.dtype if like.shape[2] == self.heads else _F32
        return self.tokens(self.heads, like.shape[3], dtype)

    def tokens(self, heads: int, size: int, dtype):
        """The layout of tokens [B, T, heads, D]; several heads of the output may share one of these heads."""
        block = max(self.block * heads // self.heads, 1)
        at = lambda h: lax.div(h * self.block * heads, self.heads * block)  # noqa: E731
        if size % LANES == 0:
            shape = (self.batch, self.length, heads * size)
            spec = pl.BlockSpec(
                (None, self.chunk, block * size), lambda b, h, n, *_: (b, self._at(n), at(h))
            )
        else:
            shape = (self.batch, heads, self.length, size)
            spec = pl.BlockSpec(
                (None, block, self.chunk, size), lambda b, h, n, *_: (b, at(h), self._at(n), 0)
            )
        return jax.ShapeDtypeStruct(shape, dtype), spec

    def padded(self, x):
        """[*, heads, D] -> [*, programs, 8, D]."""
        x = x.reshape(*x.shape[:-2], -1, self.block, x.shape[-1])
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 8 - self.block), (0, 0)])

    def rows(self):
        """The layout of one number for each token and head, [B, programs, 8, T]."""
        spec = pl.BlockSpec((None, None, 8, self.chunk), lambda b, h, n, *_: (b, h, 0, self._at(n)))
        shape = (self.batch, self.heads // self.block, 8, self.length)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def channels(self, size: int):
        """The layout of one number for each channel and head, [B, programs, 8, D]."""
        spec = pl.BlockSpec((None, None, 8, size), lambda b, h, n, *_: (b, h, 0, 0))
        shape = (self.batch, self.heads // self.block, 8, size)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def memories(self):
        """The layout of the memories, [B * S, heads, *matrix]."""
        count = self.length // self.chunk
        index = lambda b, n, slots: row_layout.memory_of(b, self._at(n), slots, self.runs, count)  # noqa: E731
        spec = pl.BlockSpec(
            (None, self.block, *self.matrix), lambda b, h, n, *slots: (index(b, n, slots), h, 0, 0)
        )
        shape = (self.batch * self.runs, self.heads, *self.matrix)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def as_memories(self, memory, *, first: bool = False):
        """[B * S, G, K, V] as [B * S, heads, *matrix] float32.

        If `first`, a memory that several heads have is 0 for all but the first of them, so that a gradient is counted once.
        """
        repeats = self.heads // memory.shape[1]
        memory = row_layout.repeat_heads(memory.astype(_F32), self.heads, axis=1)
        if first and repeats > 1:
            memory = jnp.where((jnp.arange(self.heads) % repeats == 0)[:, None, None], memory, 0)
        return jnp.swapaxes(memory, 2, 3) if self.transposed else memory

    def from_memories(self, memory):
        """[B * S, heads, *matrix] as [B * S, heads, K, V]."""
        return jnp.swapaxes(memory, 2, 3) if self.transposed else memory

    def states(self):
        """The layout of the memories before all chunks, [B, heads, N, *matrix]."""
        spec = pl.BlockSpec(
            (None, self.block, None, *self.matrix), lambda b, h, n, *_: (b, h, self._at(n), 0, 0)
        )
        shape = (self.batch, self.heads, self.length // self.chunk, *self.matrix)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def squares(self):
        """The layout of a matrix [C, C] for each chunk, [B, heads, T, C]."""
        spec = pl.BlockSpec(
            (None, self.block, self.chunk, self.chunk), lambda b, h, n, *_: (b, h, self._at(n), 0)
        )
        shape = (self.batch, self.heads, self.length, self.chunk)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def _at(self, n):
        return self.length // self.chunk - 1 - n if self.reverse else n
