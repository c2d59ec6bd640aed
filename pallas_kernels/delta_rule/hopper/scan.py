"""The walk of the delta rule over its chunks on Mosaic GPU (Hopper).

A warpgroup keeps 64 columns of a memory, turned, in registers, as an accumulator [64, K] (in pieces, where K is 256), and two of them
share what a third loads, where that fills the processors better. Up to a K of 128 every product of a chunk then has its left operand in the registers
where the one before left it, and nothing of the chain goes through shared memory; `tiles` has the formulas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SolvedChunks
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.scan import decayed, scan, slices_of

_F32, _BF16 = jnp.float32, jnp.bfloat16
_SQUARE = (CHUNK, CHUNK)


def scan_forward(
    q, k, v, solved: SolvedChunks, initial, *, heads: int, scale: float, save: bool = False,
    written=None, keep=None, parts: int = 1, checkpoints: int = 1, chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """With time, from S to S'.

    Args:
        q: [B, T, *, K]; None leaves out the output.
        k: [B, T, *, K].
        v: [B, T, *, V]; None is 0, and V then K.
        solved: of `heads` heads.
        initial: [B * S, heads * parts, K, V] float32, the memory before the first chunk; None is 0, and the identity without v.
        heads: of the output; a multiple of those of q, k and v.
        scale: of q.
        save: also return x and the memories before each chunk.
        written: [B, T, *, K], what writes if it is not k; q and k then hold their decays, and `solved` has none.
        keep: [B, heads, N * K] float32, what the key channels keep of S over a chunk, with `written`.
        parts: into which the sequence is cut, each walked by itself.
        checkpoints: also return the memories at which as many parts of the sequence begin, if more than one; with one part alone.
        chunk_bounds: the chunks [B, S + 1] at which those of a row's S memories begin and end, or None.
        interpret: parameters of the interpreter, or False.

    Returns:
        The output [B, T, heads, V] if q is given, x [B, T, heads, V] and the turned memories [B, heads, N, V, K] bfloat16 if
        `save`, those of the checkpoints [B, heads * checkpoints, K, V] float32, and the last memory of each part.
    """
    given = dict(q=q, k=k, v=v, inverse=solved.inverse, rows=solved.rows)
    given |= dict(written=written, keep=keep)
    if q is not None:
        given |= dict(scores=solved.scores)
    tokens = jax.ShapeDtypeStruct((*k.shape[:2], heads, (k if v is None else v).shape[-1]), _BF16)
    outs = ["out"] * (q is not None) + ["missing"] * save

    def step(chunk, S, left, hold, store, put):
        found = [_SQUARE] * (1 if q is None else 2)
        for memory, last in hold(S):

            def enter(held, *read, memory=memory, last=last):
                for sum, name in zip((held, *read), "kq", strict=False):
                    for keys, before in memory:
                        plgpu.wgmma(sum.ref, before, chunk[name].at[:, keys].transpose((1, 0)))
                if not last:
                    return [x.read() for x in (held, *read)]
                store(S)
                kept = decayed(chunk, S)
                columns = _columns(chunk, "enter")
                values = 0.0
                if v is not None:
                    values = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT).astype(_F32)
                missing = values - held.read(len(memory) * len(read)) * columns
                return kept, missing.astype(_BF16), [x.read() * (columns * scale) for x in read]

            found = wg.accumulators(enter, *found, interpret=interpret)
        kept, missing, read = found
        missing = wg.as_left(missing, left[0], interpret)
        solve = lambda x: plgpu.wgmma(x, missing, chunk["inverse"].transpose((1, 0)))  # noqa: E731
        (missing,) = wg.accumulate(solve, jnp.zeros(_SQUARE, _F32), interpret=interpret)
        saved = [missing.astype(_BF16)] * save
        exact = missing * _columns(chunk, "beta")
        leaving = wg.as_left(exact * _columns(chunk, "leave"), left[1], interpret)
        writes = exact.astype(_BF16)
        # What rounding takes from the writes is the largest part of the output's error.
        rest = wg.as_left(exact - writes.astype(_F32), left[2], interpret)
        writes = wg.as_left(writes, left[0], interpret)

        def leave(*sums):
            for out in sums[len(S) :]:
                plgpu.wgmma(out.ref, writes, chunk["scores"].transpose((1, 0)))
                plgpu.wgmma(out.ref, rest, chunk["scores"].transpose((1, 0)))
            for keys, piece in slices_of(S, sums):
                plgpu.wgmma(piece.ref, leaving, _written(chunk).at[:, keys])
            put(*(out.read(len(S)) for out in sums[len(S) :]), *saved)
            return tuple(piece.read() for piece in sums[: len(S)])

        return wg.accumulators(leave, *kept, *read, interpret=interpret)

    return scan(
        step, given, initial, k.shape[-1], tokens, outs, save=save, heads=heads, parts=parts, reverse=False,
        checkpoints=checkpoints, chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def scan_backward(
    q, k, d_out, solved: SolvedChunks, d_final, *, heads: int, scale: float, written=None, keep=None,
    save: bool = True, parts: int = 1, chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """Against time, from the gradient of the memory after the last chunk.

    Args:
        q: [B, T, *, K].
        k: [B, T, *, K].
        d_out: [B, T, heads, V].
        solved: of `heads` heads.
        d_final: [B * S, heads * parts, K, V] float32; None is 0.
        heads: of d_out; a multiple of those of q and k.
        scale: of q.
        written: as in `scan_forward`.
        keep: as in `scan_forward`.
        save: False returns the last alone.
        parts: as in `scan_forward`.
        chunk_bounds: as in `scan_forward`.
        interpret: parameters of the interpreter, or False.

    Returns:
        dv [B, T, heads, V], the turned gradients of the memories after each chunk [B, heads, N, V, K] bfloat16, and that of
        the memory before each part.
    """
    given = dict(q=q, k=k, v=d_out, **solved._asdict(), written=written, keep=keep)

    def step(chunk, S, left, hold, store, put):
        found = [_SQUARE]
        for memory, last in hold(S):

            def leave(later, *near, memory=memory, last=last):
                for keys, after in memory:
                    plgpu.wgmma(later.ref, after, _written(chunk).at[:, keys].transpose((1, 0)))
                if not last:
                    return [later.read()]
                turned = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
                plgpu.wgmma(near[0].ref, wg.as_left(turned, left[0], interpret), chunk["scores"])
                store(S)
                kept = decayed(chunk, S)
                writes = later.read() * _columns(chunk, "leave") + near[0].read(None)
                writes *= _columns(chunk, "beta")
                read = turned.astype(_F32) * (_columns(chunk, "enter") * scale)
                return kept, read.astype(_BF16), writes.astype(_BF16)

            found = wg.accumulators(leave, *found, *[_SQUARE] * last, interpret=interpret)
        kept, read, writes = found
        read, writes = wg.as_left(read, left[0], interpret), wg.as_left(writes, left[1], interpret)
        solve = lambda x: plgpu.wgmma(x, writes, chunk["inverse"])  # noqa: E731
        (dv,) = wg.accumulate(solve, jnp.zeros(_SQUARE, _F32), interpret=interpret)
        saved = [dv.astype(_BF16)] * save
        erased = wg.as_left(dv * -_columns(chunk, "enter"), left[1], interpret)

        def enter(*sums):
            for keys, piece in slices_of(S, sums):
                plgpu.wgmma(piece.ref, read, chunk["q"].at[:, keys])
                plgpu.wgmma(piece.ref, erased, chunk["k"].at[:, keys])
            put(*saved)
            return tuple(piece.read() for piece in sums)

        return wg.accumulators(enter, *kept, interpret=interpret)

    tokens = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    return scan(
        step, given, d_final, k.shape[-1], tokens, ["dv"] * save, save=save, heads=heads, parts=parts, reverse=True,
        chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def _columns(chunk, name):
    """One of `SolvedChunks.rows` as what multiplies the columns of [64, C], loaded where it is used: it takes 16 registers."""
    if name not in chunk:
        return 1.0
    vector = plgpu.load(chunk[name], layout=wg.LAYOUT.reduce(0))
    return wg.spread_columns(vector, _SQUARE)


def _written(chunk):
    return chunk["written"] if "written" in chunk else chunk["k"]
