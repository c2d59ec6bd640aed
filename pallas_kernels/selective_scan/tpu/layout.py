"""How the programs of a TPU kernel scan the tokens of a row: each has some channels, in lanes, and their memories in VMEM."""

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
    """The row [1, channels] of one token."""
    return ref[pl.ds(t, 1), :]


def write_row(ref, t, row) -> None:
    """Write the row [1, channels] of one token."""
    ref[pl.ds(t, 1), :] = row


class Layout:
    """The shapes of a call's arrays and the blocks of them that each program sees, as (shape, block specification)."""

    def __init__(self, u, numbers: int, widest: int, *, reverse: bool = False):
        """Choose the channels of a program.

        Args:
            u: [B, T, D].
            numbers: of each channel's memory; memories are [B, numbers, D].
            widest: channels of a program, at most.
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
        """Run a kernel over rows, blocks of channels and chunks, and return its outputs by name.

        Args:
            kernel: `kernel(refs, scratch, is_first, is_last)` reads and writes references by name; the last two say whether the chunk
                is the scan's first and last.
            inputs: name -> (array, (shape, block)).
            outputs: name -> (shape, block).
            scratch: name -> a buffer that a program has from chunk to chunk.
            interpret: False, True or `pltpu.InterpretParams`.
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
        """A buffer for memories [*axes, numbers, channels]."""
        return pltpu.VMEM((*axes, self.numbers, self.width), _F32)

    def token_scratch(self) -> Any:
        """A buffer for a row of channels for each token of a chunk."""
        return pltpu.VMEM((CHUNK, self.width), _F32)

    def tokens(self, dtype=_F32):
        """An array [B, T, D]."""
        shape = (self.batch, self.length, self.channels)
        return self._specify(shape, (None, CHUNK, self.width), lambda b, j, n: (b, n, j), dtype)

    def memory(self):
        """One memory for each row, [B, numbers, D]."""
        shape = (self.batch, self.numbers, self.channels)
        return self._specify(shape, (None, self.numbers, self.width), lambda b, j, n: (b, 0, j))

    def memories(self):
        """One memory for each chunk, [B, chunks, numbers, D]."""
        shape = (self.batch, self.chunks, self.numbers, self.channels)
        block = (None, None, self.numbers, self.width)
        return self._specify(shape, block, lambda b, j, n: (b, n, 0, j))

    def by_channel(self, count: int):
        """An array that all rows share, [count, D]."""
        return self._specify((count, self.channels), (count, self.width), lambda b, j, n: (0, j))

    def by_token(self):
        """An array that all channels share, [B, numbers, T]."""
        shape = (self.batch, self.numbers, self.length)
        return self._specify(shape, (None, self.numbers, CHUNK), lambda b, j, n: (b, 0, n))

    def token_parts(self):
        """The gradient of such an array, one part for each block of channels, [B, parts, numbers, T]."""
        shape = (self.batch, self.channels // self.width, self.numbers, self.length)
        return self._specify(shape, (None, None, self.numbers, CHUNK), lambda b, j, n: (b, j, 0, n))

    def scalars(self):
        """One scalar for each token, [B, 1, T]."""
        shape, at = (self.batch, 1, self.length), lambda b, j, n: (b, 0, n)
        return self._specify(shape, (None, 1, CHUNK), at, memory_space=pltpu.SMEM)

    def sums(self):
        """One number for each row and channel, [B, 1, D]."""
        shape = (self.batch, 1, self.channels)
        return self._specify(shape, (None, 1, self.width), lambda b, j, n: (b, 0, j))

    def _specify(self, shape, block, at, dtype=_F32, **options):
        def index(b, j, n):
            return at(b, j, self.chunks - 1 - n if self.reverse else n)

        return jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(block, index, **options)


def for_groups(count: int, step, carry, *, reverse: bool = False):
    """Return the carry after `step(first token, carry)` for a chunk's groups of `count` tokens, or in reverse order."""

    def group(index, carry):
        start = index * count
        return step(CHUNK - count - start if reverse else start, carry)

    return lax.fori_loop(0, CHUNK // count, group, carry)
