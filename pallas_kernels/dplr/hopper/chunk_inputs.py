"""The inputs of the two kernels of `chunk_backward` of a diagonal-plus-low-rank memory (RWKV7) on Mosaic GPU (Hopper): their names,
their buffers in shared memory, and their loads.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import Block
from pallas_kernels.hopper.halving import BLOCK, CHUNK, SQUARE

INPUTS = ("q", "k", "a", "b")
_VALUES = ("d_out", "d_right_side", "v", "a_read")  # arrays [B, T, *, V]


def bfloat16_tile(shape: tuple[int, ...]) -> Any:
    """Return the type of a bfloat16 buffer in shared memory, with the layout of operands of matrix products."""
    smem: Any = plgpu.SMEM
    return smem(shape, jnp.bfloat16, transforms=wg.TILED)


def input_buffers(groups: int, width: int, *, rows: int, loads: int, interpret) -> dict[str, Any]:
    """Return the types of the buffers in shared memory that both kernels have, by name.

    Args:
        groups: number of warpgroups of a program, of 64 key channels each.
        width: V, number of value channels.
        rows: number of rows of `state`.
        loads: number of arrays [*, 64] that each warpgroup loads at the beginning.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        inputs: [groups, 4, C, 64], for q, k, `a` and b.
        state: [groups, rows, 64], for the memory before the chunk and the gradient of the memory after it, transposed.
        parts: [groups, 2, 64, 64], for float32 tiles as sums of two bfloat16 numbers.
        d_outs: [2, C, V], for the gradients of the output and of the right side of the triangular system.
        values: [2, C, V], for the values v and u, what `a` reads.
        loaded: the barrier at which the loads at the beginning are complete.
        state_loaded: barriers at which later loads into `state` are complete, one for each warpgroup.
        left: [groups, C, 64] for the interpreter, which reads left operands from shared memory; else None.
    """
    return dict(
        inputs=bfloat16_tile((groups, 4, *SQUARE)),
        state=bfloat16_tile((groups, rows, BLOCK)),
        parts=bfloat16_tile((groups, 2, *SQUARE)),
        d_outs=bfloat16_tile((2, CHUNK, width)),
        values=bfloat16_tile((2, CHUNK, width)),
        loaded=plgpu.Barrier(num_arrivals=loads * groups + len(_VALUES)),
        state_loaded=plgpu.Barrier(num_barriers=groups),
        left=bfloat16_tile((groups, *SQUARE)) if interpret else None,
    )


def load_inputs(block: Block, smem, group, inputs, memories: dict[str, Any]) -> None:
    """Start to load a chunk's inputs into shared memory; `smem.loaded` counts these loads.

    Args:
        block: references to the inputs in global memory, in the warpgroup's 64 key channels.
        smem: the warpgroup's buffers, those of `input_buffers` among them.
        group: index of the warpgroup. The first one also loads the arrays of value channels, which all share.
        inputs: buffers [C, 64] for q, k, `a` and b.
        memories: buffers [V, 64] for memories, by name: see `load_memory`.
    """
    for name, to in zip(INPUTS, inputs, strict=True):
        plgpu.copy_gmem_to_smem(block.keys(name), to, smem.loaded)
    for name, to in memories.items():
        load_memory(block, name, to, smem.loaded)

    def load_shared():
        for index, name in enumerate(_VALUES):
            to = (smem.d_outs if index < 2 else smem.values).at[index % 2]
            plgpu.copy_gmem_to_smem(block.head_tokens(name), to, smem.loaded)

    pl.when(group == 0)(load_shared)


def load_memory(block: Block, name: str, to, barrier) -> None:
    """Start to load the memory before the chunk (`name` "states") or the gradient of the memory after it ("d_states"), [V, 64] in the
    warpgroup's key channels, into the shared-memory buffer `to`. The end of the load counts as an arrival at `barrier`.
    """
    place = block.place
    source = block.refs[name].at[place.row, place.h, place.n, :, block.columns]
    plgpu.copy_gmem_to_smem(source, to, barrier)
