"""The grid, the blocks and the buffers of the TPU kernels, which scan the tokens of a row.

A program of the kernel has one chunk of 128 tokens of some channels, with channels in lanes. Consecutive
programs process the chunks of a row in order; the memories of the channels stay in VMEM from chunk to chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.requirements import Requirement

_F32 = jnp.float32
CHANNELS = 128
"""The number of channels must be a multiple of this: the lanes of a register."""
CHUNK = 128
"""The number of tokens must be a multiple of this: some arrays have tokens in lanes."""


REQUIREMENTS = (
    Requirement(
        "u in bfloat16 or float32",
        lambda c: c.u.dtype in (jnp.bfloat16, jnp.float32),
        lambda c: jnp.dtype(c.u.dtype).name,
    ),
    Requirement(
        f"a multiple of {CHANNELS} channels",
        lambda c: c.u.shape[2] % CHANNELS == 0,
        lambda c: str(c.u.shape[2]),
    ),
)


def read_row(ref, t) -> Any:
    """Load the values of the chunk's token t, [1, channels], from a buffer in VMEM with one row per token."""
    return ref[pl.ds(t, 1), :]


def write_row(ref, t, row) -> None:
    """Store `row` [1, channels], the values of the chunk's token t, in a buffer in VMEM with one row per
    token.
    """
    ref[pl.ds(t, 1), :] = row


class Layout:
    """The shapes of the arrays of a selective scan on a TPU, and the blocks that a program, which computes
    one chunk of 128 tokens for some channels, loads of them.

    `tokens`, `memory` and the methods after them return (shape, block specification) for one kind of array.
    """

    def __init__(self, u, numbers: int, widest: int, *, reverse: bool = False):
        """Choose the number of channels that a program computes: 128 times the largest power of two with
        which it divides D and is at most `widest`.

        Args:
            u: the input of the scan, [B, T, D].
            numbers: N, the number of entries of each channel's memory; memories are [B, N, D].
            widest: the largest number of channels that a program may have.
            reverse: whether the chunks are scanned from the last to the first.
        """
        self.batch, self.length, self.channels = u.shape
        self.numbers, self.reverse = numbers, reverse
        self.chunks = self.length // CHUNK
        self.width = CHANNELS
        while self.channels % (2 * self.width) == 0 and 2 * self.width <= widest:
            self.width *= 2

    def call(
        self, kernel, inputs: dict, outputs: dict, scratch: dict, interpret
    ) -> dict[str, jax.Array]:
        """Run a TPU kernel of a selective scan, one program for each row, block of channels and chunk; return
        its output arrays by name.

        Args:
            kernel: called as `kernel(refs, scratch, is_first, is_last)`: references by name to the program's
                blocks of inputs and outputs, its buffers by name, and whether the chunk is the first or the
                last of the scan.
            inputs: the inputs, name -> (array, (shape, block specification)).
            outputs: the outputs, name -> (shape, block specification).
            scratch: name -> a buffer in VMEM whose values remain from chunk to chunk.
            interpret: False to compile the kernel; True or `pltpu.InterpretParams` for the interpreter.
        """
        names = (*inputs, *outputs)

        def body(*refs):
            named = dict(zip(names, refs, strict=False))
            buffers = dict(zip(scratch, refs[len(names) :], strict=True))
            chunk = pl.program_id(2)
            kernel(named, buffers, chunk == 0, chunk == self.chunks - 1)

        results = pl.pallas_call(
            body,
            grid=(self.batch, self.channels // self.width, self.chunks),
            in_specs=[spec for _, (_, spec) in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            out_shape=[shape for shape, _ in outputs.values()],
            scratch_shapes=list(scratch.values()),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(*(array for array, _ in inputs.values()))
        return dict(zip(outputs, results, strict=True))

    def memory_scratch(self, *axes: int) -> Any:
        """Return a buffer in VMEM for the memories of a program's channels, [*axes, N, channels] float32."""
        return pltpu.VMEM((*axes, self.numbers, self.width), _F32)

    def token_scratch(self) -> Any:
        """Return a buffer in VMEM with one number for each of a chunk's 128 tokens and a program's channels,
        [128, channels] float32.
        """
        return pltpu.VMEM((CHUNK, self.width), _F32)

    def tokens(self, dtype=_F32):
        """Return (shape, block specification) of an array [B, T, D] with one number per token and channel,
        such as the scan's input or output.
        """
        shape = (self.batch, self.length, self.channels)
        return self._specify(shape, (None, CHUNK, self.width), lambda b, j, n: (b, n, j), dtype)

    def memory(self):
        """Return (shape, block specification) of an array [B, N, D] with one memory per row and channel, such
        as the one before the first token.
        """
        shape = (self.batch, self.numbers, self.channels)
        return self._specify(shape, (None, self.numbers, self.width), lambda b, j, n: (b, 0, j))

    def memories(self):
        """Return (shape, block specification) of an array [B, chunks, N, D] with one memory per chunk and
        channel, such as those that enter the chunks.
        """
        shape = (self.batch, self.chunks, self.numbers, self.channels)
        block = (None, None, self.numbers, self.width)
        return self._specify(shape, block, lambda b, j, n: (b, n, 0, j))

    def by_channel(self, count: int):
        """Return (shape, block specification) of an array [count, D] that all rows of the batch share, such
        as the rates of decay.
        """
        return self._specify((count, self.channels), (count, self.width), lambda b, j, n: (0, j))

    def by_token(self):
        """Return (shape, block specification) of an array [B, N, T] that all channels share, such as the
        factors of reads and writes, with tokens in lanes.
        """
        shape = (self.batch, self.numbers, self.length)
        return self._specify(shape, (None, self.numbers, CHUNK), lambda b, j, n: (b, 0, n))

    def token_parts(self):
        """Return (shape, block specification) of the gradient of an array [B, N, T] that all channels share
        (the factors of reads or writes), with one term for each program, summed over that program's
        channels: [B, blocks of channels, N, T].
        """
        shape = (self.batch, self.channels // self.width, self.numbers, self.length)
        return self._specify(shape, (None, None, self.numbers, CHUNK), lambda b, j, n: (b, j, 0, n))

    def scalars(self):
        """Return (shape, block specification) of an array [B, 1, T] with one scalar per token, such as 0 at
        the first token of a document and 1 elsewhere, in SMEM.
        """
        shape, at = (self.batch, 1, self.length), lambda b, j, n: (b, 0, n)
        return self._specify(shape, (None, 1, CHUNK), at, memory_space=pltpu.SMEM)

    def sums(self):
        """Return (shape, block specification) of an array [B, 1, D] with one number per row and channel, such
        as a gradient summed over tokens.
        """
        shape = (self.batch, 1, self.channels)
        return self._specify(shape, (None, 1, self.width), lambda b, j, n: (b, 0, j))

    def _specify(self, shape, block, at, dtype=_F32, **options):
        def index(b, j, n):
            return at(b, j, self.chunks - 1 - n if self.reverse else n)

        return jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(block, index, **options)


def for_groups(count: int, step, carry, *, reverse: bool = False):
    """Run `step(first token, carry)`, which returns the next carry, for each group of `count` consecutive
    tokens of a chunk of 128, from the last group to the first if `reverse`; return the last carry.
    """

    def group(index, carry):
        start = index * count
        return step(CHUNK - count - start if reverse else start, carry)

    return lax.fori_loop(0, CHUNK // count, group, carry)
