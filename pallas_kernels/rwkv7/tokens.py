"""The frame of kernels on Mosaic GPU (Hopper) that compute each token and head alone, and sums over tokens.

A thread block computes consecutive tokens, and of each the same whole heads; each head is in one warp. All values of a token are in
registers; the next tokens are loaded while the current ones are computed. Sums over tokens are those of a block's tokens in registers;
XLA adds those of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement

_F32 = jnp.float32
WARPS = 4
"""The number of warps of a thread block, which is one warpgroup."""
CHANNELS = 512
"""The number of channels of a token that a thread block computes: 4 a thread."""
WIDTHS = (16, 32, 64, 128)
"""The numbers of channels of a head with which a head is in one warp."""


def in_dtype(names: str, dtype: Any) -> Requirement:
    """Return the requirement that the arrays of these names, separated by spaces, have a dtype; the call is a mapping from names to arrays."""
    wanted, listed = jnp.dtype(dtype), names.split()
    text = ", ".join(listed[:-1]) + " and " * (len(listed) > 1) + listed[-1]
    return Requirement(
        f"{text} in {wanted.name}",
        lambda c: all(c[n].dtype == wanted for n in listed),
        lambda c: ", ".join(jnp.dtype(c[n].dtype).name for n in listed),
    )


def whole_heads(name: str) -> tuple[Requirement, ...]:
    """Return the requirements on the heads of the array [B, T, H, K] called `name`; the call is a mapping from names to arrays."""
    return (
        Requirement(
            "heads of 16, 32, 64 or 128 channels",
            lambda c: c[name].shape[3] in WIDTHS,
            lambda c: str(c[name].shape[3]),
        ),
        Requirement(
            f"a multiple of {CHANNELS} channels in all heads",
            lambda c: math.prod(c[name].shape[2:]) % CHANNELS == 0,
            lambda c: str(math.prod(c[name].shape[2:])),
        ),
    )


def divided(name: str, ahead: int) -> Requirement:
    """Return the requirement that all rows of the array [B, T, ...] called `name` together have a multiple of `ahead` tokens."""
    return Requirement(
        f"a multiple of {ahead} tokens in all rows",
        lambda c: math.prod(c[name].shape[:2]) % ahead == 0,
        lambda c: str(math.prod(c[name].shape[:2])),
    )


def block_tokens(tokens: int, columns: int) -> int:
    """Return the number of consecutive tokens of a thread block: as many, up to 128, as leave every processor 8 blocks, or 16."""
    enough = [n for n in (128, 64, 32) if -(-tokens // n) * columns >= 8 * PROCESSORS]
    return (enough or [16])[0]


def run(
    compute: Callable[..., tuple[dict[str, Any], dict[str, Any]]],
    *,
    arrays: Mapping[str, jax.Array],
    weights: Mapping[str, jax.Array],
    outputs: Mapping[str, Any],
    sums: Iterable[str] = (),
    ahead: int,
    name: str,
    interpret: Any,
    shared_sums: Collection[str] = (),
) -> dict[str, jax.Array]:
    """Run a kernel that computes each token and head alone; return its outputs [tokens, H, K] and its sums over all tokens [H, K] in
    float32, by name.

    Args:
        compute: function of one token's arrays and of the weights, two dictionaries of tiles [heads, K] in float32, and of a function
            that returns the sum of a tile over the channels of each head, in the tile's shape. It returns the token's outputs and its
            addends of the sums, by name.
        arrays: [tokens, H, K] by name; H K is a multiple of `CHANNELS`, and K one of `WIDTHS`.
        weights: [H, K] in float32 by name.
        outputs: the dtypes of the outputs, by name.
        sums: names of the sums.
        ahead: the number of tokens, a divisor of all tokens, that are loaded while as many are computed.
        name: the kernel's name in profiles.
        interpret: parameters of the interpreter, or False.
        shared_sums: names of the sums that are in shared memory instead of registers.
    """
    tokens, heads, width = next(iter(arrays.values())).shape
    rows = CHANNELS // width
    columns = heads // rows
    block = block_tokens(tokens, columns)
    registers, tile = channel_rows(rows, width, WARPS), (rows, width)
    sums = tuple(sums)
    carried = tuple(n for n in sums if n not in shared_sums)

    def kernel(refs, buffers):
        own = pl.ds(lax.axis_index("column") * rows, rows)
        index = lax.axis_index("block")
        start = index * block

        def load(ref):
            return plgpu.load(ref.at[own], layout=registers, optimized=False)

        def load_step(token):
            first = jnp.minimum(token, tokens - ahead)
            return [[load(refs[f"in_{n}"].at[first + i]) for n in arrays] for i in range(ahead)]

        def store(x, to, at):
            ref = refs[to].at[at, own]
            ref[...] = plgpu.layout_cast(x.astype(ref.dtype), registers)

        def total(x):
            added = lax.broadcast_in_dim(jnp.sum(x, axis=1), tile, [0])
            return plgpu.layout_cast(added, registers)

        constants = {n: load(refs[f"weight_{n}"]) for n in weights}

        def step(i, state):
            loaded, carry = state
            token = start + i * ahead
            following = load_step(token + ahead)
            for j, values in enumerate(loaded):
                wide = (x.astype(_F32) for x in values)
                out, added = compute(dict(zip(arrays, wide, strict=True)), constants, total)
                for n in outputs:
                    store(out[n], f"out_{n}", token + j)
                for n, buffer in buffers.items():
                    add(buffer, added[n])
                carry = [x + added[n] for n, x in zip(carried, carry, strict=True)]
            return following, carry

        def add(buffer, x):
            earlier = plgpu.load(buffer, layout=registers, optimized=False)
            buffer[...] = plgpu.layout_cast(earlier + x, registers)

        zero = next(iter(constants.values())) * 0.0
        for buffer in buffers.values():
            buffer[...] = plgpu.layout_cast(zero, registers)
        count = jnp.minimum(block, tokens - start) // ahead
        _, carry = lax.fori_loop(0, count, step, (load_step(start), [zero] * len(carried)))
        for n, x in zip(carried, carry, strict=True):
            store(x, f"sum_{n}", index)
        for n, buffer in buffers.items():
            store(plgpu.load(buffer, layout=registers, optimized=False), f"sum_{n}", index)

    blocks = -(-tokens // block)
    per_token = {
        f"out_{n}": jax.ShapeDtypeStruct((tokens, heads, width), d) for n, d in outputs.items()
    }
    per_block = jax.ShapeDtypeStruct((blocks, heads, width), _F32)
    results = launch(
        kernel,
        inputs={f"in_{n}": x for n, x in arrays.items()}
        | {f"weight_{n}": x for n, x in weights.items()},
        outputs=per_token | {f"sum_{n}": per_block for n in sums},
        grid=dict(column=columns, block=blocks),
        scratch={n: plgpu.SMEM(tile, _F32) for n in sums if n in shared_sums},
        auto_barriers=not shared_sums,  # a thread loads from shared memory what it alone has stored
        name=name,
        interpret=interpret,
    )
    return {n: results[f"out_{n}"] for n in outputs} | {
        n: jnp.sum(results[f"sum_{n}"], axis=0) for n in sums
    }
