"""The scans of a diagonal-plus-low-rank memory (RWKV7) over the chunks of a row, on Mosaic GPU (Hopper), and
the gradient of v.

    u = solved_a S + values v        O = read S + scores u + scores_values v        S' = chunk_decay S + writtenᵀ u + written_valuesᵀ v

where S is the memory before a chunk, S' after it and O the output, with `solved_a` and `values` of
`SolvedChunks` and the other names of `DecayedChunks`; u [C, V] is what the vectors `a` read of the memory,
which the vectors b write back. Backward, from the gradient dS' of the memory after the chunk and dO of the
output:

    du = scoresᵀ dO + written dS'            dS = chunk_decay dS' + readᵀ dO + solved_aᵀ du
    dv = scores_valuesᵀ dO + valuesᵀ du + written_values dS'
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.dplr.hopper.chunk_forward import DecayedChunks
from pallas_kernels.dplr.hopper.solve import SolvedChunks
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import row_and_head
from pallas_kernels.hopper.halving import CHUNK, SQUARE
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.scan import decay_memory, scan, zip_with_keys

_BLOCK = 64
_F32, _BF16 = jnp.float32, jnp.bfloat16


def scan_forward(
    chunks: DecayedChunks, solved: SolvedChunks, v, initial, *, save: bool = False, read: bool = True,
    parts: int = 1, chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """Carry a diagonal-plus-low-rank memory through the chunks of each row in order; compute the output, and
    the arrays that the backward pass reads.

    Args:
        chunks: the decayed scores and tokens of all chunks of h heads, and the chunks' decays.
        solved: the inverses of the chunks' triangular systems, and their products, of h heads.
        v: [B, T, *, V] bfloat16, the values; None is v = 0 with V = K.
        initial: [B * S, h * parts, K, V] float32, the memory before the first chunk; None is 0, or the
            identity if v is None.
        save: whether to return u, what `a` reads of the memory, and the memory before each chunk.
        read: whether to compute the output; without it, and without `save`, only the last memories are
            returned.
        parts: number of parts that a row is split into; each is scanned from a separate initial memory.
        chunk_bounds: [B, S + 1], the chunks at which those of a row's S memories begin and end; None for one
            memory per row.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        In this order: with `read`, the output [B, T, h, V] bfloat16; with `save`, u [B, T, h, V] and the
        transposed memories before each of the N chunks [B, h, N, V, K], both bfloat16; always, the last memory
        of each part, in the shape of `initial`.
    """
    (batch, length, heads, depth), width = chunks.written.shape, chunks.written.shape[-1]
    inputs = dict(a=solved.solved_a, written=chunks.written, chunk_decay=chunks.chunk_decay)
    if v is not None:
        inputs |= dict(k=chunks.written_values, v=v, values=solved.values)
        width = v.shape[-1]
    if read:
        inputs |= dict(q=chunks.read, scores=chunks.scores, scores_values=chunks.scores_values)
    tokens = jax.ShapeDtypeStruct((batch, length, heads, width), _BF16)
    step = functools.partial(
        _forward_step, values=v is not None, read=read, save=save, interpret=interpret
    )
    outputs = ["out"] * read + ["a_read"] * save
    return scan(
        step, inputs, initial, depth, tokens, outputs, save=save, heads=heads, parts=parts, reverse=False,
        chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def _forward_step(
    chunk,
    S,
    left,
    operands,
    save_memory,
    store_outputs,
    *,
    values: bool,
    read: bool,
    save: bool,
    interpret,
):
    """Carry a diagonal-plus-low-rank memory through one chunk: return the memory after it, and store the
    chunk's output.

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
        values: whether there are values v; without them they are 0.
        read: whether to compute the outputs.
        save: whether to store u, what `a` reads of the memory.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The memory after the chunk, tiles shaped like `S`.
    """
    v = None
    if values:
        v = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
        v = wg.as_left(v, left[0], interpret)
    partial = [SQUARE] * (2 if read else 1)
    for memory, last in operands(S):
        add = functools.partial(
            _read_memory, chunk=chunk, S=S, memory=memory, last=last, save_memory=save_memory, v=v
        )
        partial = wg.with_accumulators(add, *partial, interpret=interpret)
    decayed_memory, rounded, rest, outputs = partial
    rest, u = wg.as_left(rest, left[2], interpret), wg.as_left(rounded, left[1], interpret)

    def write(*sums):
        for out in sums[len(S) :]:
            plgpu.wgmma(out.ref, u, chunk["scores"].transpose((1, 0)))
            plgpu.wgmma(out.ref, rest, chunk["scores"].transpose((1, 0)))
        for keys, piece in zip_with_keys(S, sums):
            plgpu.wgmma(piece.ref, u, chunk["written"].at[:, keys])
            if values:
                plgpu.wgmma(piece.ref, v, chunk["k"].at[:, keys])
        pending = len(S) * (2 if values else 1)
        store_outputs(*(out.read(pending) for out in sums[len(S) :]), *[rounded] * save)
        return tuple(piece.read() for piece in sums[: len(S)])

    return wg.with_accumulators(write, *decayed_memory, *outputs, interpret=interpret)


def _read_memory(*sums, chunk, S, memory, last: bool, save_memory, v):
    """Compute what a chunk's `a` and q read of the memory and of the chunk's values, through some slices of
    the memory's key channels: add products to the sums so far. With the last slices, also decay the memory.

    Args:
        *sums: accumulators [64, C] of u, what `a` reads, transposed, and, if the outputs are computed, of the
            output without its term through u, (read S + scores_values v)ᵀ.
        chunk: references to the chunk's inputs in shared memory, by name.
        S: the memory before the chunk, tiles [64, K or 64].
        memory: pairs of a slice of key channels and the memory's tile there, as left operand of products.
        last: whether `memory` contains the last of the tiles.
        save_memory: function that starts to store the memory before the chunk, if memories are saved.
        v: the transposed values vᵀ [64, C] as the left operand of products, or None.

    Returns:
        The sums; after the last tiles the decayed memory, uᵀ in bfloat16, the rounding error of uᵀ, and a
        list with the sum of the output, or an empty one.
    """
    names = [("a", "values"), ("q", "scores_values")][: len(sums)]
    for sum, (of_memory, of_values) in zip(sums, names, strict=True):
        for keys, before in memory:
            plgpu.wgmma(sum.ref, before, chunk[of_memory].at[:, keys].transpose((1, 0)))
        if last and v is not None:
            plgpu.wgmma(sum.ref, v, chunk[of_values].transpose((1, 0)))
    if not last:
        return [x.read() for x in sums]
    save_memory(S)
    decayed_memory = decay_memory(chunk, S)
    exact = sums[0].read((len(memory) + (v is not None)) * (len(sums) - 1))
    u = exact.astype(_BF16)
    rest = (exact - u.astype(_F32)).astype(_BF16)
    return decayed_memory, u, rest, [x.read() for x in sums[1:]]


def scan_backward(
    chunks: DecayedChunks, solved: SolvedChunks, d_out, d_final, *, save: bool = True, parts: int = 1,
    chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """Carry the gradient of a diagonal-plus-low-rank memory through the chunks of each row, from the last to
    the first, and compute du, the gradient of what `a` reads of the memory.

    Args:
        chunks: the decayed scores and tokens of all chunks of h heads, and the chunks' decays.
        solved: the inverses of the chunks' triangular systems, and their products, of h heads.
        d_out: [B, T, h, V] bfloat16, the gradient of the output.
        d_final: [B * S, h * parts, K, V] float32, the gradient of the memory after the last chunk; None is 0.
        save: whether to return all results; False returns only the gradient of the memory before each part.
        parts: number of parts that a row is split into; each is scanned from a separate gradient of the
            memory after it.
        chunk_bounds: [B, S + 1], the chunks at which those of a row's S memories begin and end; None for one
            memory per row.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradient du [B, T, h, V] bfloat16, the transposed gradients of the memories after each of the N
        chunks [B, h, N, V, K] bfloat16, and the gradient of the memory before each part, in the shape of
        `d_final`.
    """
    inputs = dict(
        a=solved.solved_a, written=chunks.written, q=chunks.read, v=d_out, scores=chunks.scores, chunk_decay=chunks.chunk_decay
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    step = functools.partial(_backward_step, save=save, interpret=interpret)
    return scan(
        step, inputs, d_final, chunks.read.shape[-1], tokens, ["d_a_read"] * save, save=save,
        heads=d_out.shape[2], parts=parts, reverse=True, chunk_bounds=chunk_bounds, interpret=interpret,
    )  # fmt: skip


def _backward_step(chunk, S, left, operands, save_memory, store_outputs, *, save: bool, interpret):
    """Carry the gradient of a diagonal-plus-low-rank memory back through one chunk: return the gradient of
    the memory before the chunk, and store du, the gradient of what `a` reads of the memory.

    `hopper.scan.scan` calls it for each chunk. All tiles are transposed: tokens are columns.

    Args:
        chunk: references to the chunk's inputs in shared memory, by name; `v` is the gradient of the output.
        S: the gradient of the memory after the chunk, tiles [64, K or 64] float32.
        left: buffers in shared memory for left operands of products, which only the interpreter uses.
        operands: function that yields some of the gradient's tiles as left operands of products, and whether
            they are the last.
        save_memory: function that starts to store the gradient of the memory after the chunk, if it is saved.
        store_outputs: function that stores the results of the chunk's tokens.
        save: whether to store du.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    d_out = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
    d_out = wg.as_left(d_out, left[0], interpret)
    partial: Any = SQUARE
    for memory, last in operands(S):

        def read(sum, memory=memory, last=last):
            for keys, after in memory:
                plgpu.wgmma(sum.ref, after, chunk["written"].at[:, keys].transpose((1, 0)))
            if not last:
                return sum.read()
            plgpu.wgmma(sum.ref, d_out, chunk["scores"])
            save_memory(S)
            decayed_gradient = decay_memory(chunk, S)
            return decayed_gradient, sum.read().astype(_BF16)

        partial = wg.with_accumulators(read, partial, interpret=interpret)
    decayed_gradient, rounded = partial
    du = wg.as_left(rounded, left[1], interpret)

    def add(*sums):
        for keys, piece in zip_with_keys(S, sums):
            plgpu.wgmma(piece.ref, d_out, chunk["q"].at[:, keys])
            plgpu.wgmma(piece.ref, du, chunk["a"].at[:, keys])
        store_outputs(*[rounded] * save)
        return tuple(piece.read() for piece in sums)

    return wg.with_accumulators(add, *decayed_gradient, interpret=interpret)


