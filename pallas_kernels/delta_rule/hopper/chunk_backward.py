"""The phase `chunk_backward` of the delta rule without decay or with a scalar decay, on Mosaic GPU (Hopper): the gradients of q, k, beta
and the log decay of all chunks in parallel.

Two kernels compute them. `chunk_gradients` keeps q and k of a chunk in shared memory and lets programs on one processor overlap;
`streamed_chunk_backward` is for heads so wide that only one program fits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl
from pallas_kernels.delta_rule.hopper import streamed_chunk_backward as streamed
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK
from pallas_kernels.delta_rule.hopper.chunk_gradients import BLOCK, ChunkProgram, Smem, smem_types
from pallas_kernels.delta_rule.hopper.streamed_tiles import Sizes, stage_count
from pallas_kernels.hopper.blocks import row_and_head
from pallas_kernels.hopper.launch import launch

_WIDTH = 256  # value channels of one program
# Pairs of tiles of S and dS' that are loaded or in use, if they cost no other chunk's shared memory.
_STAGES = 3
_SMEM_BYTES = 226 * 1024  # shared memory of a processor, of 227 KiB
_F32, _BF16 = jnp.float32, jnp.bfloat16


class _Plan(NamedTuple):
    """How `chunk_backward` divides the work for a number of key channels K and of value channels.

    Attributes:
        depth: K.
        width: the number of value channels of one program.
        slices: the number of programs for the value channels of a chunk and head.
        programs: the number of programs of the kernel that keeps q and k that run on a processor at a time.
        stages: the number of pairs of tiles of S and dS' of such a program.
        ring: the number of pairs of tiles of a program of the streamed kernel; 0 where that does not fit.
    """

    depth: int
    width: int
    slices: int
    programs: int
    stages: int
    ring: int


def _plan(depth: int, values: int) -> _Plan:
    """Return how the work for K = `depth` and V = `values` is divided."""
    width, slices = min(values, _WIDTH), max(1, values // _WIDTH)
    pair_count = (width // BLOCK) * (depth // BLOCK)
    pair_bytes, other_bytes = 4 * BLOCK * BLOCK, 2 * CHUNK * (2 * depth + 3 * width + CHUNK + 8)
    programs = _SMEM_BYTES // (other_bytes + pair_bytes)
    stages = min(_STAGES, pair_count, (_SMEM_BYTES // programs - other_bytes) // pair_bytes)
    ring = stage_count(depth, width, _SMEM_BYTES)
    return _Plan(depth, width, slices, programs, stages, ring)


def fits_streamed(depth: int, values: int) -> bool:
    """Return whether `chunk_backward` with K = `depth` and V = `values` runs by the streamed kernel: where only one program of the other
    kernel fits on a processor, so that no second one computes while it waits, and the streamed one fits. With 64 key channels it loads
    them twice for one product each, and took 1.46 times as long as the other.
    """
    plan = _plan(depth, values)
    return depth > BLOCK and plan.programs == 1 and plan.ring > 0


def chunk_backward(
    q, k, missing, d_out, dv, states, d_states, beta, log_decay, run, *, scale: float,
    decay_gradient: bool, erase: str, stream: bool | None = None, interpret: Any = False,
):  # fmt: skip
    """Compute, for all chunks in parallel, the gradients of q, k, beta and the log decay of the delta rule
    with a scalar decay or none.

    Each slice of 256 value channels has separate results, which the caller adds up.

    Args:
        q: [B, T, *, K] bfloat16, the queries.
        k: [B, T, *, K] bfloat16, the keys.
        missing: [B, T, heads, V] bfloat16, the errors x of the memory's predictions of v.
        d_out: [B, T, heads, V] bfloat16, the gradient of the output.
        dv: [B, T, heads, V] bfloat16, the gradient of v.
        states: [B, heads, N, V, K] bfloat16, the transposed memory before each of the N chunks.
        d_states: [B, heads, N, V, K] bfloat16, the transposed gradient of the memory after each chunk.
        beta: [B, T, G] float32, beta of each token and memory.
        log_decay: [B, T, G] float32, the log decay of each memory, or None.
        run: [B, T] int32, the number of each token's document, or None for one document per row.
        scale: the factor by which the queries q are multiplied.
        decay_gradient: whether to compute the gradient of the log decay.
        erase: "decayed" or, with a log decay, "undecayed", the memory that keys read.
        stream: whether the streamed kernel computes it (`streamed_chunk_backward`); None is the rule of `fits_streamed`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradients of q and k [B, T, heads * slices, K] bfloat16, of beta [B, T, heads * slices] float32
        and, if `decay_gradient`, of the log decay [B, T, heads * slices] float32.
    """
    batch, length, heads, width = dv.shape
    depth = k.shape[-1]
    plan = _plan(depth, width)
    if stream and not plan.ring:
        raise ValueError(
            f"stream=True does not fit in shared memory with K={depth} and V={width}; None chooses"
        )
    stream = fits_streamed(depth, width) if stream is None else stream
    slices = plan.slices

    options = scale, decay_gradient, erase, interpret
    chunks, sliced = length // CHUNK, (plan.slices, plan.width, depth)

    def kernel(refs):
        b, h = row_and_head(heads)
        n, piece = lax.axis_index("chunk"), lax.axis_index("slice")
        place = b, h, n, piece, pl.ds(n * CHUNK, CHUNK), h * slices + piece, heads

        def body(smem: Smem):
            ChunkProgram(refs, smem, *place, plan.width, depth, plan.stages, *options).run()

        pl.run_scoped(body, smem_types(depth, plan.width, plan.stages, interpret))

    grid = dict(row=batch * heads, chunk=chunks, slice=slices)
    if stream:
        sizes = Sizes(batch, chunks, heads, *sliced, plan.ring, *options)
        kernel = functools.partial(streamed.run, sizes=sizes)
        grid = streamed.grid(sizes)

    gradient = jax.ShapeDtypeStruct((batch, length, heads * slices, depth), _BF16)
    d_beta = jax.ShapeDtypeStruct(gradient.shape[:3], _F32)
    result = launch(
        kernel,
        inputs=dict(
            q=q, k=k, missing=missing, d_out=d_out, dv=dv, states=states, d_states=d_states, beta=beta,
            log_decay=log_decay, run=run,
        ),
        outputs=dict(dq=gradient, dk=gradient, d_beta=d_beta, d_decay=d_beta if decay_gradient else None),
        grid=grid,
        num_threads=streamed.GROUPS if stream else None,
        name="delta_chunk_backward",
        interpret=interpret,
    )  # fmt: skip
    return list(result.values())
