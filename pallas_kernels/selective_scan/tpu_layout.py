"""How programs of a TPU walk over a row's tokens: each has some channels, in lanes, and their memories in VMEM."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu

_F32 = jnp.float32
CHANNELS = 128
"""What the number of channels is a multiple of: the lanes of a register."""
CHUNK = 128
"""What the number of tokens is a multiple of: some arrays have tokens in lanes."""


def reason(u) -> str | None:
    """What these backends take in place of this argument (an array or its shape), or None."""
    if u.dtype not in (jnp.bfloat16, jnp.float32):
        return f"u in bfloat16 or float32, not {u.dtype}"
    if u.shape[2] % CHANNELS:
        return f"multiples of {CHANNELS} channels, not {u.shape[2]}"
    return None


def read_row(ref, t) -> Any:
    """[1, channels], of one token."""
    return ref[pl.ds(t, 1), :]


def write_row(ref, t, row) -> None:
    """Put down what `read_row` reads."""
    ref[pl.ds(t, 1), :] = row


class Layout:
    """The arrays of one call as the kernels take them, and what of each a program sees: (shape, block)."""

    def __init__(self, u, numbers: int, widest: int, *, reverse: bool = False):
        """Of `u` [B, T, D] and memories [B, numbers, D]; a program has at most `widest` channels; `reverse` walks against time."""
        self.batch, self.length, self.channels = u.shape
        self.numbers, self.reverse = numbers, reverse
        self.chunks = self.length // CHUNK
        self.width = CHANNELS
        while self.channels % (2 * self.width) == 0 and 2 * self.width <= widest:
            self.width *= 2

    def call(self, kernel, given: dict, outs: dict, rooms: dict, interpret) -> dict:
        """Run `kernel(refs, rooms, whether the walk begins, whether it ends)` over rows, blocks of channels and chunks.

        Args:
            kernel: reads and writes references by name.
            given: name -> (array, (shape, block)).
            outs: name -> (shape, block).
            rooms: name -> what stays with a program from chunk to chunk.
            interpret: False, True or `pltpu.InterpretParams`.
        """
        names = (*given, *outs)

        def walk(*refs):
            named = dict(zip(names, refs, strict=False))
            scratch = dict(zip(rooms, refs[len(names) :], strict=True))
            chunk = pl.program_id(2)
            kernel(named, scratch, chunk == 0, chunk == self.chunks - 1)

        found = pl.pallas_call(
            walk,
            grid=(self.batch, self.channels // self.width, self.chunks),
            in_specs=[spec for _, (_, spec) in given.values()],
            out_specs=[spec for _, spec in outs.values()],
            out_shape=[shape for shape, _ in outs.values()],
            scratch_shapes=list(rooms.values()),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(*(array for array, _ in given.values()))
        return dict(zip(outs, found, strict=True))

    def room(self, *first: int) -> Any:
        """For memories."""
        return pltpu.VMEM((*first, self.numbers, self.width), _F32)

    def row_room(self) -> Any:
        """For a row a token."""
        return pltpu.VMEM((CHUNK, self.width), _F32)

    def tokens(self, dtype=_F32):
        """Of [B, T, D]."""
        shape = (self.batch, self.length, self.channels)
        return self._of(shape, (None, CHUNK, self.width), lambda b, j, n: (b, n, j), dtype)

    def memory(self):
        """Of one a row, [B, numbers, D]."""
        shape = (self.batch, self.numbers, self.channels)
        return self._of(shape, (None, self.numbers, self.width), lambda b, j, n: (b, 0, j))

    def memories(self):
        """Of those that enter chunks, [B, chunks, numbers, D]."""
        shape = (self.batch, self.chunks, self.numbers, self.channels)
        block = (None, None, self.numbers, self.width)
        return self._of(shape, block, lambda b, j, n: (b, n, 0, j))

    def by_channel(self, count: int):
        """Of what all rows share, [count, D]."""
        return self._of((count, self.channels), (count, self.width), lambda b, j, n: (0, j))

    def by_token(self):
        """Of what all channels share, [B, numbers, T]."""
        shape = (self.batch, self.numbers, self.length)
        return self._of(shape, (None, self.numbers, CHUNK), lambda b, j, n: (b, 0, n))

    def parts(self):
        """Of a gradient of those, a part a block of channels, [B, parts, numbers, T]."""
        shape = (self.batch, self.channels // self.width, self.numbers, self.length)
        return self._of(shape, (None, None, self.numbers, CHUNK), lambda b, j, n: (b, j, 0, n))

    def scalars(self):
        """Of one a token, [B, 1, T]."""
        shape, at = (self.batch, 1, self.length), lambda b, j, n: (b, 0, n)
        return self._of(shape, (None, 1, CHUNK), at, memory_space=pltpu.SMEM)

    def sums(self):
        """Of one number a row and channel, [B, 1, D]."""
        shape = (self.batch, 1, self.channels)
        return self._of(shape, (None, 1, self.width), lambda b, j, n: (b, 0, j))

    def _of(self, shape, block, at, dtype=_F32, **options):
        def place(b, j, n):
            return at(b, j, self.chunks - 1 - n if self.reverse else n)

        return jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(block, place, **options)


def walk(count: int, step, carry, *, reverse: bool = False):
    """`step(first token, carry)` for a chunk's groups of `count` tokens, or against time."""

    def some(index, carry):
        start = index * count
        return step(CHUNK - count - start if reverse else start, carry)

    return lax.fori_loop(0, CHUNK // count, some, carry)
