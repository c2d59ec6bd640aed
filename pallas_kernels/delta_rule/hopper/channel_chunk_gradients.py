"""One warpgroup's part of the phase `chunk_backward` of the delta rule with a decay per key channel: the gradients of a chunk in 64 key
channels. `channel_chunk_backward` has the formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import Block
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    SQUARE,
    Halving,
    left_operand,
    load,
    load_by_column,
    load_by_row,
    load_float32,
    power_of_two,
)

_F32, _BF16 = jnp.float32, jnp.bfloat16
_VALUES = ("missing", "d_out", "dv")  # arrays [B, T, h, V]
_NEAR = 4  # levels that one step replaces where not all pairs of the chunk are in range: pairs in blocks of 16 tokens


class Smem(NamedTuple):
    """Buffers in shared memory of a program that computes the gradients of one chunk and head of the delta rule.

    `groups` counts the program's warpgroups, of 64 key channels each; tiles are bfloat16. S is the memory before the chunk, dS' the
    gradient of the memory after it, C the number of tokens of a chunk.

    Attributes:
        q: [groups, C, 64], the queries, then their gradient.
        k: [groups, C, 64], the keys, then their gradient.
        states: [groups, V, 64], the memory S transposed, then a buffer of `Halving.split`.
        d_states: [groups, V, 64], the gradient dS' transposed, then a buffer of `Halving.split`.
        parts: [groups, 2, 64, 64], the log decays as sums of two bfloat16 numbers, from which the decays between tokens are computed.
        tile: [groups, C, 64], a buffer of the halving, and right operands of products.
        totals: [groups, 64] float32, the gradient of the sum of the log decays over the whole chunk.
        lowest: [groups, 2, C] float32, a buffer for the check of whether the chunk's decays are in float32's range.
        columns: [groups, C] int32, the numbers 0 to C - 1.
        missing: [C, V], the errors x of the memory's predictions of v.
        d_out: [C, V], the gradient of the output.
        dv: [C, V], the gradient of v.
        read_pairs: [1, C, C], the gradient A of the scores of queries with keys, on and below the diagonal, and its transpose above.
        erase_pairs: [1, C, C], the gradient E of the products of keys with keys, below the diagonal, and its transpose above; the
            diagonal is not used.
        loaded: the barrier at which the loads of the inputs are complete.
        pairs_stored: barrier at which `read_pairs` and `erase_pairs` are complete.
        left: [groups, 2, C, 64] for the interpreter, which reads left operands from shared memory; else None.
    """

    q: Any
    k: Any
    states: Any
    d_states: Any
    parts: Any
    tile: Any
    totals: Any
    lowest: Any
    columns: Any
    missing: Any
    d_out: Any
    dv: Any
    read_pairs: Any
    erase_pairs: Any
    loaded: Any
    pairs_stored: Any
    left: Any

    def of_warpgroup(self, group, zero=0) -> Smem:
        """Return the shared-memory buffers that the warpgroup with index `group` uses: of each array with an
        axis [groups, ...] the warpgroup's entry, and the buffers that all warpgroups share. `zero` is 0, which
        the compiler need not know.
        """
        names = ("q", "k", "states", "d_states", "parts", "tile", "totals", "lowest", "columns")
        names += () if self.left is None else ("left",)
        own = {name: getattr(self, name).at[group] for name in names}
        shared = {name: getattr(self, name).at[zero] for name in ("read_pairs", "erase_pairs")}
        return self._replace(**own, **shared)


def smem_types(groups: int, width: int, interpret) -> Smem:
    """Return the types of the buffers in shared memory of a program with `groups` warpgroups, for `width` value channels."""
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    return Smem(
        q=tile((groups, *SQUARE)),
        k=tile((groups, *SQUARE)),
        states=tile((groups, width, BLOCK)),
        d_states=tile((groups, width, BLOCK)),
        parts=tile((groups, 2, *SQUARE)),
        tile=tile((groups, *SQUARE)),
        totals=smem((groups, CHUNK), _F32),
        lowest=smem((groups, 2, CHUNK), _F32),
        columns=smem((groups, CHUNK), jnp.int32),
        missing=tile((CHUNK, width)),
        d_out=tile((CHUNK, width)),
        dv=tile((CHUNK, width)),
        read_pairs=tile((1, *SQUARE)),
        erase_pairs=tile((1, *SQUARE)),
        loaded=plgpu.Barrier(num_arrivals=4 * groups + 3),
        pairs_stored=plgpu.Barrier(num_arrivals=groups),
        left=tile((groups, 2, *SQUARE)) if interpret else None,
    )


class _Gradients(NamedTuple):
    """Gradients of the queries and keys of a chunk in 64 key channels, [C, 64] float32 each, without the
    terms through the score of a query with the key of the same token, which has no decay.

    Attributes:
        q: the gradient of the queries.
        erase: the gradient of the keys as what reads (and erases from) the memory.
        write: the gradient of the keys as what is written to the memory.
    """

    q: Any
    erase: Any
    write: Any


@dataclasses.dataclass(frozen=True)
class ChunkProgram:
    """One warpgroup's computation in `channel_chunk_backward`: the gradients of q, k and the log decay of one chunk
    and head, in 64 key channels.

    Attributes:
        block: references to the chunk's inputs and outputs in global memory, in this warpgroup's key
            channels.
        buffers: the buffers in shared memory of all warpgroups of the program.
        smem: those of the warpgroup, and those that all warpgroups share.
        group: index of the warpgroup in its program.
        groups: number of warpgroups of the program.
        depth: number of key channels, K.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    block: Block
    buffers: Smem
    smem: Smem
    group: Any
    groups: int
    depth: int
    scale: float
    interpret: Any

    def renewed(self) -> ChunkProgram:
        """Return this program with addresses that the compiler does not know to be those of before. It computes them again, where
        it would else keep those of all tiles in registers through the loops, and spill others.
        """
        zero = self.smem.columns[0]
        place = self.block.place
        block = dataclasses.replace(self.block, place=place._replace(row=place.row + zero))
        return dataclasses.replace(
            self, block=block, smem=self.buffers.of_warpgroup(self.group + zero, zero)
        )

    def halving(self) -> Halving:
        """Return the `Halving` that computes the decays between the chunk's tokens with this warpgroup's buffers."""
        smem = self.smem
        return Halving(
            smem.parts, smem.tile, self.as_left, False, self.interpret, smem.lowest, smem.columns
        )

    def as_left(self, x, number: int = 0):
        """Return x [C, 64] bfloat16 as the left operand of a matrix product: in registers on the card, in
        shared memory in the interpreter, which has two buffers, with the indices 0 and 1.
        """
        buffer = self.interpret and self.smem.left.at[number]
        return left_operand(buffer, self.interpret)(x)

    @property
    def beta(self):
        """A reference, in global memory, to beta of the chunk's C tokens for this head."""
        place = self.block.place
        return self.block.refs["beta"].at[place.row, place.h, place.tokens]

    def beta_rows(self):
        """Return beta of the chunk's tokens as a tile [C, 64] with beta of token i in every column of row i.
        It is loaded again at each use, to save registers.
        """
        return wg.spread_rows(load_by_row(self.beta), SQUARE)

    def load_inputs(self) -> None:
        """Start to load, in this warpgroup's 64 key channels, q and k [C, 64], the memory before the chunk
        and the gradient of the memory after it [V, 64] into shared memory.

        The first warpgroup also loads the arrays of value channels [C, V], which all warpgroups share: the
        errors of the memory's predictions and the gradients of the output and of v.
        """
        refs, smem = self.block.refs, self.smem
        b, h, _, n, tokens = self.block.place
        for name, to in (("q", smem.q), ("k", smem.k)):
            plgpu.copy_gmem_to_smem(self.block.keys(name), to, smem.loaded)
        for name, to in (("states", smem.states), ("d_states", smem.d_states)):
            source = refs[name].at[b, h, n, :, self.block.columns]
            plgpu.copy_gmem_to_smem(source, to, smem.loaded)

        def load_shared():
            for name in _VALUES:
                to = getattr(smem, name)
                plgpu.copy_gmem_to_smem(refs[name].at[b, tokens, h], to, smem.loaded)

        pl.when(self.group == 0)(load_shared)

    def store_pairs(self, halving: Halving) -> None:
        """Store the gradient A of the chunk's scores of queries with keys and the gradient E of its products
        of keys with keys, [C, C] each, in shared memory, and the gradient of beta [C] in global memory.

        Above the diagonal, the two matrices are the transposes of their entries below it. The first warpgroup
        computes A, the last one E and the gradient of beta; all warpgroups then read both matrices.
        """
        smem = self.smem

        def read():
            self.pair_products(halving, smem.d_out, self.scale, smem.read_pairs)

        def erase():
            x_times_dv = self.pair_products(halving, smem.dv, -1.0, smem.erase_pairs)
            place = self.block.place
            d_beta = self.block.refs["d_beta"].at[place.row, place.h, place.tokens]
            d_beta[...] = x_times_dv / load_by_row(self.beta)

        plgpu.barrier_wait(smem.loaded)
        pl.when(self.group == 0)(read)
        pl.when(self.group == self.groups - 1)(erase)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.pairs_stored)

    def pair_products(self, halving: Halving, rows, factor: float, to):
        """Store in the buffer `to` [C, C] the gradient of one kind of scores: factor * (rows uᵀ) on and below
        the diagonal, and its transpose above it. Return the diagonal of rows xᵀ, [C].

        Here x [C, V] are the errors of the memory's predictions, and u = beta ⊙ x.

        Args:
            halving: the `Halving` of the chunk.
            rows: reference [C, V] to the gradient of the output (for the scores of queries with keys) or of v
                (for the products of keys with keys).
            factor: the number that multiplies the products.
            to: reference [C, C] to shared memory.
        """
        x = self.smem.missing

        def products(later, earlier):
            plgpu.wgmma(later, rows, x.transpose((1, 0)))
            plgpu.wgmma(earlier, x, rows.transpose((1, 0)))

        i, j = halving.i, halving.j
        later, earlier = halving.accumulate(products, 2)
        diagonal = jnp.sum(jnp.where(i == j, later, 0.0), axis=1)
        both = jnp.where(i >= j, later * load_by_column(self.beta), earlier * self.beta_rows())
        same = self.block.mask_documents(i >= 0)
        to[...] = jnp.where(same, both * factor, 0.0).astype(_BF16)
        return diagonal

    def memory_gradients(self, halving: Halving) -> _Gradients:
        """Return the terms of the gradients of the chunk's queries and keys, [C, 64] each, that come through
        the memory before the chunk and through the memory after it.
        """
        self = self.renewed()
        halving, smem = self.halving(), self.smem

        def products(read, erase, write):
            plgpu.wgmma(read, smem.d_out, smem.states)
            plgpu.wgmma(erase, smem.dv, smem.states)
            plgpu.wgmma(write, smem.missing, smem.d_states)

        dq, erase, write = halving.accumulate(products, 3)
        read_decay = self.block.mask_rows(halving.boundary_decay(True), "enters")
        dq *= read_decay * self.scale
        erase *= -read_decay
        write *= self.block.mask_rows(halving.boundary_decay(False), "stays") * self.beta_rows()
        return _Gradients(dq, erase, write)

    def store_totals(self, halving: Halving, write) -> None:
        """Store, for each of 64 key channels, the gradient of the sum of the log decays over the whole chunk
        in the buffer `totals`; the buffers of the memories are free then.

        With S the memory before the chunk and dS' the gradient of the memory after it, it is Σ_v chunk_decay
        S dS' + Σ_i k_i write_i, where `write` [C, 64] is the gradient of the keys through the memory after
        the chunk.
        """
        self = self.renewed()
        halving, smem, place = self.halving(), self.smem, self.block.place
        width = smem.states.shape[0]
        total = jnp.zeros(SQUARE, _F32)
        for row in range(width // BLOCK):
            rows = pl.ds(row * BLOCK, BLOCK)
            state = load_float32(smem.states.at[rows])
            total += state * load_float32(smem.d_states.at[rows])
        channels = pl.ds(place.n * self.depth + self.group * BLOCK, BLOCK)
        total *= load_by_column(self.block.refs["chunk_decay"].at[place.row, place.h, channels])
        total += load_float32(smem.k) * write
        parts = [smem.states, smem.d_states]
        if width > BLOCK:
            parts = [smem.states.at[pl.ds(part * BLOCK, BLOCK)] for part in range(2)]
        halving.split(total, parts)
        smem.totals[...] = halving.column_sums(parts)

    def add_pairs(self, halving: Halving, log_block, gradients: _Gradients) -> _Gradients:
        """Add to the gradients of the chunk's queries and keys the terms that come through pairs of different tokens, and return the
        sums.

        One step computes all pairs whose decays are in float32's range: all of the chunk, or those within blocks of 16 tokens. The
        levels of the halving compute the others.
        """
        near = (log_block > 0).astype(jnp.int32)
        step = lambda _, x: self.add_near(halving, lax.shift_left(1, log_block), x)  # noqa: E731
        gradients = lax.fori_loop(0, near, step, gradients)
        level = functools.partial(self.add_level, halving)
        return lax.fori_loop(log_block, LEVELS, level, gradients)

    def find_block(self, halving: Halving):
        """Return the number of levels of the halving that one step can replace, since the decays of their pairs are in float32's
        range: all, those within blocks of 16 tokens, or none.
        """
        _, near = halving.check_range(self.smem.q, self.smem.k, block=1 << _NEAR)
        _, all_in_range = halving.check_range()
        return near * (_NEAR + (LEVELS - _NEAR) * all_in_range)

    def add_near(self, halving: Halving, block, gradients: _Gradients) -> _Gradients:
        """Add to the gradients of the chunk's queries and keys the terms that come through the pairs of different tokens within
        blocks of `block` tokens, whose decays are in float32's range, and return the sums.

        The buffers of the memories receive operands. The pairs' gradients are scaled by row, so that no product overflows or
        underflows.
        """
        self = self.renewed()
        halving, smem = self.halving(), self.smem
        dq, erase, write = gradients
        of_later, of_keys, of_queries = (
            smem.tile,
            *(x.at[pl.ds(0, BLOCK)] for x in (smem.states, smem.d_states)),
        )
        i = halving.i
        sums = halving.sums_from_start(block)
        size = jnp.maximum(jnp.abs(load(smem.read_pairs)), jnp.abs(load(smem.erase_pairs)))
        size, inverse = power_of_two(jnp.max(size, axis=1).astype(_F32))
        size, inverse = (wg.spread_rows(x, SQUARE) for x in (size, inverse.astype(_BF16)))
        of_keys[...] = (load_float32(smem.k) * halving.in_range_decay(sums, -1.0)).astype(_BF16)
        factor = halving.in_range_decay(sums)
        of_queries[...] = (load_float32(smem.q) * factor).astype(_BF16)
        of_later[...] = (load_float32(smem.k) * factor).astype(_BF16)
        plgpu.commit_smem()

        def product(matrix, seen, operand, *start):
            x = self.as_left(jnp.where(seen, load(matrix) * inverse, 0.0).astype(_BF16))
            add = lambda out: plgpu.wgmma(out, x, operand)  # noqa: E731
            start = start or (jnp.zeros(SQUARE, _F32),)
            return wg.accumulate(add, *start, interpret=self.interpret)[0]

        def later():
            return (halving.j >= (i & -block)) & (halving.j < i)

        def earlier():
            return (halving.j > i) & (halving.j <= (i | (block - 1)))

        dx = product(smem.read_pairs, later(), of_keys)
        dq += dx * (halving.in_range_decay(sums) * size)
        dx = product(smem.erase_pairs, later(), of_keys)
        erase += dx * (halving.in_range_decay(sums) * size)
        dx = product(smem.read_pairs, earlier(), of_queries)
        dx = product(smem.erase_pairs, earlier(), of_later, dx)
        return _Gradients(dq, erase, write + dx * (halving.in_range_decay(sums, -1.0) * size))

    def add_level(self, halving: Halving, level, gradients: _Gradients) -> _Gradients:
        """Add to the gradients of the chunk's queries and keys the terms that come through the pairs of
        tokens of one level of the halving, and return the sums. `level` is the level's index.
        """
        self = self.renewed()
        halving, smem = self.halving(), self.smem
        dq, erase, write = gradients
        factor, later = halving.factor(level), halving.later(level)
        q_or_k = halving.store_operand(level, load(smem.q), load(smem.k), factor)
        pairs = self.as_left(halving.mask_to_level(level, load(smem.read_pairs)))
        (dx,) = halving.accumulate(lambda out: plgpu.wgmma(out, pairs, q_or_k))
        dx *= factor
        dq, write = dq + later * dx, write + (1 - later) * dx
        smem.tile[...] = (load_float32(smem.k) * factor).astype(_BF16)
        plgpu.commit_smem()
        pairs = self.as_left(halving.mask_to_level(level, load(smem.erase_pairs)))
        (dx,) = halving.accumulate(lambda out: plgpu.wgmma(out, pairs, smem.tile))
        dx *= factor
        return _Gradients(dq, erase + later * dx, write + (1 - later) * dx)

    def store_gradients(self, halving: Halving, gradients: _Gradients) -> None:
        """Store the gradients of the chunk's queries, keys and log decay in 64 key channels, [C, 64] each, in
        global memory.

        `gradients` are those of queries and keys without the terms through the score of each query with its
        own token's key; these terms are added here.
        """
        self = self.renewed()
        smem = self.smem
        dq, erase, write = gradients
        q, k = (load_float32(x) for x in (smem.q, smem.k))
        self.halving().split(q * dq + k * (erase - write))
        # Inputs are loaded again, and the gradients of q and k leave before the sums: else registers spill.
        self = self.renewed()
        halving, smem, block = self.halving(), self.smem, self.block
        i, j = halving.i, halving.j
        q, k = (load_float32(x) for x in (smem.q, smem.k))
        diagonal = jnp.where(i == j, load_float32(smem.read_pairs), 0.0)
        diagonal = wg.spread_rows(jnp.sum(diagonal, axis=1), SQUARE)
        block.store("dq", smem.q, dq + diagonal * k)
        block.store("dk", smem.k, erase + write + diagonal * q)
        d_decay = halving.sums(block.mask_documents(halving.j >= i))
        totals = plgpu.load(smem.totals, layout=wg.LAYOUT.reduce(0))
        d_decay += block.mask_rows(lax.broadcast_in_dim(totals, SQUARE, [1]), "stays")
        place = block.place
        block.refs["dg"].at[place.row, place.tokens, place.h, block.columns][...] = d_decay

    def run(self) -> None:
        """Compute and store the gradients of q, k, beta and the log decay of one chunk and head, in this warpgroup's 64 key
        channels.
        """
        self.load_inputs()
        smem = self.smem
        index = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=wg.LAYOUT.reduce(0))
        smem.columns[...] = index
        plgpu.commit_smem()
        halving = self.halving()
        halving.split_decay(self.block.log_decay())
        self.store_pairs(halving)
        log_block = self.find_block(halving)
        gradients = self.memory_gradients(halving)
        self.store_totals(halving, gradients.write)
        plgpu.barrier_wait(smem.pairs_stored)
        self.store_gradients(halving, self.add_pairs(halving, log_block, gradients))
        plgpu.wait_smem_to_gmem(0)
