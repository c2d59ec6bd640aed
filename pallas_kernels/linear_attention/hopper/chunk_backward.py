"""The gradients of q, k and the log decay of linear attention with a decay per key channel, on Mosaic GPU (Hopper).

This is the last phase of the backward pass. Every chunk is computed by itself, from the memory S before it and the gradient dS' of
the memory after it, which the two scans have saved, and from the gradient dO of the output. With b the inclusive sums of the log
decay g over the chunk, and P the chunk's scores,

    dq = scale e^b ⊙ (dO Sᵀ) + dq(P)        dk = e^(b_C - b) ⊙ (v dS'ᵀ) + dk(P)        dP = scale dO vᵀ, on and below the diagonal

where dq(P) and dk(P) are the gradients through the scores; `tiles.channel_decay` has these and the gradient of g. A warpgroup
computes 64 key channels of one chunk and head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import BLOCK, CHUNK, SQUARE, Documents
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.linear_attention.hopper.chunk_gradients import (
    PAIR,
    Call,
    ChunkGradients,
    Position,
)

_F32 = jnp.float32


def chunk_backward(
    q, k, v, log_decay, d_output, states, d_states, chunk_decay, documents: Documents | None, *,
    scale: float, bonus=None, pieces: int = 1, exact: bool = False, interpret: Any = False,
):  # fmt: skip
    """Compute, for all chunks in parallel, the gradients of the inputs of linear attention with a decay per key channel.

    Return the gradients of q and k [B, T, h, K] and of the log decay [B, T, h, K] (float32) for h heads; with a bonus also the
    gradient of the bonus from each chunk, [B, h, N, K]. Inputs with `*` heads have a number of heads that divides h.

    Args:
        q: [B, T, *, K] queries; None, together with `d_states` None, to compute the gradient of q alone.
        k: [B, T, *, K] keys. They may be float32 if the gradient of q is returned alone, and are then not rounded within a chunk.
        v: [B, T, *, V] values, where each head's value channels are cut into `pieces` consecutive heads.
        log_decay: [B, T, *, K], the log decay of each key channel.
        d_output: [B, T, * pieces, V], the gradient of the output.
        states: [B, h * pieces, N, K, V], the memory before each of the N chunks.
        d_states: [B, h * pieces, N, K, V], the gradient of the memory after each of the N chunks.
        chunk_decay: [B, *, N * K], the decay of each key channel over each chunk.
        documents: where documents begin, as `halving.Documents`; None is one document per row.
        scale: the factor by which the queries q are multiplied.
        bonus: [*, K], RWKV6's weight of a token's own key and value, or None.
        pieces: number of slices of each head's value channels, 1 or even; of more than 2, the next two are loaded when two are used.
        exact: whether the gradient of q, returned alone, is float32.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, length, _, width = d_output.shape
    heads = states.shape[1] // pieces
    depth, count = k.shape[-1], length // CHUNK
    inputs = dict(q=q, k=k, states=states, d_states=d_states, v=v, d_output=d_output)
    inputs |= dict(g=log_decay, chunk_decay=chunk_decay)
    inputs |= {} if documents is None else documents._asdict()
    inputs |= dict(bonus=bonus)
    # Two blocks of one warpgroup fit on a processor, so that one loads while the other computes; with two pieces they do not fit.
    groups = depth // BLOCK if pieces > 1 else 1
    call = Call(
        shapes={name: x.shape for name, x in inputs.items() if x is not None},
        heads=heads, count=count, depth=depth, width=width, pieces=pieces, groups=groups,
        blocks=depth // BLOCK // groups, scale=scale, exact=exact, interpret=interpret,
    )  # fmt: skip
    struct = jax.ShapeDtypeStruct
    rounded = struct((batch, length, heads, depth), d_output.dtype)
    unrounded = struct(rounded.shape, _F32)
    outputs = dict(dq=unrounded if exact else rounded)
    if not call.only_query:
        outputs |= dict(dk=rounded, dg=unrounded)
    if bonus is not None:
        outputs["d_bonus"] = struct((batch, heads, count, depth), _F32)
    smem = _smem(call, d_output.dtype, k.dtype)

    def kernel(refs):
        position = _position(call)
        with_smem(
            lambda buffers: ChunkGradients(call, position, refs, buffers).compute(),
            smem,
            thread_name="warpgroup",
        )

    results = launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=dict(chunk=batch * count * heads * call.blocks),
        num_threads=groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="linear_attention_chunk_backward",
        interpret=interpret,
    )
    return list(results.values())


def _position(call: Call) -> Position:
    """Return the row, head, chunk and 64 key channels whose gradients this warpgroup of `chunk_backward` computes, from its index
    in the grid.
    """
    index, local = lax.div(lax.axis_index("chunk"), call.blocks), lax.axis_index("warpgroup")
    group = lax.rem(lax.axis_index("chunk"), call.blocks) * call.groups + local
    h, n = lax.rem(index, call.heads), lax.rem(lax.div(index, call.heads), call.count)
    b = lax.div(index, call.heads * call.count)
    tokens, channels = pl.ds(n * CHUNK, CHUNK), pl.ds(group * BLOCK, BLOCK)
    return Position(b, h, n, local, group, tokens, channels)


def _smem(call: Call, dtype, key_dtype) -> dict[str, Any]:
    """Return the types of the buffers and barriers in shared memory that a thread block of `chunk_backward` uses, by name.

    `v`, `d_output`, `loaded`, `used` and `next_pair` are used by all warpgroups together. The others have a first axis with an entry for each
    warpgroup.
    """
    smem: Any = plgpu.SMEM
    groups, barrier, at_once = call.groups, plgpu.Barrier, min(call.pieces, PAIR)
    more = call.pieces > PAIR

    def tiles(*shape, dtype=dtype):
        return smem(shape, dtype=dtype, transforms=wg.smem_transforms(dtype))

    return dict(
        q=tiles(groups, *SQUARE),
        k=tiles(groups, *SQUARE, dtype=key_dtype),
        states=tiles(groups, BLOCK, call.width),
        d_states=tiles(groups, BLOCK, call.width),
        parts=tiles(groups, 2, *SQUARE, dtype=jnp.bfloat16),
        tile=tiles(groups, *SQUARE),
        totals=smem((groups, CHUNK), _F32),
        lowest=smem((groups, 2, CHUNK), _F32),
        v=tiles(at_once, CHUNK, call.width),
        d_output=tiles(at_once, CHUNK, call.width),
        loaded=barrier(num_arrivals=(2 if call.only_query else 4) * groups + 2 * at_once),
        next_piece=barrier(num_arrivals=1 if call.only_query else 2, num_barriers=groups),
        used=barrier(num_arrivals=groups) if more else None,
        next_pair=barrier(num_arrivals=(1 if call.only_query else 2) * groups + 2 * at_once)
        if more
        else None,
        left=tiles(groups, *SQUARE, dtype=jnp.bfloat16) if call.interpret else None,
    )
