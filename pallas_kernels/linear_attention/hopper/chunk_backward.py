"""The end of the backward of `hopper_channels`: gradients of q, k and the log decay, chunk by chunk, on Mosaic GPU (Hopper)."""

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
    AllPairs,
    Documents,
    Halving,
    Level,
    left_operand,
    load,
    load_by_column,
    load_by_row,
    power_of_two,
    run_by_chunk,
    same_document,
)

_F32 = jnp.float32


def chunk_backward(
    q, k, v, log_decay, d_output, states, d_states, keep, documents: Documents | None, *,
    scale: float, bonus=None, pieces: int = 1, exact: bool = False, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k [B, T, h, K] and log_decay (float32), chunk by chunk, for h heads.

    With a bonus also what each chunk gives it, [B, h, N, K].

    Args:
        q: [B, T, *, K], as the other inputs of a number of heads that divides h; None with `d_states` asks for its gradient alone.
        k: [B, T, *, K]; may be float32 where the gradient of q is asked for alone, and is then not rounded within a chunk.
        v: [B, T, *, V], with pieces of one head's values side by side as heads.
        log_decay: [B, T, *, K].
        d_output: [B, T, h * pieces, V].
        states: [B, h * pieces, N, K, V], S before each chunk.
        d_states: [B, h * pieces, N, K, V], the gradient of S after it.
        keep: [B, *, N * K].
        documents: or None.
        scale: of q.
        bonus: [*, K], or None.
        pieces: 1 or 2, into which each head's values are cut; more find no buffer.
        exact: the gradient of q, asked for alone, is float32.
        interpret: parameters of the interpreter, or False.
    """
    batch, length, heads, width = d_output.shape
    heads //= pieces
    whole = d_states is not None
    depth = k.shape[-1]
    named = dict(q=q, k=k, states=states, d_states=d_states, v=v, d_output=d_output)
    named |= dict(g=log_decay, keep=keep)
    named = {name: x for name, x in named.items() if x is not None}
    named |= {} if documents is None else documents._asdict()
    named |= {} if bonus is None else dict(bonus=bonus)
    count, groups, keep_heads = length // CHUNK, depth // BLOCK, keep.shape[1]
    # Two blocks of one warpgroup find buffer on a processor, but not with values of two pieces: one loads while the other computes.
    together = groups if pieces > 1 else 1
    apart = groups // together
    struct = jax.ShapeDtypeStruct
    wide = struct((batch, length, heads, depth), d_output.dtype)
    out_type = dict(dq=struct(wide.shape, _F32) if exact else wide)
    if whole:
        out_type |= dict(dk=wide, dg=struct(wide.shape, _F32))
    if bonus is not None:
        out_type["d_bonus"] = struct((batch, heads, count, depth), _F32)

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        index, local = lax.div(lax.axis_index("chunk"), apart), lax.axis_index("warpgroup")
        group = lax.rem(lax.axis_index("chunk"), apart) * together + local
        h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
        b = lax.div(index, heads * count)
        own = lambda name: lax.div(h * named[name].shape[2], heads)  # noqa: E731
        tokens, columns = pl.ds(n * CHUNK, CHUNK), pl.ds(group * BLOCK, BLOCK)

        def scoped(
            q_buffer, k_buffer, states, d_states, parts, x_buffer, totals, lowest, v, d_out, loaded, again, *left_buffer
        ):  # fmt: skip
            q_buffer, k_buffer, states, d_states, parts, x_buffer, totals, lowest, again = (
                x.at[local] for x in (q_buffer, k_buffer, states, d_states, parts, x_buffer, totals, lowest, again)
            )  # fmt: skip
            for name, buffer in (("q", q_buffer), ("k", k_buffer))[not whole :]:
                source = refs[name].at[b, tokens, own(name), columns]
                plgpu.copy_gmem_to_smem(source, buffer, loaded)

            def copy_memories(piece, barrier):
                for name, buffer in (("states", states), ("d_states", d_states))[: 1 + whole]:
                    source = refs[name].at[b, h * pieces + piece, n, columns]
                    plgpu.copy_gmem_to_smem(source, buffer, barrier)

            def copy(name, buffer):
                for piece in range(pieces):
                    source = refs[name].at[b, tokens, own(name) + piece]
                    plgpu.copy_gmem_to_smem(source, buffer.at[piece], loaded)

            copy_memories(0, loaded)

            pl.when(local == 0)(lambda: copy("v", v))
            pl.when(local == together - 1)(lambda: copy("d_output", d_out))
            g = wg.load_global(refs["g"].at[b, tokens, own("g"), columns])
            left = left_operand(left_buffer[0].at[local] if interpret else None, interpret)
            halving = Halving(parts, x_buffer, left, bonus is not None, interpret, lowest)
            halving.split_decay(g)
            i, j = halving.i, halving.j

            def within(mask):
                if documents is None:
                    return mask
                return mask & same_document(refs["run"].at[b, tokens])

            def border(x, name):
                if documents is None:
                    return x
                return x * wg.spread_rows(load_by_row(refs[name].at[b, tokens]), SQUARE)

            def give(name, buffer, x):
                buffer[...] = x.astype(buffer.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, refs[name].at[b, tokens, h, columns])

            def crossed(later, *earlier):
                for piece in range(pieces):
                    plgpu.wgmma(later, d_out.at[piece], v.at[piece].transpose((1, 0)))
                    for x in earlier:
                        plgpu.wgmma(x, v.at[piece], d_out.at[piece].transpose((1, 0)))

            def outside(piece, *sums):
                def add(dq, *dk):
                    plgpu.wgmma(dq, d_out.at[piece], states.transpose((1, 0)))
                    for x in dk:
                        plgpu.wgmma(x, v.at[piece], d_states.transpose((1, 0)))

                return wg.accumulate(add, *sums, interpret=interpret)

            def ends():
                found: Any = 0.0
                for c in range(width // BLOCK):
                    part = pl.ds(c * BLOCK, BLOCK)
                    both = (load(x.at[:, part]).astype(_F32) for x in (states, d_states))
                    found += jnp.sum(functools.reduce(jnp.multiply, both), axis=1)
                return found

            def resolve():
                weights, *earlier = halving.accumulate(crossed, 1 + whole)
                if whole:
                    weights = jnp.where(i >= j, weights, earlier[0])
                weights *= scale
                if documents is not None:
                    weights = jnp.where(same_document(refs["run"].at[b, tokens]), weights, 0.0)
                current = jnp.sum(jnp.where(i == j, weights, 0.0), axis=1)
                size, inverse = power_of_two(jnp.max(jnp.abs(weights), axis=1))
                weights *= wg.spread_rows(inverse, SQUARE)
                return weights.astype(jnp.bfloat16), size, current

            at_end: Any = 0.0
            zeros = [jnp.zeros(SQUARE, _F32)] * (1 + whole)
            plgpu.barrier_wait(loaded)
            _, reached = halving.check_range(*(q_buffer, k_buffer)[not whole :])
            if pieces == 1:
                weights, size, current = resolve()
                dq, *dk = outside(0, *zeros)
            else:  # while the second piece's memories are on their way, into the buffer of the first one's
                sums, at_end = outside(0, *zeros), ends()
                plgpu.commit_smem()
                copy_memories(1, again)
                weights, size, current = resolve()
                plgpu.barrier_wait(again)
                dq, *dk = outside(1, *sums)
            dq *= border(halving.boundary_decay(True), "enters") * scale
            if whole:
                at_end += ends()
                dk = [dk[0] * border(halving.boundary_decay(False), "stays")]
                # The memory's tiles have been used: their buffer takes the next parts.
                spare = [states, d_states]
                if width > BLOCK:
                    spare = [states.at[:, pl.ds(n * BLOCK, BLOCK)] for n in range(2)]
                halving.split(load(k_buffer).astype(_F32) * dk[0], spare)
                rows = pl.ds(n * depth + group * BLOCK, BLOCK)
                keep = load_by_row(refs["keep"].at[b, lax.div(h * keep_heads, heads), rows])
                totals[...] = at_end * keep + halving.column_sums(spare)

            def products(step):
                x = step.columns(load(q_buffer) if whole else load(k_buffer), load(k_buffer))
                if whole:
                    tiles = [x_buffer]
                    x_buffer[...] = x.astype(x_buffer.dtype)
                    plgpu.commit_smem()
                else:  # in two parts: a softmax over what is read multiplies its rounding
                    tiles = [x_buffer, q_buffer]
                    halving.split(x, tiles)
                near = left(step.mask(weights, both=whole))

                def product(out):
                    for tile in tiles:
                        plgpu.wgmma(out, near, tile)

                (dx,) = halving.accumulate(product)
                return dx * step.factor * wg.spread_rows(size, SQUARE)

            def all_pairs(turned, gradients):
                """Of the first, which is then the last: the second turn makes the other's."""
                first, *second = gradients
                return [*second, first + products(AllPairs(halving, turned.astype(_F32)))]

            def level(at, gradients):
                step = Level(halving, at)
                dx = products(step)
                shares = (step.later, 1 - step.later) if whole else (1,)
                return [x + share * dx for x, share in zip(gradients, shares, strict=True)]

            gradients = lax.fori_loop(0, reached * (1 + whole), all_pairs, [dq, *dk])
            dq, *dk = lax.fori_loop(reached * LEVELS, LEVELS, level, gradients)
            current = wg.spread_rows(current, SQUARE)
            if not whole:
                dq += current * load(k_buffer).astype(_F32)
                if exact:
                    refs["dq"].at[b, tokens, h, columns][...] = dq
                    return
                give("dq", x_buffer, dq)
                plgpu.wait_smem_to_gmem(0)
                return
            (dk,) = dk
            q, k = (load(x).astype(_F32) for x in (q_buffer, k_buffer))
            of_q, of_k = q * dq, k * dk
            if bonus is None:
                halving.split(of_q - of_k)
                dg = halving.sums(within(j >= i))
            else:
                halving.split(of_q)
                dg = halving.sums(within(j > i))
                halving.split(of_k)
                dg -= halving.sums(within(j >= i))
            at_end = plgpu.load(totals, layout=wg.LAYOUT.reduce(0))
            dg += border(lax.broadcast_in_dim(at_end, SQUARE, [1]), "stays")
            refs["dg"].at[b, tokens, h, columns][...] = dg

            if bonus is not None:
                halving.split(current * q * k)
                refs["d_bonus"].at[b, h, n, columns][...] = halving.column_sums()
                row = refs["bonus"].at[lax.div(h * bonus.shape[0], heads), columns]
                current *= load_by_column(row)
            give("dq", q_buffer, dq + current * k)
            give("dk", k_buffer, dk + current * q)
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=d_output.dtype, transforms=wg.TILED)
        buffers = [
            buffer((together, *SQUARE)),
            buffer((together, *SQUARE), dtype=k.dtype, transforms=wg.smem_transforms(k.dtype)),
            buffer((together, BLOCK, width)),
            buffer((together, BLOCK, width)),
            buffer((together, 2, *SQUARE), dtype=jnp.bfloat16),
            buffer((together, *SQUARE)),
            smem((together, CHUNK), _F32),
            smem((together, 2, CHUNK), _F32),
            buffer((pieces, CHUNK, width)),
            buffer((pieces, CHUNK, width)),
            plgpu.Barrier(num_arrivals=(4 if whole else 2) * together + 2 * pieces),
            plgpu.Barrier(num_arrivals=1 + whole, num_barriers=together),
        ]
        if interpret:
            buffers.append(buffer((together, *SQUARE), dtype=jnp.bfloat16))
        pl.run_scoped(scoped, *buffers, collective_axes="warpgroup")

    return run_by_chunk(
        kernel, named, list(out_type.values()), batch * count * heads * apart, together, interpret
    )
