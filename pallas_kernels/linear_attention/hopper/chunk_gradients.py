"""One warpgroup's part of the backward pass of linear attention with a decay per key channel: gradients of 64 key channels of a
chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import (
    BLOCK,
    LEVELS,
    SQUARE,
    AllPairs,
    Halving,
    Level,
    left_operand,
    load,
    load_by_column,
    load_by_row,
    power_of_two,
    same_document,
)

_F32 = jnp.float32
PAIR = 2
"""The number of slices of value channels for which a thread block has buffers."""


class Call(NamedTuple):
    """Sizes and options of one call of `chunk_backward`, which computes the gradients of q, k and the log decay of all chunks.

    Attributes:
        shapes: shapes of the inputs, by name.
        heads: number of heads of the output, h.
        count: number of chunks of a row, N.
        depth: K, number of key channels.
        width: number of value channels of one slice of a head's values.
        pieces: number of slices of each head's value channels.
        groups: number of warpgroups of a thread block.
        blocks: number of thread blocks that compute one chunk of one head.
        scale: the factor by which the queries q are multiplied.
        exact: whether the gradient of q is stored in float32.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    shapes: dict[str, tuple[int, ...]]
    heads: int
    count: int
    depth: int
    width: int
    pieces: int
    groups: int
    blocks: int
    scale: float
    exact: bool
    interpret: Any

    @property
    def only_query(self) -> bool:
        """Whether only the gradient of q is computed, not those of k and the log decay."""
        return "d_states" not in self.shapes

    def input_heads(self, name: str) -> int:
        """Return the number of heads of the input `name`, which divides the number of heads of the output."""
        return self.shapes[name][dict(chunk_decay=1, bonus=0).get(name, 2)]


class Position(NamedTuple):
    """The row, head, chunk and 64 key channels whose gradients one warpgroup computes.

    Attributes:
        b: index of the row in the batch.
        h: index of the head.
        n: index of the chunk in the row.
        local: index of the warpgroup in its thread block.
        group: index of the 64 key channels among those of the head.
        tokens: the slice of the chunk's tokens in the row.
        channels: the slice of the 64 key channels.
    """

    b: Any
    h: Any
    n: Any
    local: Any
    group: Any
    tokens: Any
    channels: Any


class _ScoresGradient(NamedTuple):
    """The gradient dP of the decayed scores P [64, 64] of one chunk's queries with its keys, scaled to bfloat16.

    Attributes:
        matrix: [64, 64] bfloat16, dP on and below the diagonal, and above it its transpose (undefined if only the gradient of q is
            computed); each row is divided by `size`.
        size: [64], the power of two by which each row of `matrix` has been divided.
        diagonal: [64], the diagonal of dP: the gradient of each query's score with its own token's key.
    """

    matrix: Any
    size: Any
    diagonal: Any


