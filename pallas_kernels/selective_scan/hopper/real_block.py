"""How the Hopper kernels of `selective_scan` lay out their inputs, and how a warpgroup loads them.

A warpgroup computes 64 channels of one chunk. Their memories, [4 warps, 16 channels, N], are in its
registers: each warp has 16 channels, and each thread has 4 numbers of one channel (N = 8) or of each of two
channels (N = 16).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu, state_rows
from pallas_kernels.selective_scan.inputs import RealInputs as Inputs

_F32 = jnp.float32
WARPS, ROWS = 4, 16  # warps of a warpgroup; channels of a warp
CHANNELS = WARPS * ROWS
"""The number of channels must be a multiple of this."""
CHUNK = 64
"""The number of tokens must be a multiple of this."""
LOG2E = math.log2(math.e)
_BY_TOKEN = ("u", "delta", "b", "c", "dy", "continues")
_WITHOUT_CHANNELS = ("b", "c", "continues")


class Sizes(NamedTuple):
    """The sizes of a call of `selective_scan`, in units of the kernels' chunks and warps.

    Attributes:
        batch: B, the number of rows.
        chunks: T / 64, the number of chunks of a row.
        groups: D / 16, the number of groups of 16 channels, each of one warp.
        states: N, the number of entries of a channel's memory.
    """

    batch: int
    chunks: int
    groups: int
    states: int

    @classmethod
    def of(cls, x: Inputs) -> Sizes:
        """Return, as `Sizes`, the numbers of rows, chunks of a row, groups of 16 channels and entries of a memory, from the
        shapes of the inputs x of `selective_scan`.
        """
        batch, length, channels = x.u.shape
        return cls(batch, length // CHUNK, channels // ROWS, x.a.shape[1])

    @property
    def columns(self) -> int:
        """The number of groups of 64 channels, each of which one warpgroup computes: D / 64."""
        return self.groups // WARPS

    @property
    def grid(self) -> dict[str, int]:
        """The kernels' grid: one thread block for each group of 64 channels, chunk and row."""
        return dict(column=self.columns, chunk=self.chunks, row=self.batch)

    def memories(self, *axes: int) -> jax.ShapeDtypeStruct:
        """Return the shape [*axes, 16, N] and dtype, float32, of an array of memories; the last of `axes` is D / 16, so that it
        and the axis after it are the D channels.
        """
        return jax.ShapeDtypeStruct((*axes, ROWS, self.states), _F32)


