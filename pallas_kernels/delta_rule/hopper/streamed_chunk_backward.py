"""The phase `chunk_backward` of the delta rule without decay or with a scalar decay, on Mosaic GPU (Hopper), for wide heads: a thread
block that leaves no space for a second one on its processor, whose loads, products and stores must overlap within it.

A thread block of three warpgroups computes one chunk after another. The third warpgroup loads everything, mostly through a ring of pairs of
tiles: first the 64 tokens' queries and keys, for the gradients A and E of the scores of pairs of tokens, then for each 64 key channels the
tiles of the memory S and of the gradient dS', and once more these channels' queries and keys, now from the L2 cache. It goes on to the next
chunk while the others complete this one. The first warpgroup computes what comes through the queries, the second what comes through the keys:

    A, dq = A k + e^b ⊙ (dO Sᵀ), <S, dS'>          E, dk = Aᵀ q + (E + Eᵀ) k + beta e^(b_C - b) ⊙ (x dS'ᵀ) - e^b ⊙ (dv Sᵀ)

so that each tile of S is read by both, and neither needs more registers than it has. dq and dk are stored for 64 key channels at a time.
`streamed_tiles` has the third warpgroup, `chunk_gradients` the other kernel, which keeps q and k, and `pallas_kernels.tiles.delta` the formulas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SQUARE, Chunk, read_chunk
from pallas_kernels.delta_rule.hopper.chunk_gradients import choose_d_beta, decay_terms
from pallas_kernels.delta_rule.hopper.streamed_tiles import BLOCK, Sizes, Smem, Tiles, smem_types
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import Place

GROUPS = 3
"""Warpgroups of a thread block: one for the queries, one for the keys, and one that loads."""
_READS, _ERASES, _LOADS = range(GROUPS)
# Registers of a thread of a warpgroup that computes, and of the one that loads: together the 3 * 168 with which the kernel begins.
_REGISTERS = 232, 40
_Q, _K = range(2)  # places of queries and keys in a pair of tiles
_F32, _BF16 = jnp.float32, jnp.bfloat16


def grid(sizes: Sizes) -> dict[str, int]:
    """Return the kernel's grid: one thread block for each processor, or for each program."""
    return dict(processor=min(PROCESSORS, sizes.programs))


