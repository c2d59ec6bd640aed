"""What a chunk of the delta rule whose decay has a value for every key channel does before any memory is known, on Mosaic GPU (Hopper).

`chunk_forward` makes the chunk's products of queries and of keys with keys, all at once for rows that the decay since the chunk's beginning
leaves within reach, for others by halving (see `linear_attention.tiles_channels`), and its queries and keys with their decay to the
chunk's chunk_bounds. On a level the rows of later blocks times those of earlier ones are the scores of queries below the diagonal; the
rows of earlier blocks times those of later ones, both of keys, are the transpose of the system above it: one tile and one product
serve both. `solve` inverts the transposed systems.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.channel_slices import split_channels
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    PARAMETERS,
    SQUARE,
    AllPairs,
    Documents,
    Halving,
    Level,
    left_operand,
    load,
    load_by_row,
    same_document,
)
from pallas_kernels.hopper.products import tile_products
from pallas_kernels.tiles import delta as tiles

_F32, _BF16 = jnp.float32, jnp.bfloat16


class Resolved(NamedTuple):
    """Every chunk, for h heads; `tiles` has the names.

    Attributes:
        upper: [B, h, T, C] float32, the transpose of N a chunk.
        scores: [B, h, T, C], P a chunk.
        read: [B, T, h, K], scale q e^b.
        erase: [B, T, h, K], k e^b.
        written: [B, T, h, K], k e^(b_C - b).
        keep: [B, h, N * K] float32, e^(b_C).
    """

    upper: jax.Array | None
    scores: jax.Array
    read: jax.Array
    erase: jax.Array
    written: jax.Array
    keep: jax.Array


def chunk_forward(
    q,
    k,
    log_decay,
    documents: Documents | None,
    *,
    heads: int,
    scale: float,
    interpret: Any = False,
) -> Resolved:
    """The kernel, over all chunks, for `heads` heads, a multiple of those of q, k and log_decay [B, T, *, K]."""
    batch, length, _, depth = k.shape
    pieces = split_channels(depth)  # one after another: their scores are summed in registers
    count, width = length // CHUNK, depth // len(pieces)
    groups = width // BLOCK
    total = batch * count * heads
    # As many warpgroups as leave each thread 128 registers.
    items = next(n for n in (4 // groups, 2 // groups, 1) if n and total % n == 0)
    named = dict(q=q, k=k, g=log_decay) | ({} if documents is None else documents._asdict())
    struct = jax.ShapeDtypeStruct
    square = (batch, heads, length, CHUNK)
    wide = struct((batch, length, heads, depth), _BF16)
    keep = struct((batch, heads, count * depth), _F32)
    out_type = [struct(square, _F32), struct(square, _BF16), wide, wide, wide, keep]

    def kernel(*refs):
        refs = dict(zip([*named, *Resolved._fields], refs, strict=True))
        warpgroup = lax.axis_index("warpgroup")
        item, group = lax.div(warpgroup, groups), lax.rem(warpgroup, groups)
        index = lax.axis_index("block") * items + item
        h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
        b, tokens = lax.div(index, heads * count), pl.ds(n * CHUNK, CHUNK)
        own = lambda name: lax.div(h * named[name].shape[2], heads)  # noqa: E731 - which of its heads serves this one

        def scoped(
            q_buffer, k_buffer, spare, parts, buffer, lowest, other, loaded, added, *left_buffer
        ):
            q_buffer, k_buffer, spare, parts, buffer, lowest, loaded = (
                x.at[warpgroup] for x in (q_buffer, k_buffer, spare, parts, buffer, lowest, loaded)
            )
            left = left_operand(left_buffer[0].at[warpgroup] if interpret else None, interpret)

            def hand_over(scores):
                other.at[item][...] = scores
                plgpu.barrier_arrive(added.at[item])

            def of_piece(number, before):
                """The scores of a piece of the keys, which are added to those before; the rest is handed out."""
                at = number * width + group * BLOCK
                columns = pl.ds(at, BLOCK)
                halving = Halving(parts, buffer, left, False, interpret, lowest)
                if len(pieces) > 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the buffers are free
                for name, x in (("q", q_buffer), ("k", k_buffer)):
                    source = refs[name].at[b, tokens, own(name), columns]
                    plgpu.copy_gmem_to_smem(source, x, loaded)
                i, j = halving.i, halving.j
                halving.split_decay(wg.load_global(refs["g"].at[b, tokens, own("g"), columns]))
                keep = jnp.exp2(halving.column_sums())
                if documents is not None:
                    keep *= refs["enters"].at[b][n * CHUNK + CHUNK - 1]
                refs["keep"].at[b, h, pl.ds(n * depth + at, BLOCK)][...] = keep
                plgpu.barrier_wait(loaded)

                since, reached = halving.check_range(q_buffer, k_buffer)
                pairs = AllPairs(halving, 0, since)
                rows = pairs.rows(load(q_buffer), None).astype(_BF16)
                spare[...] = pairs.rows(load(k_buffer), None).astype(_BF16)
                buffer[...] = pairs.columns(None, load(k_buffer)).astype(_BF16)
                rows = left(rows)
                plgpu.commit_smem()

                def both(lower, upper):
                    plgpu.wgmma(lower, rows, buffer.transpose((1, 0)))
                    plgpu.wgmma(upper, buffer, spare.transpose((1, 0)))

                lower, upper = halving.accumulate(both, 2)
                near = jnp.where(i > j, lower, jnp.where(i < j, upper, 0.0))
                near = jnp.where(halving.pairs_in_range(), near, 0.0)

                def meet(at, scores):
                    step = Level(halving, at)
                    rows = left(step.rows(load(q_buffer), load(k_buffer)).astype(_BF16))
                    buffer[...] = step.columns(load(k_buffer), load(k_buffer)).astype(_BF16)
                    plgpu.commit_smem()
                    (near,) = halving.accumulate(
                        lambda out: plgpu.wgmma(out, rows, buffer.transpose((1, 0)))
                    )
                    return scores + jnp.where(halving.pairs_in_range(), 0.0, step.mask(near))

                # A loop: the levels unrolled take more registers than there are.
                scores = lax.fori_loop(reached * LEVELS, LEVELS, meet, near)
                current = jnp.sum(load(q_buffer).astype(_F32) * load(k_buffer).astype(_F32), axis=1)
                scores = jnp.where(i == j, wg.spread_rows(current, SQUARE), scores)
                if before is not None:
                    scores += before
                if groups > 1:
                    # What is apart from the other warpgroup comes later, so that this need not wait long.
                    pl.when((group == 1) & (number == len(pieces) - 1))(
                        functools.partial(hand_over, scores)
                    )

                def border(later, flags):
                    factor = halving.boundary_decay(later)
                    if documents is None:
                        return factor
                    return factor * wg.spread_rows(load_by_row(refs[flags].at[b, tokens]), SQUARE)

                def give(name, to, x):
                    to[...] = x.astype(_BF16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(to, refs[name].at[b, tokens, h, columns])

                factor = border(True, "enters")
                give("read", q_buffer, load(q_buffer).astype(_F32) * factor * scale)
                give("erase", spare, load(k_buffer).astype(_F32) * factor)
                give("written", k_buffer, load(k_buffer).astype(_F32) * border(False, "stays"))
                return scores

            if len(pieces) == 1:
                scores = of_piece(0, None)
            else:
                zeros = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
                scores = lax.fori_loop(0, len(pieces), of_piece, zeros)

            def save():
                last = Halving(parts, buffer, left, False, interpret)
                i, j = last.i, last.j
                total = scores
                if groups > 1:
                    plgpu.barrier_wait(added.at[item])
                    total += load(other.at[item])
                if documents is not None:
                    total = jnp.where(same_document(refs["run"].at[b, tokens]), total, 0.0)
                refs["upper"].at[b, h, tokens][...] = jnp.where(i < j, total, 0.0)
                buffer[...] = (jnp.where(i < j, 0.0, total) * scale).astype(_BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, refs["scores"].at[b, h, tokens])

            pl.when(group == 0)(save)
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        each = items * groups
        buffers = [
            *[buffer((each, *SQUARE))] * 3,
            buffer((each, 2, *SQUARE)),
            buffer((each, *SQUARE)),
            smem((each, 2, CHUNK), _F32),
            smem((items if groups > 1 else 1, *SQUARE), _F32, transforms=wg.TILED_WIDE),
            plgpu.Barrier(num_arrivals=2, num_barriers=each),
            plgpu.Barrier(num_barriers=items),
        ]
        if interpret:
            buffers.append(buffer((each, *SQUARE)))
        pl.run_scoped(scoped, *buffers, collective_axes="warpgroup")

    return Resolved(
        *plgpu.kernel(
            kernel,
            out_type=out_type,
            grid=(total // items,),
            grid_names=("block",),
            num_threads=items * groups,
            thread_name="warpgroup",
            compiler_params=PARAMETERS,
            interpret=interpret,
        )(*named.values())
    )


def solve_chunks(upper, rows, *, interpret: Any = False):
    """The transpose of `(I + diag(rows) upper)⁻¹` of every chunk, in bfloat16.

    Args:
        upper: [B, h, T, C] float32, 0 on and below the diagonal of a chunk.
        rows: [B, h, T] float32.
        interpret: parameters of the interpreter, or False.
    """
    batch, heads, length, _ = upper.shape

    def kernel(upper, rows, out):
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        tokens = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)

        def scoped(right, buffer, *left):
            product, exact = tile_products(right, left, interpret)
            i = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=wg.LAYOUT)
            j = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=wg.LAYOUT)
            strict = wg.load_global(upper.at[b, h, tokens])
            strict *= wg.spread_rows(load_by_row(rows.at[b, h, tokens]), SQUARE)
            inverse = tiles.unit_inverse(strict, i ^ j, lambda a, b: product((a, b)), exact)
            buffer.transpose((1, 0))[...] = inverse.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[b, h, tokens])
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        pl.run_scoped(scoped, *[buffer(SQUARE)] * (4 if interpret else 2))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(upper.shape, _BF16),
        grid=(batch * heads, length // CHUNK),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(upper, rows)
