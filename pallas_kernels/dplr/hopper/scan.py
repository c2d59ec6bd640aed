"""The walks of a diagonal-plus-low-rank memory over its chunks on Mosaic GPU (Hopper), and the gradient of its values.

    u = reach S + values v        O = read S + scores u + scores_values v        S' = keep S + writtenᵀ u + written_valuesᵀ v

with `SolvedChunks`'s reach and values and `DecayedChunks`'s others. Against time, from dS':

    du = scoresᵀ dO + written dS'            dS = keep dS' + readᵀ dO + reachᵀ du
    dv = scores_valuesᵀ dO + valuesᵀ du + written_values dS'
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.dplr.hopper.chunk_forward import CHUNK, SQUARE, DecayedChunks, SolvedChunks
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.scan import decayed, scan, slices_of

_BLOCK = 64
_F32, _BF16 = jnp.float32, jnp.bfloat16


def scan_forward(
    chunks: DecayedChunks, solved: SolvedChunks, v, initial, *, save: bool = False, read: bool = True,
    parts: int = 1, chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """With time, from S to S'.

    Args:
        chunks: of h heads.
        solved: of h heads.
        v: [B, T, *, V]; None is 0, and V then K.
        initial: [B * S, h * parts, K, V] float32, the memory before the first chunk; None is 0, and the identity without v.
        save: return what a read and the memories before each chunk in place of the output.
        read: False returns the last memory alone.
        parts: into which the sequence is cut, each walked by itself.
        chunk_bounds: the chunks [B, S + 1] at which those of a row's S memories begin and end, or None.
        interpret: parameters of the interpreter, or False.

    Returns:
        The output [B, T, h, V], or u [B, T, h, V] and the turned memories [B, h, N, V, K] bfloat16; and the last memory of each part.
    """
    (batch, length, heads, depth), width = chunks.written.shape, chunks.written.shape[-1]
    given = dict(reach=solved.reach, written=chunks.written, keep=chunks.keep)
    if v is not None:
        given |= dict(k=chunks.written_values, v=v, values=solved.values)
        width = v.shape[-1]
    read = read and not save
    if read:
        given |= dict(q=chunks.read, scores=chunks.scores, scores_values=chunks.scores_values)
    tokens = jax.ShapeDtypeStruct((batch, length, heads, width), _BF16)

    def step(chunk, S, left, hold, store, put):
        if v is not None:
            values = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
            values = wg.as_left(values, left[0], interpret)
        found = [SQUARE] * (2 if read else 1)
        for memory, last in hold(S):

            def reach(*sums, memory=memory, last=last):
                names = [("reach", "values"), ("q", "scores_values")][: len(sums)]
                for sum, (of_keys, of_values) in zip(sums, names, strict=True):
                    for keys, before in memory:
                        plgpu.wgmma(sum.ref, before, chunk[of_keys].at[:, keys].transpose((1, 0)))
                    if last and v is not None:
                        plgpu.wgmma(sum.ref, values, chunk[of_values].transpose((1, 0)))
                if not last:
                    return [x.read() for x in sums]
                store(S)
                kept = decayed(chunk, S)
                exact = sums[0].read((len(memory) + (v is not None)) * (len(sums) - 1))
                back = exact.astype(_BF16)
                rest = (exact - back.astype(_F32)).astype(_BF16)
                return kept, back, rest, [x.read() for x in sums[1:]]

            found = wg.accumulators(reach, *found, interpret=interpret)
        kept, saved, rest, outputs = found
        rest, back = wg.as_left(rest, left[2], interpret), wg.as_left(saved, left[1], interpret)

        def leave(*sums):
            for out in sums[len(S) :]:
                plgpu.wgmma(out.ref, back, chunk["scores"].transpose((1, 0)))
                plgpu.wgmma(out.ref, rest, chunk["scores"].transpose((1, 0)))
            for keys, piece in slices_of(S, sums):
                plgpu.wgmma(piece.ref, back, chunk["written"].at[:, keys])
                if v is not None:
                    plgpu.wgmma(piece.ref, values, chunk["k"].at[:, keys])
            later = len(S) * (1 if v is None else 2)
            put(*[saved] * save, *(out.read(later) for out in sums[len(S) :]))
            return tuple(piece.read() for piece in sums[: len(S)])

        return wg.accumulators(leave, *kept, *outputs, interpret=interpret)

    outs = ["back"] * save + ["out"] * read
    return scan(
        step, given, initial, depth, tokens, outs, save=save, heads=heads, parts=parts, reverse=False,
        chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def scan_backward(
    chunks: DecayedChunks, solved: SolvedChunks, d_out, d_final, *, save: bool = True, parts: int = 1,
    chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """Against time: du [B, T, h, V] and the turned gradients of the memories after each chunk (if `save`), and that of the first.

    d_final is [B * S, h * parts, K, V], or None, which is 0; `parts` and `chunk_bounds` as in `scan_forward`.
    """
    given = dict(
        reach=solved.reach, written=chunks.written, q=chunks.read, v=d_out,
        scores=chunks.scores, keep=chunks.keep,
    )  # fmt: skip

    def step(chunk, S, left, hold, store, put):
        given = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
        given = wg.as_left(given, left[0], interpret)
        found: Any = SQUARE
        for memory, last in hold(S):

            def leave(back, memory=memory, last=last):
                for keys, after in memory:
                    plgpu.wgmma(back.ref, after, chunk["written"].at[:, keys].transpose((1, 0)))
                if not last:
                    return back.read()
                plgpu.wgmma(back.ref, given, chunk["scores"])
                store(S)
                kept = decayed(chunk, S)
                return kept, back.read().astype(_BF16)

            found = wg.accumulators(leave, found, interpret=interpret)
        kept, back = found
        reached = wg.as_left(back, left[1], interpret)

        def enter(*sums):
            for keys, piece in slices_of(S, sums):
                plgpu.wgmma(piece.ref, given, chunk["q"].at[:, keys])
                plgpu.wgmma(piece.ref, reached, chunk["reach"].at[:, keys])
            put(*[back] * save)
            return tuple(piece.read() for piece in sums)

        return wg.accumulators(enter, *kept, interpret=interpret)

    tokens = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    return scan(
        step, given, d_final, chunks.read.shape[-1], tokens, ["d_back"] * save, save=save,
        heads=d_out.shape[2], parts=parts, reverse=True, chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def values_backward(
    chunks: DecayedChunks, solved: SolvedChunks, d_out, d_back, d_states, *, interpret: Any = False
):
    """dv and Xᵀ du, [B, T, h, V], chunk by chunk; `d_states` as `scan_backward` gives them."""
    batch, length, heads, width = d_out.shape
    depth = chunks.read.shape[-1]
    named = dict(
        d_out=d_out, d_back=d_back, written=chunks.written_values, scores=chunks.scores_values,
        values=solved.values, inverse=solved.inverse, d_states=d_states,
    )  # fmt: skip

    def kernel(*refs):
        refs = dict(zip([*named, "dv", "d_reached"], refs, strict=True))
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        n = lax.axis_index("chunk")
        tokens = pl.ds(n * CHUNK, CHUNK)

        def scoped(buffers, barrier):
            for name, to in buffers.items():
                source = refs[name]
                if name == "d_states":
                    source = source.at[b, h, n]
                elif name in ("scores", "values", "inverse"):
                    source = source.at[b, h, tokens]
                else:
                    source = source.at[b, tokens, h]
                plgpu.copy_gmem_to_smem(source, to, barrier)
            plgpu.barrier_wait(barrier)
            for column in range(width // _BLOCK):
                part = pl.ds(column * _BLOCK, _BLOCK)
                d_out, d_back = (buffers[name].at[:, part] for name in ("d_out", "d_back"))

                def products(dv, reached, d_out=d_out, d_back=d_back, part=part):
                    plgpu.wgmma(dv, buffers["scores"].transpose((1, 0)), d_out)
                    plgpu.wgmma(dv, buffers["values"].transpose((1, 0)), d_back)
                    plgpu.wgmma(
                        dv, buffers["written"], buffers["d_states"].at[part].transpose((1, 0))
                    )
                    plgpu.wgmma(reached, buffers["inverse"].transpose((1, 0)), d_back)

                zeros = jnp.zeros(SQUARE, _F32)
                found = wg.accumulate(products, zeros, zeros, interpret=interpret)
                for to, x in zip(
                    (d_out, d_back), found, strict=True
                ):  # these columns are done with
                    to[...] = x.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffers["d_out"], refs["dv"].at[b, tokens, h])
            plgpu.copy_smem_to_gmem(buffers["d_back"], refs["d_reached"].at[b, tokens, h])
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        sizes = dict.fromkeys(named, SQUARE) | dict(
            d_out=(CHUNK, width), d_back=(CHUNK, width), written=(CHUNK, depth), d_states=(width, depth)
        )  # fmt: skip
        pl.run_scoped(
            scoped, {name: buffer(size) for name, size in sizes.items()},
            plgpu.Barrier(num_arrivals=len(named)),
        )  # fmt: skip

    struct = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    return plgpu.kernel(
        kernel,
        out_type=[struct, struct],
        grid=(batch * heads, length // CHUNK),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*named.values())