class ChunkGradients:
    """The gradients of q, k and the log decay in 64 key channels of one chunk and head, as one warpgroup computes them.

    It has a method for each step, in the order in which `compute` calls them.
    """

    def __init__(self, call: Call, at: Position, refs: dict[str, Any], smem: dict[str, Any]):
        """Select, of the thread block's buffers in shared memory, those that this warpgroup uses.

        Args:
            call: sizes and options of `chunk_backward`.
            at: the row, head, chunk and key channels that this warpgroup computes.
            refs: references to inputs and outputs in global memory, by name.
            smem: the thread block's buffers in shared memory, by name; of a buffer that has an entry for each warpgroup, this
                warpgroup uses the entry with its index.
        """
        self.call, self.at, self.refs = call, at, refs
        shared = ("v", "d_output", "loaded", "used", "next_pair", "left")
        self.smem = {n: x if n in shared else x.at[at.local] for n, x in smem.items()}

    def compute(self) -> None:
        """Compute and store the gradients of q, k and the log decay (or of q alone) in this warpgroup's 64 key channels of a chunk."""
        call, at, smem = self.call, self.at, self.smem
        self.start_loads()
        g = wg.load_global(self.refs["g"].at[at.b, at.tokens, self.input_head("g"), at.channels])
        left_buffer = smem["left"].at[at.local] if call.interpret else None
        self.left = left_operand(left_buffer, call.interpret)
        self.halving = Halving(
            smem["parts"], smem["tile"], self.left, "bonus" in call.shapes, call.interpret, smem["lowest"]
        )  # fmt: skip
        self.halving.split_decay(g)
        all_in_range, scores, gradients = self.memory_gradients()
        dq, *dk = self.add_pairs(all_in_range, scores, gradients)
        diagonal = wg.spread_rows(scores.diagonal, SQUARE)
        if call.only_query:
            self.store_query_gradient(dq, diagonal)
        else:
            self.store_gradients(dq, dk[0], diagonal)

    def input_head(self, name: str):
        """Return the index of the head of the input `name` (such as "q") that belongs to this warpgroup's head of the output;
        several heads of the output may share it.

        Each head of v and of the output's gradient is stored as `pieces` consecutive heads, one for each slice of its value
        channels: the index is that of the first.
        """
        pieces = self.call.pieces if name in ("v", "d_output") else 1
        heads = self.call.input_heads(name) // pieces
        return lax.div(self.at.h * heads, self.call.heads) * pieces

    def start_loads(self) -> None:
        """Start to copy one chunk's inputs to shared memory: q, k, v, the output's gradient dO, the memory before the chunk, and
        the gradient of the memory after it. The barrier `loaded` counts the copies.
        """
        call, at, smem, refs = self.call, self.at, self.smem, self.refs
        for name in ("q", "k")[call.only_query :]:
            source = refs[name].at[at.b, at.tokens, self.input_head(name), at.channels]
            plgpu.copy_gmem_to_smem(source, smem[name], smem["loaded"])

        self.start_memory_loads(0, smem["loaded"])
        # The warpgroups of a block use the same values and gradients of the output.
        pl.when(at.local == 0)(lambda: self.start_value_loads("v", 0, smem["loaded"]))
        pl.when(at.local == call.groups - 1)(
            lambda: self.start_value_loads("d_output", 0, smem["loaded"])
        )

    def start_value_loads(self, name: str, first: int, barrier) -> None:
        """Start to copy to shared memory the slices of value channels from `first` on for which there is space, of the values ("v") or
        of the output's gradient ("d_output").
        """
        at, smem = self.at, self.smem
        for piece in range(min(self.call.pieces, PAIR)):
            source = self.refs[name].at[at.b, at.tokens, self.input_head(name) + first + piece]
            plgpu.copy_gmem_to_smem(source, smem[name].at[piece], barrier)

    def start_memory_loads(self, piece: int, barrier) -> None:
        """Start to copy to shared memory one slice of value channels of the memory before the chunk and of the gradient of the
        memory after it.
        """
        call, at = self.call, self.at
        for name in ("states",) if call.only_query else ("states", "d_states"):
            source = self.refs[name].at[at.b, at.h * call.pieces + piece, at.n, at.channels]
            plgpu.copy_gmem_to_smem(source, self.smem[name], barrier)

    def memory_gradients(self):
        """Compute the gradient dP of the chunk's decayed scores, and the gradients of q and k through the memories before and after
        the chunk.

        Return whether all tokens' decays are in float32's range, dP, and a list of the gradients of q through the memory S before
        the chunk and of k through the memory S' after it, [64, 64] each (of q alone if only its gradient is computed). The decay's
        gradient through S' is stored in the buffer `totals`, [64] by key channel: e^(b_C) Σ_v S dS' + Σ_j (k dk(S'))_j, where
        e^(b_C) is the chunk's decay, dS' the gradient of S' and dk(S') that of k through S'.
        """
        call, smem, halving = self.call, self.smem, self.halving
        at_end: Any = 0.0
        scores: Any = None
        zeros = [jnp.zeros(SQUARE, _F32)] * (1 if call.only_query else 2)
        plgpu.barrier_wait(smem["loaded"])
        _, all_in_range = halving.check_range(*(smem[n] for n in ("q", "k")[call.only_query :]))
        if call.pieces == 1:
            scores = self.scores_gradient(*self.score_products(*zeros))
            dq, *dk = self.add_memory_products(0, *zeros)
        else:
            sums, weights = zeros, zeros
            for first in range(0, call.pieces, PAIR):
                if first:
                    at_end += self.memory_dots()
                    self.load_pair(first)
                sums, at_end = self.add_memory_products(0, *sums), at_end + self.memory_dots()
                plgpu.commit_smem()
                self.start_memory_loads(first + 1, smem["next_piece"])
                # While the second piece's memories are loaded into the buffer of the first piece's.
                weights = self.score_products(*weights)
                if first + PAIR == call.pieces:
                    scores = self.scores_gradient(*weights)
                plgpu.barrier_wait(smem["next_piece"])
                sums = self.add_memory_products(1, *sums)
            dq, *dk = sums
        dq *= self.mask_documents(halving.boundary_decay(True), "enters") * call.scale
        if call.only_query:
            return all_in_range, scores, [dq]
        at_end += self.memory_dots()
        dk = dk[0] * self.mask_documents(halving.boundary_decay(False), "stays")
        self.store_totals(at_end, dk)
        return all_in_range, scores, [dq, dk]

    def load_pair(self, first: int) -> None:
        """Load, when all warpgroups of the block have used the pair of slices of value channels before it, the pair that begins with
        slice `first`: values, gradients of the output, and the first slice's memories.
        """
        call, at, smem = self.call, self.at, self.smem
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["used"])
        plgpu.barrier_wait(smem["used"])
        self.start_memory_loads(first, smem["next_pair"])
        pl.when(at.local == 0)(lambda: self.start_value_loads("v", first, smem["next_pair"]))
        pl.when(at.local == call.groups - 1)(
            lambda: self.start_value_loads("d_output", first, smem["next_pair"])
        )
        plgpu.barrier_wait(smem["next_pair"])

    def score_products(self, *earlier):
        """Return dO vᵀ and, unless only the gradient of q is computed, its transpose, [64, 64] each, of the loaded slices of value
        channels, plus those of the slices before them, `earlier`.
        """
        call, smem = self.call, self.smem

        def products(lower, *upper):
            for piece in range(min(call.pieces, PAIR)):
                v, d_output = smem["v"].at[piece], smem["d_output"].at[piece]
                plgpu.wgmma(lower, d_output, v.transpose((1, 0)))
                for x in upper:
                    plgpu.wgmma(x, v, d_output.transpose((1, 0)))

        return wg.accumulate(products, *earlier, interpret=call.interpret)

    def scores_gradient(self, weights, *upper) -> _ScoresGradient:
        """Return the gradient of the chunk's scores of queries with keys, scale dO vᵀ on and below the diagonal, from the products of
        all slices of value channels, as `score_products` returns them.
        """
        call, halving = self.call, self.halving
        i, j = halving.i, halving.j
        if upper:
            weights = jnp.where(i >= j, weights, upper[0])
        weights *= call.scale
        if "run" in call.shapes:
            weights = jnp.where(self.same_document(), weights, 0.0)
        diagonal = jnp.sum(jnp.where(i == j, weights, 0.0), axis=1)
        size, inverse = power_of_two(jnp.max(jnp.abs(weights), axis=1))
        weights *= wg.spread_rows(inverse, SQUARE)
        return _ScoresGradient(weights.astype(jnp.bfloat16), size, diagonal)

    def add_memory_products(self, piece: int, *sums):
        """Return `sums`, terms of the gradients of q and k, plus the products of one slice of value channels with the memory and
        with its gradient.

        The products are dO Sᵀ, a term of the gradient of q, and v dS'ᵀ, a term of the gradient of k, [64 tokens, 64 key channels]
        each: S is the memory before the chunk, dS' the gradient of the memory after it, and dO the gradient of the output.
        """
        smem = self.smem

        def add(dq, *dk):
            plgpu.wgmma(dq, smem["d_output"].at[piece], smem["states"].transpose((1, 0)))
            for x in dk:
                plgpu.wgmma(x, smem["v"].at[piece], smem["d_states"].transpose((1, 0)))

        return wg.accumulate(add, *sums, interpret=self.call.interpret)

    def memory_dots(self):
        """Return, for each of 64 key channels, the inner product of the memory with its gradient over the loaded slice of value
        channels.
        """
        total: Any = 0.0
        for c in range(self.call.width // BLOCK):
            values = pl.ds(c * BLOCK, BLOCK)
            S, dS = (load(self.smem[n].at[:, values]).astype(_F32) for n in ("states", "d_states"))
            total += jnp.sum(jnp.multiply(S, dS), axis=1)
        return total

    def store_totals(self, at_end, dk) -> None:
        """Store the part of the log decay's gradient that comes through the memory S' after the chunk, [64] by key channel, in
        `totals`.

        It is computed from the inner products of the memory before the chunk with the gradient of S' (`at_end` [64]) and from the
        gradient of k through S' (`dk` [64, 64]).
        """
        call, at, smem, halving = self.call, self.at, self.smem, self.halving
        # S and dS' have been used: their buffers receive the two parts of a split tile.
        parts = [smem["states"], smem["d_states"]]
        if call.width > BLOCK:
            parts = [smem["states"].at[:, pl.ds(n * BLOCK, BLOCK)] for n in range(2)]
        halving.split(load(smem["k"]).astype(_F32) * dk, parts)
        channels = pl.ds(at.n * call.depth + at.group * BLOCK, BLOCK)
        chunk_decay = load_by_row(
            self.refs["chunk_decay"].at[at.b, self.input_head("chunk_decay"), channels]
        )
        smem["totals"][...] = at_end * chunk_decay + halving.column_sums(parts)

    def add_pairs(self, all_in_range, scores: _ScoresGradient, gradients: list) -> list:
        """Return `gradients`, those of q and k (or of q alone), [64 tokens, 64 key channels] each, plus the terms that come
        through the chunk's decayed scores P [64, 64] off the diagonal.

        If the decays of all tokens are in float32's range, all pairs of tokens are computed at once: by one product for the
        gradient of q, whose tokens are the later ones of the pairs, and by one for that of k, whose tokens are the earlier ones.
        Else all pairs are computed level by level of the halving.
        """
        both = not self.call.only_query

        def all_pairs(transposed, gradients):
            """Return `gradients`, the list of the gradients of q and k, with the term of all pairs of tokens added to its first
            entry, which becomes its last.

            A loop calls this function once for each of the gradients: `transposed` is 0 for that of q and 1 for that of k.
            """
            first, *second = gradients
            step = AllPairs(self.halving, transposed.astype(_F32))
            return [*second, first + self.pair_products(step, scores)]

        def level(at, gradients):
            step = Level(self.halving, at)
            dx = self.pair_products(step, scores)
            shares = (step.later, 1 - step.later) if both else (1,)
            return [x + share * dx for x, share in zip(gradients, shares, strict=True)]

        gradients = lax.fori_loop(0, all_in_range * (1 + both), all_pairs, gradients)
        return lax.fori_loop(all_in_range * LEVELS, LEVELS, level, gradients)

    def pair_products(self, step: Level | AllPairs, scores: _ScoresGradient):
        """Return the term of the gradient of q or k, [64 tokens, 64 key channels], that comes through the decayed scores of those
        pairs of a chunk's tokens that `step` selects: a level of the halving, or `AllPairs`.

        With dP the gradient of the scores, it is `step.factor * (step.mask(dP) columns)`: the mask selects the pairs, `columns`
        are the decayed keys (or queries) of each pair's other token, and the factor is the decay at the token itself.
        """
        smem, both = self.smem, not self.call.only_query
        columns = step.columns(load(smem["q" if both else "k"]), load(smem["k"]))
        if both:
            tiles = [smem["tile"]]
            smem["tile"][...] = columns.astype(smem["tile"].dtype)
            plgpu.commit_smem()
        else:  # in two parts: a softmax of the output, as slot memories have, multiplies its rounding error
            tiles = [smem["tile"], smem["q"]]
            self.halving.split(columns, tiles)
        weights = self.left(step.mask(scores.matrix, both=both))

        def product(out):
            for tile in tiles:
                plgpu.wgmma(out, weights, tile)

        (dx,) = self.halving.accumulate(product)
        return dx * step.factor * wg.spread_rows(scores.size, SQUARE)

    def store_query_gradient(self, dq, diagonal) -> None:
        """Add to the gradient of q [64, 64] the term through each query's score with its own token's key, and store it."""
        at = self.at
        dq += diagonal * load(self.smem["k"]).astype(_F32)
        if self.call.exact:
            self.refs["dq"].at[at.b, at.tokens, at.h, at.channels][...] = dq
            return
        self.store("dq", self.smem["tile"], dq)
        plgpu.wait_smem_to_gmem(0)

    def store_gradients(self, dq, dk, diagonal) -> None:
        """Store the gradients of q, k and the log decay of one chunk, [64 tokens, 64 key channels] each, and with a bonus also
        the bonus' gradient.

        `dq` and `dk` lack the terms through the score of each token's query with its own key; these are added after the log
        decay's gradient has been computed from `dq` and `dk`. `diagonal` [64, 64] has the gradient of that score of each token,
        in all columns.
        """
        at, smem, refs, halving = self.at, self.smem, self.refs, self.halving
        q, k = (load(smem[name]).astype(_F32) for name in ("q", "k"))
        dg = self.decay_gradient(q * dq, k * dk)
        refs["dg"].at[at.b, at.tokens, at.h, at.channels][...] = dg
        if "bonus" in refs:
            halving.split(diagonal * q * k)
            d_bonus = refs["d_bonus"].at[at.b, at.h, at.n, at.channels]
            d_bonus[...] = halving.column_sums()
            diagonal *= load_by_column(refs["bonus"].at[self.input_head("bonus"), at.channels])
        self.store("dq", smem["q"], dq + diagonal * k)
        self.store("dk", smem["k"], dk + diagonal * q)
        plgpu.wait_smem_to_gmem(0)

    def decay_gradient(self, q_products, k_products):
        """Return the gradient of the log decay of one chunk, [64 tokens, 64 key channels] float32.

        `q_products` is q times its gradient and `k_products` is k times its gradient, elementwise, [64, 64]; both gradients are
        without the terms through the score of each token's query with its own key.
        """
        halving = self.halving
        i, j = halving.i, halving.j
        if "bonus" not in self.refs:
            halving.split(q_products - k_products)
            dg = halving.sums(self.mask_pairs(j >= i))
        else:
            halving.split(q_products)
            dg = halving.sums(self.mask_pairs(j > i))
            halving.split(k_products)
            dg -= halving.sums(self.mask_pairs(j >= i))
        totals = plgpu.load(self.smem["totals"], layout=wg.LAYOUT.reduce(0))
        return dg + self.mask_documents(lax.broadcast_in_dim(totals, SQUARE, [1]), "stays")

    def store(self, name: str, buffer, x) -> None:
        """Start to copy a gradient x [64, 64] to the output `name` in global memory, through a buffer in shared memory."""
        at = self.at
        buffer[...] = x.astype(buffer.dtype)
        plgpu.commit_smem()
        target = self.refs[name].at[at.b, at.tokens, at.h, at.channels]
        plgpu.copy_smem_to_gmem(buffer, target)

    def same_document(self):
        """Return whether the tokens i and j of the chunk belong to one document, [64, 64] bool."""
        return same_document(self.refs["run"].at[self.at.b, self.at.tokens])

    def mask_pairs(self, mask):
        """Return `mask` [64, 64], over pairs of the chunk's tokens, with False where the two tokens belong to different
        documents.
        """
        return mask & self.same_document() if "run" in self.refs else mask

    def mask_documents(self, x, name: str):
        """Return x [64 tokens, 64 key channels] with 0 for tokens that belong to another document than the token at the chunk's
        boundary.

        That token is the last one before the chunk if `name` is "enters", and the chunk's last one if it is "stays".
        """
        if name not in self.refs:
            return x
        flags = load_by_row(self.refs[name].at[self.at.b, self.at.tokens])
        return x * wg.spread_rows(flags, SQUARE)