class Block:
    """One warpgroup's part of a selective scan's kernel, 64 channels of a row: the functions that load its arrays into registers.
    An array with one number per channel is [4, 16] (4 warps of 16 channels), one of memories [4, 16, N].

    Attributes:
        refs: references to the arrays in global memory, by name.
        smem: references to buffers in shared memory by name.
    """

    def __init__(self, refs: dict[str, Any], smem: dict[str, Any], states: int):
        self.refs, self.smem = refs, smem
        self.layout = state_rows(ROWS, states)
        self.shape = (WARPS, ROWS, states)
        self.column, self.b = lax.axis_index("column"), lax.axis_index("row")
        self.channels = pl.ds(self.column * WARPS, WARPS)

    def zero(self) -> Any:
        """Return empty memories of the warpgroup's 64 channels: zeros [4, 16, N] in registers."""
        return plgpu.layout_cast(jnp.zeros(self.shape, _F32), self.layout)

    def load_memory(self, ref) -> Any:
        """Load into registers an array [4, 16, N] with N numbers for each of the warpgroup's 64 channels: their memories, or
        their rates of decay.
        """
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_channels(self, ref) -> Any:
        """Load an array [4, 16], one number for each of the warpgroup's 64 channels, into registers as
        float32.
        """
        row = plgpu.load(ref, layout=self.layout.reduce(2), optimized=False)
        return row.astype(_F32)

    def load_states(self, ref) -> Any:
        """Load N numbers into registers, one for each entry of a channel's memory, such as a token's factors b or c, and
        broadcast them over the warpgroup's 64 channels, to [4, 16, N].
        """
        row = plgpu.load(ref, layout=self.layout.reduce((0, 1)), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [2]), self.layout)

    def spread(self, row) -> Any:
        """Broadcast the array `row` [4, 16], one number for each of the warpgroup's 64 channels, over the
        entries of the memories, to [4, 16, N].
        """
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [0, 1]), self.layout)

    def sum_states(self, x) -> Any:
        """Return the sums [4, 16] of x [4, 16, N] over the N entries of each channel's memory."""
        return plgpu.layout_cast(jnp.sum(x, axis=2), self.layout.reduce(2))

    def token_channels(self, name: str, t) -> Any:
        """Load from shared memory the values of the input `name` (u, delta or dy) at the chunk's token t, one
        for each of the warpgroup's 64 channels, [4, 16].
        """
        return self.load_channels(self.smem[name].at[t])

    def token_states(self, name: str, t) -> Any:
        """Load from shared memory the N values of the input `name` (b or c, the factors of writes and reads)
        at the chunk's token t, broadcast over the channels to [4, 16, N].
        """
        return self.load_states(self.smem[name].at[t])

    def rates(self) -> Any:
        """Load from global memory the rates of decay a, times log2(e), for the warpgroup's 64 channels, [4,
        16, N]: a token's decay is `exp2(delta rates)`.
        """
        return self.load_memory(self.refs["a"].at[self.channels])

    def decay(self, delta, rates, t) -> Any:
        """Return the decay of the memories at the chunk's token t, `exp2(delta rates)`, [4, 16, N], and 0 at the first token of a
        document. delta [4, 16] is the token's step size of each channel, rates [4, 16, N] are the rates of decay times
        log2(e).
        """
        factor = jnp.exp2(self.spread(delta) * rates)
        return factor * self.smem["continues"][t] if "continues" in self.smem else factor

    def copy_tokens(self, start) -> None:
        """Copy the 64 tokens of the chunk that begins at token `start`, of every input that has a buffer in
        shared memory, to that buffer, and wait for the copies.
        """
        tokens = pl.ds(start, CHUNK)
        for name, buffer in self.smem.items():
            if name in _BY_TOKEN:
                ref = self.refs[name].at[self.b, tokens]
                source = ref if name in _WITHOUT_CHANNELS else ref.at[:, self.channels]
                plgpu.copy_gmem_to_smem(source, buffer, self.smem["barrier"])
        plgpu.barrier_wait(self.smem["barrier"])


def token_buffers(x: Inputs, *names: str, **others: Any) -> dict[str, Any]:
    """Return a description of a warpgroup's buffers in shared memory, by name: one for each of the inputs
    `names` at a chunk's tokens, the buffers `others`, and the barrier of the copies.

    Args:
        x: the inputs of the scan: u, the step sizes delta, the rates of decay a, the factors b and c of writes and reads, and d.
        names: the names of the inputs that have a buffer; `continues` (0 at the first token of a document, else 1) has one too,
            if it is given.
        others: further buffers by name.
    """
    shapes = {"b": (CHUNK, x.a.shape[1]), "c": (CHUNK, x.a.shape[1]), "continues": (CHUNK,)}
    names = names if x.continues is None else (*names, "continues")
    buffers = {
        name: plgpu.SMEM(
            shapes.get(name, (CHUNK, WARPS, ROWS)), jnp.bfloat16 if name in ("u", "dy") else _F32
        )
        for name in names
    }
    return buffers | others | dict(barrier=plgpu.Barrier(num_arrivals=len(names)))


def split_channels(memory) -> Any:
    """Reshape an array of memories [B, D, N] to [B, D / 16, 16, N]: groups of 16 channels, each of one warp."""
    batch, channels, states = memory.shape
    return memory.reshape(batch, channels // ROWS, ROWS, states)


def kernel_inputs(x: Inputs, **others: Any) -> dict[str, Any]:
    """Return the inputs of a selective scan by name, in the shapes that the Hopper kernels read: D is
    reshaped to [D / 16, 16], and the rates of decay a are multiplied by log2(e).

    Args:
        x: the inputs of the scan: u, the step sizes delta, the rates of decay a, the factors b and c of writes and reads, and d.
        others: further inputs by name; `dy` [B, T, D] is reshaped too.
    """

    def rows(a):
        return a.reshape(*a.shape[:-1], a.shape[-1] // ROWS, ROWS)

    dy = others.pop("dy", None)
    return dict(
        u=rows(x.u),
        delta=rows(x.delta),
        b=x.b,
        c=x.c,
        d=rows(x.d),
        continues=x.continues,
        a=(x.a * LOG2E).reshape(-1, ROWS, x.a.shape[1]),
        dy=None if dy is None else rows(dy),
        **others,
    )