def run(refs: dict[str, Any], sizes: Sizes) -> None:
    """Compute this thread block's share of the programs; the body of the kernel, with the axes "processor" and "group".

    `refs` are references to inputs and outputs in global memory, by name.
    """
    processor, group = lax.axis_index("processor"), lax.axis_index("group")
    processors = lax.axis_size("processor")
    turns = lax.div(sizes.programs - processor + processors - 1, processors)

    def body(smem: Smem):
        def for_programs(part):
            def turn(number, _):
                part(_program(refs, smem, sizes, processor + number * processors), number)

            lax.fori_loop(0, turns, turn, None)

        def compute(part):
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            for_programs(lambda program, _: part(program))
            # The end of the kernel waits for the writes; only the buffers must have been read before it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(group == _READS)(lambda: compute(Program.compute_reads))
        pl.when(group == _ERASES)(lambda: compute(Program.compute_erases))

        @pl.when(group == _LOADS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            for_programs(Program.load)
            plgpu.barrier_wait(smem.values_used)
            for stage in range(sizes.stages):
                plgpu.barrier_wait(smem.used.at[stage])

    pl.run_scoped(body, smem_types(sizes), collective_axes="group")


def _program(refs: dict[str, Any], smem: Smem, sizes: Sizes, index) -> Program:
    """Return the program with this index: slices of value channels change fastest, then chunks, heads and rows."""
    piece, index = lax.rem(index, sizes.slices), lax.div(index, sizes.slices)
    n, index = lax.rem(index, sizes.chunks), lax.div(index, sizes.chunks)
    h, row = lax.rem(index, sizes.heads), lax.div(index, sizes.heads)
    place = Place(row, h, sizes.heads, n, pl.ds(n * CHUNK, CHUNK))
    return Program(refs, smem, sizes, place, piece)


@dataclasses.dataclass(frozen=True)
class Program(Tiles):
    """The computation of the terms of the gradients of one chunk and head that come through one slice of its value channels."""

    def read_chunk(self, group: int) -> Chunk:
        """Return beta, decays and documents of the chunk."""
        row, h, heads, n, _ = self.place
        return read_chunk(self.refs, row, h, heads, n, self.smem.vectors[group], self.sizes.erase)

    def pair_products(self, place: int, name: str):
        """Return the matrix products a kᵀ and c xᵀ, [C, C] float32 each, with a the queries or keys (by their `place` in a pair of tiles),
        and c the gradient of the output or of v (`name`), each product as its operands arrive.
        """
        smem = self.smem
        x, c = smem.values["missing"], smem.values[name]

        def add(alike, gradient):
            for column in range(self.sizes.columns):
                pair = self.wait(column)
                plgpu.wgmma(alike.ref, pair.at[place], pair.at[_K].transpose((1, 0)))
                if column:  # the product before has finished
                    plgpu.wgmma_wait(1)
                    self.release(column - 1)
            for row in range(self.sizes.rows):
                plgpu.barrier_wait(smem.values_loaded.at[row])
                plgpu.wgmma(gradient.ref, c.at[row], x.at[row].transpose((1, 0)))
                if not row:
                    plgpu.wgmma_wait(1)
                    self.release(self.sizes.columns - 1)
            return alike.read(), gradient.read(None)

        return wg.with_accumulators(add, SQUARE, SQUARE, interpret=self.sizes.interpret)

    def sums_over_pairs(self, chunk: Chunk, group: int, products, betas):
        """Return three sums over the entries of `products` [C, C], the terms of the log decay's gradient through pairs of tokens without
        the earlier token's beta: below the diagonal over a row, with beta, and over a column; and the diagonal. [C] each.
        """
        vector = self.smem.vectors[group]
        below = chunk.i > chunk.j
        diagonal = jnp.sum(jnp.where(below, 0.0, products), axis=1)
        products = jnp.where(below, products, 0.0)
        vector[...] = jnp.sum(products, axis=0)
        of_rows = jnp.sum(products * betas, axis=1)
        plgpu.commit_smem()
        return of_rows, plgpu.load(vector, layout=wg.LAYOUT.reduce(1)), diagonal

    def memory_products(self, column, add, *accumulators):
        """Return the products with the tiles of the memory and its gradient in 64 key channels, summed over the value channels: `add`
        starts a product with each of the accumulators' references, from the index of the value channels and a pair of tiles. The last
        accumulators may be those of a caller, whose sums are not returned.
        """

        def sums(*own):
            references = [x.ref for x in (*own, *accumulators)]
            for row in range(self.sizes.rows):
                number = self.number(column, row)
                add(row, self.wait(number), *references)
                if row:  # the products of the row before have finished
                    plgpu.wgmma_wait(len(references))
                    self.release(number - 1)
            first, *rest = own
            results = [first.read(), *(x.read(None) for x in rest)]
            self.release(self.number(column, self.sizes.rows - 1))
            last = column == self.sizes.columns - 1
            pl.when(last)(lambda: plgpu.barrier_arrive(self.smem.values_used))
            return results

        return sums

    def store(self, name: str, place: int, column, gradient) -> None:
        """Store the gradient [C, 64] of q or k, by `name` and `place`, in 64 key channels. What was read from shared memory before can then
        be overwritten by loads.
        """
        buffer = self.smem.gradients.at[place]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the channels before
        buffer[...] = gradient.astype(_BF16)
        plgpu.commit_smem()
        channels = pl.ds(column * BLOCK, BLOCK)
        plgpu.copy_smem_to_gmem(buffer, self.result(name).at[:, channels])

    # The first warpgroup

    def compute_reads(self) -> None:
        """Compute and store the gradient of q, and the gradient of the log decay with the terms of the second warpgroup; hand to it the
        gradient A of the scores of queries with keys, and the terms of the gradient of beta through these scores.
        """
        smem, chunk = self.smem, self.read_chunk(_READS)
        betas = chunk.over_columns(chunk.beta)
        scores, read = self.pair_products(_Q, "d_out")
        # Without beta, which may be 0: nothing is divided by it.
        read = read * (chunk.weights * self.sizes.scale)
        products = scores * read
        read = (read * betas).astype(_BF16)
        smem.read[...] = read
        read = wg.as_left(read, smem.left[_READS], self.sizes.interpret)
        later, of_columns, diagonal = self.sums_over_pairs(chunk, _READS, products, betas)
        smem.of_reads[...] = diagonal + of_columns
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.read_stored)
        later -= chunk.beta * of_columns
        decay = 1.0 if chunk.read_decay is None else wg.spread_rows(chunk.read_decay, SQUARE)
        if not self.sizes.decay_gradient:
            self.complete_queries(read, decay, later)
            plgpu.barrier_wait(smem.erases_stored)
            return

        def with_totals(totals):
            return self.complete_queries(read, decay, later, totals), totals.read()

        # <S, dS'> is the trace of a product: tensor cores have time.
        later, total = wg.with_accumulators(with_totals, SQUARE, interpret=self.sizes.interpret)
        self.store_d_decay(chunk, later, total)

    def complete_queries(self, pairs, decay, later, *totals):
        """Store the gradient of the queries, 64 key channels at a time; add S dS'ᵀ to the accumulator `totals`, if given. Return `later`
        with its terms through the memory before the chunk.

        Args:
            pairs: the gradient A of the scores of queries with keys, as the left operand of a product.
            decay: [C, 64] or 1, the decay from the chunk's start to each token's read.
            later: [C], terms of the log decay's gradient at all tokens from a document's first to this one.
            totals: an accumulator, or none.
        """
        d_out = self.smem.values["d_out"]

        def add(row, pair, read, *totals):
            plgpu.wgmma(read, d_out.at[row], pair.at[0])
            for total in totals:
                plgpu.wgmma(total, pair.at[0], pair.at[1].transpose((1, 0)))

        def complete(column, later):
            sums = self.memory_products(column, add, *totals)
            (read,) = wg.with_accumulators(sums, SQUARE, interpret=self.sizes.interpret)
            read = read * (decay * self.sizes.scale)
            number = self.number(column, self.sizes.rows)
            pair = self.wait(number)
            if self.sizes.decay_gradient:
                q = plgpu.load(pair.at[_Q], layout=wg.LAYOUT).astype(_F32)
                later += jnp.sum(q * read, axis=1)
            product = lambda dq: plgpu.wgmma(dq, pairs, pair.at[_K])  # noqa: E731
            (dq,) = wg.accumulate(product, read, interpret=self.sizes.interpret)
            self.store("dq", _Q, column, dq)
            self.release(number)
            return later

        return lax.fori_loop(0, self.sizes.columns, complete, later)

    def store_d_decay(self, chunk: Chunk, later, total) -> None:
        """Store the gradient of the log decay of the chunk's tokens, [C]: the second warpgroup's terms, `later` summed over the tokens
        from each one on in its document, and the decay over the whole chunk times the trace of `total`.
        """
        smem, vector = self.smem, self.smem.vectors[_READS]
        sums = jnp.sum(decay_terms(chunk, later), axis=1)
        trace = jnp.sum(jnp.where(chunk.i == chunk.j, total, 0.0), axis=1)
        trace = jnp.sum(chunk.over_columns(trace), axis=1)
        vector[...] = chunk.read_decay
        plgpu.commit_smem()
        sums += trace * vector[CHUNK - 1]
        plgpu.barrier_wait(smem.erases_stored)
        sums += plgpu.load(smem.of_erases, layout=wg.LAYOUT.reduce(1))
        self.result("d_decay")[...] = sums

    # The second warpgroup

    def compute_erases(self) -> None:
        """Compute and store the gradients of k and of beta; hand to the first warpgroup terms of the log decay's gradient."""
        smem, chunk = self.smem, self.read_chunk(_ERASES)
        betas = chunk.over_columns(chunk.beta)
        alike, erase = self.pair_products(_K, "dv")
        beta_times_d_beta = jnp.sum(jnp.where(chunk.i == chunk.j, erase, 0.0), axis=1)  # x · dv
        erase = jnp.where(chunk.i > chunk.j, -erase * chunk.erase_weights, 0.0)
        products = alike * erase
        erase = (erase * betas).astype(_BF16)
        square = smem.gradients.at[_K]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the chunk before
        square[...] = erase
        plgpu.commit_smem()
        transposed = plgpu.load(square.transpose((1, 0)), layout=wg.LAYOUT)
        symmetric = erase.astype(_F32) + transposed.astype(_F32)
        pairs = wg.as_left(symmetric, smem.left[_ERASES], self.sizes.interpret)
        # Sums over columns use one buffer: those of the first warpgroup are complete.
        plgpu.barrier_wait(smem.read_stored)
        erasing, of_columns, _ = self.sums_over_pairs(chunk, _ERASES, products, betas)
        d_beta = of_columns + plgpu.load(smem.of_reads, layout=wg.LAYOUT.reduce(1))
        erased, written = self.complete_keys(chunk, pairs)
        erasing, later = erasing - erased, -chunk.beta * of_columns
        d_beta = choose_d_beta(chunk, beta_times_d_beta, d_beta, written)
        self.result("d_beta")[...] = d_beta
        if self.sizes.decay_gradient:
            if self.sizes.erase == "decayed":
                later, erasing = later + erasing, None
            terms = decay_terms(chunk, later, erasing, chunk.beta * written)
            smem.of_erases[...] = jnp.sum(terms, axis=1)
            plgpu.commit_smem()
        plgpu.barrier_arrive(smem.erases_stored)

    def complete_keys(self, chunk: Chunk, pairs):
        """Store the gradient of the keys, 64 key channels at a time. Return two sums over the key channels, [C] each: of k times its
        gradient as what reads (and erases from) the memory, without sign, and of k times its gradient as what is written, without beta.

        `pairs` is E + Eᵀ with E the gradient of the products of keys with keys, as the left operand of a product.
        """
        smem = self.smem
        x, dv = smem.values["missing"], smem.values["dv"]

        def spread(decay):
            return 1.0 if decay is None else wg.spread_rows(decay, SQUARE)

        def add(row, pair, erase, write):
            plgpu.wgmma(erase, dv.at[row], pair.at[0])
            plgpu.wgmma(write, x.at[row], pair.at[1])

        def complete(column, found):
            erased, written = found
            sums = self.memory_products(column, add)
            erase, write = wg.with_accumulators(
                sums, SQUARE, SQUARE, interpret=self.sizes.interpret
            )
            erase, write = erase * spread(chunk.erase_decay), write * spread(chunk.write_decay)
            number = self.number(column, self.sizes.rows)
            pair = self.wait(number)
            k = plgpu.load(pair.at[_K], layout=wg.LAYOUT).astype(_F32)
            if self.sizes.decay_gradient:
                erased += jnp.sum(k * erase, axis=1)
            written += jnp.sum(k * write, axis=1)

            def of_pairs(dk):
                plgpu.wgmma(dk, smem.read.transpose((1, 0)), pair.at[_Q])
                plgpu.wgmma(dk, pairs, pair.at[_K])

            dk = write * wg.spread_rows(chunk.beta, SQUARE) - erase
            (dk,) = wg.accumulate(of_pairs, dk, interpret=self.sizes.interpret)
            self.store("dk", _K, column, dk)
            self.release(number)
            return erased, written

        zeros = plgpu.layout_cast(jnp.zeros(CHUNK, _F32), wg.LAYOUT.reduce(1))
        return lax.fori_loop(0, self.sizes.columns, complete, (zeros, zeros))
