"""One token through a memory on Mosaic GPU (Hopper): the state is read once and written once, where it stands.

A warpgroup has all keys of some value channels in its registers: a thread holds 4 neighbouring channels of every 8th (or
16th) key, so that what is summed over keys is summed in a thread and then across a few lanes. Shared memory has no part in
it; as many warpgroups as the registers hold keep enough loads on their way.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, key_columns, pl, plgpu

_F32 = jnp.float32
_WARPS = 4
_REGISTERS = 64  # of a thread, for the state
_QUERIES = 16  # heads that read one memory, at most
_ROWS = 65535  # of the slowest axis of a grid
_DTYPES = (jnp.bfloat16, jnp.float32)


def columns(programs: int, key_dim: int, value_dim: int) -> int | None:
    """Value channels of a warp; None where no number is possible."""
    sizes = [
        size
        for size in (16, 8)
        if value_dim % (_WARPS * size) == 0
        and key_dim % 16 == 0
        and key_dim * size <= 32 * _REGISTERS
    ]
    enough = [s for s in sizes if programs * (value_dim // (_WARPS * s)) >= PROCESSORS]
    return (enough or sizes[-1:] or [None])[0]


def reason(q, v, memory) -> str | None:
    """What this backend takes in place of these arguments (arrays or their shapes), or None."""
    key_dim, value_dim = memory.shape[-2:]
    for name, x in (("q", q), ("v", v)):
        if x.dtype not in _DTYPES:
            return f"{name} in bfloat16 or float32, not {x.dtype}"
    if memory.dtype != _F32:
        return f"a float32 memory, not {memory.dtype}"
    if columns(1, key_dim, value_dim) is None:
        return f"K a multiple of 16 up to 256 and V of 32, not K {key_dim} and V {value_dim}"
    if q.shape[1] > _QUERIES * v.shape[1]:
        return f"at most {_QUERIES} queries a memory, not {q.shape[1]} for {v.shape[1]}"
    if max(q.shape[0], v.shape[1]) > _ROWS:
        return f"at most {_ROWS} rows and heads, not {q.shape[0]} and {v.shape[1]}"
    return None


def step(
    memory, q, k, v, beta, decay, value_decay, a, b, bonus, emptied, layer, *, scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The output [B, max(H, G), V], and `memory` after the token; the arguments are `api`'s."""
    batch, memories, value_dim = v.shape
    key_dim, heads = q.shape[2], q.shape[1]
    width = columns(batch * memories, key_dim, value_dim)
    assert width is not None
    block, layout = _WARPS * width, key_columns(width)
    of_keys, of_values = layout.reduce(1), layout.reduce(0)
    queries = max(heads // memories, 1)
    optional = dict(
        beta=beta, decay=decay, value_decay=value_decay, a=a, b=b, bonus=bonus, emptied=emptied,
        layer=layer,
    )  # fmt: skip
    named = dict(q=q, k=k, v=v) | {n: x for n, x in optional.items() if x is not None}

    def kernel(*refs):
        own = dict(zip([*named, "memory", "output"], refs, strict=True))
        row, head = lax.axis_index("row"), lax.axis_index("head")
        part = pl.ds(lax.axis_index("column") * block, block)
        place = (own["layer"][0],) if "layer" in own else ()
        state = own["memory"].at[(*place, row, head, slice(None), part)]
        m = plgpu.load(state, layout=layout, optimized=False)

        def spread(x, axis):
            x = lax.broadcast_in_dim(x.astype(_F32), (key_dim, block), [axis])
            return plgpu.layout_cast(x, layout)

        def keys(name, at=None):
            """A row of K for every value channel; of the head that this memory's has."""
            ref = own[name]
            if at is None:
                at = lax.div(head, memories // ref.shape[-2])
            ref = ref.at[at] if name == "bonus" else ref.at[row, at]
            return spread(plgpu.load(ref, layout=of_keys, optimized=False), 0)

        def values(name):
            ref = own[name].at[row, head, part]
            return plgpu.load(ref, layout=of_values, optimized=False).astype(_F32)

        def forget(m, factor):
            # A factor of at most 0 is what the decay takes away; another is what it leaves.
            return jnp.where(factor > 0, 0.0, m) + factor * m

        def read(x, m):
            return jnp.sum(x * m, axis=0)

        def answer(m):
            for i in range(queries):
                at = head * queries + i if heads >= memories else lax.div(head, memories // heads)
                output = scale * read(keys("q", at), m)
                to = own["output"].at[row, head * queries + i, part]
                to[...] = plgpu.layout_cast(output.astype(v.dtype), of_values)

        if emptied is not None:
            m = jnp.where(own["emptied"][row] > 0, 0.0, m)
        key, value = keys("k"), values("v")
        held = read(keys("a"), m) if a is not None else None
        if bonus is not None:
            answer(m + keys("bonus") * (key * spread(value, 1)))
        if decay is not None:
            m = forget(m, keys("decay") if decay.ndim == 3 else own["decay"][row, head])
        if value_decay is not None:
            m = forget(m, spread(values("value_decay"), 1))
        if beta is not None:
            value = own["beta"][row, head] * (value - read(key, m))
        m = m + key * spread(value, 1)
        if held is not None:
            m = m + keys("b") * spread(held, 1)
        state[...] = m
        if bonus is None:
            answer(m)

    out = jax.ShapeDtypeStruct((batch, max(heads, memories), value_dim), v.dtype)
    launch = plgpu.kernel(
        kernel,
        out_type=out,
        # Neighbours in memory run side by side: the last axis is the fastest.
        grid=(batch, memories, value_dim // block),
        grid_names=("row", "head", "column"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )

    def in_place(refs):
        refs[1][...] = launch(*named.values(), refs[0])

    memory, output = pl.run_state(in_place)((memory, jnp.zeros(out.shape, out.dtype)))
    return output, memory
