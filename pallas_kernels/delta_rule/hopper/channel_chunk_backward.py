"""The phase `chunk_backward` of the delta rule with a decay per key channel (KDA), on Mosaic GPU (Hopper).

The kernel computes the gradients of q, k, beta and the log decay of every chunk in parallel, from the memory
S before the chunk, the gradient dS' of the memory after it, and two results of the scans: x, the errors of
the memory's predictions of v, and dv, the gradient of v. With dO the gradient of the output, u = beta ⊙ x,
A = scale dO uᵀ on and below the diagonal, E = -dv uᵀ below it, b the inclusive sums of the log decays, and
every product of two tokens times the decay between them (by the halving, see
`pallas_kernels.tiles.channel_decay`):

    dq = A k + scale e^b ⊙ (dO Sᵀ)                             beta ⊙ dbeta = x · dv
    dk = [E k - e^b ⊙ (dv Sᵀ)] + [Aᵀ q + Eᵀ k + e^(b_C - b) ⊙ (u dS'ᵀ)]

The first bracket of dk is the term of k as what reads the memory, as q does, and the second that of k as what
is written. In the gradient of the log decay, k times the first bracket has the sign of q dq, and k times the
second the opposite sign.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl
from pallas_kernels.delta_rule.hopper.channel_chunk_gradients import ChunkProgram, Smem, smem_types
from pallas_kernels.hopper.blocks import Block, place_of
from pallas_kernels.hopper.halving import BLOCK, CHUNK, Documents
from pallas_kernels.hopper.launch import launch

_F32, _BF16 = jnp.float32, jnp.bfloat16


def chunk_backward(
    q, k, log_decay, beta, missing, d_out, dv, states, d_states, chunk_decay, documents: Documents | None, *,
    scale: float, interpret: Any = False,
):  # fmt: skip
    """Compute, for all chunks in parallel, the gradients of q, k, beta and the log decay of the delta rule with a decay per key
    channel.

    h is the number of heads of `d_out`; the numbers of heads written as * divide it.

    Args:
        q: [B, T, *, K] bfloat16, the queries.
        k: [B, T, *, K] bfloat16, the keys.
        log_decay: [B, T, *, K] float32, the log decay of each key channel.
        beta: [B, h, T] float32, beta of each token, not 0.
        missing: [B, T, h, V] bfloat16, the errors x of the memory's predictions of v.
        d_out: [B, T, h, V] bfloat16, the gradient of the output.
        dv: [B, T, h, V] bfloat16, the gradient of v.
        states: [B, h, N, V, K] bfloat16, the transposed memory before each of the N chunks.
        d_states: [B, h, N, V, K] bfloat16, the transposed gradient of the memory after each chunk.
        chunk_decay: [B, h, N * K] float32, the decay of the memory over each of the N chunks.
        documents: where documents begin, as `halving.Documents`; None for one document per row.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradients of q and k [B, T, h, K] bfloat16, of the log decay [B, T, h, K] float32, and of beta [B, h, T] float32.
    """
    batch, length, heads, width = d_out.shape
    depth = k.shape[-1]
    count, groups = length // CHUNK, depth // BLOCK
    inputs = dict(missing=missing, d_out=d_out, dv=dv, q=q, k=k, states=states, d_states=d_states)
    inputs |= dict(g=log_decay, beta=beta, chunk_decay=chunk_decay)
    inputs |= {} if documents is None else documents._asdict()
    struct = jax.ShapeDtypeStruct
    wide = (batch, length, heads, depth)
    outputs = dict(
        dq=struct(wide, _BF16), dk=struct(wide, _BF16), dg=struct(wide, _F32),
        d_beta=struct((batch, heads, length), _F32),
    )  # fmt: skip

    def kernel(refs):
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        block = Block(refs, place_of(index, heads, count), pl.ds(group * BLOCK, BLOCK))

        def body(smem: Smem):
            ChunkProgram(
                block, smem, smem.of_warpgroup(group), group, groups, depth, scale, interpret
            ).run()

        pl.run_scoped(body, smem_types(groups, width, interpret), collective_axes="warpgroup")

    results = launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=dict(chunk=batch * count * heads),
        num_threads=groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="delta_channel_chunk_backward",
        interpret=interpret,
    )
    return list(results.values())
