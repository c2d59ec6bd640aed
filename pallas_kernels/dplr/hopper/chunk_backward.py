"""The phase `chunk_backward` of a diagonal-plus-low-rank memory (RWKV7), on Mosaic GPU (Hopper).

The gradients of q, k, `a`, b and the log decay of every chunk are computed in parallel, from the
memory S before the chunk, the gradient dS' of the memory after it, u (what `a` reads of the memory, see
`scan`) and dR = Xᵀ du, the gradient of the sum that X, the inverse of the chunk's triangular system,
multiplies. With dO the gradient of the output, g the log decay, q' = q e^g, d and d' the inclusive and
exclusive sums of the log decays, and [x yᵀ] the products x yᵀ times the decay between the two tokens (see
`chunk_forward`), below the diagonal for dq' and da and above it for dk and db:

    dq' = scale [dO vᵀ] k + scale [dO uᵀ] b + scale e^d' ⊙ (dO Sᵀ)      dk = scale [v dOᵀ] q' + [v dRᵀ] a + e^(d_C - d) ⊙ (v dS'ᵀ)
    da  =       [dR vᵀ] k +       [dR uᵀ] b +       e^d' ⊙ (dR Sᵀ)      db = scale [u dOᵀ] q' + [u dRᵀ] a + e^(d_C - d) ⊙ (u dS'ᵀ)

On a level of the halving, one tile has q' in later rows and k in earlier ones, another tile has `a` and b.
For each of the two lines of formulas and each of the two tiles there is a matrix [C, C], with the line's left
matrix below the diagonal and its right matrix above it. The products of a line's two matrices with the two
tiles are both gradients of the line. Chunks whose decays are in float32's range need no levels (`all_pairs_backward`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.dplr.hopper.all_pairs_backward import all_pairs_backward
from pallas_kernels.dplr.hopper.chunk_forward import token_decay
from pallas_kernels.dplr.hopper.chunk_inputs import (
    INPUTS,
    bfloat16_tile,
    input_buffers,
    load_inputs,
    load_memory,
)
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import Block, place_of
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    SQUARE,
    Documents,
    Halving,
    left_operand,
    load,
    load_by_row,
    load_float32,
)
from pallas_kernels.hopper.launch import launch

_F32, _BF16 = jnp.float32, jnp.bfloat16


class _Smem(NamedTuple):
    """Buffers in shared memory of a program that computes the gradients of one chunk and head of a diagonal-plus-low-rank memory.

    `groups` counts the program's warpgroups, of 64 key channels each; tiles are bfloat16. S is the memory before the chunk of C
    tokens, dS' the gradient of the memory after it.

    Attributes:
        inputs: [groups, 4, C, 64], q, k, `a` and b, later their gradients; after `of_warpgroup`, a list of four
            references [C, 64].
        state: [groups, max(V, 128), 64], the memory S transposed, then the gradient dS', then two tiles [C, 64].
        parts: [groups, 2, 64, 64], the log decays as sums of two bfloat16 numbers, from which the decays between tokens are computed.
        tile: [groups, C, 64], a buffer of the halving.
        totals: [groups, 64] float32, the gradient of the sum of the log decays over the whole chunk.
        d_outs: [2, C, V], the gradients of the output and of the right side of the triangular system, then two matrices [C, C],
            line 0 of `pair_matrices`.
        values: [2, C, V], the values v and u, what `a` reads, then two matrices [C, C], line 1 of `pair_matrices`.
        loaded: the barrier at which the loads of the inputs and of the memory S are complete.
        state_loaded: the barriers at which the loads of dS' are complete, one for each warpgroup.
        values_used: barrier at which no warpgroup reads `d_outs` and `values` any more.
        matrices_stored: the barrier at which the four matrices are complete.
        left: [groups, C, 64] for the interpreter, which reads left operands from shared memory; else None.
    """

    inputs: Any
    state: Any
    parts: Any
    tile: Any
    totals: Any
    d_outs: Any
    values: Any
    loaded: Any
    state_loaded: Any
    values_used: Any
    matrices_stored: Any
    left: Any

    def of_warpgroup(self, group) -> _Smem:
        """Return the shared-memory buffers that the warpgroup with index `group` uses: of each array with an
        axis [groups, ...] the warpgroup's entry, and the buffers that all warpgroups share unchanged.
        """
        names = ("inputs", "state", "parts", "tile", "totals", "state_loaded")
        names += () if self.left is None else ("left",)
        buffers = {name: getattr(self, name).at[group] for name in names}
        buffers["inputs"] = [buffers["inputs"].at[index] for index in range(len(INPUTS))]
        return self._replace(**buffers)


def _smem(groups: int, width: int, interpret) -> _Smem:
    """Return the types of the buffers in shared memory of a program with `groups` warpgroups, for `width` value channels."""
    buffers = input_buffers(
        groups, width, rows=max(width, 2 * BLOCK), loads=len(INPUTS) + 1, interpret=interpret
    )
    smem: Any = plgpu.SMEM
    return _Smem(
        tile=bfloat16_tile((groups, *SQUARE)),
        totals=smem((groups, CHUNK), _F32),
        values_used=plgpu.Barrier(num_arrivals=groups),
        matrices_stored=plgpu.Barrier(num_arrivals=groups),
        **buffers,
    )


class _Gradients(NamedTuple):
    """Gradients of one chunk's q', k, `a` and b in 64 key channels, [C, 64] float32 each, where q' = q e^g
    are the queries times the decay of their token.

    The terms through the products of a query with k and b of the same token, which have no decay, are not
    included.
    """

    q: Any
    k: Any
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class _Program:
    """One warpgroup's computation in `chunk_backward`: the gradients of q, k, `a`, b and the log decay of one
    chunk and head, in 64 key channels.

    Attributes:
        block: references to the chunk's inputs and outputs in global memory, in this warpgroup's key
            channels.
        smem: buffers in shared memory: those of the warpgroup, and those that all warpgroups of the program
            share.
        group: index of the warpgroup in its program.
        groups: number of warpgroups of the program.
        depth: number of key channels, K.
        width: number of value channels, V.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    block: Block
    smem: _Smem
    group: Any
    groups: int
    depth: int
    width: int
    scale: float
    interpret: Any

    def as_left(self, x):
        """Return x [C, 64] bfloat16 as the left operand of a matrix product: in registers on the card, in
        shared memory in the interpreter.
        """
        return left_operand(self.smem.left, self.interpret)(x)

    def products_with_memory(self, halving: Halving, rows, memory):
        """Return the products of two arrays, `rows` [2, C, V] (gradients, or values), with the memory or its
        gradient, `memory` [V, 64] in shared memory, [C, 64] float32 each: terms of the gradients of two
        inputs.
        """

        def products(first, second):
            plgpu.wgmma(first, rows.at[0], memory)
            plgpu.wgmma(second, rows.at[1], memory)

        return halving.accumulate(products, 2)

    def pair_matrices(self, halving: Halving):
        """Compute the gradients of a chunk's decayed scores: four matrices [C, C] bfloat16, each with the
        gradient of one kind of scores on and below the diagonal and that of another kind above it.

        The product of a matrix with a decayed tile of tokens is a term of the gradients of two inputs. Line 0
        are the two matrices for the gradients of q' (q times its token's decay) and k, line 1 those for `a`
        and b. In a line, matrix 0 multiplies the tile of q' and k, matrix 1 that of `a` and b. With two
        warpgroups, each computes one line.

        Returns:
            A list of (line, tile, matrix), with the index of the line and of the tile that the matrix
            multiplies.
        """
        i, j = halving.i, halving.j
        matrices = []
        for line in [self.group] if self.groups > 1 else [0, 1]:
            for tile in range(2):
                products = functools.partial(self.line_products, line=line, tile=tile)
                later, earlier = halving.accumulate(products, 2)
                if self.groups > 1:
                    later *= jnp.where(line == 0, self.scale, 1.0)
                else:
                    later *= 1.0 if line else self.scale
                earlier *= 1.0 if tile else self.scale
                matrix = jnp.where(self.block.mask_documents(i >= j), later, 0.0)
                matrix = jnp.where(self.block.mask_documents(i < j), earlier, matrix)
                matrices.append((line, tile, matrix.astype(_BF16)))
        return matrices

    def line_products(self, later, earlier, *, line, tile: int) -> None:
        """Compute two gradients of decayed scores between a chunk's tokens, [C, C] each, by adding matrix
        products to two accumulators.

        Here dO is the gradient of the output, dR that of the triangular system's right side, v are the
        values, and u is what `a` reads of the memory.

        Args:
            later: accumulator of (dO or dR) (v or u)ᵀ, of which the entries on and below the diagonal are
                used.
            earlier: accumulator of (v or u) (dO or dR)ᵀ, of which the entries above the diagonal are used.
            line: 0 selects dO for `later` and v for `earlier` as left operand, 1 selects dR and u.
            tile: 0 selects v for `later` and dO for `earlier` as right operand, 1 selects u and dR.
        """
        d_outs, values = self.smem.d_outs, self.smem.values
        plgpu.wgmma(later, d_outs.at[line], values.at[tile].transpose((1, 0)))
        plgpu.wgmma(earlier, values.at[line], d_outs.at[tile].transpose((1, 0)))

    def store_matrices(self, matrices):
        """Store the gradients of the chunk's decayed scores, four matrices [C, C] from `pair_matrices`, in
        shared memory, where all warpgroups can read them; return references to them as `refs[line][tile]`.

        The matrices replace the gradients of output and right side and the values v and u, once no warpgroup
        reads these any more.
        """
        smem = self.smem
        plgpu.barrier_arrive(smem.values_used)
        plgpu.barrier_wait(smem.values_used)
        refs = [
            [x.at[tile, :, pl.ds(0, CHUNK)] for tile in range(2)]
            for x in (smem.d_outs, smem.values)
        ]

        def store(to, matrix):
            to[...] = matrix

        for line, tile, matrix in matrices:
            if self.groups == 1:
                store(refs[line][tile], matrix)
                continue
            for index in range(2):
                pl.when(self.group == index)(functools.partial(store, refs[index][tile], matrix))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.matrices_stored)
        return refs

    def store_totals(self, halving: Halving, gradients: _Gradients, parts) -> None:
        """Store, for each of 64 key channels, the gradient of the sum of the log decays over the whole chunk
        in the buffer `totals`.

        With S the memory before the chunk and dS' the gradient of the memory after it, it is Σ_v chunk_decay
        S dS' plus Σ_i (k dk + b db)_i, where `gradients` has dk and db, the gradients of k and b through the
        memory after the chunk. `parts` are two buffers [64, 64] in shared memory.
        """
        _, k, _, b = self.smem.inputs
        place = self.block.place
        halving.split(load_float32(k) * gradients.k + load_float32(b) * gradients.b, parts)
        written = halving.column_sums(parts)
        channels = pl.ds(place.n * self.depth + self.group * BLOCK, BLOCK)
        memory = load_by_row(self.block.refs["through_memory"].at[place.row, place.h, channels])
        self.smem.totals[...] = written + memory

    def add_level(self, halving: Halving, matrices, tiles, level, gradients: _Gradients):
        """Add to the gradients of q', k, `a` and b of one chunk the terms that come through the pairs of
        tokens of one level of the halving, and return the sums. q' are the queries times their token's decay.

        Args:
            halving: the `Halving` of the chunk.
            matrices: references to the gradients of the chunk's decayed scores, from `store_matrices`.
            tiles: two buffers [C, 64] in shared memory for operands of products.
            level: index of the level of the halving.
            gradients: the gradients of q', k, `a` and b so far.
        """
        q, k, a, b = self.smem.inputs
        dq, dk, da, db = gradients
        factor, later = halving.factor(level), halving.later(level)
        for of_later, of_earlier, to in ((q, k, tiles[0]), (a, b, tiles[1])):
            x = halving.blend(level, load(of_later), load(of_earlier))
            to[...] = (x.astype(_F32) * factor).astype(_BF16)
        plgpu.commit_smem()
        sums = []
        for line, of_later, of_earlier in zip(matrices, (dq, da), (dk, db), strict=True):
            dx = self.line_gradient(halving, level, line, tiles) * factor
            sums += [of_later + later * dx, of_earlier + (1 - later) * dx]
        dq, dk, da, db = sums
        return _Gradients(dq, dk, da, db)

    def line_gradient(self, halving: Halving, level, line, tiles):
        """Return the gradient [C, 64] float32 of one level's decayed operand with rows of q' or k, or with
        rows of `a` or b: the sum over two matrices M and two tiles Y of M Y, with M masked to the level's
        pairs of tokens.

        Args:
            halving: the `Halving` of the chunk.
            level: index of the level of the halving.
            line: references to two matrices M [C, C], gradients of decayed scores.
            tiles: references to two tiles Y [C, 64], the level's decayed operands: of q' and k, and of `a`
                and b.
        """
        dx = [jnp.zeros(SQUARE, _F32)]
        for matrix, x in zip(line, tiles, strict=True):
            pairs = self.as_left(halving.mask_to_level(level, load(matrix)))
            add = lambda out, pairs=pairs, x=x: plgpu.wgmma(out, pairs, x)  # noqa: E731
            dx = wg.accumulate(add, *dx, interpret=self.interpret)
        return dx[0]

    def store_d_decay(self, halving: Halving, gradients: _Gradients) -> None:
        """Store the gradient of the log decay of the chunk's tokens in 64 key channels, [C, 64].

        The products of a query with its own token's k and b add nothing: they have no decay.
        """
        q, k, a, b = self.smem.inputs
        i, j = halving.i, halving.j
        dq, dk, da, db = gradients
        block, place = self.block, self.block.place
        halving.split(load_float32(q) * dq - load_float32(k) * dk - load_float32(b) * db)
        d_decay = halving.sums(block.mask_documents(j >= i))
        halving.split(load_float32(a) * da)
        d_decay += halving.sums(block.mask_documents(j > i))
        totals = plgpu.load(self.smem.totals, layout=wg.LAYOUT.reduce(0))
        d_decay += block.mask_rows(lax.broadcast_in_dim(totals, SQUARE, [1]), "stays")
        block.refs["dg"].at[place.row, place.tokens, place.h, block.columns][...] = d_decay

    def store_gradients(self, halving: Halving, matrices, gradients: _Gradients) -> None:
        """Store the gradients of q, k, `a` and b of the chunk, [C, 64] each, in global memory, after adding
        the terms through the products of each query with k and b of its own token.
        """
        q, k, a, b = self.smem.inputs
        i, j = halving.i, halving.j
        dq, dk, da, db = gradients
        of_k, of_b = (
            wg.spread_rows(jnp.sum(jnp.where(i == j, load_float32(x), 0.0), axis=1), SQUARE)
            for x in matrices[0]
        )
        decay = token_decay(self.block.log_decay())
        queries = wg.load_global(self.block.keys("q")).astype(_F32)
        dq = dq * decay + of_k * load_float32(k) + of_b * load_float32(b)
        dk, db = dk + of_k * queries, db + of_b * queries
        for name, buffer, x in (("dq", q, dq), ("dk", k, dk), ("da", a, da), ("db", b, db)):
            self.block.store(name, buffer, x)

    def run(self) -> None:
        """Compute and store the gradients of q, k, `a`, b and the log decay of one chunk and head, in this
        warpgroup's 64 key channels.
        """
        smem, block = self.smem, self.block
        q = smem.inputs[0]
        memory = smem.state.at[pl.ds(0, self.width)]
        load_inputs(block, smem, self.group, smem.inputs, dict(states=memory))
        halving = Halving(smem.parts, smem.tile, self.as_left, True, self.interpret)
        halving.split_decay(block.log_decay())
        plgpu.barrier_wait(smem.loaded)
        dq, da = self.products_with_memory(halving, smem.d_outs, memory)
        plgpu.commit_smem()
        load_memory(block, "d_states", memory, smem.state_loaded)
        matrices = self.pair_matrices(halving)
        plgpu.barrier_wait(smem.state_loaded)
        dk, db = self.products_with_memory(halving, smem.values, memory)
        matrices = self.store_matrices(matrices)
        read_decay = block.mask_rows(halving.boundary_decay(True), "enters")
        dq *= read_decay * self.scale
        da *= read_decay
        write_decay = block.mask_rows(halving.boundary_decay(False), "stays")
        dk *= write_decay
        db *= write_decay
        gradients = _Gradients(dq, dk, da, db)
        # The memories are no longer read: two tiles use their buffer.
        tiles = [smem.state.at[pl.ds(index * BLOCK, BLOCK)] for index in range(2)]
        self.store_totals(halving, gradients, tiles)
        plgpu.barrier_wait(smem.matrices_stored)
        q[...] = (load_float32(q) * token_decay(block.log_decay())).astype(_BF16)  # q'
        plgpu.commit_smem()
        level = functools.partial(self.add_level, halving, matrices, tiles)
        gradients = lax.fori_loop(0, LEVELS, level, gradients)
        self.store_d_decay(halving, gradients)
        self.store_gradients(halving, matrices, gradients)
        plgpu.wait_smem_to_gmem(0)


