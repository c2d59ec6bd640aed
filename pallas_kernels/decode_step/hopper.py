"""The kernel that applies one token to a matrix memory on Mosaic GPU (Hopper): the memory is loaded once and
stored once, in place.

A warpgroup has all key channels of some value channels in its registers. A thread has 4 neighbouring value
channels of every 8th (or 16th) key channel, so that a sum over key channels is a sum inside a thread followed
by a sum across a few lanes. Shared memory is not used. As many warpgroups run at a time as the registers
allow, so that enough loads are in flight.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, key_columns, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_WARPS = 4
_STATE_REGISTERS = 64  # registers of a thread for the memory
_MAX_QUERIES = 16  # query heads that read one memory, at most
MAX_GRID = 65535  # size of a grid's slowest axes, at most
_DTYPES = (jnp.bfloat16, jnp.float32)


def column_width(programs: int, key_dim: int, value_dim: int) -> int | None:
    """Return the number of value channels that each warp of the `decode_step` kernel computes, 16 or 8, or
    None if neither is possible.

    Args:
        programs: the number of memories of all rows, B G.
        key_dim: K, the number of key channels.
        value_dim: V, the number of value channels.
    """
    sizes = [
        size
        for size in (16, 8)
        if value_dim % (_WARPS * size) == 0
        and key_dim % 16 == 0
        and key_dim * size <= 32 * _STATE_REGISTERS
    ]
    enough = [s for s in sizes if programs * (value_dim // (_WARPS * s)) >= PROCESSORS]
    return (enough or sizes[-1:] or [None])[0]


REQUIREMENTS = (
    Requirement(
        "q and v in bfloat16 or float32",
        lambda c: c.q.dtype in _DTYPES and c.v.dtype in _DTYPES,
        lambda c: f"{jnp.dtype(c.q.dtype if c.q.dtype not in _DTYPES else c.v.dtype).name}",
    ),
    Requirement(
        "memory in float32",
        lambda c: c.memory.dtype == _F32,
        lambda c: jnp.dtype(c.memory.dtype).name,
    ),
    Requirement(
        "K a multiple of 16 up to 256 and V a multiple of 32",
        lambda c: column_width(1, *c.memory.shape[-2:]) is not None,
        lambda c: f"K {c.memory.shape[-2]} and V {c.memory.shape[-1]}",
    ),
    Requirement(
        f"at most {_MAX_QUERIES} query heads for each memory",
        lambda c: c.q.shape[1] <= _MAX_QUERIES * c.v.shape[1],
        lambda c: f"{c.q.shape[1]} query heads for {c.v.shape[1]} memories",
    ),
    Requirement(
        f"at most {MAX_GRID:,} rows and memories of a row",
        lambda c: max(c.q.shape[0], c.v.shape[1]) <= MAX_GRID,
        lambda c: f"{c.q.shape[0]:,} and {c.v.shape[1]:,}",
    ),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `decode_step` does not meet, or None
    if the kernel supports it.
    """
    return first_unmet(REQUIREMENTS, call)


