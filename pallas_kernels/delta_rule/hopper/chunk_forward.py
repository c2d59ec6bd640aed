"""What a chunk of the delta rule does before any memory is known, on Mosaic GPU (Hopper): a warpgroup a chunk."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.tiles import delta as tiles

CHUNK = 64
SQUARE = (CHUNK, CHUNK)
_F32, _BF16 = jnp.float32, jnp.bfloat16


class Prepared(NamedTuple):
    """By head and token; of a chunk, `tiles` has the names.

    Attributes:
        inverse: [B, heads, T, C] bfloat16, X a chunk.
        scores: [B, heads, T, C] bfloat16, P a chunk.
        rows: [B, heads, T * (1 or 3)] float32, by chunk beta and, where they are not all 1, e^b and e^(b_C - b).
    """

    inverse: jax.Array
    scores: jax.Array
    rows: jax.Array


class Chunk(NamedTuple):
    """A chunk in registers.

    Attributes:
        i: [C, C], the row.
        j: [C, C], the column.
        turn: one value a row -> one a column, spread over [C, C].
        beta: one a row.
        weights: [C, C], G.
        same: [C, C], where two tokens are of one document; None with one document alone.
        enter: e^b a row; None where it is 1.
        leave: e^(b_C - b) a row; None where it is 1.
    """

    i: Any
    j: Any
    turn: Any
    beta: Any
    weights: Any
    same: Any
    enter: Any
    leave: Any


def read_chunk(refs: dict[str, Any], b, h, heads: int, chunk, vector) -> Chunk:
    """Read beta, decays and documents.

    Args:
        refs: in global memory: beta [B, T, G], and perhaps log_decay [B, T, G] and run [B, T].
        b: index of the row.
        h: index of the head.
        heads: of how many; a multiple of G.
        chunk: index of the chunk.
        vector: buffer for [C] float32 in shared memory.
    """
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    own = lax.div(h * refs["beta"].shape[2], heads)

    def rows(ref, axis=1):
        return plgpu.load(ref, layout=wg.LAYOUT.reduce(axis), optimized=False)

    def turn(x):
        vector[...] = x
        plgpu.commit_smem()
        return wg.spread_columns(rows(vector, 0), SQUARE)

    i = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=wg.LAYOUT)
    j = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=wg.LAYOUT)
    seen = i >= j
    weights = jnp.where(seen, 1.0, 0.0)
    same = enter = leave = None
    if "log_decay" in refs:
        # Below -104 nothing is left in float32; larger sums would cost the others their precision.
        decay = turn(jnp.maximum(rows(refs["log_decay"].at[b, tokens, own]), -128.0))
        sums = jnp.sum(jnp.where(seen, decay, 0.0), axis=1)
        # A sum of the rows after, not a difference: nothing cancels.
        leave = jnp.exp(jnp.sum(jnp.where(seen, 0.0, decay), axis=1))
        enter = jnp.exp(sums)
        weights = jnp.exp(jnp.where(seen, wg.spread_rows(sums, SQUARE) - turn(sums), wg.NEVER))
    if "run" in refs:
        runs = refs["run"].at[b]
        run = rows(runs.at[tokens])
        same = wg.spread_rows(run, SQUARE) == wg.spread_columns(rows(runs.at[tokens], 0), SQUARE)
        weights = jnp.where(same, weights, 0.0)
        before = jnp.where(chunk == 0, 0, runs[jnp.maximum(chunk * CHUNK - 1, 0)])
        one = jnp.ones_like(run, _F32)
        enter = jnp.where(run == before, one if enter is None else enter, 0.0)
        last = runs[chunk * CHUNK + CHUNK - 1]
        leave = jnp.where(run == last, one if leave is None else leave, 0.0)
    beta = rows(refs["beta"].at[b, tokens, own])
    return Chunk(i, j, turn, beta, weights, same, enter, leave)


def chunk_forward(
    q, k, beta, log_decay, run, *, heads: int, scale: float, interpret: Any = False
) -> Prepared:
    """The kernel, over all chunks.

    Args:
        q: [B, T, *, K] bfloat16.
        k: [B, T, *, K] bfloat16.
        beta: [B, T, G] float32.
        log_decay: [B, T, G] float32, or None.
        run: [B, T] int32, or None.
        heads: of the result; a multiple of those of q, k and of G.
        scale: of q.
        interpret: parameters of the interpreter, or False.
    """
    batch, length, _, depth = k.shape
    given = dict(q=q, k=k, beta=beta, log_decay=log_decay, run=run)
    named = {name: x for name, x in given.items() if x is not None}
    decays = log_decay is not None or run is not None
    struct = jax.ShapeDtypeStruct
    square = struct((batch, heads, length, CHUNK), _BF16)
    rows = struct((batch, heads, length * (3 if decays else 1)), _F32)
    out_type = dict(inverse=square, scores=square, rows=rows)

    def kernel(*refs):
        outs = dict(zip(out_type, refs[len(named) :], strict=True))
        refs = dict(zip(named, refs[: len(named)], strict=True))
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        chunk = lax.axis_index("chunk")
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        to = {name: outs[name].at[b, h, tokens] for name in ("inverse", "scores")}
        own = lambda n: lax.div(h * n, heads)  # noqa: E731 - which of n heads serves this one

        def scoped(q_smem, k_smem, right, out_smem, vector, barrier, *left):
            def product(*pairs, start=None):
                """`start` plus the sum of a b over the pairs of [C, C], which share the b of the first."""
                right[...] = pairs[0][1].astype(_BF16)
                lefts = [
                    wg.as_left(pairs[n][0], left and left[n], interpret) for n in range(len(pairs))
                ]
                plgpu.commit_smem()

                def add(acc):
                    for a in lefts:
                        plgpu.wgmma(acc, a, right)

                start = jnp.zeros(SQUARE, _F32) if start is None else start
                return wg.accumulate(add, start, interpret=interpret)[0]

            def exact(a, b):
                rest = a - a.astype(_BF16).astype(_F32)
                return b.astype(_BF16).astype(_F32), product((a, b), (rest, b))

            plgpu.copy_gmem_to_smem(refs["k"].at[b, tokens, own(k.shape[2])], k_smem, barrier)
            plgpu.copy_gmem_to_smem(refs["q"].at[b, tokens, own(q.shape[2])], q_smem, barrier)
            x = read_chunk(refs, b, h, heads, chunk, vector)
            rows = [x.beta, x.enter, x.leave] if decays else [x.beta]
            for index, row in enumerate(rows):
                at = pl.ds((chunk * len(rows) + index) * CHUNK, CHUNK)
                outs["rows"].at[b, h, at][...] = row
            plgpu.barrier_wait(barrier)

            def products(alike, scores):
                plgpu.wgmma(alike, k_smem, k_smem.transpose((1, 0)))
                plgpu.wgmma(scores, q_smem, k_smem.transpose((1, 0)))

            alike, scores = wg.accumulate(
                products, jnp.zeros(SQUARE, _F32), jnp.zeros(SQUARE, _F32), interpret=interpret
            )
            out_smem[...] = (scores * (x.weights * scale)).astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, to["scores"])
            strict = jnp.where(x.i > x.j, alike * x.weights * x.turn(x.beta), 0.0)
            inverse = tiles.unit_inverse(strict, x.i ^ x.j, lambda a, b: product((a, b)), exact)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = inverse.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, to["inverse"])
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        pl.run_scoped(
            scoped, buffer((CHUNK, depth)), buffer((CHUNK, depth)), buffer(SQUARE), buffer(SQUARE),
            smem((CHUNK,), _F32), plgpu.Barrier(num_arrivals=2),
            *([buffer(SQUARE), buffer(SQUARE)] if interpret else []),
        )  # fmt: skip

    return Prepared(
        *plgpu.kernel(
            kernel,
            out_type=list(out_type.values()),
            grid=(batch * heads, length // CHUNK),
            grid_names=("row", "chunk"),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                # The layout inference of the other semantics finds no solution here (jax 0.11.2).
                lowering_semantics=plgpu.LoweringSemantics.Lane,
            ),
            interpret=interpret,
        )(*named.values())
    )
