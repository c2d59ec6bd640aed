"""The end of the backward of `hopper_channels`: gradients of q, k, beta and the log decay, chunk by chunk, on Mosaic GPU (Hopper).

With u = beta ⊙ x, A = scale dO uᵀ on and below the diagonal, E = -dv uᵀ below it, and the decays of `linear_attention.tiles_channels`
between two tokens where they meet:

    dq = A k + scale e^b ⊙ (dO Sᵀ)                             beta ⊙ dbeta = x · dv
    dk = [E k - e^b ⊙ (dv Sᵀ)] + [Aᵀ q + Eᵀ k + e^(b_C - b) ⊙ (u dS'ᵀ)]

The first bracket reads the memory as q does and the second writes it, which is their sign in the gradient of the decay.
"""

from __future__ import annotations

import functools
from typing import Any

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
    Documents,
    Halving,
    left_operand,
    load,
    load_by_column,
    load_by_row,
    run_by_chunk,
    same_document,
)

_F32, _BF16 = jnp.float32, jnp.bfloat16


def chunk_backward(
    q, k, log_decay, beta, missing, d_out, dv, states, d_states, keep, documents: Documents | None, *,
    scale: float, interpret: Any = False,
):  # fmt: skip
    """The kernel, over all chunks, for the h heads of `d_out`.

    Args:
        q: [B, T, *, K].
        k: [B, T, *, K].
        log_decay: [B, T, *, K].
        beta: [B, h, T], not 0.
        missing: [B, T, h, V], x.
        d_out: [B, T, h, V].
        dv: [B, T, h, V].
        states: [B, h, N, V, K], S turned.
        d_states: [B, h, N, V, K], dS' turned.
        keep: [B, h, N * K].
        documents: or None.
        scale: of q.
        interpret: parameters of the interpreter, or False.

    Returns:
        dq and dk [B, T, h, K] bfloat16, that of the decay [B, T, h, K] and of beta [B, h, T], float32.
    """
    batch, length, heads, width = d_out.shape
    depth = k.shape[-1]
    count, groups = length // CHUNK, depth // BLOCK
    tiles = dict(missing=missing, d_out=d_out, dv=dv)
    named = tiles | dict(q=q, k=k, states=states, d_states=d_states)
    named |= dict(g=log_decay, beta=beta, keep=keep)
    named |= {} if documents is None else documents._asdict()
    struct = jax.ShapeDtypeStruct
    wide = (batch, length, heads, depth)
    out_type = dict(
        dq=struct(wide, _BF16), dk=struct(wide, _BF16), dg=struct(wide, _F32),
        d_beta=struct((batch, heads, length), _F32),
    )  # fmt: skip

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        index, group = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
        b = lax.div(index, heads * count)
        own = lambda name: lax.div(h * named[name].shape[2], heads)  # noqa: E731
        tokens, columns = pl.ds(n * CHUNK, CHUNK), pl.ds(group * BLOCK, BLOCK)

        def scoped(
            q_buffer, k_buffer, states, d_states, parts, buffer, totals, x, d_out, dv, read_pairs, erase_pairs,
            loaded, crossed, *left_buffer,
        ):  # fmt: skip
            q_buffer, k_buffer, states, d_states, parts, buffer, totals = (
                x.at[group] for x in (q_buffer, k_buffer, states, d_states, parts, buffer, totals)
            )
            for name, to in (("q", q_buffer), ("k", k_buffer)):
                source = refs[name].at[b, tokens, own(name), columns]
                plgpu.copy_gmem_to_smem(source, to, loaded)
            for name, to in (("states", states), ("d_states", d_states)):
                plgpu.copy_gmem_to_smem(refs[name].at[b, h, n, :, columns], to, loaded)

            def copy_shared():
                for name, to in zip(tiles, (x, d_out, dv), strict=True):
                    plgpu.copy_gmem_to_smem(refs[name].at[b, tokens, h], to, loaded)

            pl.when(group == 0)(copy_shared)
            left = left_operand(left_buffer[0].at[group] if interpret else None, interpret)
            halving = Halving(parts, buffer, left, False, interpret)
            halving.split_decay(wg.load_global(refs["g"].at[b, tokens, own("g"), columns]))
            i, j = halving.i, halving.j
            beta = refs["beta"].at[b, h, tokens]
            beta_rows = lambda: wg.spread_rows(load_by_row(beta), SQUARE)  # noqa: E731 - loaded where it is used

            def within(mask):
                return mask if documents is None else mask & same_document(refs["run"].at[b, tokens])  # fmt: skip

            def border(x, name):
                if documents is None:
                    return x
                return x * wg.spread_rows(load_by_row(refs[name].at[b, tokens]), SQUARE)

            def give(name, to, x):
                to[...] = x.astype(_BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(to, refs[name].at[b, tokens, h, columns])

            def cross(rows, factor, to):
                """rows uᵀ, mirrored; and the diagonal of rows xᵀ."""

                def both(later, earlier):
                    plgpu.wgmma(later, rows, x.transpose((1, 0)))
                    plgpu.wgmma(earlier, x, rows.transpose((1, 0)))

                later, earlier = halving.accumulate(both, 2)
                own = jnp.sum(jnp.where(i == j, later, 0.0), axis=1)
                mirrored = jnp.where(i >= j, later * load_by_column(beta), earlier * beta_rows())
                to[...] = jnp.where(within(i >= 0), mirrored * factor, 0.0).astype(_BF16)
                return own

            def cross_output():
                cross(d_out, scale, read_pairs)

            def cross_values():
                own = cross(dv, -1.0, erase_pairs)
                refs["d_beta"].at[b, h, tokens][...] = own / load_by_row(beta)

            plgpu.barrier_wait(loaded)
            # The same for both warpgroups, so each makes one.
            pl.when(group == 0)(cross_output)
            pl.when(group == groups - 1)(cross_values)
            plgpu.commit_smem()
            plgpu.barrier_arrive(crossed)

            def outside(read, erase, write):
                plgpu.wgmma(read, d_out, states)
                plgpu.wgmma(erase, dv, states)
                plgpu.wgmma(write, x, d_states)

            dq, erase, write = halving.accumulate(outside, 3)
            enter = border(halving.boundary_decay(True), "enters")
            dq *= enter * scale
            erase *= -enter
            write *= border(halving.boundary_decay(False), "stays") * beta_rows()
            # What the decay of the whole chunk gets, by channel: from S kept, and from all that is written.
            given = jnp.zeros(SQUARE, _F32)
            for row in range(width // BLOCK):
                part = pl.ds(row * BLOCK, BLOCK)
                given += load(states.at[part]).astype(_F32) * load(d_states.at[part]).astype(_F32)
            given *= load_by_column(refs["keep"].at[b, h, pl.ds(n * depth + group * BLOCK, BLOCK)])
            given += load(k_buffer).astype(_F32) * write
            # The memory's tiles have been used: their buffer takes the next parts.
            spare = [states, d_states]
            if width > BLOCK:
                spare = [states.at[pl.ds(part * BLOCK, BLOCK)] for part in range(2)]
            halving.split(given, spare)
            totals[...] = halving.column_sums(spare)

            plgpu.barrier_wait(crossed)

            def level(at, gradients):
                dq, erase, write = gradients
                factor, later = halving.factor(at), halving.later(at)
                q_or_k = halving.store_operand(at, load(q_buffer), load(k_buffer), factor)
                near = left(halving.mask_to_level(at, load(read_pairs)))
                (dx,) = halving.accumulate(lambda out: plgpu.wgmma(out, near, q_or_k))
                dx *= factor
                dq, write = dq + later * dx, write + (1 - later) * dx
                buffer[...] = (load(k_buffer).astype(_F32) * factor).astype(_BF16)
                plgpu.commit_smem()
                near = left(halving.mask_to_level(at, load(erase_pairs)))
                (dx,) = halving.accumulate(lambda out: plgpu.wgmma(out, near, buffer))
                dx *= factor
                return dq, erase + later * dx, write + (1 - later) * dx

            dq, erase, write = lax.fori_loop(0, LEVELS, level, (dq, erase, write))
            q, k = (load(x).astype(_F32) for x in (q_buffer, k_buffer))
            halving.split(q * dq + k * (erase - write))
            dg = halving.sums(within(j >= i))
            at_end = plgpu.load(totals, layout=wg.LAYOUT.reduce(0))
            dg += border(lax.broadcast_in_dim(at_end, SQUARE, [1]), "stays")
            refs["dg"].at[b, tokens, h, columns][...] = dg
            current = jnp.where(i == j, load(read_pairs).astype(_F32), 0.0)
            current = wg.spread_rows(jnp.sum(current, axis=1), SQUARE)
            give("dq", q_buffer, dq + current * k)
            give("dk", k_buffer, erase + write + current * q)
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        buffers = [
            buffer((groups, *SQUARE)),
            buffer((groups, *SQUARE)),
            buffer((groups, width, BLOCK)),
            buffer((groups, width, BLOCK)),
            buffer((groups, 2, *SQUARE)),
            buffer((groups, *SQUARE)),
            smem((groups, CHUNK), _F32),
            *[buffer((CHUNK, width))] * 3,
            *[buffer(SQUARE)] * 2,
            plgpu.Barrier(num_arrivals=4 * groups + 3),
            plgpu.Barrier(num_arrivals=groups),
        ]
        if interpret:
            buffers.append(buffer((groups, *SQUARE)))
        pl.run_scoped(scoped, *buffers, collective_axes="warpgroup")

    return run_by_chunk(
        kernel, named, list(out_type.values()), batch * count * heads, groups, interpret
    )
