"""The phase `chunk_forward` of a diagonal-plus-low-rank memory (RWKV7), on Mosaic GPU (Hopper).

`chunk_forward` computes, for every chunk in parallel, the products of q and `a` with k and b, times the
decays between the two tokens. Tokens whose decay since the chunk's start is at least 2^-100 (`halving.RANGE`)
are in range: all pairs of them come from one product (`AllPairs`). The other pairs come from the halving
(`Level`; see `pallas_kernels.tiles.channel_decay`). With g the log decay and q' = q e^g, all four products
have the same decay between tokens i and j, e to the sum of the log decays strictly between them. So on a
level one tile contains q' in later rows and k or b in earlier ones, another tile contains `a` in later rows
and b or k in earlier ones, and two products of such tiles compute all four matrices: those of q below the
diagonal, those of `a`, transposed, above it.

`solve.solve_chunks` then inverts the triangular system of each chunk, and applies the inverse to the terms
that do not depend on the memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import Block, place_of
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    SQUARE,
    AllPairs,
    Documents,
    Halving,
    Level,
    left_operand,
    load,
    load_float32,
    same_document,
)
from pallas_kernels.hopper.launch import launch
from pallas_kernels.tiles import channel_decay as tiles

_F32, _BF16 = jnp.float32, jnp.bfloat16
_INPUTS = ("q", "k", "a", "b")


class DecayedChunks(NamedTuple):
    """The arrays of all chunks of h heads that a diagonal-plus-low-rank memory requires and that do not
    depend on the memory: scores and decayed tokens.

    A token reads the memory with the vector `a`, and writes the result back with b. d are the inclusive sums
    of a chunk's log decays, d' the exclusive ones, and A_xy the products of x with y times the decays between
    the tokens: (A_xy)_ij = Σ_c x_ic y_jc e^(d'_i - d_j)_c for x = a and i > j, with d_i in place of d'_i for
    x = q and i >= j.

    Attributes:
        upper: [B, h, T, C] float32, the transposed decayed products of `a` with b: the rows of each chunk's
            A_abᵀ.
        upper_values: [B, h, T, C] bfloat16, the transposed decayed products of `a` with keys: the rows of
            each chunk's A_akᵀ.
        scores: [B, h, T, C] bfloat16, the decayed products of queries with b: the rows of each chunk's scale
            A_qb.
        scores_values: [B, h, T, C] bfloat16, the decayed products of queries with keys: the rows of each
            chunk's scale A_qk.
        read: [B, T, h, K] bfloat16, the queries decayed from the chunk's start, scale q e^d.
        decayed_a: [B, T, h, K] bfloat16, `a` decayed from the chunk's start, a e^d'.
        written: [B, T, h, K] bfloat16, b decayed to the chunk's end, b e^(d_C - d).
        written_values: [B, T, h, K] bfloat16, the keys decayed to the chunk's end, k e^(d_C - d).
        chunk_decay: [B, h, N * K] float32, e^(d_C), the decay of the memory over each of the N chunks.
    """

    upper: jax.Array | None
    upper_values: jax.Array | None
    scores: jax.Array
    scores_values: jax.Array
    read: jax.Array
    decayed_a: jax.Array | None
    written: jax.Array
    written_values: jax.Array
    chunk_decay: jax.Array


class _Smem(NamedTuple):
    """Buffers in shared memory of a program that computes the scores and decayed tokens of one chunk of a diagonal-plus-low-rank
    memory.

    `groups` counts the program's warpgroups, of 64 key channels each; C is the number of tokens of a chunk; tiles are bfloat16.

    Attributes:
        inputs: [groups, 4, C, 64], q, k, `a` and b; after `of_warpgroup`, a list of four references [C, 64].
            First q' replaces q, later the decayed tokens replace all.
        parts: [groups, 2, 64, 64], the log decays as sums of two bfloat16 numbers, from which the decays between tokens are computed.
        tile: [groups, C, 64], right operands of products, and a buffer of the halving.
        decayed: [groups, 2, C, 64], `a` and b with the decays of `AllPairs`.
        lowest: [groups, 2, C] float32, a buffer for the check of which tokens' decays are in float32's range.
        partial: [2, C, C] float32, the scores of the second warpgroup.
        loaded: the barrier at which the loads of the inputs are complete.
        partial_stored: barrier at which `partial` is complete.
        left: [groups, C, 64] for the interpreter, which reads left operands from shared memory; else None.
    """

    inputs: Any
    parts: Any
    tile: Any
    decayed: Any
    lowest: Any
    partial: Any
    loaded: Any
    partial_stored: Any
    left: Any

    def of_warpgroup(self, group) -> _Smem:
        """Return the shared-memory buffers that the warpgroup with index `group` uses: of each array with an
        axis [groups, ...] the warpgroup's entry, and the buffers that all warpgroups share unchanged.
        """
        names = ("inputs", "parts", "tile", "decayed", "lowest")
        names += () if self.left is None else ("left",)
        buffers = {name: getattr(self, name).at[group] for name in names}
        buffers["inputs"] = [buffers["inputs"].at[index] for index in range(len(_INPUTS))]
        return self._replace(**buffers)


def _smem(groups: int, interpret) -> _Smem:
    """Return the types of the buffers in shared memory of a program with `groups` warpgroups, of 64 key channels each."""
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    partial = (2 if groups > 1 else 1, *SQUARE)
    return _Smem(
        inputs=tile((groups, 4, *SQUARE)),
        parts=tile((groups, 2, *SQUARE)),
        tile=tile((groups, *SQUARE)),
        decayed=tile((groups, 2, *SQUARE)),
        lowest=smem((groups, 2, CHUNK), _F32),
        partial=smem(partial, _F32, transforms=wg.TILED_WIDE),
        loaded=plgpu.Barrier(num_arrivals=4 * groups),
        partial_stored=plgpu.Barrier(),
        left=tile((groups, *SQUARE)) if interpret else None,
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """One warpgroup's computation in `chunk_forward`: the scores and decayed tokens of one chunk and head of
    a diagonal-plus-low-rank memory, in 64 key channels.

    The scores are two matrices [C, C] float32 of decayed products A_xy of x with y. The first is A_qk on and
    below the diagonal and the transpose of A_ab above it, the second A_qb and the transpose of A_ak.

    Attributes:
        block: references to the chunk's inputs and outputs in global memory, in this warpgroup's key
            channels.
        smem: buffers in shared memory: those of the warpgroup, and those that all warpgroups of the program
            share.
        group: index of the warpgroup in its program.
        groups: number of warpgroups of the program.
        depth: number of key channels, K.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    block: Block
    smem: _Smem
    group: Any
    groups: int
    depth: int
    scale: float
    interpret: Any

    def as_left(self, x):
        """Return x [C, 64] bfloat16 as the left operand of a matrix product: in registers on the card, in
        shared memory in the interpreter.
        """
        return left_operand(self.smem.left, self.interpret)(x)

    def store_chunk_decay(self, halving: Halving) -> None:
        """Store the decay of the memory over the whole chunk, for this warpgroup's 64 key channels; 0 if a document begins in the
        chunk.
        """
        place, refs = self.block.place, self.block.refs
        chunk_decay = jnp.exp2(halving.column_sums())
        if "run" in refs:
            chunk_decay *= refs["enters"].at[place.row][place.n * CHUNK + CHUNK - 1]
        channels = pl.ds(place.n * self.depth + self.group * BLOCK, BLOCK)
        refs["chunk_decay"].at[place.row, place.h, channels][...] = chunk_decay

    def near_scores(self, halving: Halving):
        """Return the decayed scores between the chunk's tokens that are in range (whose decays `AllPairs`
        computes without overflow), and whether all tokens are in range, as 1 or 0.

        The scores are two matrices [C, C] float32, with 0 at other pairs and on the diagonal. Below the
        diagonal are the products of q with k (first matrix) and with b (second), above it the transposed
        products of `a` with b and with k.
        """
        smem = self.smem
        q, k, a, b = smem.inputs
        since, all_in_range = halving.check_range(q, k, a, b)
        pairs = AllPairs(halving, 0, since)
        of_later, of_earlier = pairs.factor, pairs.columns_factor
        q_rows = self.as_left((load_float32(q) * of_later).astype(_BF16))
        decayed_a, decayed_b, decayed_k = smem.decayed.at[0], smem.decayed.at[1], smem.tile
        decayed_a[...] = (load_float32(a) * of_later).astype(_BF16)
        decayed_b[...] = (load_float32(b) * of_earlier).astype(_BF16)
        decayed_k[...] = (load_float32(k) * of_earlier).astype(_BF16)
        plgpu.commit_smem()
        i, j = halving.i, halving.j
        scores = []
        for of_q, of_a in ((decayed_k, decayed_b), (decayed_b, decayed_k)):
            below = _product(halving, q_rows, of_q.transpose((1, 0)))
            above = _product(halving, of_a, decayed_a.transpose((1, 0)))
            near = jnp.where(i > j, below, jnp.where(i < j, above, 0.0))
            scores.append(jnp.where(halving.pairs_in_range(), near, 0.0))
        return scores, all_in_range

    def add_level(self, halving: Halving, at, scores):
        """Add to the chunk's scores, two matrices [C, C], the scores of one level's pairs of tokens, except
        pairs that are in range, which `near_scores` has computed; return the sums. `at` is the index of the
        level of the halving.
        """
        q, k, a, b = self.smem.inputs
        tile = self.smem.tile
        level, added = Level(halving, at), []
        for rows, columns in (((q, b), (a, k)), ((q, k), (a, b))):
            tile[...] = level.columns(*map(load, columns)).astype(_BF16)
            left = self.as_left(level.rows(*map(load, rows)).astype(_BF16))
            plgpu.commit_smem()
            products = level.mask(_product(halving, left, tile.transpose((1, 0))))
            added.append(jnp.where(halving.pairs_in_range(), 0.0, products))
        return [x + y for x, y in zip(scores, added, strict=True)]

    def store_partial(self, scores) -> None:
        """Store the second warpgroup's scores, two matrices [C, C] summed over its key channels, in shared
        memory, where the first warpgroup adds them to its scores.
        """
        for index, x in enumerate(scores):
            self.smem.partial.at[index][...] = x
        plgpu.barrier_arrive(self.smem.partial_stored)

    def store_decayed(self, halving: Halving) -> None:
        """Store, in 64 key channels, the chunk's q and `a` decayed from the chunk's start (for reads of the
        memory), and its b and k decayed to the chunk's end (for writes), [C, 64] each.
        """
        q, k, a, b = self.smem.inputs
        for since_start, flags, outputs in (
            (True, "enters", dict(read=(q, self.scale), decayed_a=(a, 1.0))),
            (False, "stays", dict(written=(b, 1.0), written_values=(k, 1.0))),
        ):
            factor = self.block.mask_rows(halving.boundary_decay(since_start), flags)
            for name, (tile, scale) in outputs.items():
                self.block.store(name, tile, load_float32(tile) * factor * scale)

    def store_scores(self, halving: Halving, scores) -> None:
        """Store four matrices [C, C] of decayed products of the chunk's tokens in global memory: of q with k
        and with b, and, transposed, of `a` with b and with k.

        `scores` are two matrices with the sums over the first warpgroup's key channels; those over the second
        warpgroup's channels are added.
        """
        refs, place = self.block.refs, self.block.place
        i, j = halving.i, halving.j
        if self.groups > 1:
            plgpu.barrier_wait(self.smem.partial_stored)
        names = ("scores_values", "upper"), ("scores", "upper_values")
        for index, (below, above) in enumerate(names):
            total = scores[index]
            if self.groups > 1:
                total += load(self.smem.partial.at[index])
            if "run" in refs:
                same = same_document(refs["run"].at[place.row, place.tokens])
                total = jnp.where(same, total, 0.0)
            to = refs[above].at[place.row, place.h, place.tokens]
            to[...] = jnp.where(i < j, total, 0.0).astype(refs[above].dtype)
            lower = (jnp.where(i < j, 0.0, total) * self.scale).astype(_BF16)
            refs[below].at[place.row, place.h, place.tokens][...] = lower

    def run(self) -> None:
        """Compute and store the scores, the decayed q, k, `a` and b, and the decay of one chunk and head, in
        this warpgroup's 64 key channels.
        """
        smem = self.smem
        q, k, _, b = smem.inputs
        for name, to in zip(_INPUTS, smem.inputs, strict=True):
            plgpu.copy_gmem_to_smem(self.block.keys(name), to, smem.loaded)
        halving = Halving(smem.parts, smem.tile, self.as_left, True, self.interpret, smem.lowest)
        decay = self.block.log_decay()
        halving.split_decay(decay)
        self.store_chunk_decay(halving)
        plgpu.barrier_wait(smem.loaded)
        diagonals = [jnp.sum(load_float32(q) * load_float32(x), axis=1) for x in (k, b)]
        q[...] = (load_float32(q) * token_decay(decay)).astype(_BF16)
        plgpu.commit_smem()
        scores, all_in_range = self.near_scores(halving)
        level = functools.partial(self.add_level, halving)
        scores = lax.fori_loop(all_in_range * LEVELS, LEVELS, level, scores)
        scores = [
            jnp.where(halving.i == halving.j, wg.spread_rows(x, SQUARE), y)
            for x, y in zip(diagonals, scores, strict=True)
        ]
        if self.groups > 1:
            # Before this warpgroup's own outputs, so that the other one does not wait long.
            pl.when(self.group == 1)(functools.partial(self.store_partial, scores))
        self.store_decayed(halving)
        pl.when(self.group == 0)(functools.partial(self.store_scores, halving, scores))
        plgpu.wait_smem_to_gmem(0)


def token_decay(log_decay):
    """Return the decay e^g of each token, shaped like the log decay g. A log decay below `tiles.FLOOR` (-128)
    counts as that, as in the sums of log decays.
    """
    return jnp.exp(jnp.maximum(log_decay, tiles.FLOOR))


def _product(halving: Halving, rows, columns):
    """Return the matrix product of `rows` [C, 64] and `columns` [64, C], operands of `plgpu.wgmma`, as a tile
    [C, C] float32.
    """
    return halving.accumulate(lambda out: plgpu.wgmma(out, rows, columns))[0]


def chunk_forward(
    q, k, a, b, log_decay, documents: Documents | None, *, heads: int, scale: float, interpret: Any = False
) -> DecayedChunks:  # fmt: skip
    """Compute, for all chunks in parallel, the arrays of a diagonal-plus-low-rank memory that do not depend
    on the memory: the decayed products of q and `a` with k and b, these vectors decayed from the chunk's
    start or to its end, and the decay over each chunk. Return them as `DecayedChunks`.

    Args:
        q: [B, T, *, K] bfloat16, the queries.
        k: [B, T, *, K] bfloat16, the keys.
        a: [B, T, *, K] bfloat16, the vectors with which a token reads the memory for u.
        b: [B, T, *, K] bfloat16, the vectors with which a token writes u back to the memory.
        log_decay: [B, T, *, K] float32, the log decay of each key channel.
        documents: where documents begin, as `halving.Documents`; None for one document per row.
        heads: number of heads of the result; a multiple of those of the inputs.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, length, _, depth = k.shape
    count, groups = length // CHUNK, depth // BLOCK
    inputs = dict(q=q, k=k, a=a, b=b, g=log_decay)
    inputs |= {} if documents is None else documents._asdict()
    struct = jax.ShapeDtypeStruct
    square, wide = (batch, heads, length, CHUNK), struct((batch, length, heads, depth), _BF16)
    types = [struct(square, _F32), *[struct(square, _BF16)] * 3, *[wide] * 4]
    types.append(struct((batch, heads, count * depth), _F32))

    def kernel(refs):
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        columns = pl.ds(group * BLOCK, BLOCK)
        block = Block(refs, place_of(index, heads, count), columns)

        def body(smem: _Smem):
            smem = smem.of_warpgroup(group)
            _Program(block, smem, group, groups, depth, scale, interpret).run()

        pl.run_scoped(body, _smem(groups, interpret), collective_axes="warpgroup")

    results = launch(
        kernel,
        inputs=inputs,
        outputs=dict(zip(DecayedChunks._fields, types, strict=True)),
        grid=dict(chunk=batch * count * heads),
        num_threads=groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="dplr_chunk_forward",
        interpret=interpret,
    )
    return DecayedChunks(**results)
