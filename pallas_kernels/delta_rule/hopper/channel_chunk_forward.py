"""The phase `chunk_forward` of the delta rule with a decay per key channel (KDA), on Mosaic GPU (Hopper).

`chunk_forward` computes, for every chunk in parallel, the products of queries with keys and of keys with
keys, times the decay between the two tokens, and the queries and keys decayed from the chunk's start or to
its end. Tokens whose decay since the chunk's start is at least 2^-100 (`halving.RANGE`) are in range: all
pairs of them come from one product (`AllPairs`), and pairs within blocks of 16 tokens whose decay since the
block's start is in range from another one. The other pairs come from the halving (`Level`; see
`pallas_kernels.tiles.channel_decay`). On a level, the product of queries in later blocks with keys in earlier
blocks contains scores, which are below the diagonal; the product of keys in earlier blocks with keys in later
blocks contains entries of the transposed triangular system, which are above the diagonal. So one product
[C, C] of two tiles contains both. `channel_solve.solve_chunks` then inverts the transposed systems.
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
from pallas_kernels.hopper.blocks import Block, Place, place_of
from pallas_kernels.hopper.channel_slices import split_channels
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

_F32, _BF16 = jnp.float32, jnp.bfloat16
_NEAR = 4  # levels within blocks of 16 tokens


class DecayedChunks(NamedTuple):
    """The arrays of all chunks of h heads that the delta rule with a decay per key channel requires and that do not
    depend on the memory.

    b are the inclusive sums of a chunk's log decays, b_C the sum over the whole chunk of C tokens.

    Attributes:
        upper: [B, h, T, C] float32, the transposed decayed products N of keys with keys: the rows of each chunk's Nᵀ, where N_ij =
            Σ_c k_ic k_jc e^(b_i - b_j)_c for i > j.
        scores: [B, h, T, C] bfloat16, the decayed scores of queries with keys: the rows of each chunk's P, where P_ij = scale Σ_c
            q_ic k_jc e^(b_i - b_j)_c for i >= j.
        read: [B, T, h, K] bfloat16, the queries decayed from the chunk's start, scale q e^b.
        erase: [B, T, h, K] bfloat16, the keys decayed from the chunk's start, k e^b.
        written: [B, T, h, K] bfloat16, the keys decayed to the chunk's end, k e^(b_C - b).
        chunk_decay: [B, h, N * K] float32, e^(b_C), the decay of the memory over each of the N chunks.
    """

    upper: jax.Array | None
    scores: jax.Array
    read: jax.Array
    erase: jax.Array
    written: jax.Array
    chunk_decay: jax.Array


class _Smem(NamedTuple):
    """Buffers in shared memory of a thread block that computes the scores and decayed tokens of a few chunks
    of the delta rule.

    Each program (one or two warpgroups) of the thread block computes one chunk; `each` counts the warpgroups
    of all its programs. C is the number of tokens of a chunk; tiles are bfloat16.

    Attributes:
        q: [each, C, 64], queries in a warpgroup's 64 key channels.
        k: [each, C, 64], keys in a warpgroup's 64 key channels.
        erase: [each, C, 64], keys decayed from the chunk's start.
        parts: [each, 2, 64, 64], the log decays as sums of two bfloat16 numbers, from which the decays
            between tokens are computed.
        tile: [each, C, 64], right operands of products, and a buffer of the halving.
        partial: [programs, C, C] float32, the scores of a program's second warpgroup.
        lowest: [each, 4, C], a buffer for the checks of which tokens' decays are in float32's range. The last row has the bits of
            the numbers 0 to C - 1.
        loaded: the barriers at which the loads of q and k are complete, one for each warpgroup.
        partial_stored: the barriers at which `partial` is complete, one for each program.
        left: [each, C, 64] for the interpreter, which reads left operands from shared memory; else None.
    """

    q: Any
    k: Any
    erase: Any
    parts: Any
    tile: Any
    partial: Any
    lowest: Any
    loaded: Any
    partial_stored: Any
    left: Any

    def of_warpgroup(self, warpgroup, program) -> _Smem:
        """Return the shared-memory buffers that one warpgroup uses: of each array with an axis [each, ...]
        the entry with index `warpgroup`, and of `partial` and `partial_stored` the entry with index
        `program`, the chunk that the warpgroup helps to compute.
        """
        indices = dict.fromkeys(self._fields, warpgroup)
        indices |= dict(partial=program, partial_stored=program)
        buffers = {name: x for name, x in self._asdict().items() if x is not None}
        return self._replace(**{name: x.at[indices[name]] for name, x in buffers.items()})


def _smem(programs: int, groups: int, interpret) -> _Smem:
    """Return the types of the buffers in shared memory of a thread block with `programs` programs (chunks) of `groups` warpgroups
    each.
    """
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    each = programs * groups
    partial = (programs if groups > 1 else 1, *SQUARE)
    return _Smem(
        q=tile((each, *SQUARE)),
        k=tile((each, *SQUARE)),
        erase=tile((each, *SQUARE)),
        parts=tile((each, 2, *SQUARE)),
        tile=tile((each, *SQUARE)),
        partial=smem(partial, _F32, transforms=wg.TILED_WIDE),
        lowest=smem((each, 4, CHUNK), _BF16),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=each),
        partial_stored=plgpu.Barrier(num_barriers=programs),
        left=tile((each, *SQUARE)) if interpret else None,
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """One warpgroup's computation in `chunk_forward`: the scores and decayed tokens of one chunk and head of
    the delta rule, in 64 channels of every slice of the key channels.

    Attributes:
        refs: references to inputs and outputs in global memory, by name.
        buffers: the buffers of all warpgroups of the thread block.
        smem: the warpgroup's buffers; `partial` and `partial_stored` are the program's.
        place: the row, head and chunk that the warpgroup computes.
        warpgroup: index of the warpgroup in its thread block.
        group: index of the warpgroup in its program.
        groups: number of warpgroups of a program.
        slices: number of slices of the key channels, computed one after the other; their scores are summed in
            registers.
        depth: number of key channels, K.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    refs: dict[str, Any]
    buffers: _Smem
    smem: _Smem
    place: Place
    warpgroup: Any
    group: Any
    groups: int
    slices: int
    depth: int
    scale: float
    interpret: Any

    def renewed(self) -> _Program:
        """Return this program with addresses that the compiler does not know to be those of before. It computes them again, where
        it would else keep those of all tiles in registers through the loops, and spill others.
        """
        zero = lax.bitcast_convert_type(self.smem.lowest.at[3][0], jnp.int16).astype(jnp.int32)
        program = lax.div(self.warpgroup, self.groups) + zero
        return dataclasses.replace(
            self, smem=self.buffers.of_warpgroup(self.warpgroup + zero, program)
        )

    def as_left(self, x):
        """Return x [C, 64] bfloat16 as the left operand of a matrix product: in registers on the card, in
        shared memory in the interpreter.
        """
        return left_operand(self.smem.left, self.interpret)(x)

    def halving(self) -> Halving:
        """Return the `Halving` that computes the decays between the chunk's tokens with this warpgroup's
        buffers in shared memory.
        """
        smem = self.smem
        return Halving(
            smem.parts,
            smem.tile,
            self.as_left,
            False,
            self.interpret,
            smem.lowest,
            smem.lowest.at[3],
        )

    def scores_of_slice(self, number, previous):
        """Add to `previous` the decayed scores [C, C] that one slice of key channels contributes, and store that slice's decayed
        tokens.

        Args:
            number: index of the slice of key channels.
            previous: [C, C] float32, the sum of the scores of the slices before; None for a single slice.

        Returns:
            `previous` plus this slice's scores, [C, C] float32: q kᵀ on and below the diagonal, k kᵀ above
            it, under their decays.
        """
        q, k = self.smem.q, self.smem.k
        at = number * (self.depth // self.slices) + self.group * BLOCK
        block = Block(self.refs, self.place, pl.ds(at, BLOCK))
        halving = self.halving()
        if self.slices > 1:
            plgpu.wait_smem_to_gmem(
                0, wait_read_only=True
            )  # the previous slice's stores read the buffers
        for name, to in (("q", q), ("k", k)):
            plgpu.copy_gmem_to_smem(block.keys(name), to, self.smem.loaded)
        halving.split_decay(block.log_decay())
        self.store_chunk_decay(halving, at)
        plgpu.barrier_wait(self.smem.loaded)
        zeros = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
        scores, all_in_range = self.add_near(CHUNK, zeros)

        def add_others(_, scores):
            scores, all_near = self.add_near(1 << _NEAR, scores)
            # A loop: the unrolled levels need more registers than there are.
            return lax.fori_loop(all_near * _NEAR, LEVELS, self.add_level, scores)

        scores = lax.fori_loop(0, 1 - all_in_range, add_others, scores)
        self = self.renewed()
        halving, q, k = self.halving(), self.smem.q, self.smem.k
        i, j = halving.i, halving.j
        diagonal = jnp.sum(load_float32(q) * load_float32(k), axis=1)
        scores = jnp.where(i == j, wg.spread_rows(diagonal, SQUARE), scores)
        if previous is not None:
            scores += previous
        if self.groups > 1:
            # Before this warpgroup's own outputs, so that the other one does not wait long.
            last = (self.group == 1) & (number == self.slices - 1)
            pl.when(last)(functools.partial(self.store_partial, scores))
        self.store_decayed(block, halving)
        return scores

    def store_chunk_decay(self, halving: Halving, at) -> None:
        """Store the decay of the memory over the whole chunk, for the 64 key channels from index `at` on; 0
        if a document begins in the chunk.
        """
        b, h, _, n, _ = self.place
        chunk_decay = jnp.exp2(halving.column_sums())
        if "run" in self.refs:
            chunk_decay *= self.refs["enters"].at[b][n * CHUNK + CHUNK - 1]
        self.refs["chunk_decay"].at[b, h, pl.ds(n * self.depth + at, BLOCK)][...] = chunk_decay

    def add_near(self, block: int, scores):
        """Add to the chunk's scores [C, C] those of the pairs of tokens within blocks of `block` tokens that are in range (whose
        decays `AllPairs` computes without overflow), and return the sum and whether all tokens are in range, as 1 or 0.

        Pairs that are in range of the whole chunk are added with `block` C, and only there. Below the diagonal are the products of
        queries with keys, above it those of keys with keys, transposed.
        """
        self = self.renewed()
        halving, smem = self.halving(), self.smem
        whole = block == CHUNK
        sums, all_in_range = halving.check_range(
            smem.q, smem.k, block=block, slot=0 if whole else 2
        )
        pairs = AllPairs(halving, 0, sums)
        smem.erase[...] = pairs.rows(load(smem.k), None).astype(_BF16)
        smem.tile[...] = pairs.columns(None, load(smem.k)).astype(_BF16)
        rows = self.as_left(pairs.rows(load(smem.q), None).astype(_BF16))
        plgpu.commit_smem()

        def products(lower, upper):
            plgpu.wgmma(lower, rows, smem.tile.transpose((1, 0)))
            plgpu.wgmma(upper, smem.tile, smem.erase.transpose((1, 0)))

        lower, upper = halving.accumulate(products, 2)
        near = jnp.where(halving.i > halving.j, lower, jnp.where(halving.i < halving.j, upper, 0.0))
        if whole:
            return scores + jnp.where(halving.pairs_in_range(), near, 0.0), all_in_range
        seen = halving.pairs_in_range(2) & ~halving.pairs_in_range()
        seen &= (halving.i & -block) == (halving.j & -block)
        return scores + jnp.where(seen, near, 0.0), all_in_range

    def add_level(self, at, scores):
        """Add to the chunk's scores [C, C] the scores of one level's pairs of tokens, except pairs that are
        in range, which `add_near` has computed; return the sum. `at` is the index of the level of the
        halving.
        """
        self = self.renewed()
        halving = self.halving()
        q, k, tile = self.smem.q, self.smem.k, self.smem.tile
        level = Level(halving, at)
        rows = self.as_left(level.rows(load(q), load(k)).astype(_BF16))
        tile[...] = level.columns(load(k), load(k)).astype(_BF16)
        plgpu.commit_smem()
        add = lambda out: plgpu.wgmma(out, rows, tile.transpose((1, 0)))  # noqa: E731
        (products,) = halving.accumulate(add)
        computed = halving.pairs_in_range(jnp.where(at < _NEAR, 2, 0))
        return scores + jnp.where(computed, 0.0, level.mask(products))

    def store_partial(self, scores) -> None:
        """Store the second warpgroup's scores [C, C], summed over its key channels, in shared memory, where
        the chunk's first warpgroup adds them to its scores.
        """
        self.smem.partial[...] = scores
        plgpu.barrier_arrive(self.smem.partial_stored)

    def store_decayed(self, block: Block, halving: Halving) -> None:
        """Store the chunk's queries and keys decayed from its start, and its keys decayed to its end, in 64 key channels."""
        q, k, erase = self.smem.q, self.smem.k, self.smem.erase
        factor = block.mask_rows(halving.boundary_decay(True), "enters")
        block.store("read", q, load_float32(q) * factor * self.scale)
        block.store("erase", erase, load_float32(k) * factor)
        written = load_float32(k) * block.mask_rows(halving.boundary_decay(False), "stays")
        block.store("written", k, written)

    def store_scores(self, scores) -> None:
        """Store the chunk's decayed scores P of queries with keys, and Nᵀ, the transposed decayed products of
        keys with keys, [C, C] each, in global memory.

        `scores` [C, C] are the sums over the first warpgroup's key channels; those over the second
        warpgroup's channels are added.
        """
        b, h, _, _, tokens = self.place
        halving, tile = self.halving(), self.smem.tile
        i, j = halving.i, halving.j
        total = scores
        if self.groups > 1:
            plgpu.barrier_wait(self.smem.partial_stored)
            total += load(self.smem.partial)
        if "run" in self.refs:
            total = jnp.where(same_document(self.refs["run"].at[b, tokens]), total, 0.0)
        self.refs["upper"].at[b, h, tokens][...] = jnp.where(i < j, total, 0.0)
        tile[...] = (jnp.where(i < j, 0.0, total) * self.scale).astype(_BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, self.refs["scores"].at[b, h, tokens])

    def run(self) -> None:
        """Compute and store the scores, the decayed queries and keys, and the decay of one chunk and head, in this warpgroup's key
        channels.
        """
        index = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=wg.LAYOUT.reduce(0))
        self.smem.lowest.at[3][...] = lax.bitcast_convert_type(index.astype(jnp.int16), _BF16)
        plgpu.commit_smem()
        if self.slices == 1:
            scores = self.scores_of_slice(0, None)
        else:
            zeros = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
            scores = lax.fori_loop(0, self.slices, self.scores_of_slice, zeros)
        pl.when(self.group == 0)(functools.partial(self.store_scores, scores))
        plgpu.wait_smem_to_gmem(0)


