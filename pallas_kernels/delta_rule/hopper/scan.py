"""The scans of the delta rule over the chunks of a row, on Mosaic GPU (Hopper).

`scan_forward` carries the memory S through the chunks in order, `scan_backward` its gradient in the opposite
order; `pallas_kernels.tiles.delta` has the formulas. A warpgroup has 64 value channels of a memory,
transposed, as accumulators [64, K] in registers (in pieces of 64 key channels for K = 256). Where that uses
the processors better, two warpgroups of a program share the tiles that a third one loads. Up to K = 128, the
left operand of every product is the result of the product before, in registers, so nothing of the chain of
products passes through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.compat import plgpu
from pallas_kernels.delta_rule.hopper import split_scan
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SolvedChunks
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.scan import decay_memory, scan, zip_with_keys

FORWARD: str | None = None
"""How the forward scan that stores only outputs is computed: "joint", by warpgroups that compute the outputs of the memory that they carry;
"split", with another warpgroup for the outputs (`split_scan`), where it fits; "scored", by "split", where without a derivative that warpgroup
also computes the scores; None is what the caller asks for.
"""
_F32, _BF16 = jnp.float32, jnp.bfloat16
_SQUARE = (CHUNK, CHUNK)


class SavedMemories(NamedTuple):
    """The arrays of all chunks that the forward scan of a delta rule stores, so that the backward pass does not compute them again.

    Attributes:
        missing: [B, T, h, V] bfloat16, the errors of the memories' predictions of v.
        states: [B, h, N, V, K] bfloat16, the transposed memories before each of the N chunks.
    """

    missing: jax.Array
    states: jax.Array


def scan_forward(
    q, k, v, solved: SolvedChunks, initial, *, heads: int, scale: float, save: bool = False,
    written=None, chunk_decay=None, parts: int = 1, checkpoints: int = 1, chunk_bounds=None, forward: str = "joint",
    interpret: Any = False,
):  # fmt: skip
    """Carry the delta rule's memory S [K, V] through the chunks of each row in order; compute the output, and
    the arrays that the backward pass reads.

    Args:
        q: [B, T, *, K] bfloat16, the queries; None computes no output.
        k: [B, T, *, K] bfloat16, the keys.
        v: [B, T, *, V] bfloat16, the values; None is v = 0 with V = K.
        solved: the inverses X of the chunks' triangular systems, the scores, beta and decays, of `heads`
            heads.
        initial: [B * S, heads * parts, K, V] float32, the memory before the first chunk; None is 0, or the
            identity if v is None.
        heads: number of heads of the output; a multiple of those of q, k and v.
        scale: the factor by which the queries q are multiplied.
        save: whether to return the memory before each chunk, and x, the errors of its predictions of v.
        written: [B, T, *, K] bfloat16, with a decay per key channel: the keys of the writes, decayed to the
            chunk's end. q and k are then decayed from the chunk's start, and `solved.rows` is beta alone.
            None uses k.
        chunk_decay: [B, heads, N * K] float32, with `written`: the decay of the memory's key channels over
            each of the N chunks.
        parts: number of parts that a row is split into; each is scanned from a separate initial memory.
        checkpoints: if more than 1, the memory is also returned before each of this number of equal parts of
            the row; requires `parts` 1.
        chunk_bounds: [B, S + 1], the chunks at which those of a row's S memories begin and end; None for one
            memory per row.
        forward: how outputs are computed where nothing else is stored, "joint", "split" or "scored"; `FORWARD` replaces it.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        In this order: with q, the output [B, T, heads, V] bfloat16; with `save`, x [B, T, heads, V] and the
            transposed memories before each chunk [B, heads, N, V, K], both bfloat16; with `checkpoints` above
            1, the checkpointed memories [B, heads * checkpoints, K, V] float32; always, the last memory of
            each part, in the shape of `initial`.
    """
    plain = written is None and not save and checkpoints == 1
    if (FORWARD or forward) != "joint" and plain and q is not None and v is not None:
        if split_scan.fits(k.shape[-1], v.shape[-1]):
            return split_scan.split_scan_forward(
                q, k, v, solved, initial, heads=heads, scale=scale, parts=parts, chunk_bounds=chunk_bounds, interpret=interpret
            )  # fmt: skip
    inputs = dict(q=q, k=k, v=v, inverse=solved.inverse, rows=solved.rows)
    inputs |= dict(written=written, chunk_decay=chunk_decay)
    if q is not None:
        inputs |= dict(scores=solved.scores)
    tokens = jax.ShapeDtypeStruct((*k.shape[:2], heads, (k if v is None else v).shape[-1]), _BF16)
    outputs = ["out"] * (q is not None) + ["missing"] * save
    step = functools.partial(
        _forward_step, outputs=q is not None, values=v is not None, save=save, scale=scale, interpret=interpret
    )  # fmt: skip
    return scan(
        step, inputs, initial, k.shape[-1], tokens, outputs, save=save, heads=heads, parts=parts, reverse=False,
        checkpoints=checkpoints, chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def _forward_step(
    chunk, S, left, operands, save_memory, store_outputs, *, outputs: bool, values: bool, save: bool, scale: float, interpret
):  # fmt: skip
    """Carry a memory of the delta rule through one chunk: return the memory after it, and store the chunk's
    output.

    `hopper.scan.scan` calls it for each chunk. All tiles are transposed: tokens are columns. The memory [64
    value channels, K] is a list of tiles, slices of its key channels.

    Args:
        chunk: references to the chunk's inputs in shared memory, by name.
        S: the memory before the chunk, tiles [64, K or 64] float32.
        left: buffers in shared memory for left operands of products, which only the interpreter uses.
        operands: function that yields some of the memory's tiles as left operands of products, and whether
            they are the last.
        save_memory: function that starts to store the memory before the chunk, if memories are saved.
        store_outputs: function that stores the results of the chunk's tokens.
        outputs: whether to compute what the queries read of the memory.
        values: whether there are values v; without them they are 0.
        save: whether to store x, the errors of the memory's predictions of v.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The memory after the chunk, tiles shaped like `S`.
    """
    partial = [_SQUARE] * (2 if outputs else 1)
    for memory, last in operands(S):
        read = functools.partial(
            _read_memory, chunk=chunk, S=S, memory=memory, last=last, save_memory=save_memory, values=values, scale=scale
        )  # fmt: skip
        partial = wg.with_accumulators(read, *partial, interpret=interpret)
    decayed_memory, errors, read = partial
    errors = wg.as_left(errors, left[0], interpret)
    solve = lambda x: plgpu.wgmma(x, errors, chunk["inverse"].transpose((1, 0)))  # noqa: E731
    (x,) = wg.accumulate(solve, jnp.zeros(_SQUARE, _F32), interpret=interpret)
    saved = [x.astype(_BF16)] * save
    exact = x * _columns(chunk, "beta")
    leaving = wg.as_left(exact * _columns(chunk, "write_decay"), left[1], interpret)
    writes = exact.astype(_BF16)
    # The rounding error of the writes would be the largest part of the output's error.
    rest = wg.as_left(exact - writes.astype(_F32), left[2], interpret)
    writes = wg.as_left(writes, left[0], interpret)

    def write(*sums):
        for out in sums[len(S) :]:
            plgpu.wgmma(out.ref, writes, chunk["scores"].transpose((1, 0)))
            plgpu.wgmma(out.ref, rest, chunk["scores"].transpose((1, 0)))
        for keys, piece in zip_with_keys(S, sums):
            plgpu.wgmma(piece.ref, leaving, _written(chunk).at[:, keys])
        store_outputs(*(out.read(len(S)) for out in sums[len(S) :]), *saved)
        return tuple(piece.read() for piece in sums[: len(S)])

    return wg.with_accumulators(write, *decayed_memory, *read, interpret=interpret)


def _read_memory(
    at_keys, *at_queries, chunk, S, memory, last: bool, save_memory, values: bool, scale: float
):
    """Compute what a chunk's keys and queries read of the memory, through some slices of the memory's key
    channels: add products to the sums so far. With the last slices, also compute the right side of the
    chunk's triangular system, and decay the memory.

    Args:
        at_keys: accumulator [64, C] of what the keys read of the memory, (k S)ᵀ.
        *at_queries: accumulator [64, C] of what the queries read of the memory, (q S)ᵀ, if there are queries.
        chunk: references to the chunk's inputs in shared memory, by name.
        S: the memory before the chunk, tiles [64, K or 64].
        memory: pairs of a slice of key channels and the memory's tile there, as left operand of products.
        last: whether `memory` contains the last of the tiles.
        save_memory: function that starts to store the memory before the chunk, if memories are saved.
        values: whether there are values v; without them they are 0.
        scale: the factor by which the queries q are multiplied.

    Returns:
        The sums; after the last tiles the decayed memory, the right side of the triangular system, (v - e^a ⊙
        (k S))ᵀ in bfloat16, and a list of what the queries read, (scale e^b ⊙ (q S))ᵀ, where e^a and e^b are the
        decays from the chunk's start up to a token's erase and up to its read.
    """
    for sum, name in zip((at_keys, *at_queries), "kq", strict=False):
        for keys, before in memory:
            plgpu.wgmma(sum.ref, before, chunk[name].at[:, keys].transpose((1, 0)))
    if not last:
        return [x.read() for x in (at_keys, *at_queries)]
    save_memory(S)
    decayed_memory = decay_memory(chunk, S)
    erase_decay = _columns(chunk, _erase_decay(chunk))
    v = 0.0
    if values:
        v = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT).astype(_F32)
    errors = v - at_keys.read(len(memory) * len(at_queries)) * erase_decay
    read_decay = erase_decay
    if at_queries and "erase_decay" in chunk:
        read_decay = _columns(chunk, "read_decay")
    return (
        decayed_memory,
        errors.astype(_BF16),
        [x.read() * (read_decay * scale) for x in at_queries],
    )


def scan_backward(
    q, k, d_out, solved: SolvedChunks, d_final, *, heads: int, scale: float, written=None, chunk_decay=None,
    save: bool = True, parts: int = 1, chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """Carry the gradient of the delta rule's memory through the chunks of each row, from the last to the
    first; compute the gradient of v.

    Args:
        q: [B, T, *, K] bfloat16, the queries.
        k: [B, T, *, K] bfloat16, the keys.
        d_out: [B, T, heads, V] bfloat16, the gradient of the output.
        solved: the inverses of the chunks' triangular systems, the scores, beta and decays, of `heads` heads.
        d_final: [B * S, heads * parts, K, V] float32, the gradient of the memory after the last chunk; None
            is 0.
        heads: number of heads of d_out; a multiple of those of q and k.
        scale: the factor by which the queries q are multiplied.
        written: [B, T, *, K] bfloat16, with a decay per key channel: the keys of the writes, decayed to the
            chunk's end. None uses k.
        chunk_decay: [B, heads, N * K] float32, with `written`: the decay of the memory's key channels over
            each of the N chunks.
        save: whether to return all results; False returns only the gradient of the memory before each part.
        parts: number of parts that a row is split into; each is scanned from a separate gradient of the
            memory after it.
        chunk_bounds: [B, S + 1], the chunks at which those of a row's S memories begin and end; None for one
            memory per row.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradient of v [B, T, heads, V] bfloat16, the transposed gradients of the memories after each chunk
        [B, heads, N, V, K] bfloat16, and the gradient of the memory before each part, in the shape of
        `d_final`.
    """
    inputs = dict(q=q, k=k, v=d_out, **solved._asdict(), written=written, chunk_decay=chunk_decay)
    tokens = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    step = functools.partial(_backward_step, save=save, scale=scale, interpret=interpret)
    return scan(
        step, inputs, d_final, k.shape[-1], tokens, ["dv"] * save, save=save, heads=heads, parts=parts, reverse=True,
        chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def _backward_step(
    chunk, S, left, operands, save_memory, store_outputs, *, save: bool, scale: float, interpret
):
    """Carry the gradient of a memory of the delta rule back through one chunk: return the gradient of the
    memory before the chunk, and store the gradient of v.

    `hopper.scan.scan` calls it for each chunk. All tiles are transposed: tokens are columns.

    Args:
        chunk: references to the chunk's inputs in shared memory, by name; `v` is the gradient of the output.
        S: the gradient of the memory after the chunk, tiles [64, K or 64] float32.
        left: buffers in shared memory for left operands of products, which only the interpreter uses.
        operands: function that yields some of the gradient's tiles as left operands of products, and whether
            they are the last.
        save_memory: function that starts to store the gradient of the memory after the chunk, if it is saved.
        store_outputs: function that stores the results of the chunk's tokens.
        save: whether to store the gradient of v.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    partial = [_SQUARE]
    for memory, last in operands(S):
        read = functools.partial(
            _read_gradient, chunk=chunk, S=S, memory=memory, last=last, save_memory=save_memory, left=left, scale=scale,
            interpret=interpret,
        )  # fmt: skip
        partial = wg.with_accumulators(read, *partial, *[_SQUARE] * last, interpret=interpret)
    decayed_gradient, read, writes = partial
    read, writes = wg.as_left(read, left[0], interpret), wg.as_left(writes, left[1], interpret)
    solve = lambda x: plgpu.wgmma(x, writes, chunk["inverse"])  # noqa: E731
    (dv,) = wg.accumulate(solve, jnp.zeros(_SQUARE, _F32), interpret=interpret)
    saved = [dv.astype(_BF16)] * save
    erased = wg.as_left(dv * -_columns(chunk, _erase_decay(chunk)), left[1], interpret)

    def add(*sums):
        for keys, piece in zip_with_keys(S, sums):
            plgpu.wgmma(piece.ref, read, chunk["q"].at[:, keys])
            plgpu.wgmma(piece.ref, erased, chunk["k"].at[:, keys])
        store_outputs(*saved)
        return tuple(piece.read() for piece in sums)

    return wg.with_accumulators(add, *decayed_gradient, interpret=interpret)


