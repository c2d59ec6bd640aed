"""The gradients of one chunk of the delta rule without decay or with a scalar decay, on Mosaic GPU (Hopper): the program of the kernel
of `chunk_backward` that keeps q and k.

One warpgroup computes the gradients of q, k, beta and the log decay of one chunk, from the memory S before
the chunk, the gradient dS' of the memory after it, and two results of the scans: x, the error of the memory's
prediction of v, and dv, the gradient of v. `pallas_kernels.tiles.delta` has the formulas. The
gradients of the scores of pairs of tokens, of queries with keys (A) and of keys with keys (E), from the gradient dO of the output and
the decays G between the tokens,

    A / beta = scale G ⊙ (dO xᵀ)          E / beta = -(G ⊙ dv xᵀ) below its diagonal

(beta on their columns; E with the decays up to the tokens' erases) come first. A loop over blocks of 64 key channels then adds the products with S and
dS', whose tiles are loaded ahead.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SQUARE, Chunk, read_chunk
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import head_index

BLOCK = 64
"""Key or value channels of one tile of a memory."""
_TOKENS = ("q", "k", "missing", "d_out", "dv")
_F32, _BF16 = jnp.float32, jnp.bfloat16


class Smem(NamedTuple):
    """Buffers in shared memory of a warpgroup that computes the gradients of one chunk and head of the delta rule; tiles are
    bfloat16.

    C is the number of tokens of a chunk, S the memory before it and dS' the gradient of the memory after it.

    Attributes:
        tokens: queries and keys [C, K]; the errors x of the memory's predictions (`missing`), the gradients of the output and of v
            [C, V].
        pairs: [stages, 2, 64, 64], tiles of the memory S and of the gradient dS'.
        square: [C, C], the gradient E of the products of keys with keys, then the gradient A of the scores, to be read transposed.
        vector: [C] float32, for a value of each token.
        loaded: the barrier at which the loads of `tokens` are complete.
        pair_loaded: the barriers at which the loads of `pairs` are complete, one for each stage.
        left: two [C, C] for the interpreter, which reads left operands from shared memory; else None.
    """

    tokens: dict[str, Any]
    pairs: Any
    square: Any
    vector: Any
    loaded: Any
    pair_loaded: Any
    left: list[Any]


class _PairGradients(NamedTuple):
    """Terms of the gradients of one chunk that come through pairs of its tokens: through the scores of
    queries with keys, and through the products of keys with keys.

    Attributes:
        read: [C, C], the gradient A of the scores q kᵀ, as the left operand of a product; its transpose is
            read from `Smem.square`.
        erase: [C, C], E + Eᵀ with E the gradient of the products k kᵀ, as the left operand of a product.
        beta_times_d_beta: [C], beta times its gradient: for each token the inner product x · dv of the
            memory's error and the gradient of v.
        d_beta: [C], the terms of the gradient of beta through pairs of tokens.
        later: [C], for each token a number that is a term of the log decay's gradient at all tokens from its
            document's first to itself.
        erasing: [C], for each token a number that is a term of the log decay's gradient at all tokens from its
            document's first to the one before itself; None if keys read the decayed memory.
    """

    read: Any
    erase: Any
    beta_times_d_beta: Any
    d_beta: Any
    later: Any
    erasing: Any


class _MemoryGradients(NamedTuple):
    """Terms of the gradients of beta and of the log decay of one chunk that come through the memory S before
    the chunk or the memory S' after it; `later` and `erasing` also contain terms through pairs of tokens.

    Attributes:
        written: [C], the term of the gradient of beta through the memory after the chunk: k · (x dS'ᵀ) e^(b_C
            - b) for each token, where x are the memory's errors, dS' the gradient of S' and b the sums of the
            log decay.
        later: [C], for each token a number that is a term of the log decay's gradient at all tokens from its
            document's first to itself, through pairs of tokens and through S.
        erasing: [C], for each token a number that is a term of the log decay's gradient at all tokens from its
            document's first to the one before itself; None if keys read the decayed memory.
        totals: [[64, 64]], a matrix whose trace is the inner product <S, dS'> of the memory with the gradient
            dS'; empty without a gradient of the decay.
    """

    written: Any
    later: Any
    erasing: Any
    totals: list[Any]


@dataclasses.dataclass(frozen=True)
class ChunkProgram:
    """One warpgroup's computation in this kernel: the terms of the gradients of one chunk and head that
    come through one slice of its value channels.

    Attributes:
        refs: references to inputs and outputs in global memory, by name.
        smem: the buffers of the warpgroup in shared memory.
        b: index of the row in the batch.
        h: index of the head.
        n: index of the chunk in the row.
        piece: index of the slice of value channels.
        tokens: slice of the chunk's tokens.
        result: index, in the outputs' axis of heads, of the pair of the head and the slice of value channels.
        heads: number of heads of d_out.
        width: number of value channels of a slice.
        depth: number of key channels, K.
        stages: number of pairs of tiles of the memory and its gradient that fit in shared memory.
        scale: the factor by which the queries q are multiplied.
        decay_gradient: whether the gradient of the log decay is computed.
        erase: "decayed" or "undecayed", the memory that keys read.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    refs: dict[str, Any]
    smem: Smem
    b: Any
    h: Any
    n: Any
    piece: Any
    tokens: Any
    result: Any
    heads: int
    width: int
    depth: int
    stages: int
    scale: float
    decay_gradient: bool
    erase: str
    interpret: Any

    @property
    def steps(self) -> int:
        """The number of tiles [64, 64] into which 64 key channels of the memory are divided along this slice
        of value channels.
        """
        return self.width // BLOCK

    def load_tokens(self) -> None:
        """Start to load the chunk's queries, keys, errors x of the memory's predictions, gradient of the
        output and gradient of v, in this slice of value channels, into shared memory.
        """
        for name in _TOKENS:
            source = self.refs[name]
            source = source.at[self.b, self.tokens, head_index(source, self.h, self.heads)]
            if name not in ("q", "k"):
                source = source.at[:, pl.ds(self.piece * self.width, self.width)]
            plgpu.copy_gmem_to_smem(source, self.smem.tokens[name], self.smem.loaded)

    def load_pair(self, step: int) -> None:
        """Start to load into shared memory one tile [64, 64] of the memory before the chunk and the same tile
        of the gradient of the memory after it.

        `step` counts the tiles: those of the first 64 key channels in the order of their value channels, then
        those of the next 64.
        """
        row, column = (x * BLOCK for x in (step % self.steps, step // self.steps))
        rows = pl.ds(self.piece * self.width + row, BLOCK)
        for index, name in enumerate(("states", "d_states")):
            source = self.refs[name].at[self.b, self.h, self.n, rows, pl.ds(column, BLOCK)]
            stage = step % self.stages
            to = self.smem.pairs.at[stage, index]
            plgpu.copy_gmem_to_smem(source, to, self.smem.pair_loaded.at[stage])

    def two_products(self, a, b, c, d):
        """Return the matrix products a bᵀ and c dᵀ, [C, C] float32 each, of references to shared memory, such
        as the products of queries with keys; both run at once.
        """
        zeros = [jnp.zeros(SQUARE, _F32)] * 2

        def add(first, second):
            plgpu.wgmma(first, a, b.transpose((1, 0)))
            plgpu.wgmma(second, c, d.transpose((1, 0)))

        return wg.accumulate(add, *zeros, interpret=self.interpret)

    def pair_gradients(self, chunk: Chunk, betas) -> _PairGradients:
        """Compute the gradient A [C, C] of a chunk's scores of queries with keys, the gradient E [C, C] of
        its products of keys with keys, and the sums over their entries that are terms of the gradients of
        beta and of the log decay.

        `betas` [C, C] has beta of token j in column j.
        """
        q, k, x, d_out, dv = (self.smem.tokens[name] for name in _TOKENS)
        square, vector = self.smem.square, self.smem.vector
        # Without beta, which may be 0: nothing is divided by it.
        alike, erase = self.two_products(k, k, dv, x)
        beta_times_d_beta = jnp.sum(jnp.where(chunk.i == chunk.j, erase, 0.0), axis=1)
        below = chunk.i > chunk.j
        erase = jnp.where(below, -erase * chunk.erase_weights, 0.0)
        products = alike * erase
        erasing = jnp.sum(products * betas, axis=1) if self.erase == "undecayed" else None
        erase = (erase * betas).astype(_BF16)
        square[...] = erase
        plgpu.commit_smem()
        transposed = plgpu.load(square.transpose((1, 0)), layout=wg.LAYOUT)
        symmetric = erase.astype(_F32) + transposed.astype(_F32)
        erase = wg.as_left(symmetric, self.smem.left[0], self.interpret)
        scores, read = self.two_products(q, k, d_out, x)
        read = read * (chunk.weights * self.scale)
        of_reads = scores * read
        products += of_reads
        read = (read * betas).astype(_BF16)
        square[...] = read
        plgpu.commit_smem()
        read = wg.as_left(read, self.smem.left[1], self.interpret)
        diagonal = jnp.sum(jnp.where(below, 0.0, products), axis=1)
        products = jnp.where(below, products, 0.0)
        vector[...] = jnp.sum(products, axis=0)
        if erasing is not None:
            products = jnp.where(below, of_reads, 0.0)
        later = jnp.sum(products * betas, axis=1)
        plgpu.commit_smem()
        column_sums = plgpu.load(vector, layout=wg.LAYOUT.reduce(1))
        d_beta, later = diagonal + column_sums, later - chunk.beta * column_sums
        return _PairGradients(read, erase, beta_times_d_beta, d_beta, later, erasing)

    def memory_gradients(
        self, chunk: Chunk, read_decay, erase_decay, write_decay, pairs: _PairGradients
    ):
        """Complete the gradients of the chunk's queries and keys, which replace them in shared memory, 64 key
        channels at a time, and return terms of the gradients of beta and of the log decay.

        Args:
            chunk: beta, decays and documents of the chunk.
            read_decay: [C, 64] or 1, the decay from the chunk's start to each token's read.
            erase_decay: [C, 64] or 1, the decay from the chunk's start to each token's erase.
            write_decay: [C, 64] or 1, the decay from each token to the chunk's end.
            pairs: the terms of the gradients that come through pairs of tokens.
        """
        q, k = self.smem.tokens["q"], self.smem.tokens["k"]
        later, erasing = pairs.later, pairs.erasing
        written = jnp.zeros_like(later)
        # <S, dS'> is the trace of a product: tensor cores have time, and registers have no space for the elementwise product.
        totals = [jnp.zeros(SQUARE, _F32)] * self.decay_gradient
        for column in range(self.depth // BLOCK):
            columns = pl.ds(column * BLOCK, BLOCK)
            (read, erase, write), totals = self.memory_products(column, totals)
            tile = lambda x, at=columns: plgpu.load(x.at[:, at], layout=wg.LAYOUT).astype(_F32)  # noqa: E731
            read, erase, write = (
                read * (read_decay * self.scale),
                erase * erase_decay,
                write * write_decay,
            )
            if self.decay_gradient:
                later += jnp.sum(tile(q) * read, axis=1)
                erased = jnp.sum(tile(k) * erase, axis=1)
                if erasing is None:
                    later -= erased
                else:
                    erasing -= erased
            written += jnp.sum(tile(k) * write, axis=1)
            write = write * wg.spread_rows(chunk.beta, SQUARE) - erase
            gradients = self.add_pairs(columns, pairs, read, write)
            for buffer, gradient in zip((q, k), gradients, strict=True):  # no longer read
                buffer.at[:, columns][...] = gradient.astype(_BF16)
        return _MemoryGradients(written, later, erasing, totals)

    def memory_products(self, column: int, totals):
        """Compute dO Sᵀ, dv Sᵀ and x dS'ᵀ, [C, 64] each, in the block of 64 key channels with index `column`,
        and add S dS'ᵀ to `totals`; return the three products and the sum.

        S is the memory before the chunk, dS' the gradient of the memory after it, dO and dv are the gradients
        of the output and of v, and x the errors of the memory's predictions.
        """
        _, _, x, d_out, dv = (self.smem.tokens[name] for name in _TOKENS)
        sums = [jnp.zeros(SQUARE, _F32)] * 3
        for row in range(self.steps):
            step = column * self.steps + row
            plgpu.barrier_wait(self.smem.pair_loaded.at[step % self.stages])
            values, pair = pl.ds(row * BLOCK, BLOCK), self.smem.pairs.at[step % self.stages]

            def add(read, erase, write, *totals, values=values, pair=pair):
                plgpu.wgmma(read, d_out.at[:, values], pair.at[0])
                plgpu.wgmma(erase, dv.at[:, values], pair.at[0])
                plgpu.wgmma(write, x.at[:, values], pair.at[1])
                for total in totals:
                    plgpu.wgmma(total, pair.at[0], pair.at[1].transpose((1, 0)))

            results = wg.accumulate(add, *sums, *totals, interpret=self.interpret)
            sums, totals = results[:3], results[3:]
            if step + self.stages < self.steps * (self.depth // BLOCK):
                self.load_pair(step + self.stages)
        return sums, totals

    def add_pairs(self, columns, pairs: _PairGradients, dq, dk):
        """Return dq + A k and dk + Aᵀ q + (E + Eᵀ) k, [C, 64] each, in a block of 64 key channels (the slice
        `columns`): the gradients of queries and keys with the terms through pairs of tokens.

        dq and dk are the terms through the memories, A is the gradient of the scores of queries with keys,
        and E that of the products of keys with keys.
        """
        q, k = self.smem.tokens["q"], self.smem.tokens["k"]

        def add(dq, dk):
            plgpu.wgmma(dq, pairs.read, k.at[:, columns])
            plgpu.wgmma(dk, self.smem.square.transpose((1, 0)), q.at[:, columns])
            plgpu.wgmma(dk, pairs.erase, k.at[:, columns])

        return wg.accumulate(add, dq, dk, interpret=self.interpret)

    def store_d_beta(self, chunk: Chunk, pairs: _PairGradients, written) -> None:
        """Store the gradient of beta of the chunk's tokens, [C]; `written` is its term through the memory after the chunk."""
        d_beta = choose_d_beta(chunk, pairs.beta_times_d_beta, pairs.d_beta, written)
        self.refs["d_beta"].at[self.b, self.tokens, self.result][...] = d_beta

    def store_d_decay(self, chunk: Chunk, memory: _MemoryGradients) -> None:
        """Store the gradient of the scalar log decay of the chunk's tokens, [C].

        It has the terms of `decay_terms`, and at each token the decay over the whole chunk times <S, dS'>, the inner product of the
        memory before the chunk with the gradient of the memory after it.
        """
        vector = self.smem.vector
        sums = decay_terms(chunk, memory.later, memory.erasing, chunk.beta * memory.written)
        total = jnp.where(chunk.i == chunk.j, memory.totals[0], 0.0)
        total = chunk.over_columns(jnp.sum(total, axis=1))
        vector[...] = chunk.read_decay
        plgpu.commit_smem()
        sums += total * vector[CHUNK - 1]
        self.refs["d_decay"].at[self.b, self.tokens, self.result][...] = jnp.sum(sums, axis=1)

    def run(self) -> None:
        """Compute and store the terms of the gradients of q, k, beta and the log decay of one chunk and head
        that come through one slice of value channels; the caller of the kernel adds the slices' results.
        """
        self.load_tokens()
        for step in range(self.stages):
            self.load_pair(step)
        chunk = read_chunk(
            self.refs, self.b, self.h, self.heads, self.n, self.smem.vector, self.erase
        )
        spread = lambda x: 1.0 if x is None else wg.spread_rows(x, SQUARE)  # noqa: E731
        read_decay, write_decay = spread(chunk.read_decay), spread(chunk.write_decay)
        erase_decay = read_decay if self.erase == "decayed" else spread(chunk.erase_decay)
        betas = chunk.over_columns(chunk.beta)
        plgpu.barrier_wait(self.smem.loaded)
        pairs = self.pair_gradients(chunk, betas)
        memory = self.memory_gradients(chunk, read_decay, erase_decay, write_decay, pairs)
        plgpu.commit_smem()
        for name in ("q", "k"):
            to = self.refs[f"d{name}"].at[self.b, self.tokens, self.result]
            plgpu.copy_smem_to_gmem(self.smem.tokens[name], to)
        self.store_d_beta(chunk, pairs, memory.written)
        if self.decay_gradient:
            self.store_d_decay(chunk, memory)
        plgpu.wait_smem_to_gmem(0)


def smem_types(depth: int, width: int, stages: int, interpret) -> Smem:
    """Return the types of the buffers in shared memory of a warpgroup, for K = `depth` and slices of `width` value channels."""
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    return Smem(
        tokens={n: tile((CHUNK, depth if n in ("q", "k") else width)) for n in _TOKENS},
        pairs=tile((stages, 2, *SQUARE)),
        square=tile(SQUARE),
        vector=smem((CHUNK,), _F32),
        loaded=plgpu.Barrier(num_arrivals=len(_TOKENS)),
        pair_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        left=[tile(SQUARE)] * 2 if interpret else [None] * 2,
    )


def choose_d_beta(chunk: Chunk, beta_times_d_beta, through_pairs, written):
    """Return the gradient of beta of the chunk's tokens, [C]: x · dv / beta, a sum in which nothing cancels; where beta is 0, the sum of
    its terms through pairs of tokens and through the memory after the chunk (`written`).

    x are the errors of the memory's predictions, dv is the gradient of v; `beta_times_d_beta` is x · dv.
    """
    positive = chunk.beta > 1e-10
    divisor = jnp.where(positive, chunk.beta, 1.0)
    return jnp.where(positive, beta_times_d_beta / divisor, through_pairs + written)


def decay_terms(chunk: Chunk, later, erasing=None, after=None):
    """Return a matrix [C, C] whose row t has the terms of the log decay's gradient at token t, to be summed: `later` of the tokens from t
    on in its document, `erasing` of the tokens after t in its document, and `after` of the tokens before t, [C] each.
    """
    i, j = chunk.i, chunk.j
    seen = i <= j
    if chunk.same_document is not None:
        seen &= chunk.same_document
    terms = jnp.where(seen, chunk.over_columns(later), 0.0)
    if erasing is not None:
        terms += jnp.where(seen & (i < j), chunk.over_columns(erasing), 0.0)
    if after is not None:
        terms += jnp.where(i > j, chunk.over_columns(after), 0.0)
    return terms