class Block:
    """One warpgroup's part of the `decode_step` kernel, some value channels of one memory: the functions that load its arrays
    into registers, as [K, channels] for the memory and for what it is multiplied by.

    Attributes:
        refs: references to the arrays in global memory, by name.
        row: the index of the row in the batch.
        head: the index of the memory in its row.
        channels: the slice of value channels.
        value_dim: V.
        starts: the first columns of the inputs whose heads are side by side, by name.
        layout: how the memory is distributed over the warpgroup's registers.
        shape: the shape of the memory in registers, (K, number of the warpgroup's value channels).
    """

    def __init__(
        self,
        refs: dict[str, Any],
        width: int,
        key_dim: int,
        value_dim: int,
        starts: dict[str, int],
        column: Any = None,
    ):
        self.refs, self.layout, self.starts = refs, key_columns(width), starts
        self.value_dim = value_dim
        self.shape = key_dim, _WARPS * width
        self.row, self.head = lax.axis_index("row"), lax.axis_index("head")
        column = lax.axis_index("column") if column is None else column
        self.channels = pl.ds(column * self.shape[1], self.shape[1])

    def memory(self):
        """Return a reference to the value channels of the memory M that this warpgroup computes, [K,
        channels], in global memory.
        """
        layer = (self.refs["layer"][0],) if "layer" in self.refs else ()
        return self.refs["memory"].at[(*layer, self.row, self.head, slice(None), self.channels)]

    def spread(self, x, axis: int):
        """Broadcast x, with one number for each key channel (axis 0) or value channel (axis 1), to the shape
        of the memory in registers, [K, channels] in float32.
        """
        x = lax.broadcast_in_dim(x.astype(_F32), self.shape, [axis])
        return plgpu.layout_cast(x, self.layout)

    def load_keys(self, name: str, memories: int):
        """Load the K numbers of the input `name` (such as the keys) in the key head that this memory uses,
        broadcast over the value channels to [K, channels]. `memories` is the number of memories of a row.
        """
        if name in self.starts:
            return self.load_key_head(name, self.head)
        ref = self.refs[name]
        return self.load_key_head(name, lax.div(self.head, memories // ref.shape[-2]))

    def load_key_head(self, name: str, key_head):
        """Load the K numbers of the input `name` (such as the queries or keys) in the head with index
        `key_head`, broadcast over the value channels to [K, channels].
        """
        ref = self.refs[name]
        if name in self.starts:
            keys = self.shape[0]
            ref = ref.at[self.row, pl.ds(self.starts[name] + key_head * keys, keys)]
        else:
            ref = ref.at[key_head] if name == "bonus" else ref.at[self.row, key_head]
        return self.spread(plgpu.load(ref, layout=self.layout.reduce(1), optimized=False), 0)

    def load_gated_decay(self, temperature: float):
        """Compute the decay of each key channel of this memory from its low-rank gate, as the kernel's factor, broadcast to [K, channels]."""
        refs, keys = self.refs, pl.ds(self.head * self.shape[0], self.shape[0])

        def load(ref):
            return plgpu.load(ref, layout=self.layout.reduce(1), optimized=False).astype(_F32)

        gate = load(refs["gate_bias"].at[keys])
        if "gate_up" in refs:
            for rank in range(refs["gate_up"].shape[0]):
                down = refs["gate_down"][self.row, rank].astype(_F32)
                gate += down * load(refs["gate_up"].at[rank, keys])
        else:
            gate += load(refs["gate_down"].at[self.row, keys])
        return self.spread(gated_factor(gate, temperature), 0)

    def load_values(self, name: str):
        """Load from the input `name` (such as the values) one number for each value channel that this
        warpgroup computes, in float32.
        """
        ref = self.refs[name]
        if name in self.starts:
            first = self.starts[name] + self.head * self.value_dim
            ref = ref.at[self.row, pl.ds(first + self.channels.start, self.shape[1])]
        else:
            ref = ref.at[self.row, self.head, self.channels]
        return plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(_F32)


def gated_factor(gate, temperature: float):
    """Return the decay `sigmoid(gate)^(1 / temperature)` as `api.decay_factor` encodes it."""
    small = jnp.exp(-jnp.abs(gate))
    log_decay = (jnp.minimum(gate, 0.0) - _log1p(small)) * (1 / temperature)
    remaining = jnp.maximum(jnp.exp(log_decay), jnp.finfo(_F32).tiny)
    return jnp.where(log_decay > -0.5, _expm1(log_decay), remaining)


def _log1p(x):
    """Return log(1 + x) for x from 0 to 1 with the relative precision of x (Kahan)."""
    total = 1.0 + x
    rounded = total - 1.0
    return jnp.where(
        rounded > 0.0, jnp.log(total) * (x / jnp.where(rounded > 0.0, rounded, 1.0)), x
    )


def _expm1(x):
    """Return e^x - 1 for x from -0.5 to 0, by its power series."""
    series = 1.0 + x * (1 / 9)
    for n in range(8, 1, -1):
        series = 1.0 + x * (1 / n) * series
    return x * series


def apply_decay(m, factor):
    """Return the memory m [K, channels] multiplied by the decay that `factor` encodes as in
    `api.decay_factor`: a factor of at most 0 is `decay - 1`, a factor above 0 is the decay itself.
    """
    return jnp.where(factor > 0, 0.0, m) + factor * m


def read(x, m):
    """Return the product of a vector x of K numbers, such as a query, broadcast to [K, channels], with the
    memory m [K, channels]: one number for each value channel.
    """
    return jnp.sum(x * m, axis=0)


# Traced and lowered once for all layers that are compiled one after the other.
@functools.partial(
    jax.jit, static_argnames=("scale", "erase", "temperature", "columns", "interpret")
)
def step(
    memory, q, k, v, optional: dict[str, Any], *, scale: float, erase: str, temperature: float = 1.0,
    columns: tuple[int, int, int] | None = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Apply one token of each row to its memories on a Hopper GPU; return the token's output [B, max(H, G),
    V] in v's dtype, and the memories after the token.

    Args:
        memory: the memories, [B, G, K, V] float32, or [L, B, G, K, V], those of all layers, with `layer`.
        q: [B, H, K] queries; with `columns` these and the others are [B, C].
        k: [B, Hk, K] keys.
        v: [B, G, V] values.
        optional: the optional arguments of `decode_step`, each an array or None, by name: beta, decay and value_decay (as
            `api.decay_factor` encodes them), a, b, bonus, emptied [B] int32, layer [1] int32, and gate_down, gate_up and gate_bias, those
            of `api.Gate`.
        scale: the factor by which the queries q are multiplied.
        erase: "decayed" or "undecayed", the memory M in the delta rule's write `beta (v - k M)`.
        temperature: of the gate.
        columns: the first columns of q, k and v, or None.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, memories, key_dim, value_dim = memory.shape[-4:]
    heads = memories if columns is not None else q.shape[1]
    starts: dict[str, int] = {} if columns is None else dict(zip("qkv", columns, strict=True))
    width = column_width(batch * memories, key_dim, value_dim)
    assert width is not None
    queries = max(heads // memories, 1)

    def kernel(refs):
        block = Block(refs, width, key_dim, value_dim, starts)
        row, head, state = block.row, block.head, block.memory()
        m = plgpu.load(state, layout=block.layout, optimized=False)

        def load_keys(name):
            return block.load_keys(name, memories)

        def write_outputs(m):
            for i in range(queries):
                query = (
                    head * queries + i if heads >= memories else lax.div(head, memories // heads)
                )
                output = scale * read(block.load_key_head("q", query), m)
                to = refs["output"].at[row, head * queries + i, block.channels]
                to[...] = plgpu.layout_cast(output.astype(v.dtype), block.layout.reduce(0))

        if "emptied" in refs:
            m = jnp.where(refs["emptied"][row] > 0, 0.0, m)
        key, value = load_keys("k"), block.load_values("v")
        read_before = read(load_keys("a"), m) if "a" in refs else None
        held = read(key, m) if erase == "undecayed" else None
        if "bonus" in refs:
            write_outputs(m + load_keys("bonus") * (key * block.spread(value, 1)))
        if "decay" in refs:
            by_key = optional["decay"].ndim == 3
            m = apply_decay(m, load_keys("decay") if by_key else refs["decay"][row, head])
        if "gate_down" in refs:
            m = apply_decay(m, block.load_gated_decay(temperature))
        if "value_decay" in refs:
            m = apply_decay(m, block.spread(block.load_values("value_decay"), 1))
        if "beta" in refs:
            strength = refs["beta"][row, head]
            value = strength * (value - (read(key, m) if held is None else held))
        m = m + key * block.spread(value, 1)
        if read_before is not None:
            m = m + load_keys("b") * block.spread(read_before, 1)
        state[...] = m
        if "bonus" not in refs:
            write_outputs(m)

    output = jax.ShapeDtypeStruct((batch, max(heads, memories), value_dim), v.dtype)

    def in_place(refs):
        memory_ref, output_ref = refs
        output_ref[...] = launch(
            kernel,
            inputs=dict(q=q, k=k, v=v, **optional, memory=memory_ref),
            outputs=dict(output=output),
            # Thread blocks that are neighbours in memory run at the same time: the last axis varies fastest.
            grid=dict(row=batch, head=memories, column=value_dim // (_WARPS * width)),
            approx_math=False,
            name="decode_step",
            interpret=interpret,
        )["output"]

    memory, result = pl.run_state(in_place)((memory, jnp.zeros(output.shape, output.dtype)))
    return result, memory
