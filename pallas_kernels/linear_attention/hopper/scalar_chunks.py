"""The gradients of linear attention with a scalar decay on Mosaic GPU (Hopper), all chunks at once: from the memory before each chunk and its
gradient after it, which two scans of writes have saved.

With decays cum (summed from the chunk's start) and write_decay, W_ij = scale exp(cum_i - cum_j) for j <= i, A = (q kᵀ) W, B = (dO vᵀ) W, the
memory S before the chunk and the gradient D of that after it:

    dq_i = scale exp(cum_i) dO_i Sᵀ + (B k)_i,    dk_j = write_decay_j v_j Dᵀ + (Bᵀ q)_j,    dv_j = write_decay_j k_j D + (Aᵀ dO)_j.

A token's log decay is in the products of its memory and of earlier writes with later reads: its gradient is exp(cum_63) <S, D>, plus k_j . (write_decay_j
v_j Dᵀ) of earlier tokens, plus q_i . dq_i - k_i . (Bᵀ q)_i of itself and later ones. Mamba2 (arXiv 2405.21060) section 6 has the chunks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK
from pallas_kernels.linear_attention.hopper.scalar_weights import SQUARE, times_rows, token_weights

CHANNELS = 64
"""The number of key and of value channels: a thread block has one warpgroup, and registers for tiles of [64, 64]."""
_F32 = jnp.float32
_DECAYS = "cum", "write_decay"
_FIRST = "q", "k", "v", "d_output", *_DECAYS  # what is loaded before the memories


def chunk_gradients(
    q, k, v, d_output, cum, write_decay, states, d_states, *, scale: float, decay_gradient: bool, interpret: Any
) -> dict[str, jax.Array]:  # fmt: skip
    """Return the gradients of q, k, v [B, T, G, 64] and, if `decay_gradient`, of log_decay [B, T, G], by name, of rows with one document and one
    memory.

    Args:
        q, k, v, d_output: [B, T, G, 64] bfloat16, T a multiple of 64.
        cum: [B, G, T] float32, for each token the sum of the log decays of its chunk up to it.
        write_decay: [B, G, T] float32, the exponential of the sum of those after it.
        states: [B, G, T / 64, 64, 64] bfloat16, the memory [K, V] before each chunk.
        d_states: the same of the gradient of the memory after each chunk.
        scale: the factor of the output.
        decay_gradient: whether to compute the gradient of log_decay.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, length, heads, _ = q.shape
    inputs = dict(
        q=q, k=k, v=v, d_output=d_output, cum=cum, write_decay=write_decay, states=states, d_states=d_states
    )  # fmt: skip
    struct: Any = jax.ShapeDtypeStruct
    outputs = dict(
        dq=struct(q.shape, q.dtype),
        dk=struct(k.shape, k.dtype),
        dv=struct(v.shape, v.dtype),
        d_decay=struct((batch, length, heads), _F32) if decay_gradient else None,
    )
    smem: dict[str, Any] = {
        name: plgpu.SMEM((CHUNK, CHANNELS), dtype=q.dtype, transforms=wg.TILED)
        for name in ("q", "k", "v", "d_output", "states", "d_states", "scores", "weights")
    }
    smem |= {name: plgpu.SMEM((CHUNK,), _F32) for name in _DECAYS}
    smem |= dict(
        first=plgpu.Barrier(num_arrivals=len(_FIRST)),
        memories=plgpu.Barrier(num_arrivals=2),
        dots=plgpu.SMEM((3, CHUNK), _F32) if decay_gradient else None,
    )

    def kernel(refs):
        with_smem(lambda buffers: _compute(refs, buffers, scale, interpret), smem)

    return launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=dict(row=batch, chunk=length // CHUNK, head=heads),
        num_threads=1,
        reduction_scratch_bytes=0,
        name="linear_attention_scalar_chunks",
        interpret=interpret,
    )


