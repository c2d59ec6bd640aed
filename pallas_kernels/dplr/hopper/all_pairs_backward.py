"""The gradients of one chunk of a diagonal-plus-low-rank memory (RWKV7) whose decays are in float32's range, on
Mosaic GPU (Hopper): all pairs of tokens by one product, where `chunk_backward` has six levels of the halving.

With d and d' the inclusive and exclusive sums of the log decays in base 2, and R = `halving.RANGE` / 2, four
decayed tiles replace the inputs:

    q~ = scale q 2^(d + R)      a~ = a 2^(d' + R)      k~ = k 2^(-d - R)      b~ = b 2^(-d - R)

and, with [x yᵀ] the products x yᵀ on and below the diagonal, without the diagonal if x is dR,

    dq = scale 2^(d + R) ⊙ (2^-R dO Sᵀ + [dO vᵀ] k~ + [dO uᵀ] b~)      dk = 2^(-d - R) ⊙ (2^(d_C + R) v dS'ᵀ + [dO vᵀ]ᵀ q~ + [dR vᵀ]ᵀ a~)
    da =       2^(d' + R) ⊙ (2^-R dR Sᵀ + [dR vᵀ] k~ + [dR uᵀ] b~)     db = 2^(-d - R) ⊙ (2^(d_C + R) u dS'ᵀ + [dO uᵀ]ᵀ q~ + [dR uᵀ]ᵀ a~)

The gradient of the log decay contains each input times its gradient. That is the decayed tile times the sum in
brackets: the rounding of a tile is in both terms of a pair of tokens, which cancel where no decay is between
them, so that the pairs of a token with itself need no other treatment.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
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
    RANGE,
    SQUARE,
    Halving,
    in_base_2,
    left_operand,
    load,
    load_by_row,
    load_float32,
)
from pallas_kernels.hopper.launch import launch

_F32, _BF16 = jnp.float32, jnp.bfloat16
# The largest entry of each token's q, k, a, b and gradients is 0 or within these bounds, and those of v and u are at most the
# second. Then operands are at most 2^(RANGE / 2 + 20), and sums of two products of 64 and at most 128 terms below 2^126.
SMALLEST, LARGEST = 2.0**-60, 2.0**20
_SMALL = 2.0 ** (-RANGE / 2)


class _Smem(NamedTuple):
    """Buffers in shared memory of a program that computes the gradients of one chunk and head; tiles are bfloat16.

    `groups` counts the program's warpgroups, of 64 key channels each. S is the memory before the chunk of C tokens, dS' the gradient of
    the memory after it.

    Attributes:
        inputs: [groups, 4, C, 64], q, k, `a` and b, then their decayed tiles, then their gradients and buffers of `Halving.split`.
        state: [groups, V or 2 V, 64], dS' transposed, and S behind it if there is space, else in its place.
        parts: [groups, 2, 64, 64], buffers of `Halving.split`.
        masks: [groups, 2, C, C], the masks of pairs of a token with itself and earlier ones, and with earlier ones; the second is first a
            buffer of the halving.
        totals: [groups, 2, 64] float32, the decay over the chunk times 2^R, and the gradient of its logarithm.
        d_outs: [2, C, V], the gradients of the output and of the right side of the triangular system.
        values: [2, C, V], the values v and u, what `a` reads.
        loaded: the barrier at which the loads at the beginning are complete.
        state_loaded: barriers at which the later loads of S are complete, one for each warpgroup.
        left: [groups, C, 64] for the interpreter, which reads left operands from shared memory; else None.
    """

    inputs: Any
    state: Any
    parts: Any
    masks: Any
    totals: Any
    d_outs: Any
    values: Any
    loaded: Any
    state_loaded: Any
    left: Any

    def of_warpgroup(self, group) -> _Smem:
        """Return the shared-memory buffers that the warpgroup with index `group` uses: of each array with an
        axis [groups, ...] the warpgroup's entry, and the buffers that all warpgroups share unchanged.
        """
        names = ("inputs", "state", "parts", "masks", "totals", "state_loaded")
        names += () if self.left is None else ("left",)
        buffers = {name: getattr(self, name).at[group] for name in names}
        return self._replace(**buffers)


def _memories(width: int) -> int:
    """Return how many memories [V, 64] a warpgroup has in shared memory at once, for V = `width`."""
    return 2 if width == BLOCK else 1


def _smem(groups: int, width: int, interpret) -> _Smem:
    """Return the types of the buffers in shared memory of a program with `groups` warpgroups, for `width` value channels."""
    memories = _memories(width)
    buffers = input_buffers(
        groups, width, rows=memories * width, loads=len(INPUTS) + memories, interpret=interpret
    )
    smem: Any = plgpu.SMEM
    return _Smem(
        masks=bfloat16_tile((groups, 2, *SQUARE)),
        totals=smem((groups, 2, BLOCK), _F32),
        **buffers,
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """One warpgroup's computation of the gradients of q, k, `a`, b and the log decay of one chunk and head, in 64 key channels.

    Attributes:
        block: references to the chunk's inputs and outputs in global memory, in this warpgroup's key channels.
        smem: buffers in shared memory: those of the warpgroup, and those that all warpgroups of the program share.
        group: index of the warpgroup in its program.
        depth: number of key channels, K.
        width: number of value channels, V.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """

    block: Block
    smem: _Smem
    group: Any
    depth: int
    width: int
    scale: float
    interpret: Any

    @functools.cached_property
    def halving(self) -> Halving:
        """The `Halving` of the chunk."""
        smem = self.smem
        return Halving(smem.parts, smem.masks.at[1], self.as_left, True, self.interpret)

    def as_left(self, x):
        """Return x [C, 64] bfloat16 as the left operand of a matrix product: in registers on the card, in
        shared memory in the interpreter.
        """
        return left_operand(self.smem.left, self.interpret)(x)

    @property
    def d_state(self):
        """The gradient of the memory after the chunk [V, 64], in shared memory until `load_state`."""
        return self.smem.state.at[pl.ds(0, self.width)]

    def load_inputs(self) -> None:
        """Start to load the inputs into shared memory; the first warpgroup loads those that all warpgroups share."""
        memories = dict(d_states=self.d_state)
        if _memories(self.width) == 2:
            memories["states"] = self.smem.state.at[pl.ds(BLOCK, BLOCK)]
        inputs = [self.smem.inputs.at[index] for index in range(len(INPUTS))]
        load_inputs(self.block, self.smem, self.group, inputs, memories)

    def load_state(self):
        """Return the memory before the chunk [V, 64] in shared memory. If there is no space for it beside the gradient of the memory
        after the chunk, load it into the same buffer, which is no longer read.
        """
        if _memories(self.width) == 2:
            return self.smem.state.at[pl.ds(BLOCK, BLOCK)]
        plgpu.commit_smem()
        load_memory(self.block, "states", self.d_state, self.smem.state_loaded)
        plgpu.barrier_wait(self.smem.state_loaded)
        return self.d_state

    def run(self) -> None:
        """Compute and store the gradients, and which tokens are in range."""
        smem, halving, block = self.smem, self.halving, self.block
        self.load_inputs()
        self.split(in_base_2(block.log_decay()))
        smem.totals.at[0][...] = jnp.exp2(halving.column_sums() + RANGE / 2)
        sums = halving.sums_from_start()
        plgpu.barrier_wait(smem.loaded)
        self.store_range(halving.sums_to_write(sums, 1.0))
        plgpu.commit_smem()  # else the inputs stay in registers until they are used again
        sums = self.decay_inputs(sums)
        self.store_totals()
        self.store_masks()
        zeros = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
        products = lax.fori_loop(0, 2, functools.partial(self.add_written, sums), zeros)
        read = functools.partial(self.add_read, sums, self.load_state())
        self.store_d_decay(*lax.fori_loop(0, 2, read, (products, zeros)))
        plgpu.wait_smem_to_gmem(0)

    def add_written(self, sums, n, products):
        """Compute and store the gradient of k (n = 0) or b (n = 1), and return `products` minus the input times it. `sums` are
        the inclusive sums of the log decays in base 2.
        """
        smem = self.smem
        columns = [
            (smem.d_outs.at[m], smem.masks.at[m].transpose((1, 0)), smem.inputs.at[2 * m])
            for m in range(2)
        ]
        x = self.gradient(smem.values.at[n], self.d_state, self.at_end, columns)
        products -= load_float32(smem.inputs.at[1 + 2 * n]) * x
        self.store(("dk", "db"), n, smem.parts.at[n], x * (jnp.exp2(-sums) * _SMALL))
        return products

    def add_read(self, sums, state, n, products):
        """Compute and store the gradient of q (n = 0) or `a` (n = 1), and return the first of `products` plus the input times it, and that
        product. `sums` are the inclusive sums of the log decays in base 2, `state` is the memory before the chunk in shared memory.
        """
        smem, tile = self.smem, self.smem.inputs.at[2 * n]
        columns = [
            (smem.values.at[m], smem.masks.at[n], smem.inputs.at[1 + 2 * m]) for m in range(2)
        ]
        x = self.gradient(smem.d_outs.at[n], state, self.at_start, columns)
        of_tile = load_float32(tile) * x
        of_a = n.astype(_F32)
        sums -= of_a * in_base_2(self.block.log_decay())
        scale = (self.scale + of_a * (1 - self.scale)) * (1 / _SMALL)
        self.store(("dq", "da"), n, tile, x * (jnp.exp2(sums) * scale))
        return products[0] + of_tile, of_tile

    def store(self, names, n, buffer, x) -> None:
        """Store x [C, 64] in the output with index n of `names`, through a buffer in shared memory."""
        place = self.block.place
        buffer[...] = x.astype(_BF16)
        plgpu.commit_smem()
        for index, name in enumerate(names):
            to = self.block.refs[name].at[place.row, place.tokens, place.h, self.block.columns]
            pl.when(n == index)(functools.partial(plgpu.copy_smem_to_gmem, buffer, to))

    def split(self, x, parts=None) -> None:
        """Store a float32 tile x [C, 64] as two bfloat16 tiles, as `Halving.split` does, the first cut off instead of rounded: an
        instruction of the integer units, which are free here. `parts` are the two buffers; None is those of the halving.
        """
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, _F32)
        for part, value in zip(parts or self.halving.parts, (high, x - high), strict=True):
            part[...] = value.astype(_BF16)
        plgpu.commit_smem()

    def store_range(self, sums) -> None:
        """Store, in `lowest`, each token's smallest inclusive sum of log decays, of `sums` [C, 64], or a very low number if entries of
        an input are too large or too small.
        """
        smem, place = self.smem, self.block.place

        def largest(*tiles):
            x = functools.reduce(jnp.maximum, (jnp.abs(load(tile)) for tile in tiles))
            return jnp.max(x, axis=1).astype(_F32)

        penalty: Any = 0.0
        columns = [pl.ds(n, BLOCK) for n in range(0, self.width, BLOCK)]
        gradients = [[smem.d_outs.at[n, :, x] for x in columns] for n in range(2)]
        for index, tiles in enumerate([*([smem.inputs.at[n]] for n in range(4)), *gradients]):
            size = largest(*tiles) * (1.0 if index else abs(self.scale))
            fits = ((size >= SMALLEST) & (size <= LARGEST)) | (size == 0)
            penalty += jnp.where(fits, 0.0, wg.NEVER)
        others = [smem.values.at[n, :, x] for n in range(2) for x in columns]
        others += [self.d_state.at[x] for x in columns]
        penalty += jnp.where(largest(*others) <= LARGEST, 0.0, wg.NEVER)
        to = self.block.refs["lowest"].at[place.row, place.h, self.group, place.tokens]
        to[...] = jnp.min(sums, axis=1) + penalty

    def decay_inputs(self, sums):
        """Replace q, k, `a` and b in shared memory by the decayed tiles. `sums` are the exclusive sums of the log decays in base 2; return the inclusive ones, [C, 64]."""
        q, k, a, b = (self.smem.inputs.at[n] for n in range(4))
        halving = self.halving
        a[...] = (load_float32(a) * jnp.exp2(sums + RANGE / 2)).astype(_BF16)
        sums = halving.sums_to_write(sums, 1.0)
        q[...] = (load_float32(q) * (jnp.exp2(sums + RANGE / 2) * self.scale)).astype(_BF16)
        write = jnp.exp2(-sums - RANGE / 2)
        for x in (k, b):
            x[...] = (load_float32(x) * write).astype(_BF16)
        plgpu.commit_smem()
        return sums

    def store_masks(self) -> None:
        """Store the masks of pairs of tokens of one document in shared memory."""
        i, j = self.halving.i, self.halving.j
        for n, mask in enumerate((i >= j, i > j)):
            self.smem.masks.at[n][...] = jnp.where(
                self.block.mask_documents(mask), 1.0, 0.0
            ).astype(_BF16)
        plgpu.commit_smem()

    def at_end(self, x):
        """Return x [C, 64], the product of values with the gradient of the memory after the chunk, as a term of the gradient of a decayed
        tile: times the decay over the chunk and 2^(RANGE / 2).
        """
        decay = plgpu.load(self.smem.totals.at[0], layout=wg.LAYOUT.reduce(0))
        decay = lax.broadcast_in_dim(decay, SQUARE, [1])
        return self.block.mask_rows(x * decay, "stays")

    def at_start(self, x):
        """Return x [C, 64], the product of gradients with the memory before the chunk, as a term of the gradient of a decayed tile: times
        2^(-RANGE / 2).
        """
        return self.block.mask_rows(x * _SMALL, "enters")

    def gradient(self, rows, memory, through_memory, columns):
        """Return the gradient of an input's decayed tile, [C, 64] float32: its term through the memory, and those through pairs of tokens,
        which for each (`values`, `mask`, `tile`) of `columns` are the product of `rows` valuesᵀ, masked, with the tile.

        Args:
            rows: reference to an array [C, V], gradients or values of the tile's tokens.
            memory: reference to a memory or its gradient, [V, 64].
            through_memory: function from the product of `rows` with the memory to its term.
            columns: two triples of references to an array [C, V] of the other tokens, to a mask of pairs [C, C], and to the other tokens'
                decayed tile [C, 64].
        """
        (first, first_mask, first_tile), (second, second_mask, second_tile) = columns
        zeros = jnp.zeros(SQUARE, _F32)
        accumulate = functools.partial(wg.accumulate, interpret=self.interpret)

        def left(mask, pairs):
            return self.as_left(load(mask) * pairs.astype(_BF16))

        def begin(x, pairs):
            plgpu.wgmma(pairs, rows, first.transpose((1, 0)))
            plgpu.wgmma(x, rows, memory)

        x, pairs = accumulate(begin, zeros, zeros)
        x, pairs = through_memory(x), left(first_mask, pairs)

        def both(x, next_pairs):
            plgpu.wgmma(next_pairs, rows, second.transpose((1, 0)))
            plgpu.wgmma(x, pairs, first_tile)

        x, next_pairs = accumulate(both, x, zeros)
        next_pairs = left(second_mask, next_pairs)
        return accumulate(lambda x: plgpu.wgmma(x, next_pairs, second_tile), x)[0]

    def store_totals(self) -> None:
        """Store in row 1 of `totals`, for each key channel, the gradient of the sum of the log decays over the whole chunk: through the
        memory before the chunk `through_memory`, and through the writes the sum over tokens of k dk + b db.
        """
        halving, place, smem = self.halving, self.block.place, self.smem

        def add(n, total):
            def product(out):
                plgpu.wgmma(out, smem.values.at[n], self.d_state)

            (x,) = halving.accumulate(product)
            return total + load_float32(smem.inputs.at[1 + 2 * n]) * self.at_end(x)

        zeros = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
        self.split(lax.fori_loop(0, 2, add, zeros))
        channels = pl.ds(place.n * self.depth + self.group * BLOCK, BLOCK)
        memory = load_by_row(self.block.refs["through_memory"].at[place.row, place.h, channels])
        smem.totals.at[1][...] = halving.column_sums() + memory

    def store_d_decay(self, products, of_a) -> None:
        """Store the gradient of the log decay of the chunk's tokens in 64 key channels, [C, 64].

        Args:
            products: q dq + a da - k dk - b db, [C, 64].
            of_a: a da, [C, 64]: a token reads with `a` ahead of its decay.
        """
        halving, block, place = self.halving, self.block, self.block.place
        parts = [self.smem.inputs.at[n] for n in (1, 3)]  # k and b are no longer read
        self.split(products, parts)

        def sums(out):
            for part in parts:
                plgpu.wgmma(out, self.smem.masks.at[0].transpose((1, 0)), part)

        d_decay = halving.accumulate(sums)[0] - of_a
        totals = plgpu.load(self.smem.totals.at[1], layout=wg.LAYOUT.reduce(0))
        d_decay += block.mask_rows(lax.broadcast_in_dim(totals, SQUARE, [1]), "stays")
        block.refs["dg"].at[place.row, place.tokens, place.h, block.columns][...] = d_decay


def all_pairs_backward(inputs: dict[str, jax.Array], *, scale: float, interpret: Any = False):
    """Compute, for all chunks in parallel, the gradients of q, k, `a`, b and the log decay of a diagonal-plus-low-rank
    memory; valid for the chunks that are in range.

    Args:
        inputs: the inputs of `chunk_backward`, by name, with `g` for the log decay, and the fields of
            `Documents` if rows have several.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradients by name, dq, dk, da and db [B, T, h, K] bfloat16 and dg [B, T, h, K] float32, and whether each
        of the N chunks is in range, [B, h, N] bool. The gradients of other chunks are undefined.
    """
    batch, length, heads, width = inputs["d_out"].shape
    depth = inputs["k"].shape[-1]
    count, groups = length // CHUNK, depth // BLOCK
    struct = jax.ShapeDtypeStruct
    wide = (batch, length, heads, depth)
    outputs = {f"d{name}": struct(wide, _BF16) for name in INPUTS} | dict(dg=struct(wide, _F32))
    outputs["lowest"] = struct((batch, heads, groups, length), _F32)

    def kernel(refs):
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        block = Block(refs, place_of(index, heads, count), pl.ds(group * BLOCK, BLOCK))

        def body(smem: _Smem):
            smem = smem.of_warpgroup(group)
            _Program(block, smem, group, depth, width, scale, interpret).run()

        pl.run_scoped(body, _smem(groups, width, interpret), collective_axes="warpgroup")

    results = launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=dict(chunk=batch * count * heads),
        num_threads=groups,
        thread_name="warpgroup",
        reduction_scratch_bytes=0,
        name="dplr_chunk_backward",
        interpret=interpret,
    )
    lowest = results.pop("lowest").reshape(batch, heads, groups, count, CHUNK)
    return results, jnp.min(lowest, axis=(2, 4)) >= -RANGE
