"""Linear attention whose decay has a value for every key channel (GLA, HGRN2, RWKV6) on Mosaic TPU: one kernel forward, one backward,
each a single pass over the tokens.

`tiles.channel_decay` has the mathematics, `tpu.halving` the pairs of tokens in a chunk, and `tpu.layout` the arrays. The memory is
transposed, [V, K], so that its columns decay. The forward pass saves the memory before each chunk, in v's dtype. The backward pass
loads these, computes the last chunk first, computes its scores again, and carries the gradient of the memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import pl
from pallas_kernels.memory_calls import FLOAT32_DECAY, TPU
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import halving, row_layout
from pallas_kernels.tpu import layout as tpu_layout

CHUNK = 128
_F32 = jnp.float32

REQUIREMENTS = (
    FLOAT32_DECAY,
    *TPU,
)


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, bonus=None, save: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Compute linear attention with a decay per key channel, and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and, if `save`, the memories before all chunks,
    else None. The arguments are those of `linear_attention`, with T a multiple of `CHUNK`.
    """
    layout, inputs = _inputs(q, k, v, log_decay, run, initial, bonus)
    inputs["initial"] = layout.as_memories(initial), layout.memories()
    outs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outs["states"] = layout.states()
    result = layout.call(_forward_kernel, inputs, outs, scale, interpret)
    final = layout.from_memories(result["final"])[:, :: layout.heads // v.shape[2]]
    return layout.from_tokens(result["out"], v.shape[3]), final, result.get("states")


def backward(
    q, k, v, log_decay, run, initial, residuals, d_output, d_final, *, scale: float, bonus=None,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a decay per key channel, and with a bonus,
    as the sixth, the bonus' gradient [G, K].

    The gradient of log_decay is None if `decay_gradient` is False. The arguments are those of `forward`, the memories before all
    chunks that it returned (`residuals`), and the gradients of the output and of the final memories.
    """
    layout, inputs = _inputs(q, k, v, log_decay, run, initial, bonus, reverse=True)
    output_layout = layout.tokens(layout.heads, v.shape[3], v.dtype)
    inputs["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), output_layout
    inputs["states"] = residuals, layout.states()
    inputs["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    outs = {"d" + n: layout.gradient_tokens(x) for n, x in dict(q=q, k=k, v=v).items()}
    outs["d_initial"] = layout.memories()
    if decay_gradient:
        outs["d_decay"] = layout.gradient_tokens(log_decay)
    if bonus is not None:
        outs["d_bonus"] = layout.channels(q.shape[3])
    result = layout.call(_backward_kernel, inputs, outs, scale, interpret)
    grads = [layout.gradient(result["d" + n], x) for n, x in dict(q=q, k=k, v=v).items()]
    grads.append(layout.gradient(result["d_decay"], log_decay) if decay_gradient else None)
    d_initial = layout.from_memories(result["d_initial"])
    grads.append(row_layout.sum_heads(d_initial, v.shape[2], axis=1))
    if bonus is not None:
        rows = result["d_bonus"][:, :, : layout.block].reshape(len(q), layout.heads, -1)
        grads.append(row_layout.sum_heads(jnp.sum(rows, 0), v.shape[2], axis=0))
    return tuple(grads)


def _inputs(q, k, v, log_decay, run, initial, bonus, *, reverse: bool = False):
    """Return the `Layout` of a call's arrays and a dictionary of the inputs that the forward and the backward kernel both read.

    Each input is a pair of the array, as the kernel requires it, and its layout.
    """
    runs = len(initial) // len(q)
    layout = tpu_layout.Layout(q, k, v, CHUNK, transposed=True, runs=runs, reverse=reverse)
    inputs = layout.inputs(run, q=q, k=k, v=v, log_decay=log_decay)
    if bonus is not None:
        rows = layout.padded(row_layout.repeat_heads(bonus.astype(_F32), layout.heads, axis=0))
        rows = jnp.broadcast_to(rows, (layout.batch, *rows.shape))
        inputs["bonus"] = rows, layout.channels(q.shape[3])
    return layout, inputs


class _Head:
    """The arrays of one chunk and head that the forward and the backward kernel both compute, for a decay per key channel.

    b are the inclusive sums of the log decays of the chunk of C tokens, b_C the sum over the whole chunk. With a bonus, a token
    reads the memory before its own decay, and b in `read` is exclusive.

    Attributes:
        q: [C, K] float32, the queries.
        k: [C, K] float32, the keys.
        v: [C, V], the values.
        bonus: [1, K], the weight of a token's own key and value in its output, or 1.
        exclusive: whether there is a bonus, so that a token reads before its own decay.
        decays: the decays of the chunk, of `halving.chunk_decays`.
        tiles: the queries and keys of each level of the halving, decayed, of `halving.operands`.
        scores: [C, C], the decayed scores P of queries with keys.
        read: [C, K], the queries decayed from the chunk's start, scale q e^b.
        written: [C, K], the keys decayed to the chunk's end, k e^(b_C - b).
    """

    def __init__(self, layout, scale: float, refs: dict, masks: halving.Masks, h: int):
        sizes = dict(q=layout.key_dim, k=layout.key_dim, v=layout.value_dim, log_decay=layout.key_dim)  # fmt: skip
        q, k, v, g = (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())
        self.q, self.k, self.v = q.astype(_F32), k.astype(_F32), v
        self.exclusive = "bonus" in refs
        self.bonus = refs["bonus"][h : h + 1] if self.exclusive else 1.0
        self.decays = halving.chunk_decays(g, masks, exclusive=self.exclusive)
        self.tiles = halving.operands(self.q, self.k, self.decays, v.dtype)
        current = jnp.sum(self.q * self.k * self.bonus, axis=1, keepdims=True)
        scores = jnp.where(masks.level < 0, current, halving.scores(self.tiles, masks))
        self.scores = jnp.where(masks.seen, scale * scores, 0).astype(v.dtype)
        self.read = (scale * self.q * self.decays.read_decay).astype(v.dtype)
        self.written = (self.k * self.decays.write_decay).astype(v.dtype)


def _forward_kernel(layout, scale: float, refs: dict, memory):
    """Compute the output of one chunk of linear attention with a decay per key channel, for the heads of one program; save the
    heads' memories [V, K] before the chunk, and update them.

    `layout.call` runs it for each row, program and chunk, with references `refs` by name to the program's blocks of the inputs
    and outputs.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    for h in range(layout.block):
        x = _Head(layout, scale, refs, masks, h)
        before = memory[h]
        narrow = before.astype(x.v.dtype)
        if "states" in refs:
            refs["states"][h] = narrow
        layout.store(refs["out"], h, dot(x.scores, x.v) + dot(x.read, narrow, "nt"))
        memory[h] = x.decays.chunk_decay * before + dot(x.v, x.written, "tn")


def _backward_kernel(layout, scale: float, refs: dict, d_memory):
    """Compute the gradients of the inputs of one chunk of linear attention with a decay per key channel, for the heads of one
    program; carry `d_memory`, the gradient of the heads' memories [V, K], to the chunk before it.

    `layout.call` runs it for each row, program and chunk, with references `refs` by name to the program's blocks of the inputs
    and outputs.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        if "d_bonus" in refs:
            refs["d_bonus"][...] = jnp.zeros_like(refs["d_bonus"])

    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    for h in range(layout.block):
        x = _Head(layout, scale, refs, masks, h)
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)]
        before, after = refs["states"][h], d_memory[h]
        narrow = after.astype(x.v.dtype)
        layout.store(refs["dv"], h, dot(x.scores, d_out, "tn") + dot(x.written, narrow, "nt"))
        d_memory[h] = x.decays.chunk_decay * after + dot(d_out, x.read, "tn")

        weights = halving.mirror(dot(d_out, x.v, "nt"), dot(x.v, d_out, "nt"), masks)
        products = halving.level_products(scale * weights, x.tiles, masks)
        current = d_out.astype(_F32) * x.v.astype(_F32)
        current = scale * jnp.sum(current, axis=1, keepdims=True)
        of_read = scale * x.decays.read_decay * dot(d_out, before)
        of_write = x.decays.write_decay * dot(x.v, narrow)
        diagonal = x.bonus * current
        dq = halving.operand_gradient(products, x.decays, later=True) + of_read + diagonal * x.k
        dk = halving.operand_gradient(products, x.decays, later=False) + of_write + diagonal * x.q
        layout.store(refs["dq"], h, dq)
        layout.store(refs["dk"], h, dk)
        if "d_bonus" in refs:
            refs["d_bonus"][h : h + 1] += jnp.sum(x.q * x.k * current, axis=0, keepdims=True)
        if "d_decay" in refs:
            of_chunk_decay = (
                jnp.sum(before.astype(_F32) * after, axis=0, keepdims=True) * x.decays.chunk_decay
            )
            terms = halving.decay_terms(x.tiles, products)
            d_decay = halving.decay_gradient(
                terms, x.q * of_read, x.k * of_write, of_chunk_decay, exclusive=x.exclusive
            )
            layout.store(refs["d_decay"], h, d_decay)
