"""The gradients of a diagonal-plus-low-rank memory that each chunk makes by itself, on Mosaic GPU (Hopper).

dR = Xᵀ du is the gradient of what a reads. Under the decays between two tokens (of `hopper_resolve`), and with S and dS':

    dq' = scale [dO vᵀ] k + scale [dO uᵀ] b + scale e^b' ⊙ (dO Sᵀ)      dk = scale [v dOᵀ] q' + [v dRᵀ] a + e^(b_C - b) ⊙ (v dS'ᵀ)
    da  =       [dR vᵀ] k +       [dR uᵀ] b +       e^b' ⊙ (dR Sᵀ)      db = scale [u dOᵀ] q' + [u dRᵀ] a + e^(b_C - b) ⊙ (u dS'ᵀ)

On a level one tile holds rows q' or k, the other a or b, and a matrix for each tile and each line gives both of a line.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.dplr.hopper.chunk_forward import token_decay
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    SQUARE,
    Documents,
    Halving,
    by_row,
    left_operand,
    load,
    run_by_chunk,
    same_document,
)

_F32, _BF16 = jnp.float32, jnp.bfloat16


def chunk_backward(
    q, k, a, b, log_decay, v, back, d_out, d_reached, states, d_states, kept, documents: Documents | None, *,
    scale: float, interpret: Any = False,
):  # fmt: skip
    """The kernel, over all chunks, for the h heads of `d_out`.

    Args:
        q: [B, T, *, K], as k, a, b and log_decay.
        k: see q.
        a: see q.
        b: see q.
        log_decay: see q.
        v: [B, T, *, V].
        back: [B, T, h, V], u.
        d_out: [B, T, h, V].
        d_reached: [B, T, h, V], dR.
        states: [B, h, N, V, K], S turned.
        d_states: [B, h, N, V, K], dS' turned.
        kept: [B, h, N * K], what the decay of the whole chunk gets from the memory: the sum over V of keep S dS'.
        documents: or None.
        scale: of q.
        interpret: parameters of the interpreter, or False.

    Returns:
        dq, dk, da and db [B, T, h, K] bfloat16, and that of the decay, float32.
    """
    batch, length, heads, width = d_out.shape
    depth = k.shape[-1]
    count, groups = length // CHUNK, depth // BLOCK
    inputs = dict(q=q, k=k, a=a, b=b)
    tiles = dict(d_out=d_out, d_reached=d_reached, v=v, back=back)
    named = inputs | tiles | dict(states=states, d_states=d_states, g=log_decay, kept=kept)
    named |= {} if documents is None else documents._asdict()
    struct = jax.ShapeDtypeStruct
    wide = (batch, length, heads, depth)
    out_type = {f"d{name}": struct(wide, _BF16) for name in inputs} | dict(dg=struct(wide, _F32))

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
        row = lax.div(index, heads * count)
        own = lambda name: lax.div(h * named[name].shape[2], heads)  # noqa: E731
        tokens, columns = pl.ds(n * CHUNK, CHUNK), pl.ds(group * BLOCK, BLOCK)

        def scoped(
            buffers, state, parts, buffer, totals, d_outs, values, loaded, state_loaded, used, crossed, *left_buffer
        ):  # fmt: skip
            buffers, state, parts, buffer, totals = (
                x.at[group] for x in (buffers, state, parts, buffer, totals)
            )
            q_buffer, k_buffer, a_buffer, b_buffer = (buffers.at[at] for at in range(4))
            memory = state.at[pl.ds(0, width)]
            for at, name in enumerate(inputs):
                source = refs[name].at[row, tokens, own(name), columns]
                plgpu.copy_gmem_to_smem(source, buffers.at[at], loaded)
            plgpu.copy_gmem_to_smem(refs["states"].at[row, h, n, :, columns], memory, loaded)

            def copy_shared():
                for at, name in enumerate(tiles):
                    to = (d_outs if at < 2 else values).at[at % 2]
                    plgpu.copy_gmem_to_smem(refs[name].at[row, tokens, own(name)], to, loaded)

            pl.when(group == 0)(copy_shared)
            left = left_operand(left_buffer[0].at[group] if interpret else None, interpret)
            halving = Halving(parts, buffer, left, True, interpret)
            i, j = halving.i, halving.j
            tile = lambda x: load(x).astype(_F32)  # noqa: E731
            decay = lambda: wg.load_global(refs["g"].at[row, tokens, own("g"), columns])  # noqa: E731 - twice
            halving.split_decay(decay())

            def within(mask):
                return mask if documents is None else mask & same_document(refs["run"].at[row, tokens])  # fmt: skip

            def border(x, name):
                if documents is None:
                    return x
                return x * wg.spread_rows(by_row(refs[name].at[row, tokens]), SQUARE)

            plgpu.barrier_wait(loaded)

            def read(dq, da):
                plgpu.wgmma(dq, d_outs.at[0], memory)
                plgpu.wgmma(da, d_outs.at[1], memory)

            dq, da = halving.accumulate(read, 2)
            plgpu.commit_smem()
            plgpu.copy_gmem_to_smem(
                refs["d_states"].at[row, h, n, :, columns], memory, state_loaded.at[group]
            )

            # Four matrices: two for q' and k, two for a and b. Each warpgroup makes the same of different tiles.
            pairs = []
            for line in [group] if groups > 1 else [0, 1]:
                for at in range(2):

                    def both(later, earlier, line=line, at=at):
                        plgpu.wgmma(later, d_outs.at[line], values.at[at].transpose((1, 0)))
                        plgpu.wgmma(earlier, values.at[line], d_outs.at[at].transpose((1, 0)))

                    later, earlier = halving.accumulate(both, 2)
                    later *= (
                        jnp.where(line == 0, scale, 1.0) if groups > 1 else (1.0 if line else scale)
                    )
                    earlier *= 1.0 if at else scale
                    mirrored = jnp.where(within(i >= j), later, 0.0)
                    mirrored = jnp.where(within(i < j), earlier, mirrored)
                    pairs.append((line, at, mirrored.astype(_BF16)))

            def write(dk, db):
                plgpu.wgmma(dk, values.at[0], memory)
                plgpu.wgmma(db, values.at[1], memory)

            plgpu.barrier_wait(state_loaded.at[group])
            dk, db = halving.accumulate(write, 2)
            # Both warpgroups are done with the tiles: the matrices take their buffer, by line.
            plgpu.barrier_arrive(used)
            plgpu.barrier_wait(used)
            matrices = [[x.at[at, :, pl.ds(0, CHUNK)] for at in range(2)] for x in (d_outs, values)]
            for line, at, x in pairs:
                if groups == 1:
                    matrices[line][at][...] = x
                    continue
                for to in range(2):

                    def put(to=to, at=at, x=x):
                        matrices[to][at][...] = x

                    pl.when(group == to)(put)
            plgpu.commit_smem()
            plgpu.barrier_arrive(crossed)

            enter = border(halving.border(True), "enters")
            dq *= enter * scale
            da *= enter
            leave = border(halving.border(False), "stays")
            dk *= leave
            db *= leave
            # The memory's tiles have been used: their buffer takes the next parts, and then what stands on a level.
            spare = [state.at[pl.ds(at * BLOCK, BLOCK)] for at in range(2)]
            halving.split(tile(k_buffer) * dk + tile(b_buffer) * db, spare)
            written = halving.column_sums(spare)
            totals[...] = written + by_row(refs["kept"].at[row, h, pl.ds(n * depth + group * BLOCK, BLOCK)])  # fmt: skip

            plgpu.barrier_wait(crossed)
            q_buffer[...] = (tile(q_buffer) * token_decay(decay())).astype(_BF16)  # q'
            plgpu.commit_smem()

            def level(at, gradients):
                dq, dk, da, db = gradients
                factor, later = halving.factor(at), halving.later(at)
                for of_later, of_earlier, to in ((q_buffer, k_buffer, spare[0]), (a_buffer, b_buffer, spare[1])):  # fmt: skip
                    x = halving.blend(at, load(of_later), load(of_earlier))
                    to[...] = (x.astype(_F32) * factor).astype(_BF16)
                plgpu.commit_smem()
                found = []
                for line, first, second in zip(matrices, (dq, da), (dk, db), strict=True):
                    dx = [jnp.zeros(SQUARE, _F32)]
                    for matrix, x in zip(line, spare, strict=True):
                        near = left(halving.only_meeting(at, load(matrix)))
                        add = lambda out, near=near, x=x: plgpu.wgmma(out, near, x)  # noqa: E731
                        dx = wg.accumulate(add, *dx, interpret=interpret)
                    dx = dx[0] * factor
                    found += [first + later * dx, second + (1 - later) * dx]
                dq, dk, da, db = found
                return dq, dk, da, db

            dq, dk, da, db = lax.fori_loop(0, LEVELS, level, (dq, dk, da, db))
            halving.split(tile(q_buffer) * dq - tile(k_buffer) * dk - tile(b_buffer) * db)
            dg = halving.sums(within(j >= i))
            halving.split(tile(a_buffer) * da)
            dg += halving.sums(within(j > i))
            at_end = plgpu.load(totals, layout=wg.LAYOUT.reduce(0))
            dg += border(lax.broadcast_in_dim(at_end, SQUARE, [1]), "stays")
            refs["dg"].at[row, tokens, h, columns][...] = dg
            # What q sees of its own token's writes.
            current = (jnp.sum(jnp.where(i == j, tile(x), 0.0), axis=1) for x in matrices[0])
            of_k, of_b = (wg.spread_rows(x, SQUARE) for x in current)
            shift = token_decay(decay())
            q = wg.load_global(refs["q"].at[row, tokens, own("q"), columns]).astype(_F32)
            dq = dq * shift + of_k * tile(k_buffer) + of_b * tile(b_buffer)
            for name, to, x in (
                ("dq", q_buffer, dq), ("dk", k_buffer, dk + of_k * q), ("da", a_buffer, da), ("db", b_buffer, db + of_b * q)
            ):  # fmt: skip
                to[...] = x.astype(_BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(to, refs[name].at[row, tokens, h, columns])
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        buffers = [
            buffer((groups, 4, *SQUARE)),
            buffer((groups, max(width, 2 * BLOCK), BLOCK)),
            buffer((groups, 2, *SQUARE)),
            buffer((groups, *SQUARE)),
            smem((groups, CHUNK), _F32),
            buffer((2, CHUNK, width)),
            buffer((2, CHUNK, width)),
            plgpu.Barrier(num_arrivals=5 * groups + 4),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
        ]
        if interpret:
            buffers.append(buffer((groups, *SQUARE)))
        pl.run_scoped(scoped, *buffers, collective_axes="warpgroup")

    return run_by_chunk(
        kernel, named, list(out_type.values()), batch * count * heads, groups, interpret
    )