def _compute(refs: dict[str, Any], smem: dict[str, Any], scale: float, interpret: Any) -> None:
    """Compute and store the gradients of one chunk and head."""
    b, n, h = (lax.axis_index(x) for x in ("row", "chunk", "head"))
    tokens = pl.ds(n * CHUNK, CHUNK)
    for name in _FIRST:
        source = refs[name].at[(b, h, tokens) if name in _DECAYS else (b, tokens, h)]
        plgpu.copy_gmem_to_smem(source, smem[name], smem["first"])
    for name in ("states", "d_states"):
        plgpu.copy_gmem_to_smem(refs[name].at[b, h, n], smem[name], smem["memories"])
    q, k, v, d_output = (smem[x] for x in ("q", "k", "v", "d_output"))
    plgpu.barrier_wait(smem["first"])

    def store(name, buffer, x):
        """Start to store a gradient through a buffer that all products have read."""
        smem[buffer][...] = x.astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem[buffer], refs[name].at[b, tokens, h])

    def scores(qk, dov):
        plgpu.wgmma(qk, q, k.transpose((1, 0)))
        plgpu.wgmma(dov, d_output, v.transpose((1, 0)))
        factor = token_weights(smem, False, scale)
        plgpu.barrier_wait(smem["memories"])
        smem["scores"][...] = (qk[...] * factor).astype(q.dtype)
        smem["weights"][...] = (dov[...] * factor).astype(q.dtype)

    pl.run_scoped(scores, plgpu.ACC(SQUARE, _F32), plgpu.ACC(SQUARE, _F32))
    plgpu.commit_smem()

    def load(name):
        return plgpu.load(smem[name], layout=wg.LAYOUT).astype(_F32)

    def gradient(*products, factors):
        """Return the first product, of the left and the right tile in `products`, with its rows times `factors`, and that plus the second."""
        first, second = products
        (x,) = wg.products_from_zero(lambda ref: plgpu.wgmma(ref, *first), (CHUNK, BLOCK))
        x = times_rows(x, *factors)
        (total,) = wg.accumulate(lambda ref: plgpu.wgmma(ref, *second), x, interpret=interpret)
        return x, total

    with_decay = "d_decay" in refs
    written = smem, "write_decay", 1
    if with_decay:
        of_memory = jnp.sum(load("states") * load("d_states"), axis=1)
        smem["dots"].at[2][...] = of_memory * jnp.exp(smem["cum"][CHUNK - 1])
    weights, transposed = smem["weights"], lambda name: smem[name].transpose((1, 0))
    read = dict(cum=smem["cum"]), "read_decay", scale
    _, dq = gradient((d_output, transposed("states")), (weights, k), factors=read)
    own = jnp.sum(load("q") * dq, axis=1) if with_decay else 0.0
    store("dq", "states", dq)
    earlier, dk = gradient((v, transposed("d_states")), (transposed("weights"), q), factors=written)
    if with_decay:
        keys = load("k")
        earlier = jnp.sum(keys * earlier, axis=1)
        smem["dots"].at[0][...] = own - (jnp.sum(keys * dk, axis=1) - earlier)
        smem["dots"].at[1][...] = earlier
    store("dk", "weights", dk)
    _, dv = gradient((k, smem["d_states"]), (transposed("scores"), d_output), factors=written)
    store("dv", "d_states", dv)
    if with_decay:
        refs["d_decay"].at[b, tokens, h][...] = _decay_gradient(smem["dots"])
    plgpu.wait_smem_to_gmem(0)


def _decay_gradient(dots):
    """Return the gradient [64] of a chunk's log decays, from three vectors [3, 64] in shared memory: of each token's inner products, those that
    itself and earlier tokens add, those that later tokens add, and those that all tokens add.
    """
    own, earlier, of_all = (
        wg.spread_columns(plgpu.load(dots.at[x], layout=wg.LAYOUT.reduce(0)), SQUARE)
        for x in range(3)
    )
    i, j = (plgpu.broadcasted_iota(jnp.int32, SQUARE, x, layout=wg.LAYOUT) for x in (0, 1))
    return jnp.sum(jnp.where(j >= i, own, earlier) + of_all, axis=1)
