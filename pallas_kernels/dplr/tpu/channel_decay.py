"""A diagonal-plus-low-rank memory (RWKV7) on Mosaic TPU: a forward and a backward kernel, each one pass over
the tokens.

With d_i the sum of a chunk's log decays before token i, and q in place of scale q e^g, that is with its
token's decay applied, all pairs of tokens have the same decay: A_xy = Σ_c x_ic y_jc e^(d_i - d_(j+1))_c for
x = q or `a` and y = b or k, by the halving of `pallas_kernels.tpu.halving`. Then, with the fields of `_Head`
and `Decays`,

    U = (I - A_ab)⁻¹ (decayed_a S + A_ak V)    O = read S + A_qb U + A_qk V    S' = chunk_decay S + (b write_decay)ᵀ U + (k write_decay)ᵀ V

(the diagonals of A_qb and A_qk have no decay), where S is the memory before a chunk, S' after it, U what the
vectors `a` read and the vectors b write back, and O the output. Two tiles per level of the halving contain
all operands: one has q in later rows and b in earlier rows, the other `a` and k. The memory is transposed,
[V, K]: its columns decay. The systems of a program's heads are solved in lockstep.
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
_HEADS = 8  # of a program of the forward kernel
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
    """Compute diagonal-plus-low-rank memories (RWKV7), and the arrays that `backward` requires.

    Return the output [B, T, max(H, G), V], the final memories in the shape of `initial`, and the residuals
    (None without `save`): the memory [V, K] before each chunk and the inverse of each chunk's triangular
    system. The other arguments are those of the op `dplr`; T is divisible by `CHUNK`.
    """
    layout = _layout(q, k, v, a, b, initial)
    inputs = layout.inputs(run, q=q, k=k, v=v, a=a, b=b, log_decay=log_decay)
    inputs["initial"] = layout.as_memories(initial), layout.memories()
    outputs = dict(out=layout.tokens(layout.heads, v.shape[3], v.dtype), final=layout.memories())
    if save:
        outputs |= dict(states=layout.states(), inverse=layout.squares())
    result = layout.call(_forward_kernel, inputs, outputs, scale, interpret)
    final = layout.from_memories(result["final"])[:, :: layout.heads // v.shape[2]]
    residuals = Residuals(result["states"], result["inverse"]) if save else None
    return layout.from_tokens(result["out"], v.shape[3]), final, residuals


def backward(
    q, k, v, a, b, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, a, b, log_decay and initial of diagonal-plus-low-rank memories
    (RWKV7), each in the shape of its input.

    The arguments are the inputs of `forward`, the residuals that `forward` returned, and the gradients of the
    output, `d_output`, and of the final memories, `d_final`. The gradient of log_decay is computed whether or
    not `decay_gradient` is set.
    """
    del decay_gradient
    layout = _layout(q, k, v, a, b, initial, reverse=True)
    inputs = layout.inputs(run, q=q, k=k, v=v, a=a, b=b, log_decay=log_decay)
    output_tokens = layout.tokens(layout.heads, v.shape[3], v.dtype)
    inputs["d_out"] = layout.as_tokens(d_output.astype(v.dtype)), output_tokens
    inputs["states"] = residuals.states, layout.states()
    inputs["inverse"] = residuals.inverse, layout.squares()
    inputs["d_final"] = layout.as_memories(d_final, first=True), layout.memories()
    likes = dict(dq=q, dk=k, dv=v, da=a, db=b, d_decay=log_decay)
    outputs = {name: layout.gradient_tokens(like) for name, like in likes.items()}
    outputs["d_initial"] = layout.memories()
    result = layout.call(_backward_kernel, inputs, outputs, scale, interpret)
    d_initial = row_layout.sum_heads(layout.from_memories(result["d_initial"]), v.shape[2], axis=1)
    return *(layout.gradient(result[n], like) for n, like in likes.items()), d_initial


