"""The phase `chunk_forward` of the delta rule without decay or with a scalar decay, on Mosaic GPU (Hopper).

One warpgroup computes one chunk: the decayed scores P of queries with keys, the inverse X of the triangular system, and the decays
of its tokens. None of them depends on the memory, so all chunks run in parallel. `pallas_kernels.tiles.delta` has the
formulas.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import unit_inverse
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import head_index, row_and_head
from pallas_kernels.hopper.launch import launch

CHUNK = 64
SQUARE = (CHUNK, CHUNK)
_F32, _BF16 = jnp.float32, jnp.bfloat16


class SolvedChunks(NamedTuple):
    """The arrays of all chunks that the scans of the delta rule read: inverses of their triangular systems, scores,
    beta and decays.

    b are the inclusive sums of the log decays over a chunk of C tokens, b_C the sum over the whole chunk.

    Attributes:
        inverse: [B, heads, T, C] bfloat16, each token's row of X, the inverse of its chunk's triangular system.
        scores: [B, heads, T, C] bfloat16, each token's row of P, its chunk's decayed scores of queries with keys; None if the scan
            computes them.
        rows: [B, heads, T] float32, beta; or [B, heads, T * 3] with beta, e^b and e^(b_C - b) of each chunk
            one after the other; or [B, heads, T * 4] with e^a too, if keys read the undecayed memory (a: the sums
            without a token's own log decay). Without scores, where there are decays or documents, b and, with documents, the numbers of
            the tokens' documents follow.
    """

    inverse: jax.Array
    scores: jax.Array | None
    rows: jax.Array


class Chunk(NamedTuple):
    """Beta, decays and documents of the C tokens of one chunk for one head, in registers of a warpgroup.

    b are the inclusive sums of the log decays over the chunk, b_C the sum over the whole chunk.

    Attributes:
        i: [C, C], the index of the row of each entry.
        j: [C, C], the index of the column of each entry.
        over_columns: function from a value per row, [C], to a tile [C, C] with the value of row j in column
            j.
        beta: [C], beta of each token.
        weights: [C, C], the decay from token j to token i where i >= j are in one document, else 0.
        erase_weights: [C, C], the decay from token j to the erase of token i where i > j are in one document; elsewhere
            it is not used. The same as `weights` if keys read the decayed memory.
        same_document: [C, C], whether two tokens belong to one document; None if all do.
        read_decay: [C], e^b, the decay of the memory before the chunk where a token reads it; None where it is 1.
        write_decay: [C], e^(b_C - b), the decay of a token's write at the chunk's end; None where it is 1.
        erase_decay: [C], the decay of the memory before the chunk where a token erases; None where it is 1. The same as
            `read_decay` if keys read the decayed memory.
        sums: [C], b; None if there is no decay.
        run: [C], the number of each token's document; None if there is one document.
    """

    i: Any
    j: Any
    over_columns: Any
    beta: Any
    weights: Any
    erase_weights: Any
    same_document: Any
    read_decay: Any
    write_decay: Any
    erase_decay: Any
    sums: Any
    run: Any


def read_chunk(refs: dict[str, Any], b, h, heads: int, chunk, vector, erase: str) -> Chunk:
    """Load beta of one chunk and head of the delta rule, and compute the chunk's decays (scalar or none) and
    the masks of its documents, as a `Chunk`.

    Args:
        refs: references to global memory: beta [B, T, G], optionally log_decay [B, T, G] and run [B, T].
        b: index of the row in the batch.
        h: index of the head of the output.
        heads: number of heads of the output; a multiple of G.
        chunk: index of the chunk in the row.
        vector: a buffer [C] float32 in shared memory, through which values of tokens become columns.
        erase: "decayed" or "undecayed", the memory that keys read; the latter requires log_decay.
    """
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    memory = head_index(refs["beta"], h, heads)

    def load(ref, axis=1):
        return plgpu.load(ref, layout=wg.LAYOUT.reduce(axis), optimized=False)

    def over_columns(x):
        vector[...] = x
        plgpu.commit_smem()
        return wg.spread_columns(load(vector, 0), SQUARE)

    i = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=wg.LAYOUT)
    j = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=wg.LAYOUT)
    seen = i >= j
    weights = jnp.where(seen, 1.0, 0.0)
    same_document = read_decay = write_decay = sums = run = None
    erase_weights = erase_decay = None
    if "log_decay" in refs:
        # e^-104 is 0 in float32. A larger bound than -128 would cost the other sums precision.
        decay = over_columns(jnp.maximum(load(refs["log_decay"].at[b, tokens, memory]), -128.0))
        sums = jnp.sum(jnp.where(seen, decay, 0.0), axis=1)
        # The sum of the rows after, not a difference of two sums: nothing cancels.
        write_decay = jnp.exp(jnp.sum(jnp.where(seen, 0.0, decay), axis=1))
        read_decay = jnp.exp(sums)
        rows, columns = wg.spread_rows(sums, SQUARE), over_columns(sums)
        weights = jnp.exp(jnp.where(seen, rows - columns, wg.NEVER))
        if erase == "undecayed":
            before = jnp.sum(jnp.where(i > j, decay, 0.0), axis=1)
            erase_decay = jnp.exp(before)
            rows = wg.spread_rows(before, SQUARE)
            erase_weights = jnp.exp(jnp.where(i > j, rows - columns, wg.NEVER))
    if "run" in refs:
        runs = refs["run"].at[b]
        run = load(runs.at[tokens])
        of_row = wg.spread_rows(run, SQUARE)
        same_document = of_row == wg.spread_columns(load(runs.at[tokens], 0), SQUARE)
        weights = jnp.where(same_document, weights, 0.0)
        if erase_weights is not None:
            erase_weights = jnp.where(same_document, erase_weights, 0.0)
        before = jnp.where(chunk == 0, 0, runs[jnp.maximum(chunk * CHUNK - 1, 0)])
        one = jnp.ones_like(run, _F32)
        read_decay = jnp.where(run == before, one if read_decay is None else read_decay, 0.0)
        if erase_decay is not None:
            erase_decay = jnp.where(run == before, erase_decay, 0.0)
        last = runs[chunk * CHUNK + CHUNK - 1]
        write_decay = jnp.where(run == last, one if write_decay is None else write_decay, 0.0)
    beta = load(refs["beta"].at[b, tokens, memory])
    if erase == "decayed":
        erase_weights, erase_decay = weights, read_decay
    return Chunk(
        i, j, over_columns, beta, weights, erase_weights, same_document, read_decay, write_decay, erase_decay, sums, run
    )  # fmt: skip


class _Smem(NamedTuple):
    """Buffers in shared memory of a warpgroup that computes the scores and the inverse of the triangular system of one chunk.

    Attributes:
        q: [C, K] bfloat16, the queries.
        k: [C, K] bfloat16, the keys.
        right: [C, C] bfloat16, the right operand of the inverse's products.
        result: [C, C] bfloat16, the scores P, then the inverse X, on the way to global memory.
        vector: [C] float32, for `read_chunk`.
        loaded: the barrier at which the loads of q and k are complete.
        left: two [C, C] bfloat16 for the interpreter, which reads left operands from shared memory; else
            empty.
    """

    q: Any
    k: Any
    right: Any
    result: Any
    vector: Any
    loaded: Any
    left: list[Any]


def chunk_forward(
    q, k, beta, log_decay, run, *, heads: int, scale: float, erase: str, method: str = "doubled", interpret: Any = False
) -> SolvedChunks:  # fmt: skip
    """Compute, for all chunks in parallel, the arrays of the delta rule with a scalar decay or none that do
    not depend on the memory: the inverse of each chunk's triangular system, its decayed scores of queries
    with keys, beta and the decays. Return them as `SolvedChunks`.

    Args:
        q: [B, T, *, K] bfloat16, the queries; None computes no scores.
        k: [B, T, *, K] bfloat16, the keys.
        beta: [B, T, G] float32, beta of each token and memory.
        log_decay: [B, T, G] float32, the log decay of each memory, or None.
        run: [B, T] int32, the number of each token's document, or None for one document per row.
        heads: number of heads of the result; a multiple of those of q, of k and of G.
        scale: the factor by which the queries q are multiplied.
        erase: "decayed" or, with a log decay, "undecayed", the memory that keys read.
        method: how systems are inverted, "doubled" or "blocks" (`unit_inverse`).
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    method = unit_inverse.METHOD or method
    batch, length, _, depth = k.shape
    factors = 1 if log_decay is None and run is None else 4 if erase == "undecayed" else 3
    smem: Any = plgpu.SMEM
    struct = jax.ShapeDtypeStruct
    square = struct((batch, heads, length, CHUNK), _BF16)
    extra = 0 if q is not None or factors == 1 else 1 + (run is not None)
    count = factors + extra
    rows = struct((batch, heads, length * count), _F32)
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    buffers = _Smem(
        q=None if q is None else tile((CHUNK, depth)),
        k=tile((CHUNK, depth)),
        right=tile(SQUARE),
        result=tile(SQUARE),
        vector=smem((CHUNK,), _F32),
        loaded=plgpu.Barrier(num_arrivals=1 if q is None else 2),
        left=[tile(SQUARE), tile(SQUARE)] if interpret else [],
    )

    def kernel(refs):
        b, h = row_and_head(heads)
        chunk = lax.axis_index("chunk")
        tokens = pl.ds(chunk * CHUNK, CHUNK)

        def body(buffers: _Smem):
            for name, to in (("k", buffers.k), ("q", buffers.q))[: 1 if q is None else 2]:
                source = refs[name].at[b, tokens, head_index(refs[name], h, heads)]
                plgpu.copy_gmem_to_smem(source, to, buffers.loaded)
            x = read_chunk(refs, b, h, heads, chunk, buffers.vector, erase)
            values = [x.beta, x.read_decay, x.write_decay, x.erase_decay][:factors]
            if extra:
                # A constant has no layout by itself, so that a store of 64 entries would not compile.
                no_sums = plgpu.layout_cast(jnp.zeros(CHUNK, _F32), wg.LAYOUT.reduce(1))
                values.append(no_sums if x.sums is None else x.sums)
                values += [] if x.run is None else [x.run.astype(_F32)]
            for index, value in enumerate(values):
                at = pl.ds((chunk * count + index) * CHUNK, CHUNK)
                refs["rows"].at[b, h, at][...] = value
            plgpu.barrier_wait(buffers.loaded)
            stored = {
                name: ref.at[b, h, tokens]
                for name, ref in refs.items()
                if name in ("scores", "inverse")
            }
            _solve(x, buffers, stored, scale, method, interpret)

        pl.run_scoped(body, buffers)

    result = launch(
        kernel,
        inputs=dict(q=q, k=k, beta=beta, log_decay=log_decay, run=run),
        outputs=dict(inverse=square, scores=None if q is None else square, rows=rows),
        grid=dict(row=batch * heads, chunk=length // CHUNK),
        name="delta_chunk_forward",
        interpret=interpret,
    )
    return SolvedChunks(result["inverse"], result.get("scores"), result["rows"])


def _solve(
    x: Chunk, buffers: _Smem, stored: dict[str, Any], scale: float, method: str, interpret
) -> None:
    """Compute the decayed scores P of a chunk's queries with its keys, and the inverse X of its triangular
    system, and store them in global memory (`stored`: references to "scores", unless they are left out, and "inverse", [C, C] bfloat16).

    `x` has beta, decays and documents of the chunk; the chunk's q and k are in the shared-memory `buffers`.
    """
    q, k, result = buffers.q, buffers.k, buffers.result

    def products(*lefts):
        def add(*sums):
            for out, left in zip(sums, lefts, strict=True):
                plgpu.wgmma(out, left, k.transpose((1, 0)))

        return wg.accumulate(add, *[jnp.zeros(SQUARE, _F32) for _ in lefts], interpret=interpret)

    alike = None
    if "scores" in stored:
        # One after the other leaves enough registers for four thread blocks on a processor, if the inverse requires no more.
        together = method == "doubled"
        *alike, scores = products(k, q) if together else products(q)
        result[...] = (scores * (x.weights * scale)).astype(_BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, stored["scores"])
    (alike,) = alike or products(k)
    strict = jnp.where(x.i > x.j, alike * x.erase_weights * x.over_columns(x.beta), 0.0)
    inverse = unit_inverse.unit_inverse(
        strict, x.i ^ x.j, buffers.right, buffers.left, interpret, method=method
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    result[...] = inverse.astype(_BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, stored["inverse"])
    plgpu.wait_smem_to_gmem(0)
