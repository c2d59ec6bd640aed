"""The shapes of the arrays of TPU kernels that have a tile for each head, and the block of an array that one program of the kernel
computes.

A program has the memories of up to four heads in VMEM and computes one chunk after another. Keys and values of a multiple of 128 channels
are blocks of columns of [B, T, heads * D], so that nothing is transposed; others are [B, heads, T, D].
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
    """The sizes and array layouts of one call of a TPU kernel. A "layout" is an array's shape and the `BlockSpec` of a program's block of
    it.

    Attributes:
        batch: B, the number of rows.
        length: T, the number of tokens in a row.
        chunk: C, the number of tokens in a chunk.
        heads: the number of heads of the output; each has a memory.
        block: the number of heads of one program.
        matrix: the numbers of rows and columns of a memory: (K, V), or (V, K) if it is transposed.
        dtype: the dtype of q, k, v and the output.
    """

    def __init__(
        self, q, k, v, chunk: int, *, others=(), heads: int = HEADS, transposed: bool = False,
        runs: int = 1, reverse: bool = False,
    ):  # fmt: skip
        """Choose how many heads one program computes, and set the sizes of a call from its inputs.

        Args:
            q: [B, T, H, K], the queries.
            k: [B, T, Hk, K], the keys.
            v: [B, T, G, V], the values.
            chunk: C, the number of tokens in a chunk.
            others: further arrays [B, T, *, K], whose numbers of heads must also fit into the programs' heads.
            heads: the number of heads of one program, at most.
            transposed: whether a memory is [V, K].
            runs: S, the number of memories of a row, each of which consecutive chunks update.
            reverse: whether the chunks are computed from the last to the first.
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
        """Return the inputs of a kernel as {name: (array, layout)}, each in the shape that the kernel requires; an array that is
        None is left out.

        With several memories per row, also store the index of the memory that each chunk updates, which `call` passes to the
        kernel.

        Args:
            run: [B, T], the number of each token's document; with several memories per row, the index of the memory that it
                updates. Or None.
            rows: arrays [B, T, heads] of one number for each token and head, by name.
            tokens: arrays [B, T, heads, D] of D channels for each token and head, by name.
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
        """Run a kernel once for each row of the batch, group of heads (program) and chunk, and return its outputs by name.

        The memory is carried from chunk to chunk, from the input "initial" to the output "final"; if `reverse`, its gradient, from
        "d_final" to "d_initial".

        Args:
            kernel: a function that computes one chunk: `kernel(layout, scale, refs, memory)`, with this object, references by
                name to the program's blocks of the inputs and outputs, and a reference to its memories in VMEM.
            inputs: the input arrays with their layouts, {name: (array, layout)}, as `inputs` returns them.
            outs: the layouts of the output arrays, {name: layout}.
            scale: the factor by which the queries q are multiplied.
            interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.
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
        """Return the index, in a program's block `ref` of an array, of the tile [C, size] that the program's h-th head of the
        output uses. The array has `size` channels per head; it may have fewer heads than the output, each of which several
        heads of the output share.
        """
        if len(ref.shape) == 3:
            return h * ref.shape[0] // self.block
        index = h * (ref.shape[1] // size) // self.block
        return slice(None), slice(index * size, (index + 1) * size)

    def store(self, ref, h: int, x):
        """Store x [C, D], one chunk of one head, in a program's block `ref` of an output: as the tile of the program's h-th head."""
        ref[self.tile_index(ref, h, x.shape[1])] = x.astype(ref.dtype)

    def as_tokens(self, x):
        """Return x [B, T, heads, D] as the kernels require it: reshaped to [B, T, heads * D] if D is a multiple of 128, else transposed to
        [B, heads, T, D].
        """
        aligned = x.shape[3] % LANES == 0
        return x.reshape(*x.shape[:2], -1) if aligned else jnp.moveaxis(x, 2, 1)

    def from_tokens(self, x, size: int):
        """Return x, an array in a kernel's shape [B, T, heads * D] or [B, heads, T, D], as [B, T, heads, D], with D = `size` channels per
        head; the inverse of `as_tokens`.
        """
        return x.reshape(*x.shape[:2], -1, size) if x.ndim == 3 else jnp.moveaxis(x, 1, 2)

    def gradient(self, x, like):
        """Return the gradient of an input, in its shape and dtype, from a kernel's gradient x for all heads of the output: summed over the
        heads of the output that share a head of the input. `like` [B, T, heads, D] is that input.
        """
        terms = self.from_tokens(x, like.shape[3])
        return row_layout.sum_heads(terms, like.shape[2], axis=2).astype(like.dtype)

    def rows_gradient(self, x, heads: int):
        """Return the gradient of an input with one number per token and head, [B, T, heads], from a kernel's gradient x [B,
        programs, 8, T], which has a row for each head of the output: summed over the heads of the output that share a head of
        the input.
        """
        x = x[:, :, : self.block].reshape(self.batch, self.heads, -1)
        return jnp.moveaxis(row_layout.sum_heads(x, heads, axis=1), 1, 2)

    def gradient_tokens(self, like):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of a kernel's gradient of the input `like` [B, T,
        *, D], with all heads of the output; float32 if `like` has fewer heads, so that several will be summed.
        """
        dtype = like.dtype if like.shape[2] == self.heads else _F32
        return self.tokens(self.heads, like.shape[3], dtype)

    def tokens(self, heads: int, size: int, dtype):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of an array [B, T, heads, D] of tokens, with D =
        `size` channels; several heads of the output may share one of its heads.
        """
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
        """Return x [*, heads, D], of one number for each head and token or channel, in the shape that the kernels require, [*, programs,
        8, D]: the heads of each program, padded with zeros to 8.
        """
        x = x.reshape(*x.shape[:-2], -1, self.block, x.shape[-1])
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 8 - self.block), (0, 0)])

    def rows(self):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of a float32 array with one number for each token
        and head, [B, programs, 8, T]; the heads of one program are padded to 8.
        """
        spec = pl.BlockSpec((None, None, 8, self.chunk), lambda b, h, n, *_: (b, h, 0, self._at(n)))
        shape = (self.batch, self.heads // self.block, 8, self.length)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def channels(self, size: int):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of a float32 array with one number for each
        channel and head in each row of the batch, [B, programs, 8, D], with D = `size`; the heads of one program are padded to 8.
        """
        spec = pl.BlockSpec((None, None, 8, size), lambda b, h, n, *_: (b, h, 0, 0))
        shape = (self.batch, self.heads // self.block, 8, size)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def memories(self):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of the memories before or after all chunks (or
        their gradients), [B * S, heads, *matrix] float32. A program's block is of the memory that its chunk updates, of shape `matrix`,
        which is (K, V), or (V, K) if memories are transposed.
        """
        count = self.length // self.chunk
        index = lambda b, n, slots: row_layout.memory_of(b, self._at(n), slots, self.runs, count)  # noqa: E731
        spec = pl.BlockSpec(
            (None, self.block, *self.matrix), lambda b, h, n, *slots: (index(b, n, slots), h, 0, 0)
        )
        shape = (self.batch * self.runs, self.heads, *self.matrix)
        return jax.ShapeDtypeStruct(shape, _F32), spec

    def as_memories(self, memory, *, first: bool = False):
        """Return memories [B * S, G, K, V] in the shape that the kernels require, [B * S, heads, *matrix] float32: repeated for heads that
        share one, and transposed if `matrix`, a memory's shape, is (V, K).

        If `first`, a memory that several heads have is 0 for all but the first of them, so that a gradient is counted once.
        """
        repeats = self.heads // memory.shape[1]
        memory = row_layout.repeat_heads(memory.astype(_F32), self.heads, axis=1)
        if first and repeats > 1:
            memory = jnp.where((jnp.arange(self.heads) % repeats == 0)[:, None, None], memory, 0)
        return jnp.swapaxes(memory, 2, 3) if self.transposed else memory

    def from_memories(self, memory):
        """Return a kernel's memories [B * S, heads, *matrix] as [B * S, heads, K, V]: transposed if `matrix`, a memory's shape in the
        kernel, is (V, K).
        """
        return jnp.swapaxes(memory, 2, 3) if self.transposed else memory

    def states(self):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of the saved memories, one before each of N
        chunks, [B, heads, N, *matrix], in the dtype of the output; `matrix` is a memory's shape, which is (K, V), or (V, K) if memories
        are transposed.
        """
        spec = pl.BlockSpec(
            (None, self.block, None, *self.matrix), lambda b, h, n, *_: (b, h, self._at(n), 0, 0)
        )
        shape = (self.batch, self.heads, self.length // self.chunk, *self.matrix)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def squares(self):
        """Return the layout (an array's shape and the `BlockSpec` of a program's block) of an array [B, heads, T, C] with a matrix [C, C]
        for each chunk and head, such as the inverse of a chunk's triangular system.
        """
        spec = pl.BlockSpec(
            (None, self.block, self.chunk, self.chunk), lambda b, h, n, *_: (b, h, self._at(n), 0)
        )
        shape = (self.batch, self.heads, self.length, self.chunk)
        return jax.ShapeDtypeStruct(shape, self.dtype), spec

    def _at(self, n):
        return self.length // self.chunk - 1 - n if self.reverse else n
