"""The gradients of the delta rule that each chunk makes by itself, on Mosaic GPU (Hopper): a warpgroup a chunk."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SQUARE, read_chunk
from pallas_kernels.hopper import warpgroups as wg

_BLOCK = 64
_WIDTH = 256  # columns of values that have buffer
_STAGES = 3  # pairs of memories on their way or in use, where they take no other chunk's buffer
_ROOM = 226 * 1024  # bytes of shared memory, of 227
_F32, _BF16 = jnp.float32, jnp.bfloat16


def chunk_backward(
    q, k, missing, d_out, dv, states, d_states, beta, log_decay, run, *, scale: float,
    decay_gradient: bool, interpret: Any = False,
):  # fmt: skip
    """The kernel, over all chunks. It takes columns of values by 256, and what each such slice gives is left to be added up.

    Args:
        q: [B, T, *, K].
        k: [B, T, *, K].
        missing: [B, T, heads, V], x.
        d_out: [B, T, heads, V].
        dv: [B, T, heads, V].
        states: [B, heads, N, V, K], S turned.
        d_states: [B, heads, N, V, K], dS' turned.
        beta: [B, T, G] float32.
        log_decay: [B, T, G] float32, or None.
        run: [B, T] int32, or None.
        scale: of q.
        decay_gradient: whether it is wanted.
        interpret: parameters of the interpreter, or False.

    Returns:
        dq and dk [B, T, heads * slices, K] bfloat16, dbeta and (where wanted) that of the decay [B, T, heads * slices] float32.
    """
    batch, length, heads, width = dv.shape
    width, slices = min(width, _WIDTH), max(1, width // _WIDTH)
    depth = k.shape[-1]
    tiles = dict(q=q, k=k, missing=missing, d_out=d_out, dv=dv)
    named = tiles | dict(states=states, d_states=d_states, beta=beta, log_decay=log_decay, run=run)
    named = {name: x for name, x in named.items() if x is not None}
    struct = jax.ShapeDtypeStruct
    tokens = struct((batch, length, heads * slices, depth), _BF16)
    out_type = dict(dq=tokens, dk=tokens, d_beta=struct(tokens.shape[:3], _F32))
    if decay_gradient:
        out_type["d_decay"] = out_type["d_beta"]

    steps = width // _BLOCK
    pairs_count = steps * (depth // _BLOCK)
    pair_bytes, other_bytes = 4 * _BLOCK * _BLOCK, 2 * CHUNK * (2 * depth + 3 * width + CHUNK + 8)
    beside = _ROOM // (other_bytes + pair_bytes)  # chunks that a processor works on
    stages = min(_STAGES, pairs_count, (_ROOM // beside - other_bytes) // pair_bytes)

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        n, piece = lax.axis_index("chunk"), lax.axis_index("slice")
        at, to = pl.ds(n * CHUNK, CHUNK), h * slices + piece

        def scoped(loaded, pairs, square, vector, barrier, pair_barriers, left):
            for name, x in tiles.items():
                source = refs[name].at[b, at, lax.div(h * x.shape[2], heads)]
                if name not in ("q", "k"):
                    source = source.at[:, pl.ds(piece * width, width)]
                plgpu.copy_gmem_to_smem(source, loaded[name], barrier)

            def load_pair(step):
                row, column = (x * _BLOCK for x in (step % steps, step // steps))
                rows, columns = pl.ds(piece * width + row, _BLOCK), pl.ds(column, _BLOCK)
                for index, name in enumerate(("states", "d_states")):
                    source, stage = refs[name].at[b, h, n, rows, columns], step % stages
                    plgpu.copy_gmem_to_smem(source, pairs.at[stage, index], pair_barriers.at[stage])

            for step in range(stages):
                load_pair(step)
            chunk = read_chunk(refs, b, h, heads, n, vector)
            rows_of = lambda x: 1.0 if x is None else wg.spread_rows(x, SQUARE)  # noqa: E731
            enter, leave = rows_of(chunk.enter), rows_of(chunk.leave)
            betas = chunk.turn(chunk.beta)
            plgpu.barrier_wait(barrier)
            q, k, x, d_out, dv = (loaded[name] for name in tiles)

            def products(a, b, c, d):
                acc = [jnp.zeros(SQUARE, _F32)] * 2

                def add(first, second):
                    plgpu.wgmma(first, a, b.transpose((1, 0)))
                    plgpu.wgmma(second, c, d.transpose((1, 0)))

                return wg.accumulate(add, *acc, interpret=interpret)

            # What pairs of tokens give each other. Without beta, which is not to be divided by.
            alike, erased = products(k, k, dv, x)
            own = jnp.sum(jnp.where(chunk.i == chunk.j, erased, 0.0), axis=1)
            earlier = chunk.i > chunk.j
            erased = jnp.where(earlier, -erased * chunk.weights, 0.0)
            products_of = alike * erased
            erased = (erased * betas).astype(_BF16)
            square[...] = erased
            plgpu.commit_smem()
            turned = plgpu.load(square.transpose((1, 0)), layout=wg.LAYOUT)
            erased = wg.as_left(erased.astype(_F32) + turned.astype(_F32), left[0], interpret)
            scores, seen = products(q, k, d_out, x)
            seen = seen * (chunk.weights * scale)
            products_of += scores * seen
            seen = (seen * betas).astype(_BF16)
            square[...] = seen
            plgpu.commit_smem()
            seen = wg.as_left(seen, left[1], interpret)
            diagonal = jnp.sum(jnp.where(earlier, 0.0, products_of), axis=1)
            products_of = jnp.where(earlier, products_of, 0.0)
            vector[...] = jnp.sum(products_of, axis=0)
            later = jnp.sum(products_of * betas, axis=1)
            plgpu.commit_smem()
            given = plgpu.load(vector, layout=wg.LAYOUT.reduce(1))
            d_beta, later = diagonal + given, later - chunk.beta * given

            # What the memory gives them.
            written = jnp.zeros_like(later)
            # <S, dS'> is the trace of a product: the tensor cores have time, the registers no buffer.
            totals = [jnp.zeros(SQUARE, _F32)] * decay_gradient
            for column in range(depth // _BLOCK):
                columns = pl.ds(column * _BLOCK, _BLOCK)
                sums = [jnp.zeros(SQUARE, _F32)] * 3
                for row in range(steps):
                    step = column * steps + row
                    plgpu.barrier_wait(pair_barriers.at[step % stages])
                    values, pair = pl.ds(row * _BLOCK, _BLOCK), pairs.at[step % stages]

                    def add(read, erase, write, *totals, values=values, pair=pair):
                        plgpu.wgmma(read, d_out.at[:, values], pair.at[0])
                        plgpu.wgmma(erase, dv.at[:, values], pair.at[0])
                        plgpu.wgmma(write, x.at[:, values], pair.at[1])
                        for total in totals:
                            plgpu.wgmma(total, pair.at[0], pair.at[1].transpose((1, 0)))

                    found = wg.accumulate(add, *sums, *totals, interpret=interpret)
                    sums, totals = found[:3], found[3:]
                    if step + stages < pairs_count:
                        load_pair(step + stages)
                read, erase, write = sums
                tile = lambda x, at=columns: plgpu.load(x.at[:, at], layout=wg.LAYOUT).astype(_F32)  # noqa: E731
                read, erase, write = read * (enter * scale), erase * enter, write * leave
                if decay_gradient:
                    later += jnp.sum(tile(q) * read, axis=1)
                    later -= jnp.sum(tile(k) * erase, axis=1)
                written += jnp.sum(tile(k) * write, axis=1)
                write = write * wg.spread_rows(chunk.beta, SQUARE) - erase

                def near(dq, dk, columns=columns):
                    plgpu.wgmma(dq, seen, k.at[:, columns])
                    plgpu.wgmma(dk, square.transpose((1, 0)), q.at[:, columns])
                    plgpu.wgmma(dk, erased, k.at[:, columns])

                grads = wg.accumulate(near, read, write, interpret=interpret)
                for buffer, grad in zip((q, k), grads, strict=True):  # these columns are done with
                    buffer.at[:, columns][...] = grad.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q, refs["dq"].at[b, at, to])
            plgpu.copy_smem_to_gmem(k, refs["dk"].at[b, at, to])
            # x · dv = beta dbeta is the more exact, since nothing cancels in it, but says nothing where beta is 0.
            some = chunk.beta > 1e-10
            d_beta = jnp.where(some, own / jnp.where(some, chunk.beta, 1.0), d_beta + written)
            refs["d_beta"].at[b, at, to][...] = d_beta
            if decay_gradient:
                # Each token's sum over those after it in its document, and over the writes of those before it.
                i = chunk.i
                after = i <= chunk.j
                if chunk.same is not None:
                    after &= chunk.same
                summed = jnp.where(after, chunk.turn(later), 0.0)
                summed += jnp.where(i > chunk.j, chunk.turn(chunk.beta * written), 0.0)
                total = jnp.where(i == chunk.j, totals[0], 0.0)
                total = chunk.turn(jnp.sum(total, axis=1))
                vector[...] = chunk.enter
                plgpu.commit_smem()
                summed += total * vector[CHUNK - 1]
                refs["d_decay"].at[b, at, to][...] = jnp.sum(summed, axis=1)
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        pl.run_scoped(
            scoped, {n: buffer((CHUNK, depth if n in ("q", "k") else width)) for n in tiles}, buffer((stages, 2, *SQUARE)),
            buffer(SQUARE), smem((CHUNK,), _F32), plgpu.Barrier(num_arrivals=len(tiles)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages), [buffer(SQUARE)] * 2 if interpret else [None] * 2,
        )  # fmt: skip

    return plgpu.kernel(
        kernel,
        out_type=list(out_type.values()),
        grid=(batch * heads, length // CHUNK, slices),
        grid_names=("row", "chunk", "slice"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The layout inference of the other semantics finds no solution here (jax 0.11.2).
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*named.values())
