"""The inputs of the kernels of real memories, and how a warpgroup loads its part of them.

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
    """The sizes of a call.

    Attributes:
        batch: B.
        chunks: T / 64.
        groups: D / 16.
        states: N.
    """

    batch: int
    chunks: int
    groups: int
    states: int

    @classmethod
    def of(cls, x: Inputs) -> Sizes:
        """The sizes of a call with these inputs."""
        batch, length, channels = x.u.shape
        return cls(batch, length // CHUNK, channels // ROWS, x.a.shape[1])

    @property
    def columns(self) -> int:
        """Blocks of 64 channels."""
        return self.groups // WARPS

    @property
    def grid(self) -> dict[str, int]:
        """One thread block for each block of channels, chunk and row."""
        return dict(column=self.columns, chunk=self.chunks, row=self.batch)

    def memories(self, *axes: int) -> jax.ShapeDtypeStruct:
        """The shape [*axes, 16, N] in float32, for memories whose last of `axes` is D / 16."""
        return jax.ShapeDtypeStruct((*axes, ROWS, self.states), _F32)


class Block:
    """A warpgroup's row and channels, and its loads into registers: arrays [4, 16] by channel, or [4, 16, N]
    for memories.

    Attributes:
        refs: references to global memory by name.
        smem: references to buffers in shared memory by name.
    """

    def __init__(self, refs: dict[str, Any], smem: dict[str, Any], states: int):
        self.refs, self.smem = refs, smem
        self.layout = state_rows(ROWS, states)
        self.shape = (WARPS, ROWS, states)
        self.column, self.b = lax.axis_index("column"), lax.axis_index("row")
        self.channels = pl.ds(self.column * WARPS, WARPS)

    def zero(self) -> Any:
        """An empty memory."""
        return plgpu.layout_cast(jnp.zeros(self.shape, _F32), self.layout)

    def load_memory(self, ref) -> Any:
        """Load a memory [4, 16, N]."""
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_channels(self, ref) -> Any:
        """Load one number for each channel, [4, 16], as float32."""
        row = plgpu.load(ref, layout=self.layout.reduce(2), optimized=False)
        return row.astype(_F32)

    def load_states(self, ref) -> Any:
        """Load N numbers and broadcast them over the channels, [4, 16, N]."""
        row = plgpu.load(ref, layout=self.layout.reduce((0, 1)), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [2]), self.layout)

    def spread(self, row) -> Any:
        """Broadcast one number for each channel, [4, 16], to [4, 16, N]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [0, 1]), self.layout)

    def sum_states(self, x) -> Any:
        """Sum [4, 16, N] over N, to [4, 16]."""
        return plgpu.layout_cast(jnp.sum(x, axis=2), self.layout.reduce(2))

    def token_channels(self, name: str, t) -> Any:
        """Load u, delta or dy at the chunk's token t from shared memory, [4, 16]."""
        return self.load_channels(self.smem[name].at[t])

    def token_states(self, name: str, t) -> Any:
        """Load b or c at the chunk's token t from shared memory, [4, 16, N]."""
        return self.load_states(self.smem[name].at[t])

    def rates(self) -> Any:
        """Load `a log2(e)`, [4, 16, N]: the decay is `exp2(delta rates)`."""
        return self.load_memory(self.refs["a"].at[self.channels])

    def decay(self, delta, rates, t) -> Any:
        """The decay of the chunk's token t, [4, 16, N]."""
        factor = jnp.exp2(self.spread(delta) * rates)
        return factor * self.smem["continues"][t] if "continues" in self.smem else factor

    def copy_tokens(self, start) -> None:
        """Copy the chunk's tokens of every input that has a buffer to shared memory, and wait for the copies."""
        tokens = pl.ds(start, CHUNK)
        for name, buffer in self.smem.items():
            if name in _BY_TOKEN:
                ref = self.refs[name].at[self.b, tokens]
                source = ref if name in _WITHOUT_CHANNELS else ref.at[:, self.channels]
                plgpu.copy_gmem_to_smem(source, buffer, self.smem["barrier"])
        plgpu.barrier_wait(self.smem["barrier"])


def token_buffers(x: Inputs, *names: str, **others: Any) -> dict[str, Any]:
    """Return buffers in shared memory for a chunk's tokens, the buffers `others`, and the barrier of the
    copies.

    Args:
        x: the inputs.
        names: the inputs that have a buffer; `continues` has one in addition if it is given.
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
    """Reshape memories [B, D, N] to [B, D / 16, 16, N]."""
    batch, channels, states = memory.shape
    return memory.reshape(batch, channels // ROWS, ROWS, states)


def kernel_inputs(x: Inputs, **others: Any) -> dict[str, Any]:
    """Return the inputs by name, with D reshaped to [D / 16, 16] and `a` multiplied by log2(e).

    Args:
        x: the inputs.
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
