"""The gradient of SwiGLU and its hidden layer on Mosaic GPU (Hopper): one kernel, which loads gate, up and the gradient of the hidden layer once.

A thread block computes consecutive tokens, and of each the same 256 channels of gate and of up. A warp has one token at a time, a thread
8 channels, 16 bytes of each array. The next tokens are loaded while the current ones are computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_WARPS = 4  # of a warpgroup, each with one token
_CHANNELS = 256
AHEAD = 2
"""Groups of tokens, one for each warp, that are loaded one step ahead."""
_STEP = AHEAD * _WARPS


def _tokens(x) -> int:
    return x.shape[0] * x.shape[1]


REQUIREMENTS = (
    Requirement(
        "gate and up in bfloat16",
        lambda x: x.dtype == jnp.dtype(jnp.bfloat16),
        lambda x: jnp.dtype(x.dtype).name,
    ),
    Requirement(
        f"a multiple of {_CHANNELS} channels of gate and of up",
        lambda x: x.shape[2] % (2 * _CHANNELS) == 0,
        lambda x: f"half of {x.shape[2]}",
    ),
    Requirement(
        f"a multiple of {_STEP} tokens in all rows",
        lambda x: _tokens(x) % _STEP == 0,
        lambda x: str(_tokens(x)),
    ),
)


def unsupported(gate_up) -> str | None:
    """Return the first requirement of the Hopper kernel that an array [B, T, 2F] does not meet, or None if it supports the array."""
    return first_unmet(REQUIREMENTS, gate_up)


def gradients(scale: float, interpret: Any, gate_up, d_hidden) -> tuple[jax.Array, jax.Array]:
    """Compute the gradient [B, T, 2F] of gate and up and the hidden layer [B, T, F] on a Hopper GPU; arguments and results are those of
    `api.swiglu_gradients`.
    """
    tokens, columns = _tokens(gate_up), d_hidden.shape[2] // _CHANNELS
    enough = [n for n in (128, 64, 32) if -(-tokens // n) * columns >= 8 * PROCESSORS]
    block = (enough or [16])[0]
    registers = channel_rows(_WARPS, _CHANNELS, _WARPS)

    def kernel(refs):
        column = lax.axis_index("column")
        start = lax.axis_index("block") * block

        def at(name, token, column):
            return refs[name].at[pl.ds(token, _WARPS), column]

        def load(name, token, column):
            return plgpu.load(at(name, token, column), layout=registers, optimized=False)

        def store(x, name, token, column):
            ref = at(name, token, column)
            ref[...] = plgpu.layout_cast(x.astype(ref.dtype), registers)

        def load_step(token):
            first = jnp.minimum(token, tokens - _STEP)
            return [
                (
                    load("gate_up", first + i, column),
                    load("gate_up", first + i, column + columns),
                    load("d_hidden", first + i, column),
                )
                for i in range(0, _STEP, _WARPS)
            ]

        def step(index, loaded):
            token = start + index * _STEP
            following = load_step(token + _STEP)
            for i, arrays in enumerate(loaded):
                gate, up, d = (x.astype(_F32) for x in arrays)
                gate = gate if scale == 1 else gate * scale
                root = lax.rsqrt(1.0 + jnp.exp(-gate))  # the sigmoid without a division
                sigmoid = root * root
                silu = gate * sigmoid
                d_gate = d * up * (sigmoid + silu * (1.0 - sigmoid))
                to = token + i * _WARPS
                store(d_gate if scale == 1 else d_gate * scale, "d_gate_up", to, column)
                store(d * silu, "d_gate_up", to, column + columns)
                store(silu * up, "hidden", to, column)
            return following

        count = jnp.minimum(block, tokens - start) // _STEP
        lax.fori_loop(0, count, step, load_step(start))

    def cut(x):
        return x.reshape(tokens, -1, _CHANNELS)

    inputs = dict(gate_up=cut(gate_up), d_hidden=cut(d_hidden))
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()}
    results = launch(
        kernel,
        inputs=inputs,
        outputs=dict(d_gate_up=like["gate_up"], hidden=like["d_hidden"]),
        grid=dict(column=columns, block=-(-tokens // block)),
        auto_barriers=False,  # no thread loads what another has stored
        name="swiglu_backward",
        interpret=interpret,
    )
    return results["d_gate_up"].reshape(gate_up.shape), results["hidden"].reshape(d_hidden.shape)