def chunk_forward(
    q,
    k,
    log_decay,
    documents: Documents | None,
    *,
    heads: int,
    scale: float,
    interpret: Any = False,
) -> DecayedChunks:
    """Compute, for all chunks in parallel, the arrays of the delta rule with a decay per key channel that do
    not depend on the memory: the decayed products of queries with keys and of keys with keys, the queries and
    keys decayed from the chunk's start or to its end, and the decay over each chunk. Return them as
    `DecayedChunks`.

    Args:
        q: [B, T, *, K] bfloat16, the queries.
        k: [B, T, *, K] bfloat16, the keys.
        log_decay: [B, T, *, K] float32, the log decay of each key channel.
        documents: where documents begin, as `halving.Documents`; None for one document per row.
        heads: number of heads of the result; a multiple of those of q, k and log_decay.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, length, _, depth = k.shape
    slices = len(split_channels(depth))
    count, groups = length // CHUNK, depth // slices // BLOCK
    total = batch * count * heads
    # As many programs in a block as leave each thread 128 registers.
    programs = next(n for n in (4 // groups, 2 // groups, 1) if n and total % n == 0)
    inputs = dict(q=q, k=k, g=log_decay) | ({} if documents is None else documents._asdict())
    struct = jax.ShapeDtypeStruct
    square = (batch, heads, length, CHUNK)
    wide = struct((batch, length, heads, depth), _BF16)
    chunk_decay = struct((batch, heads, count * depth), _F32)
    types = [struct(square, _F32), struct(square, _BF16), wide, wide, wide, chunk_decay]

    def kernel(refs):
        warpgroup = lax.axis_index("warpgroup")
        program, group = lax.div(warpgroup, groups), lax.rem(warpgroup, groups)
        place = place_of(lax.axis_index("block") * programs + program, heads, count)

        def body(smem: _Smem):
            own = smem.of_warpgroup(warpgroup, program)
            _Program(
                refs, smem, own, place, warpgroup, group, groups, slices, depth, scale, interpret
            ).run()

        pl.run_scoped(body, _smem(programs, groups, interpret), collective_axes="warpgroup")

    results = launch(
        kernel,
        inputs=inputs,
        outputs=dict(zip(DecayedChunks._fields, types, strict=True)),
        grid=dict(block=total // programs),
        num_threads=programs * groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="delta_channel_chunk_forward",
        interpret=interpret,
    )
    return DecayedChunks(**results)
