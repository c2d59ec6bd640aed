"""The delta rule whose decay has a value for every key channel (KDA) on Mosaic TPU: one kernel forward, one backward, each a single
pass over the tokens.

As in `tpu`, with N_ij = Σ_c k_ic k_jc e^(b_i - b_j)_c for its system and P_ij = scale Σ_c q_ic k_jc e^(b_i - b_j)_c for what is read,
both by the halving of `linear_attention.tpu_halving`, and with queries and keys decayed to the chunk's chunk_bounds:

    x = (I + N diag(beta))⁻¹ (v - erase S)    O = read S + P (beta ⊙ x)    S' = keep S + writtenᵀ (beta ⊙ x)

The memory is kept as [V, K], whose columns decay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.memory_calls import FLOAT32_DECAY, TPU
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import halving, row_layout, solve
from pallas_kernels.tpu import layout as tpu_layout
from pallas_kernels.tpu.row_layout import CHUNK
from pallas_kernels.tpu.solve import Residuals

_F32 = jnp.float32
length_multiple = solve.length_multiple
REQUIREMENTS = (
    FLOAT32_DECAY,
    *TPU,
)


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memories as `initial` and, to `save`, the residuals. T is a multiple of `CHUNK`.

    The residuals' memories are [V, K].
    """
    layout = _layout(q, k, v, initial)
    given = layout.inputs(run, dict(beta=beta), q=q, k=k, v=v, log_decay=log_decay)
    given["initial"] = layout.as_memories(initial), layout.memories()
    outs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outs |= dict(states=layout.states(), inverse=layout.squares())
    result = layout.call(_forward_kernel, given, outs, scale, interpret)
    final = layout.from_memories(result["final"])[:, :: layout.heads // v.shape[2]]
    residuals = Residuals(result["states"], result["inverse"]) if save else None
    return layout.from_tokens(result["out"], v.shape[3]), final, residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, beta, log_decay (None where it is not wanted) and initial."""
    layout = _layout(q, k, v, initial, reverse=True)
    given = layout.inputs(run, dict(beta=beta), q=q, k=k, v=v, log_decay=log_decay)
    of_output = layout.tokens(layout.heads, v.shape[3], v.dtype)
    given["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), of_output
    given["states"] = residuals.states, layout.states()
    given["inverse"] = residuals.inverse, layout.squares()
    given["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    likes = dict(dq=q, dk=k, dv=v) | (dict(d_decay=log_decay) if decay_gradient else {})
    outs = {name: layout.gradient_tokens(like) for name, like in likes.items()}
    outs |= dict(d_beta=layout.rows(), d_initial=layout.memories())
    result = layout.call(_backward_kernel, given, outs, scale, interpret)
    grads = {name: layout.gradient(result[name], like) for name, like in likes.items()}
    d_beta = layout.rows_gradient(result["d_beta"], v.shape[2])
    d_initial = row_layout.sum_heads(layout.from_memories(result["d_initial"]), v.shape[2], axis=1)
    return grads["dq"], grads["dk"], grads["dv"], d_beta, grads.get("d_decay"), d_initial


def _layout(q, k, v, initial, reverse: bool = False) -> tpu_layout.Layout:
    heads = min(solve.HEADS, tpu_layout.HEADS) if reverse else solve.HEADS
    options = dict(heads=heads, transposed=True, runs=len(initial) // len(q), reverse=reverse)
    return tpu_layout.Layout(q, k, v, CHUNK, **options)


class _Head:
    """One head's part of a chunk, what both kernels make of it.

    Attributes:
        q: [C, K] float32.
        k: [C, K] float32.
        v: [C, V].
        beta: [C, 1].
        system: N [C, C] float32, below its diagonal.
        scores: P [C, C].
        decays: of `tpu_halving`.
        tiles: the levels' tiles of queries with keys.
        alike: those of keys with keys.
        read: [C, K], scale q e^b.
        erase: [C, K], k e^b.
        written: [C, K], k e^(b_C - b).
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
        current = jnp.sum(self.q * self.k, axis=1, keepdims=True)
        (scores,), (alike,) = halving.cross_scores((self.q, self.k), (self.k,), self.decays, dtype)
        scores = jnp.where(masks.level < 0, current, scores)
        self.scores = jnp.where(masks.seen, scale * scores, 0).astype(dtype)
        self.system = jnp.where(masks.seen & (masks.level >= 0), alike, 0)
        self.read = scale * self.q * self.decays.enter
        self.erase = self.k * self.decays.enter
        self.written = (self.k * self.decays.leave).astype(dtype)

    def missing(self, held, inverse):
        """x [C, V] float32; `held` is what the memory holds at the keys."""
        found = self.v.astype(_F32) - held
        return dot(inverse, found.astype(self.v.dtype))


def _forward_kernel(layout, scale: float, refs: dict, memory):
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    columns = refs["beta"][...].T
    heads = [_Head(layout, scale, refs, masks, columns, h) for h in range(layout.block)]
    dtype = heads[0].v.dtype
    before = [memory[h].astype(dtype) for h in range(layout.block)]
    # Step by step for all, as in `solve.invert`, and first what needs no inverse.
    held = [
        dot(jnp.concatenate([x.read, x.erase]).astype(dtype), m, "nt")
        for x, m in zip(heads, before, strict=True)
    ]
    inverses = solve.invert([x.system * x.row for x in heads], dtype)
    if "states" in refs:
        for h, (narrow, inverse) in enumerate(zip(before, inverses, strict=True)):
            refs["states"][h], refs["inverse"][h] = narrow, inverse
    writes = [
        (x.beta * x.missing(own[CHUNK:], inverse)).astype(dtype)
        for x, own, inverse in zip(heads, held, inverses, strict=True)
    ]
    for h, (x, own, w) in enumerate(zip(heads, held, writes, strict=True)):
        layout.store(refs["out"], h, own[:CHUNK] + dot(x.scores, w))
    for h, (x, w) in enumerate(zip(heads, writes, strict=True)):
        memory[h] = x.decays.keep * memory[h] + dot(w, x.written, "tn")


def _backward_kernel(layout, scale: float, refs: dict, d_memory):
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    columns = refs["beta"][...].T
    refs["d_beta"][...] = jnp.zeros_like(refs["d_beta"])

    def outer(a, b):
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
        d_memory[h] = decays.keep * after + dot(d_out, read, "tn") - dot(dv, erase, "tn")

        read = halving.level_products(scale * outer(d_out, writes), x.tiles, masks)
        erased = halving.level_products(-outer(dv, writes), x.alike, masks)
        current = d_out.astype(_F32) * writes.astype(_F32)
        current = scale * jnp.sum(current, axis=1, keepdims=True)
        of_read = scale * decays.enter * dot(d_out, before)
        of_erase = -decays.enter * dot(dv, before)
        of_write = decays.leave * dot(writes, narrow)
        dq = halving.operand_gradient(read, decays, later=True) + of_read + current * x.k
        layout.store(refs["dq"], h, dq)
        dk = (
            halving.operand_gradient(read, decays, later=False)
            + of_erase
            + of_write
            + current * x.q
        )
        for product, factor in zip(erased, decays.factors, strict=True):
            dk += product * factor
        layout.store(refs["dk"], h, dk)
        if "d_decay" in refs:
            kept = jnp.sum(before.astype(_F32) * after, axis=0, keepdims=True) * decays.keep
            terms = zip(
                halving.decay_terms(x.tiles, read),
                halving.decay_terms(x.alike, erased),
                strict=True,
            )
            of_enter = x.q * of_read + x.k * of_erase
            d_decay = halving.decay_gradient(
                [a + b for a, b in terms], of_enter, x.k * of_write, kept
            )
            layout.store(refs["d_decay"], h, d_decay)
