"""The delta rule with a decay per key channel (KDA) on Mosaic TPU: a forward and a backward kernel, each one
pass over the tokens.

The kernels are those of the delta rule with a scalar decay (`scalar_decay`) with other products. With b the
inclusive sums of the log decays, N_ij = Σ_c k_ic k_jc e^(b_i - b_j)_c is the triangular system and
P_ij = scale Σ_c q_ic k_jc e^(b_i - b_j)_c are the scores; the halving of `pallas_kernels.tpu.halving`
computes both. With queries and keys decayed from the chunk's start (read, erase) or to its end (written; see
`_Head`):

    x = (I + N diag(beta))⁻¹ (v - erase S)    O = read S + P (beta ⊙ x)    S' = chunk_decay S + writtenᵀ (beta ⊙ x)

Here S is the memory before a chunk, S' after it, x the error of its predictions of v, and O the output. The
memory is transposed, [V, K]: its columns decay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.memory_calls import DECAYED_ERASE, FLOAT32_DECAY, TPU_IN_PARTS
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import halving, row_layout, solve
from pallas_kernels.tpu import layout as tpu_layout
from pallas_kernels.tpu.row_layout import CHUNK
from pallas_kernels.tpu.solve import Residuals

_F32 = jnp.float32
length_multiple = solve.length_multiple
REQUIREMENTS = (FLOAT32_DECAY, *TPU_IN_PARTS, DECAYED_ERASE)


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """Compute the delta rule with a decay per key channel, and the arrays that `backward` requires.

    Return the output [B, T, max(H, G), V], the final memories in the shape of `initial`, and the residuals
    (None without `save`): the memory before each chunk, [V, K], and the inverse of each chunk's triangular
    system. The other arguments are those of the op `delta_rule`; T is divisible by `CHUNK`.
    """
    layout = _layout(q, k, v, initial)
    inputs = layout.inputs(run, dict(beta=beta), q=q, k=k, v=v, log_decay=log_decay)
    inputs["initial"] = layout.as_memories(initial), layout.memories()
    outputs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outputs |= dict(states=layout.states(), inverse=layout.squares())
    result = layout.call(_forward_kernel, inputs, outputs, scale, interpret)
    final = layout.from_memories(result["final"])[:, :: layout.heads // v.shape[2]]
    residuals = Residuals(result["states"], result["inverse"]) if save else None
    return layout.from_tokens(result["out"], v.shape[3]), final, residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, beta, log_decay and initial of the delta rule with a decay per key
    channel, each in the shape of its input.

    The arguments are the inputs of `forward`, the residuals that `forward` returned, and the gradients of the
    output, `d_output`, and of the final memories, `d_final`. The gradient of log_decay is None if
    `decay_gradient` is False.
    """
    layout = _layout(q, k, v, initial, reverse=True)
    inputs = layout.inputs(run, dict(beta=beta), q=q, k=k, v=v, log_decay=log_decay)
    output_tokens = layout.tokens(layout.heads, v.shape[3], v.dtype)
    inputs["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), output_tokens
    inputs["states"] = residuals.states, layout.states()
    inputs["inverse"] = residuals.inverse, layout.squares()
    inputs["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    likes = dict(dq=q, dk=k, dv=v) | (dict(d_decay=log_decay) if decay_gradient else {})
    outputs = {name: layout.gradient_tokens(like) for name, like in likes.items()}
    outputs |= dict(d_beta=layout.rows(), d_initial=layout.memories())
    result = layout.call(_backward_kernel, inputs, outputs, scale, interpret)
    grads = {name: layout.gradient(result[name], like) for name, like in likes.items()}
    d_beta = layout.rows_gradient(result["d_beta"], v.shape[2])
    d_initial = row_layout.sum_heads(layout.from_memories(result["d_initial"]), v.shape[2], axis=1)
    return grads["dq"], grads["dk"], grads["dv"], d_beta, grads.get("d_decay"), d_initial


def _layout(q, k, v, initial, reverse: bool = False) -> tpu_layout.Layout:
    heads = min(solve.HEADS, tpu_layout.HEADS) if reverse else solve.HEADS
    options = dict(heads=heads, transposed=True, runs=len(initial) // len(q), reverse=reverse)
    return tpu_layout.Layout(q, k, v, CHUNK, **options)


class _Head:
    """The tokens of one chunk and head, with their decays and scores, that both kernels of the delta rule with a decay per key
    channel use.

    b are the inclusive sums of the chunk's log decays, b_C the sum over the whole chunk of C tokens.

    Attributes:
        q: [C, K] float32, the queries.
        k: [C, K] float32, the keys.
        v: [C, V], the values.
        row: [1, C], beta of each token, as a row.
        beta: [C, 1], beta of each token, as a column.
        system: [C, C] float32, the decayed products N of keys with keys, 0 on and above the diagonal.
        scores: [C, C], the decayed scores P of queries with keys.
        decays: the decays of the chunk, as `halving.chunk_decays` returns them.
        tiles: the queries and keys [C, K] of each level of the halving, decayed.
        alike: the keys [C, K] of each level of the halving, decayed, for products of keys with keys.
        read: [C, K], the queries decayed from the chunk's start, scale q e^b.
        erase: [C, K], the keys decayed from the chunk's start, k e^b.
        written: [C, K], the keys decayed to the chunk's end, k e^(b_C - b).
    """

    def __init__(self, layout, scale: float, refs: dict, masks: halving.Masks, columns, h: int):
        sizes = dict(q=layout.key_dim, k=layout.key_dim, v=layout.value_dim, log_decay=layout.key_dim)  # fmt: skip
        q, k, v, g = (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())
        dtype = v.dtype
        self.q, self.k, self.v = q.astype(_F32), k.astype(_F32), v
        self.row = refs["beta"][h : h + 1]
        self.beta = columns[:, h : h + 1]
        self.decays = halving.chunk_decays(g, masks)
        self.tiles = halving.operands(self.q, self.k, self.decays, dtype)
        self.alike = halving.operands(self.k, self.k, self.decays, dtype)
        diagonal = jnp.sum(self.q * self.k, axis=1, keepdims=True)
        (scores,), (alike,) = halving.cross_scores((self.q, self.k), (self.k,), self.decays, dtype)
        scores = jnp.where(masks.level < 0, diagonal, scores)
        self.scores = jnp.where(masks.seen, scale * scores, 0).astype(dtype)
        self.system = jnp.where(masks.seen & (masks.level >= 0), alike, 0)
        self.read = scale * self.q * self.decays.read_decay
        self.erase = self.k * self.decays.read_decay
        self.written = (self.k * self.decays.write_decay).astype(dtype)

    def missing(self, predicted, inverse):
        """Return the errors x = X (v - k e^b S) [C, V] float32 of the memory's predictions of the chunk's
        values.

        Args:
            predicted: [C, V], k e^b S, what the keys, decayed from the chunk's start, read of the memory S
                before the chunk.
            inverse: [C, C], X, the inverse of the chunk's triangular system.
        """
        errors = self.v.astype(_F32) - predicted
        return dot(inverse, errors.astype(self.v.dtype))


def _forward_kernel(layout, scale: float, refs: dict, memory):
    """Compute the output of one chunk by the delta rule with a decay per key channel, for all heads of one
    program, and update the heads' memories [V, K] in `memory`.

    If residuals are saved, also store the memories before the chunk and the inverses of the heads' triangular
    systems.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    columns = refs["beta"][...].T
    heads = [_Head(layout, scale, refs, masks, columns, h) for h in range(layout.block)]
    dtype = heads[0].v.dtype
    before = [memory[h].astype(dtype) for h in range(layout.block)]
    # Each step for all heads, as in `solve.invert`; first the products that need no inverse.
    reads = [
        dot(jnp.concatenate([x.read, x.erase]).astype(dtype), m, "nt")
        for x, m in zip(heads, before, strict=True)
    ]
    inverses = solve.invert([x.system * x.row for x in heads], dtype)
    if "states" in refs:
        for h, (narrow, inverse) in enumerate(zip(before, inverses, strict=True)):
            refs["states"][h], refs["inverse"][h] = narrow, inverse
    writes = [
        (x.beta * x.missing(read[CHUNK:], inverse)).astype(dtype)
        for x, read, inverse in zip(heads, reads, inverses, strict=True)
    ]
    for h, (x, read, w) in enumerate(zip(heads, reads, writes, strict=True)):
        layout.store(refs["out"], h, read[:CHUNK] + dot(x.scores, w))
    for h, (x, w) in enumerate(zip(heads, writes, strict=True)):
        memory[h] = x.decays.chunk_decay * memory[h] + dot(w, x.written, "tn")


def _backward_kernel(layout, scale: float, refs: dict, d_memory):
    """Compute the gradients of the inputs of one chunk of the delta rule with a decay per key channel, for
    all heads of one program.

    `d_memory` is the gradient of the heads' memories: after the chunk when the kernel begins, before the
    chunk when it ends.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    columns = refs["beta"][...].T
    refs["d_beta"][...] = jnp.zeros_like(refs["d_beta"])

    def outer(a, b):
        """Return a symmetric matrix [C, C], the gradient of scores: a bᵀ on and below the diagonal, its
        transpose above it, and 0 at pairs of two documents. a and b are [C, V].
        """
        return halving.mirror(dot(a, b, "nt"), dot(b, a, "nt"), masks)

    for h in range(layout.block):
        x = _Head(layout, scale, refs, masks, columns, h)
        dtype, decays = x.v.dtype, x.decays
        read, erase = x.read.astype(dtype), x.erase.astype(dtype)
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)]
        before, inverse, after = refs["states"][h], refs["inverse"][h], d_memory[h]
        narrow = after.astype(dtype)
        missing = x.missing(dot(erase, before, "nt"), inverse)
        writes = (x.beta * missing).astype(dtype)

        d_writes = dot(x.scores, d_out, "tn") + dot(x.written, narrow, "nt")
        dv = dot(inverse, (x.beta * d_writes).astype(dtype), "tn")
        layout.store(refs["dv"], h, dv)
        dv = dv.astype(dtype)
        d_writes -= dot(x.system.astype(dtype), dv, "tn")
        d_beta = jnp.sum(missing * d_writes, axis=1, keepdims=True)
        refs["d_beta"][h : h + 1] = d_beta.T
        d_memory[h] = decays.chunk_decay * after + dot(d_out, read, "tn") - dot(dv, erase, "tn")

        read = halving.level_products(scale * outer(d_out, writes), x.tiles, masks)
        erased = halving.level_products(-outer(dv, writes), x.alike, masks)
        diagonal = d_out.astype(_F32) * writes.astype(_F32)
        diagonal = scale * jnp.sum(diagonal, axis=1, keepdims=True)
        through_read = scale * decays.read_decay * dot(d_out, before)
        through_erase = -decays.read_decay * dot(dv, before)
        through_write = decays.write_decay * dot(writes, narrow)
        dq = halving.operand_gradient(read, decays, later=True) + through_read + diagonal * x.k
        layout.store(refs["dq"], h, dq)
        dk = (
            halving.operand_gradient(read, decays, later=False)
            + through_erase
            + through_write
            + diagonal * x.q
        )
        for product, factor in zip(erased, decays.factors, strict=True):
            dk += product * factor
        layout.store(refs["dk"], h, dk)
        if "d_decay" in refs:
            through_chunk_decay = before.astype(_F32) * after
            through_chunk_decay = (
                jnp.sum(through_chunk_decay, axis=0, keepdims=True) * decays.chunk_decay
            )
            terms = zip(
                halving.decay_terms(x.tiles, read),
                halving.decay_terms(x.alike, erased),
                strict=True,
            )
            through_read_decay = x.q * through_read + x.k * through_erase
            d_decay = halving.decay_gradient(
                [a + b for a, b in terms],
                through_read_decay,
                x.k * through_write,
                through_chunk_decay,
            )
            layout.store(refs["d_decay"], h, d_decay)