def values_backward(
    chunks: DecayedChunks,
    solved: SolvedChunks,
    d_out,
    d_a_read,
    d_states,
    *,
    interpret: Any = False,
):
    """Compute, for all chunks in parallel, the gradient of v and Xᵀ du, the gradient of the right side of the
    triangular systems (of the sum that X multiplies).

    X is the inverse of a chunk's triangular system, and du the gradient of what `a` reads of the memory.

    Args:
        chunks: the decayed scores and tokens of all chunks of h heads.
        solved: the inverses of the chunks' triangular systems, and their products, of h heads.
        d_out: [B, T, h, V] bfloat16, the gradient of the output.
        d_a_read: [B, T, h, V] bfloat16, the gradient du, from `scan_backward`.
        d_states: [B, h, N, V, K] bfloat16, the transposed gradient of the memory after each of the N chunks,
            from `scan_backward`.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The gradient of v and Xᵀ du, [B, T, h, V] bfloat16 each.
    """
    batch, length, heads, width = d_out.shape
    depth = chunks.read.shape[-1]
    inputs = dict(
        d_out=d_out, d_a_read=d_a_read, written=chunks.written_values, scores=chunks.scores_values,
        values=solved.values, inverse=solved.inverse, d_states=d_states,
    )  # fmt: skip
    sizes = dict.fromkeys(inputs, SQUARE) | dict(
        d_out=(CHUNK, width), d_a_read=(CHUNK, width), written=(CHUNK, depth), d_states=(width, depth)
    )  # fmt: skip
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    # Allocated in the order of the names: `run_scoped` sorts a dictionary.
    buffers = {name: tile(size) for name, size in sizes.items()}

    def kernel(refs):
        b, h = row_and_head(heads)
        n = lax.axis_index("chunk")
        tokens = pl.ds(n * CHUNK, CHUNK)
        chunk = {name: ref.at[b, tokens, h] for name, ref in refs.items()}
        squares = ("scores", "values", "inverse")
        chunk |= {name: refs[name].at[b, h, tokens] for name in squares}
        chunk["d_states"] = refs["d_states"].at[b, h, n]
        body = functools.partial(_values_backward_chunk, chunk, interpret=interpret)
        pl.run_scoped(body, buffers, plgpu.Barrier(num_arrivals=len(inputs)))

    struct = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    result = launch(
        kernel,
        inputs=inputs,
        outputs=dict(dv=struct, d_right_side=struct),
        grid=dict(row=batch * heads, chunk=length // CHUNK),
        name="dplr_values_backward",
        interpret=interpret,
    )
    return list(result.values())


def _values_backward_chunk(refs: dict[str, Any], buffers: dict[str, Any], loaded, *, interpret):
    """Compute and store the gradient of v and that of the right side of the triangular system, [C, V] each,
    of one chunk and head of a diagonal-plus-low-rank memory.

    `refs` are the chunk's inputs and outputs in global memory, `buffers` the inputs' buffers in shared
    memory, by name; `loaded` is the barrier at which the inputs are loaded.
    """
    for name, to in buffers.items():
        plgpu.copy_gmem_to_smem(refs[name], to, loaded)
    plgpu.barrier_wait(loaded)
    scores, values, inverse = (buffers[name] for name in ("scores", "values", "inverse"))
    for column in range(buffers["d_out"].shape[1] // _BLOCK):
        columns = pl.ds(column * _BLOCK, _BLOCK)
        d_out, d_a_read = (buffers[name].at[:, columns] for name in ("d_out", "d_a_read"))
        d_state = buffers["d_states"].at[columns]

        def products(dv, d_right_side, d_out=d_out, d_a_read=d_a_read, d_state=d_state):
            plgpu.wgmma(dv, scores.transpose((1, 0)), d_out)
            plgpu.wgmma(dv, values.transpose((1, 0)), d_a_read)
            plgpu.wgmma(dv, buffers["written"], d_state.transpose((1, 0)))
            plgpu.wgmma(d_right_side, inverse.transpose((1, 0)), d_a_read)

        zeros = jnp.zeros(SQUARE, _F32)
        dv, d_right_side = wg.accumulate(products, zeros, zeros, interpret=interpret)
        d_out[...] = dv.astype(_BF16)  # no longer read
        d_a_read[...] = d_right_side.astype(_BF16)
    plgpu.commit_smem()
    for name, source in (("dv", "d_out"), ("d_right_side", "d_a_read")):
        plgpu.copy_smem_to_gmem(buffers[source], refs[name])
    plgpu.wait_smem_to_gmem(0)
