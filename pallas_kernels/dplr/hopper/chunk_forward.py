"""What a chunk of a diagonal-plus-low-rank memory does before any memory is known, on Mosaic GPU (Hopper).

`chunk_forward` makes the products of q and a with k and b under their decays, all at once for rows that the decay since the chunk's
beginning leaves within reach, for others by halving (see `linear_attention.tiles_channels`). With q' = q e^g every one of them
stands under the decay between the two tokens, without either's own, so that on a level one tile holds q' or k, the other a or b, and
two products give the four: what q sees below the diagonal, what a sees, transposed, above it. `solve` inverts what a sees of b, and
solves for what a reads of the memory before the chunk and of its values.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
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
    load_by_row,
    run_by_chunk,
    same_document,
)
from pallas_kernels.hopper.products import tile_products
from pallas_kernels.tiles import channel_decay as tiles_channels
from pallas_kernels.tiles import delta as tiles

_F32, _BF16 = jnp.float32, jnp.bfloat16


class Resolved(NamedTuple):
    """Every chunk, for h heads; b are the inclusive sums of the decays over it and b' the exclusive ones.

    Attributes:
        upper: [B, h, T, C] float32, what a sees of b, transposed, a chunk.
        upper_values: [B, h, T, C], of k.
        scores: [B, h, T, C], what q sees of b, with scale.
        scores_values: [B, h, T, C], of k.
        read: [B, T, h, K], scale q e^b.
        reach: [B, T, h, K], a e^b'.
        written: [B, T, h, K], b e^(b_C - b).
        written_values: [B, T, h, K], k e^(b_C - b).
        keep: [B, h, N * K] float32, e^(b_C).
    """

    upper: jax.Array | None
    upper_values: jax.Array | None
    scores: jax.Array
    scores_values: jax.Array
    read: jax.Array
    reach: jax.Array | None
    written: jax.Array
    written_values: jax.Array
    keep: jax.Array


def chunk_forward(
    q, k, a, b, log_decay, documents: Documents | None, *, heads: int, scale: float, interpret: Any = False
) -> Resolved:  # fmt: skip
    """The kernel, over all chunks, for `heads` heads, a multiple of those of the inputs [B, T, *, K]."""
    batch, length, _, depth = k.shape
    count, groups = length // CHUNK, depth // BLOCK
    tokens_of = dict(q=q, k=k, a=a, b=b)
    named = tokens_of | dict(g=log_decay)
    named |= {} if documents is None else documents._asdict()
    struct = jax.ShapeDtypeStruct
    square, wide = (batch, heads, length, CHUNK), struct((batch, length, heads, depth), _BF16)
    out_type = [struct(square, _F32), *[struct(square, _BF16)] * 3, *[wide] * 4]
    out_type.append(struct((batch, heads, count * depth), _F32))

    def kernel(*refs):
        refs = dict(zip([*named, *Resolved._fields], refs, strict=True))
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        columns = pl.ds(group * BLOCK, BLOCK)
        h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
        row, tokens = lax.div(index, heads * count), pl.ds(n * CHUNK, CHUNK)
        own = lambda name: lax.div(h * named[name].shape[2], heads)  # noqa: E731 - which of its heads serves this one

        def scoped(
            loaded_rooms, parts, buffer, decayed, lowest, other, loaded, added, *left_buffer
        ):
            loaded_rooms, parts, buffer, decayed, lowest = (
                x.at[group] for x in (loaded_rooms, parts, buffer, decayed, lowest)
            )
            q_buffer, k_buffer, a_buffer, b_buffer = (loaded_rooms.at[n] for n in range(4))
            for name, to in zip(tokens_of, (q_buffer, k_buffer, a_buffer, b_buffer), strict=True):
                plgpu.copy_gmem_to_smem(refs[name].at[row, tokens, own(name), columns], to, loaded)
            left = left_operand(left_buffer[0].at[group] if interpret else None, interpret)
            halving = Halving(parts, buffer, left, True, interpret, lowest)
            i, j = halving.i, halving.j
            tile = lambda x: load(x).astype(_F32)  # noqa: E731
            decay = wg.load_global(refs["g"].at[row, tokens, own("g"), columns])
            halving.split_decay(decay)
            keep = jnp.exp2(halving.column_sums())
            if documents is not None:
                keep *= refs["enters"].at[row][n * CHUNK + CHUNK - 1]
            refs["keep"].at[row, h, pl.ds(n * depth + group * BLOCK, BLOCK)][...] = keep
            plgpu.barrier_wait(loaded)
            current = [jnp.sum(tile(q_buffer) * tile(x), axis=1) for x in (k_buffer, b_buffer)]
            q_buffer[...] = (tile(q_buffer) * own_decay(decay)).astype(_BF16)
            plgpu.commit_smem()

            def product(rows, columns):
                return halving.accumulate(lambda out: plgpu.wgmma(out, rows, columns))[0]

            since, reached = halving.check_range(q_buffer, k_buffer, a_buffer, b_buffer)
            pairs = AllPairs(halving, 0, since)
            of_later, of_earlier = pairs.factor, pairs.columns_factor
            of_q = left((tile(q_buffer) * of_later).astype(_BF16))
            of_a, of_b = decayed.at[0], decayed.at[1]
            of_a[...] = (tile(a_buffer) * of_later).astype(_BF16)
            of_b[...] = (tile(b_buffer) * of_earlier).astype(_BF16)
            buffer[...] = (tile(k_buffer) * of_earlier).astype(_BF16)
            plgpu.commit_smem()
            turned = lambda x: x.transpose((1, 0))  # noqa: E731
            scores = []
            for below, above in ((buffer, of_b), (of_b, buffer)):
                below, above = product(of_q, turned(below)), product(above, turned(of_a))
                near = jnp.where(i > j, below, jnp.where(i < j, above, 0.0))
                scores.append(jnp.where(halving.pairs_in_range(), near, 0.0))

            def level(at, scores):
                step, found = Level(halving, at), []
                for rows, turn in (((q_buffer, b_buffer), (a_buffer, k_buffer)), ((q_buffer, k_buffer), (a_buffer, b_buffer))):  # fmt: skip
                    buffer[...] = step.columns(*map(load, turn)).astype(_BF16)
                    x = left(step.rows(*map(load, rows)).astype(_BF16))
                    plgpu.commit_smem()
                    near = step.mask(product(x, turned(buffer)))
                    found.append(jnp.where(halving.pairs_in_range(), 0.0, near))
                return [x + y for x, y in zip(scores, found, strict=True)]

            scores = lax.fori_loop(reached * LEVELS, LEVELS, level, scores)
            scores = [
                jnp.where(i == j, wg.spread_rows(x, SQUARE), y)
                for x, y in zip(current, scores, strict=True)
            ]

            def hand_over():
                for to, x in enumerate(scores):
                    other.at[to][...] = x
                plgpu.barrier_arrive(added)

            if groups > 1:
                pl.when(group == 1)(hand_over)

            # What is apart from the other warpgroup goes first, so that it need not wait long.
            for later, flags, times, buffers in (
                (True, "enters", scale, dict(read=q_buffer, reach=a_buffer)),
                (False, "stays", 1.0, dict(written=b_buffer, written_values=k_buffer)),
            ):
                factor = halving.boundary_decay(later)
                if documents is not None:
                    factor *= wg.spread_rows(load_by_row(refs[flags].at[row, tokens]), SQUARE)
                for name, to in buffers.items():
                    to[...] = (tile(to) * factor * (times if name == "read" else 1.0)).astype(_BF16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(to, refs[name].at[row, tokens, h, columns])

            def save():
                if groups > 1:
                    plgpu.barrier_wait(added)
                for at, (below, above) in enumerate((("scores_values", "upper"), ("scores", "upper_values"))):  # fmt: skip
                    whole = scores[at]
                    if groups > 1:
                        whole += load(other.at[at])
                    if documents is not None:
                        whole = jnp.where(same_document(refs["run"].at[row, tokens]), whole, 0.0)
                    high = jnp.where(i < j, whole, 0.0)
                    refs[above].at[row, h, tokens][...] = high.astype(refs[above].dtype)
                    low = (jnp.where(i < j, 0.0, whole) * scale).astype(_BF16)
                    refs[below].at[row, h, tokens][...] = low

            pl.when(group == 0)(save)
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        buffers = [
            buffer((groups, 4, *SQUARE)),
            buffer((groups, 2, *SQUARE)),
            buffer((groups, *SQUARE)),
            buffer((groups, 2, *SQUARE)),
            smem((groups, 2, CHUNK), _F32),
            smem((2 if groups > 1 else 1, *SQUARE), _F32, transforms=wg.TILED_WIDE),
            plgpu.Barrier(num_arrivals=4 * groups),
            plgpu.Barrier(),
        ]
        if interpret:
            buffers.append(buffer((groups, *SQUARE)))
        pl.run_scoped(scoped, *buffers, collective_axes="warpgroup")

    return Resolved(
        *run_by_chunk(kernel, named, out_type, batch * count * heads, groups, interpret)
    )


def own_decay(log_decay):
    """e^g, as the sums of the decays have it."""
    return jnp.exp(jnp.maximum(log_decay, tiles_channels.FLOOR))


class Solved(NamedTuple):
    """Of every chunk, in bfloat16.

    Attributes:
        inverse: [B, h, T, C], X = (I - what a sees of b)⁻¹.
        reach: [B, T, h, K], X (a e^b'): what a reads of the memory before the chunk.
        values: [B, h, T, C], X (what a sees of k): what a reads of the chunk's values.
    """

    inverse: jax.Array
    reach: jax.Array
    values: jax.Array


def solve_chunks(upper, upper_values, reach, *, interpret: Any = False) -> Solved:
    """The kernel, over all chunks; the arguments are `Resolved`'s."""
    batch, heads, length, _ = upper.shape
    depth = reach.shape[-1]
    struct = jax.ShapeDtypeStruct
    square = struct(upper.shape, _BF16)

    def kernel(upper, upper_values, reach, inverse_out, reach_out, values_out):
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        tokens = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)

        def scoped(right, buffer, values_buffer, reach_buffer, barrier, *left):
            plgpu.copy_gmem_to_smem(upper_values.at[b, h, tokens], values_buffer, barrier)
            plgpu.copy_gmem_to_smem(reach.at[b, tokens, h], reach_buffer, barrier)
            product, exact = tile_products(right, left, interpret)
            i = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=wg.LAYOUT)
            j = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=wg.LAYOUT)
            strict = -wg.load_global(upper.at[b, h, tokens])
            inverse = tiles.unit_inverse(strict, i ^ j, lambda a, b: product((a, b)), exact)
            buffer.transpose((1, 0))[...] = inverse.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, inverse_out.at[b, h, tokens])
            plgpu.barrier_wait(barrier)
            multiply = lambda out, x: plgpu.wgmma(out, buffer, x)  # noqa: E731
            zeros = jnp.zeros(SQUARE, _F32)
            for n in range(depth // BLOCK):
                part = reach_buffer.at[:, pl.ds(n * BLOCK, BLOCK)]
                add = functools.partial(multiply, x=part)
                (found,) = wg.accumulate(add, zeros, interpret=interpret)
                part[...] = found.astype(_BF16)
            add = functools.partial(multiply, x=values_buffer.transpose((1, 0)))
            (found,) = wg.accumulate(add, zeros, interpret=interpret)
            values_buffer[...] = found.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(reach_buffer, reach_out.at[b, tokens, h])
            plgpu.copy_smem_to_gmem(values_buffer, values_out.at[b, h, tokens])
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        pl.run_scoped(
            scoped, *[buffer(SQUARE)] * 3, buffer((CHUNK, depth)), plgpu.Barrier(num_arrivals=2),
            *[buffer(SQUARE)] * (2 if interpret else 0),
        )  # fmt: skip

    return Solved(
        *plgpu.kernel(
            kernel,
            out_type=[square, struct(reach.shape, _BF16), square],
            grid=(batch * heads, length // CHUNK),
            grid_names=("row", "chunk"),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
            interpret=interpret,
        )(upper, upper_values, reach)
    )
