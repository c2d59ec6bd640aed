"""One token through a memory on Mosaic GPU (Hopper): the state is read once and written once, in place.

A warpgroup holds all keys of some value channels in its registers: a thread holds 4 neighbouring channels of every 8th (or
16th) key, so that a sum over keys is a sum inside a thread and then across a few lanes. Shared memory is not used; there are
as many warpgroups as the registers allow, so that enough loads are in flight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, key_columns, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_WARPS = 4
_STATE_REGISTERS = 64  # registers of a thread that hold the state
_MAX_QUERIES = 16  # query heads that read one memory, at most
_MAX_GRID = 65535  # size of a grid's slowest axes, at most
_DTYPES = (jnp.bfloat16, jnp.float32)


def columns(programs: int, key_dim: int, value_dim: int) -> int | None:
    """Value channels of a warp; None where no number is possible."""
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
        lambda c: columns(1, *c.memory.shape[-2:]) is not None,
        lambda c: f"K {c.memory.shape[-2]} and V {c.memory.shape[-1]}",
    ),
    Requirement(
        f"at most {_MAX_QUERIES} query heads for each memory",
        lambda c: c.q.shape[1] <= _MAX_QUERIES * c.v.shape[1],
        lambda c: f"{c.q.shape[1]} query heads for {c.v.shape[1]} memories",
    ),
    Requirement(
        f"at most {_MAX_GRID:,} rows and memories of a row",
        lambda c: max(c.q.shape[0], c.v.shape[1]) <= _MAX_GRID,
        lambda c: f"{c.q.shape[0]:,} and {c.v.shape[1]:,}",
    ),
)


def unsupported(call) -> str | None:
    """Return the first of `REQUIREMENTS` that an `api.Call` does not meet, or None."""
    return first_unmet(REQUIREMENTS, call)


def step(
    memory, q, k, v, optional: dict[str, Any], *, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, max(H, G), V], and `memory` after the token.

    Args:
        memory: as in `api.decode_step`, also q, k and v.
        q: queries.
        k: keys.
        v: values.
        optional: beta, decay and value_decay (as `api.decay_factor` encodes them), a, b, bonus, emptied [B] int32 and layer
            [1] int32, each an array or None.
        scale: multiplies q.
        interpret: parameters of the interpreter, or False.
    """
    batch, memories, value_dim = v.shape
    key_dim, heads = q.shape[2], q.shape[1]
    width = columns(batch * memories, key_dim, value_dim)
    assert width is not None
    block, layout = _WARPS * width, key_columns(width)
    queries = max(heads // memories, 1)

    def kernel(refs):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        channels = pl.ds(lax.axis_index("column") * block, block)
        layer = (refs["layer"][0],) if "layer" in refs else ()
        state = refs["memory"].at[(*layer, row, head, slice(None), channels)]
        m = plgpu.load(state, layout=layout, optimized=False)

        def spread(x, axis):
            x = lax.broadcast_in_dim(x.astype(_F32), (key_dim, block), [axis])
            return plgpu.layout_cast(x, layout)

        def load_keys(name, key_head=None):
            """A vector of K, spread over the value channels; by default of the key head that belongs to this memory."""
            ref = refs[name]
            if key_head is None:
                key_head = lax.div(head, memories // ref.shape[-2])
            ref = ref.at[key_head] if name == "bonus" else ref.at[row, key_head]
            return spread(plgpu.load(ref, layout=layout.reduce(1), optimized=False), 0)

        def load_values(name):
            ref = refs[name].at[row, head, channels]
            return plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(_F32)

        def apply_decay(m, factor):
            # A factor of at most 0 is the decay minus 1; one above 0 is the decay.
            return jnp.where(factor > 0, 0.0, m) + factor * m

        def read_memory(x, m):
            return jnp.sum(x * m, axis=0)

        def write_outputs(m):
            for i in range(queries):
                query = (
                    head * queries + i if heads >= memories else lax.div(head, memories // heads)
                )
                output = scale * read_memory(load_keys("q", query), m)
                to = refs["output"].at[row, head * queries + i, channels]
                to[...] = plgpu.layout_cast(output.astype(v.dtype), layout.reduce(0))

        if "emptied" in refs:
            m = jnp.where(refs["emptied"][row] > 0, 0.0, m)
        key, value = load_keys("k"), load_values("v")
        read_before = read_memory(load_keys("a"), m) if "a" in refs else None
        if "bonus" in refs:
            write_outputs(m + load_keys("bonus") * (key * spread(value, 1)))
        if "decay" in refs:
            by_key = optional["decay"].ndim == 3
            m = apply_decay(m, load_keys("decay") if by_key else refs["decay"][row, head])
        if "value_decay" in refs:
            m = apply_decay(m, spread(load_values("value_decay"), 1))
        if "beta" in refs:
            value = refs["beta"][row, head] * (value - read_memory(key, m))
        m = m + key * spread(value, 1)
        if read_before is not None:
            m = m + load_keys("b") * spread(read_before, 1)
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
            # Neighbours in memory run side by side: the last axis is the fastest.
            grid=dict(row=batch, head=memories, column=value_dim // block),
            approx_math=False,
            name="decode_step",
            interpret=interpret,
        )["output"]

    memory, result = pl.run_state(in_place)((memory, jnp.zeros(output.shape, output.dtype)))
    return result, memory
