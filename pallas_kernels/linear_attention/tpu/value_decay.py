"""Linear attention whose decay has a value for every value channel (slot memories) on Mosaic TPU: one kernel forward, one
backward.

Let A = scale q kᵀ be the scores of a chunk, without decay, and b [C, V] the inclusive sums of its log decays. Token i reads Σ_j
A_ij e^(b_i - b_j) ⊙ v_j. On each level of the halving (`tpu.halving`) this is the product of A's entries at the level's pairs of
tokens with the decayed values. Compared with a decay per key channel (`channel_decay`), the two kinds of products are exchanged
in the backward pass: the gradient of A consists of the levels' inner products of the decayed gradient dO of the output with the
decayed v. Everything else is as in `channel_decay`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear_attention.tpu import channel_decay
from pallas_kernels.memory_calls import FLOAT32_DECAY, NO_BONUS, ONE_DECAY, TPU
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import halving, row_layout
from pallas_kernels.tpu import layout as tpu_layout

CHUNK = channel_decay.CHUNK
_F32 = jnp.float32
REQUIREMENTS = (
    ONE_DECAY,
    NO_BONUS,
    FLOAT32_DECAY,
    *TPU,
)


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Compute linear attention with a decay per value channel (slot memories), and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and, if `save`, the memories before all chunks,
    else None. The arguments are those of `linear_attention`, with log_decay [B, T, G, V] and T a multiple of `CHUNK`.
    """
    layout = tpu_layout.Layout(q, k, v, CHUNK, runs=len(initial) // len(q))
    inputs = layout.inputs(run, q=q, k=k, v=v, log_decay=log_decay)
    inputs["initial"] = layout.as_memories(initial), layout.memories()
    outs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outs["states"] = layout.states()
    result = layout.call(_forward_kernel, inputs, outs, scale, interpret)
    final = result["final"][:, :: layout.heads // v.shape[2]]
    return layout.from_tokens(result["out"], v.shape[3]), final, result.get("states")


def backward(
    q, k, v, log_decay, run, initial, residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a decay per value channel.

    The arguments are those of `forward`, the memories before all chunks (`residuals`), and the gradients of the output and of the
    final memories. The gradient of log_decay is computed whether or not `decay_gradient` is set.
    """
    del decay_gradient
    layout = tpu_layout.Layout(q, k, v, CHUNK, runs=len(initial) // len(q), reverse=True)
    inputs = layout.inputs(run, q=q, k=k, v=v, log_decay=log_decay)
    output_layout = layout.tokens(layout.heads, v.shape[3], v.dtype)
    inputs["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), output_layout
    inputs["states"] = residuals, layout.states()
    inputs["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    likes = dict(dq=q, dk=k, dv=v, d_decay=log_decay)
    outs = {name: layout.gradient_tokens(like) for name, like in likes.items()}
    outs["d_initial"] = layout.memories()
    result = layout.call(_backward_kernel, inputs, outs, scale, interpret)
    d_initial = row_layout.sum_heads(result["d_initial"], v.shape[2], axis=1)
    return *(layout.gradient(result[n], like) for n, like in likes.items()), d_initial


def _load(layout, refs: dict, h: int):
    """Return the queries and keys [C, K], the values and the log decays [C, V] of one chunk and of the program's head h, from
    `refs`, references to the program's blocks by name.
    """
    sizes = dict(q=layout.key_dim, k=layout.key_dim, v=layout.value_dim, log_decay=layout.value_dim)
    return (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())


def _forward_kernel(layout, scale: float, refs: dict, memory):
    """Compute the output of one chunk of linear attention with a decay per value channel, for the heads of one program; save the
    heads' memories [K, V] before the chunk, and update them.

    `layout.call` runs it for each row, program and chunk, with references `refs` by name to the program's blocks of the inputs
    and outputs.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    for h in range(layout.block):
        q, k, v, g = _load(layout, refs, h)
        decays, values = halving.chunk_decays(g, masks), v.astype(_F32)
        scores = jnp.where(masks.seen, scale * dot(q, k, "nt"), 0)
        tiles = halving.operands(values, values, decays, v.dtype)
        products = halving.level_products(scores, tiles, masks)
        before = memory[h]
        narrow = before.astype(v.dtype)
        if "states" in refs:
            refs["states"][h] = narrow
        current = jnp.sum(jnp.where(masks.level < 0, scores, 0), axis=1, keepdims=True)
        out = current * values + scale * decays.read_decay * dot(q, narrow)
        for product, factor in zip(products, decays.factors, strict=True):
            out += product * factor  # in rows of earlier blocks the product is 0
        layout.store(refs["out"], h, out)
        memory[h] = decays.chunk_decay * before + dot(
            k, (values * decays.write_decay).astype(v.dtype), "tn"
        )


def _backward_kernel(layout, scale: float, refs: dict, d_memory):
    """Compute the gradients of the inputs of one chunk of linear attention with a decay per value channel, for the heads of one
    program; carry `d_memory`, the gradient of the heads' memories [K, V], to the chunk before it.

    `layout.call` runs it for each row, program and chunk, with references `refs` by name to the program's blocks of the inputs
    and outputs.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    for h in range(layout.block):
        q, k, v, g = _load(layout, refs, h)
        dtype = v.dtype
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)].astype(_F32)
        before, after = refs["states"][h], d_memory[h]
        narrow = after.astype(dtype)
        decays, values = halving.chunk_decays(g, masks), v.astype(_F32)
        tiles = halving.operands(d_out, values, decays, dtype)

        current = jnp.sum(d_out * values, axis=1, keepdims=True)
        d_scores = jnp.where(masks.level < 0, current, halving.scores(tiles, masks))
        d_scores = jnp.where(masks.seen, scale * d_scores, 0).astype(dtype)
        entering = (scale * d_out * decays.read_decay).astype(dtype)
        leaving = (values * decays.write_decay).astype(dtype)
        layout.store(refs["dq"], h, dot(d_scores, k) + dot(entering, before, "nt"))
        layout.store(refs["dk"], h, dot(d_scores, q, "tn") + dot(leaving, narrow, "nt"))
        d_memory[h] = decays.chunk_decay * after + dot(q, entering, "tn")

        scores = scale * halving.mirror(dot(q, k, "nt"), dot(k, q, "nt"), masks)
        products = halving.level_products(scores, tiles, masks)
        diagonal = jnp.sum(jnp.where(masks.level < 0, scores, 0), axis=1, keepdims=True)
        of_write = decays.write_decay * dot(k, narrow)
        dv = halving.operand_gradient(products, decays, later=False) + diagonal * d_out + of_write
        layout.store(refs["dv"], h, dv)
        of_read_decay = scale * d_out * decays.read_decay * dot(q, before)
        of_chunk_decay = (
            jnp.sum(before.astype(_F32) * after, axis=0, keepdims=True) * decays.chunk_decay
        )
        terms = halving.decay_terms(tiles, products)
        d_decay = halving.decay_gradient(terms, of_read_decay, values * of_write, of_chunk_decay)
        layout.store(refs["d_decay"], h, d_decay)