def chunk_backward(
    q, k, a, b, log_decay, v, a_read, d_out, d_right_side, states, d_states, through_memory, documents: Documents | None,
    *, scale: float, all_pairs: bool | None = None, interpret: Any = False,
):  # fmt: skip
    """Compute, for all chunks in parallel, the gradients of q, k, `a`, b and the log decay of a
    diagonal-plus-low-rank memory: of the chunks in range for all pairs of tokens at once
    (`all_pairs_backward`), then of the others by levels, by a kernel whose programs of chunks in range end at once.

    h is the number of heads of `d_out`; the numbers of heads written as * divide it.

    Args:
        q: [B, T, *, K] bfloat16, the queries.
        k: [B, T, *, K] bfloat16, the keys.
        a: [B, T, *, K] bfloat16, the vectors with which a token reads the memory for u.
        b: [B, T, *, K] bfloat16, the vectors with which a token writes u back to the memory.
        log_decay: [B, T, *, K] float32, the log decay of each key channel.
        v: [B, T, *, V] bfloat16, the values.
        a_read: [B, T, h, V] bfloat16, u, what `a` reads of the memory.
        d_out: [B, T, h, V] bfloat16, the gradient of the output.
        d_right_side: [B, T, h, V] bfloat16, the gradient of the right side of the triangular system (of the
            sum that its inverse multiplies).
        states: [B, h, N, V, K] bfloat16, the transposed memory S before each of the N chunks.
        d_states: [B, h, N, V, K] bfloat16, the transposed gradient dS' of the memory after each chunk.
        through_memory: [B, h, N * K] float32, the term Σ_v chunk_decay S dS' of the gradient of each chunk's
            total log decay.
        documents: where documents begin, as `halving.Documents`; None for one document per row.
        scale: the factor by which the queries q are multiplied.
        all_pairs: whether chunks in range are computed for all pairs of tokens at once; None: if heads have 64 key and 64 value channels
            (for wider ones that kernel spills a few registers, and has not been timed).
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradients of q, k, `a` and b [B, T, h, K] bfloat16, and of the log decay [B, T, h, K] float32.
    """
    batch, length, heads, width = d_out.shape
    depth = k.shape[-1]
    count, groups = length // CHUNK, depth // BLOCK
    inputs = dict(q=q, k=k, a=a, b=b, d_out=d_out, d_right_side=d_right_side, v=v, a_read=a_read)
    inputs |= dict(states=states, d_states=d_states, g=log_decay, through_memory=through_memory)
    inputs |= {} if documents is None else documents._asdict()
    if all_pairs is None:
        all_pairs = depth == width == BLOCK
    struct = jax.ShapeDtypeStruct
    wide = (batch, length, heads, depth)
    outputs = {f"d{name}": struct(wide, _BF16) for name in INPUTS} | dict(dg=struct(wide, _F32))
    gradients = {}
    if all_pairs:
        gradients, near = all_pairs_backward(inputs, scale=scale, interpret=interpret)
        # The kernel replaces the gradients of the other chunks in place.
        gradients = {name: jax.new_ref(x) for name, x in gradients.items()}
        inputs |= gradients | dict(far=jnp.logical_not(near).astype(jnp.int32))

    def kernel(refs):
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        place = place_of(index, heads, count)
        block = Block(refs, place, pl.ds(group * BLOCK, BLOCK))

        def body(smem: _Smem):
            own = smem.of_warpgroup(group)
            _Program(block, own, group, groups, depth, width, scale, interpret).run()

        def compute():
            pl.run_scoped(body, _smem(groups, width, interpret), collective_axes="warpgroup")

        if "far" in refs:
            pl.when(refs["far"].at[place.row, place.h][place.n] == 1)(compute)
        else:
            compute()

    results = launch(
        kernel,
        inputs=inputs,
        outputs={} if all_pairs else outputs,
        grid=dict(chunk=batch * count * heads),
        num_threads=groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="dplr_chunk_backward_by_levels" if all_pairs else "dplr_chunk_backward",
        interpret=interpret,
    )
    return [jax.freeze(x) for x in gradients.values()] if all_pairs else list(results.values())
