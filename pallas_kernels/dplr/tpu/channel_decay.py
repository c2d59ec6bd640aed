"""A diagonal-plus-low-rank memory (RWKV7) on Mosaic TPU: one kernel forward, one backward, each a single pass over the tokens.

With b_i the sums of a chunk's log decays before token i, and q standing for scale q e^g, its own decay taken, all pairs of tokens are as
far apart: A_xy = Σ_c x_ic y_jc e^(b_i - b_(j+1))_c for x of q, a and y of b, k, by the halving of `linear_attention.tpu_halving`. Then

    U = (I - A_ab)⁻¹ (reach S + A_ak V)    O = read S + A_qb U + A_qk V    S' = keep S + (b leave)ᵀ U + (k leave)ᵀ V

(the diagonals of A_qb and A_qk without a decay). Two tiles a level hold all operands: later rows of q over earlier ones of b, and a
over k. The memory is kept as [V, K], whose columns decay. The systems of a program are solved side by side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.memory_calls import FLOAT32_DECAY, TPU
from pallas_kernels.requirements import Requirement
from pallas_kernels.tiles.scalar_decay import dot
from pallas_kernels.tpu import halving, row_layout
from pallas_kernels.tpu import layout as tpu_layout
from pallas_kernels.tpu.solve import Residuals, invert, length_multiple

CHUNK = 128
_HEADS = 8  # of one program
__all__ = ["CHUNK", "REQUIREMENTS", "backward", "forward", "length_multiple"]
_F32 = jnp.float32
REQUIREMENTS = (
    Requirement(
        "a and b in v's dtype",
        lambda call: call.a.dtype == call.b.dtype == call.v.dtype,
        lambda call: f"{jnp.dtype(call.a.dtype).name} and {jnp.dtype(call.b.dtype).name}",
    ),
    FLOAT32_DECAY,
    *TPU,
)


def forward(
    q, k, v, a, b, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memories as `initial` and, to `save`, the residuals. T is a multiple of `CHUNK`.

    The residuals' memories are [V, K].
    """
    layout = _layout(q, k, v, a, b, initial)
    given = layout.inputs(run, q=q, k=k, v=v, a=a, b=b, log_decay=log_decay)
    given["initial"] = layout.as_memories(initial), layout.memories()
    outs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outs |= dict(states=layout.states(), inverse=layout.squares())
    result = layout.call(_forward_kernel, given, outs, scale, interpret)
    final = layout.from_memories(result["final"])[:, :: layout.heads // v.shape[2]]
    residuals = Residuals(result["states"], result["inverse"]) if save else None
    return layout.from_tokens(result["out"], v.shape[3]), final, residuals


def backward(
    q, k, v, a, b, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, a, b, log_decay and initial."""
    layout = _layout(q, k, v, a, b, initial, reverse=True)
    given = layout.inputs(run, q=q, k=k, v=v, a=a, b=b, log_decay=log_decay)
    of_output = layout.tokens(layout.heads, v.shape[3], v.dtype)
    given["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), of_output
    given["states"] = residuals.states, layout.states()
    given["inverse"] = residuals.inverse, layout.squares()
    given["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    likes = dict(dq=q, dk=k, dv=v, da=a, db=b, d_decay=log_decay)
    outs = {name: layout.gradient_tokens(like) for name, like in likes.items()}
    outs["d_initial"] = layout.memories()
    result = layout.call(_backward_kernel, given, outs, scale, interpret)
    d_initial = row_layout.sum_heads(layout.from_memories(result["d_initial"]), v.shape[2], axis=1)
    return *(layout.gradient(result[n], like) for n, like in likes.items()), d_initial


def _layout(q, k, v, a, b, initial, reverse: bool = False) -> tpu_layout.Layout:
    heads = tpu_layout.HEADS if reverse else _HEADS
    options = dict(heads=heads, transposed=True, runs=len(initial) // len(q), reverse=reverse)
    return tpu_layout.Layout(q, k, v, CHUNK, others=(a, b), **options)


class _Head:
    """One head's part of a chunk, what both kernels make of it.

    Attributes:
        q: [C, K] float32, times the scale.
        k: [C, K] float32.
        v: [C, V].
        a: [C, K] float32.
        b: [C, K] float32.
        own: [C, K], e^g.
        decays: of `tpu_halving`.
        tiles: the levels' tiles of q over b.
        others: those of a over k.
        through_b: A_qb [C, C].
        through_k: A_qk [C, C].
        system: -A_ab [C, C] float32.
        values: A_ak [C, C].
        read: [C, K], q e^b.
        reach: [C, K], a e^b.
        written_b: [C, K], b e^(b_C - b).
        written_k: [C, K], k e^(b_C - b).
    """

    def __init__(self, layout, scale: float, refs: dict, masks: halving.Masks, h: int):
        sizes = dict.fromkeys(("q", "k", "a", "b", "log_decay"), layout.key_dim)
        q, k, a, b, g = (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())
        self.v = refs["v"][layout.tile_index(refs["v"], h, layout.value_dim)]
        dtype = self.v.dtype
        self.q, self.k, self.a, self.b = (x.astype(_F32) for x in (q, k, a, b))
        self.q *= scale
        self.own, self.decays = jnp.exp(g), halving.chunk_decays(g, masks, exclusive=True)
        decayed = self.q * self.own
        self.tiles = halving.operands(decayed, self.b, self.decays, dtype)
        self.others = halving.operands(self.a, self.k, self.decays, dtype)

        def scores(written, pairs):
            current = jnp.sum(self.q * written, axis=1, keepdims=True)
            pairs = jnp.where(masks.level < 0, current, pairs)
            return jnp.where(masks.seen, pairs, 0).astype(dtype)

        below = masks.seen & (masks.level >= 0)
        pairs = halving.cross_scores((decayed, self.a), (self.b, self.k), self.decays, dtype)
        self.through_b, self.through_k = (
            scores(x, y) for x, y in zip((self.b, self.k), pairs[0], strict=True)
        )
        self.system = jnp.where(below, -pairs[1][0], 0)
        self.values = jnp.where(below, pairs[1][1], 0).astype(dtype)
        self.read = decayed * self.decays.enter
        self.reach = self.a * self.decays.enter
        self.written_b = (self.b * self.decays.leave).astype(dtype)
        self.written_k = (self.k * self.decays.leave).astype(dtype)

    def back(self, held, inverse):
        """U [C, V], what is written back; `held` is what the memory holds at the `a`."""
        found = held + dot(self.values, self.v)
        return dot(inverse, found.astype(self.v.dtype)).astype(self.v.dtype)


def _forward_kernel(layout, scale: float, refs: dict, memory):
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    heads = [_Head(layout, scale, refs, masks, h) for h in range(layout.block)]
    dtype = heads[0].v.dtype
    before = [memory[h].astype(dtype) for h in range(layout.block)]
    # Step by step for all, as in `invert`, and first what needs no inverse.
    held = [
        dot(jnp.concatenate([x.read, x.reach]).astype(dtype), m, "nt")
        for x, m in zip(heads, before, strict=True)
    ]
    inverses = invert([x.system for x in heads], dtype)
    if "states" in refs:
        for h, (narrow, inverse) in enumerate(zip(before, inverses, strict=True)):
            refs["states"][h], refs["inverse"][h] = narrow, inverse
    backs = [
        x.back(own[CHUNK:], inverse) for x, own, inverse in zip(heads, held, inverses, strict=True)
    ]
    for h, (x, own, back) in enumerate(zip(heads, held, backs, strict=True)):
        out = own[:CHUNK] + dot(x.through_b, back) + dot(x.through_k, x.v)
        layout.store(refs["out"], h, out)
    for h, (x, back) in enumerate(zip(heads, backs, strict=True)):
        update = dot(back, x.written_b, "tn") + dot(x.v, x.written_k, "tn")
        memory[h] = x.decays.keep * memory[h] + update


def _backward_kernel(layout, scale: float, refs: dict, d_memory):
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)

    def outer(lower, upper):
        return halving.mirror(dot(lower[0], lower[1], "nt"), dot(upper[0], upper[1], "nt"), masks)

    for h in range(layout.block):
        x = _Head(layout, scale, refs, masks, h)
        v, dtype, decays = x.v, x.v.dtype, x.decays
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)]
        before, inverse, after = refs["states"][h], refs["inverse"][h], d_memory[h]
        read, reach = x.read.astype(dtype), x.reach.astype(dtype)
        narrow, back = after.astype(dtype), x.back(dot(reach, before, "nt"), inverse)

        d_back = dot(x.through_b, d_out, "tn") + dot(x.written_b, narrow, "nt")
        found = dot(inverse, d_back.astype(dtype), "tn").astype(dtype)  # its gradient
        dv = dot(x.through_k, d_out, "tn") + dot(x.written_k, narrow, "nt")
        layout.store(refs["dv"], h, dv + dot(x.values, found, "tn"))
        d_memory[h] = decays.keep * after + dot(d_out, read, "tn") + dot(found, reach, "tn")

        pairs = ((d_out, back), (found, v), (d_out, v), (found, back))  # qb, ak, qk, ab
        of_qb, of_ak, of_qk, of_ab = (((x, y), (y, x)) for x, y in pairs)

        def spread(lower, upper, tiles):
            return halving.level_products(outer(lower[0], upper[1]), tiles, masks)

        def added(x, y):
            return [a + b for a, b in zip(x, y, strict=True)]

        of_tiles = added(spread(of_qb, of_qb, x.tiles), spread(of_qk, of_ab, x.others))
        of_others = added(spread(of_ak, of_ak, x.others), spread(of_ab, of_qk, x.tiles))
        of_read = decays.enter * dot(d_out, before)
        of_reach = decays.enter * dot(found, before)
        of_write_b = decays.leave * dot(back, narrow)
        of_write_k = decays.leave * dot(v, narrow)
        current_b, current_k = (
            jnp.sum(d_out.astype(_F32) * y.astype(_F32), axis=1, keepdims=True) for y in (back, v)
        )
        decayed = (halving.operand_gradient(of_tiles, decays, later=True) + of_read) * x.own
        layout.store(refs["dq"], h, scale * (decayed + current_b * x.b + current_k * x.k))
        db = halving.operand_gradient(of_tiles, decays, later=False) + of_write_b
        layout.store(refs["db"], h, db + current_b * x.q)
        layout.store(
            refs["da"], h, halving.operand_gradient(of_others, decays, later=True) + of_reach
        )
        dk = halving.operand_gradient(of_others, decays, later=False) + of_write_k
        layout.store(refs["dk"], h, dk + current_k * x.q)
        kept = jnp.sum(before.astype(_F32) * after, axis=0, keepdims=True) * decays.keep
        terms = added(
            halving.decay_terms(x.tiles, of_tiles), halving.decay_terms(x.others, of_others)
        )
        of_enter = x.q * x.own * of_read + x.a * of_reach
        of_leave = x.b * of_write_b + x.k * of_write_k
        d_decay = halving.decay_gradient(terms, of_enter, of_leave, kept, exclusive=True)
        layout.store(refs["d_decay"], h, d_decay + x.q * decayed)