def _read_gradient(
    later, *scores, chunk, S, memory, last: bool, save_memory, left, scale: float, interpret
):
    """Compute the gradient of a chunk's writes u = beta ⊙ x, where x are the errors of the memory's
    predictions, through some slices of the key channels of the memory's gradient: add products to the sum so
    far. With the last slices, add the term through the output, and decay the gradient of the memory.

    Args:
        later: accumulator [64, C] of the products of the memory's gradient dS' with the keys of the writes,
            (k dS')ᵀ.
        *scores: with the last tiles, an accumulator [64, C] of the scores P times the output's gradient,
            (Pᵀ dO)ᵀ.
        chunk: references to the chunk's inputs in shared memory, by name; `v` is the gradient of the output.
        S: the gradient of the memory after the chunk, tiles [64, K or 64].
        memory: pairs of a slice of key channels and the gradient's tile there, as left operand of products.
        last: whether `memory` contains the last of the tiles.
        save_memory: function that starts to store the gradient of the memory after the chunk, if it is saved.
        left: buffers in shared memory for left operands of products, which only the interpreter uses.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The sum; after the last tiles the decayed gradient of the memory, and in bfloat16 (scale e^b ⊙ dO)ᵀ,
        where e^b is the decay from the chunk's start, and (beta ⊙ du)ᵀ.
    """
    for keys, after in memory:
        plgpu.wgmma(later.ref, after, _written(chunk).at[:, keys].transpose((1, 0)))
    if not last:
        return [later.read()]
    d_out = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
    plgpu.wgmma(scores[0].ref, wg.as_left(d_out, left[0], interpret), chunk["scores"])
    save_memory(S)
    decayed_gradient = decay_memory(chunk, S)
    writes = later.read() * _columns(chunk, "write_decay") + scores[0].read(None)
    writes *= _columns(chunk, "beta")
    read = d_out.astype(_F32) * (_columns(chunk, "read_decay") * scale)
    return decayed_gradient, read.astype(_BF16), writes.astype(_BF16)


def _columns(chunk, name):
    """Return beta or a decay of the chunk's tokens (the input `name`) as a tile [64, C] with token j's value
    in every row of column j, to multiply transposed tiles; 1 if the chunk has no such input.

    It is loaded again at each use, since it occupies 16 registers.
    """
    if name not in chunk:
        return 1.0
    vector = plgpu.load(chunk[name], layout=wg.LAYOUT.reduce(0))
    return wg.spread_columns(vector, _SQUARE)


def _erase_decay(chunk) -> str:
    """Return the name of the chunk's input with the decay of the memory from the chunk's start to each token's erase."""
    return "erase_decay" if "erase_decay" in chunk else "read_decay"


def _written(chunk):
    """Return a reference [C, K] to the keys with which a chunk's tokens write to the memory. With a decay per
    key channel they are decayed to the chunk's end.
    """
    return chunk["written"] if "written" in chunk else chunk["k"]