def _layout(q, k, v, a, b, initial, reverse: bool = False) -> tpu_layout.Layout:
    heads = tpu_layout.HEADS if reverse else _HEADS
    options = dict(heads=heads, transposed=True, runs=len(initial) // len(q), reverse=reverse)
    return tpu_layout.Layout(q, k, v, CHUNK, others=(a, b), **options)


class _Head:
    """The tokens of one chunk and head, with their decays and scores, that both kernels of a
    diagonal-plus-low-rank memory use.

    A token reads the memory with the vector `a`, and writes the result back with b. d_i is the sum of the
    chunk's log decays before token i, g the log decay of a token, and A_xy the products of x with y times the
    decays between the tokens.

    Attributes:
        q: [C, K] float32, the queries times the scale.
        k: [C, K] float32, the keys.
        v: [C, V], the values.
        a: [C, K] float32, the vectors that read the memory.
        b: [C, K] float32, the vectors that write the result back.
        token_decay: [C, K], the decay e^g of each token.
        decays: the decays of the chunk, as `halving.chunk_decays` returns them.
        tiles: for each level of the halving [C, K], the decayed q in later rows and b in earlier ones.
        others: for each level of the halving [C, K], the decayed `a` in later rows and k in earlier ones.
        through_b: [C, C], the decayed products A_qb of queries with b.
        through_k: [C, C], the decayed products A_qk of queries with keys.
        system: [C, C] float32, the negative decayed products -A_ab of `a` with b.
        values: [C, C], the decayed products A_ak of `a` with keys.
        read: [C, K], the queries decayed from the chunk's start, scale q e^g e^d.
        decayed_a: [C, K], `a` decayed from the chunk's start, a e^d.
        written_b: [C, K], b decayed to the chunk's end.
        written_k: [C, K], the keys decayed to the chunk's end.
    """

    def __init__(self, layout, scale: float, refs: dict, masks: halving.Masks, h: int):
        sizes = dict.fromkeys(("q", "k", "a", "b", "log_decay"), layout.key_dim)
        q, k, a, b, g = (refs[n][layout.tile_index(refs[n], h, size)] for n, size in sizes.items())
        self.v = refs["v"][layout.tile_index(refs["v"], h, layout.value_dim)]
        dtype = self.v.dtype
        self.q, self.k, self.a, self.b = (x.astype(_F32) for x in (q, k, a, b))
        self.q *= scale
        self.token_decay, self.decays = jnp.exp(g), halving.chunk_decays(g, masks, exclusive=True)
        decayed = self.q * self.token_decay
        self.tiles = halving.operands(decayed, self.b, self.decays, dtype)
        self.others = halving.operands(self.a, self.k, self.decays, dtype)

        def scores(written, pairs):
            diagonal = jnp.sum(self.q * written, axis=1, keepdims=True)
            pairs = jnp.where(masks.level < 0, diagonal, pairs)
            return jnp.where(masks.seen, pairs, 0).astype(dtype)

        below = masks.seen & (masks.level >= 0)
        pairs = halving.cross_scores((decayed, self.a), (self.b, self.k), self.decays, dtype)
        self.through_b, self.through_k = (
            scores(x, y) for x, y in zip((self.b, self.k), pairs[0], strict=True)
        )
        self.system = jnp.where(below, -pairs[1][0], 0)
        self.values = jnp.where(below, pairs[1][1], 0).astype(dtype)
        self.read = decayed * self.decays.read_decay
        self.decayed_a = self.a * self.decays.read_decay
        self.written_b = (self.b * self.decays.write_decay).astype(dtype)
        self.written_k = (self.k * self.decays.write_decay).astype(dtype)

    def a_read(self, from_memory, inverse):
        """Return U = X (decayed_a S + A_ak V) [C, V], what the chunk's vectors `a` read of the memory and its
        vectors b write back.

        Args:
            from_memory: [C, V], decayed_a S, the product of the decayed `a` with the memory before the chunk.
            inverse: [C, C], X, the inverse of the chunk's triangular system.
        """
        sums = from_memory + dot(self.values, self.v)
        return dot(inverse, sums.astype(self.v.dtype)).astype(self.v.dtype)


def _forward_kernel(layout, scale: float, refs: dict, memory):
    """Compute the output of one chunk of a diagonal-plus-low-rank memory, for all heads of one program, and
    update the heads' memories [V, K] in `memory`.

    If residuals are saved, also store the memories before the chunk and the inverses of the heads' triangular
    systems.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)
    heads = [_Head(layout, scale, refs, masks, h) for h in range(layout.block)]
    dtype = heads[0].v.dtype
    before = [memory[h].astype(dtype) for h in range(layout.block)]
    # Each step for all heads, as in `invert`; first the products that need no inverse.
    reads = [
        dot(jnp.concatenate([x.read, x.decayed_a]).astype(dtype), m, "nt")
        for x, m in zip(heads, before, strict=True)
    ]
    inverses = invert([x.system for x in heads], dtype)
    if "states" in refs:
        for h, (narrow, inverse) in enumerate(zip(before, inverses, strict=True)):
            refs["states"][h], refs["inverse"][h] = narrow, inverse
    a_reads = [
        x.a_read(read[CHUNK:], inverse)
        for x, read, inverse in zip(heads, reads, inverses, strict=True)
    ]
    for h, (x, read, a_read) in enumerate(zip(heads, reads, a_reads, strict=True)):
        out = read[:CHUNK] + dot(x.through_b, a_read) + dot(x.through_k, x.v)
        layout.store(refs["out"], h, out)
    for h, (x, a_read) in enumerate(zip(heads, a_reads, strict=True)):
        update = dot(a_read, x.written_b, "tn") + dot(x.v, x.written_k, "tn")
        memory[h] = x.decays.chunk_decay * memory[h] + update


def _backward_kernel(layout, scale: float, refs: dict, d_memory):
    """Compute the gradients of the inputs of one chunk of a diagonal-plus-low-rank memory, for all heads of
    one program.

    `d_memory` is the gradient of the heads' memories: after the chunk when the kernel begins, before the
    chunk when it ends.
    """
    masks = halving.read_masks(refs["runs"][...] if "runs" in refs else None, CHUNK)

    def outer(lower, upper):
        """Return the gradient of a chunk's scores [C, C]: x yᵀ below the diagonal for `lower` = (x, y), and x
        yᵀ on and above the diagonal for `upper` = (x, y), with x and y [C, V].
        """
        return halving.mirror(dot(lower[0], lower[1], "nt"), dot(upper[0], upper[1], "nt"), masks)

    for h in range(layout.block):
        x = _Head(layout, scale, refs, masks, h)
        v, dtype, decays = x.v, x.v.dtype, x.decays
        d_out = refs["d_out"][layout.tile_index(refs["d_out"], h, layout.value_dim)]
        before, inverse, after = refs["states"][h], refs["inverse"][h], d_memory[h]
        read, decayed_a = x.read.astype(dtype), x.decayed_a.astype(dtype)
        narrow, a_read = after.astype(dtype), x.a_read(dot(decayed_a, before, "nt"), inverse)

        d_a_read = dot(x.through_b, d_out, "tn") + dot(x.written_b, narrow, "nt")
        # The gradient of decayed_a S + A_ak V.
        d_right_side = dot(inverse, d_a_read.astype(dtype), "tn").astype(dtype)
        dv = dot(x.through_k, d_out, "tn") + dot(x.written_k, narrow, "nt")
        layout.store(refs["dv"], h, dv + dot(x.values, d_right_side, "tn"))
        d_memory[h] = (
            decays.chunk_decay * after + dot(d_out, read, "tn") + dot(d_right_side, decayed_a, "tn")
        )

        pairs = (
            (d_out, a_read),
            (d_right_side, v),
            (d_out, v),
            (d_right_side, a_read),
        )  # qb, ak, qk, ab
        qb, ak, qk, ab = (((x, y), (y, x)) for x, y in pairs)

        def spread(lower, upper, tiles):
            """Return, for each level of the halving, a term of the gradient [C, K] of a decayed operand: the
            gradient of scores, masked to the level's pairs of tokens, times `tiles`, the operand with which
            these scores are computed.

            Args:
                lower: the arrays [C, V] of one kind of scores, ((x, y), (y, x)); its gradient x yᵀ is used
                    below the diagonal.
                upper: the arrays of a second kind, ((x, y), (y, x)); its transposed gradient y xᵀ is used
                    above the diagonal.
                tiles: for each level [C, K], the decayed operand that the gradient of scores multiplies.
            """
            return halving.level_products(outer(lower[0], upper[1]), tiles, masks)

        def added(x, y):
            return [a + b for a, b in zip(x, y, strict=True)]

        d_tiles = added(spread(qb, qb, x.tiles), spread(qk, ab, x.others))
        d_others = added(spread(ak, ak, x.others), spread(ab, qk, x.tiles))
        through_read = decays.read_decay * dot(d_out, before)
        through_a = decays.read_decay * dot(d_right_side, before)
        through_write_b = decays.write_decay * dot(a_read, narrow)
        through_write_k = decays.write_decay * dot(v, narrow)
        diagonal_b, diagonal_k = (
            jnp.sum(d_out.astype(_F32) * y.astype(_F32), axis=1, keepdims=True) for y in (a_read, v)
        )
        decayed = (
            halving.operand_gradient(d_tiles, decays, later=True) + through_read
        ) * x.token_decay
        layout.store(refs["dq"], h, scale * (decayed + diagonal_b * x.b + diagonal_k * x.k))
        db = halving.operand_gradient(d_tiles, decays, later=False) + through_write_b
        layout.store(refs["db"], h, db + diagonal_b * x.q)
        layout.store(
            refs["da"], h, halving.operand_gradient(d_others, decays, later=True) + through_a
        )
        dk = halving.operand_gradient(d_others, decays, later=False) + through_write_k
        layout.store(refs["dk"], h, dk + diagonal_k * x.q)
        through_chunk_decay = before.astype(_F32) * after
        through_chunk_decay = (
            jnp.sum(through_chunk_decay, axis=0, keepdims=True) * decays.chunk_decay
        )
        terms = added(
            halving.decay_terms(x.tiles, d_tiles), halving.decay_terms(x.others, d_others)
        )
        through_read_decay = x.q * x.token_decay * through_read + x.a * through_a
        through_write_decay = x.b * through_write_b + x.k * through_write_k
        d_decay = halving.decay_gradient(
            terms, through_read_decay, through_write_decay, through_chunk_decay, exclusive=True
        )
        layout.store(refs["d_decay"], h, d_decay + x.q * decayed)
