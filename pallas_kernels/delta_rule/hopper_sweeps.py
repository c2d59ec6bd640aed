"""The walk of the delta rule over its chunks on Mosaic GPU (Hopper).

A warpgroup keeps 64 columns of a memory, turned, in registers, as an accumulator [64, K], and two of them share what a third
loads. Every product of a chunk then has its left operand in the registers where the one before left it, and nothing of the
chain goes through shared memory; `tiles` has the formulas.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import warpgroups as wg
from pallas_kernels.compat import pl, plgpu
from pallas_kernels.delta_rule.hopper_prepare import CHUNK, Prepared

_BLOCK = 64  # columns of the memory that a warpgroup holds
_STAGES = 3  # chunks on their way or in use, where there is room
_ROOM = 224 * 1024  # bytes of shared memory
_F32, _BF16 = jnp.float32, jnp.bfloat16
_SQUARE = (CHUNK, CHUNK)


def sweep(
    q, k, v, prepared: Prepared, initial, *, heads: int, scale: float, save: bool = False,
    interpret: Any = False,
):  # fmt: skip
    """With time, from S to S'.

    Args:
        q: [B, T, *, K]; None leaves out the output.
        k: [B, T, *, K].
        v: [B, T, *, V].
        prepared: of `heads` heads.
        initial: [B, heads, K, V] float32, the memory before the first chunk.
        heads: of the output; a multiple of those of q, k and v.
        scale: of q.
        save: also return x and the memories before each chunk.
        interpret: parameters of the interpreter, or False.

    Returns:
        The output [B, T, heads, V] if q is given, x [B, T, heads, V] and the turned memories [B, heads, N, V, K] bfloat16 if
        `save`, and the last memory.
    """
    given = dict(q=q, k=k, v=v, inverse=prepared.inverse, beta=prepared.beta)
    given |= dict(enter=prepared.enter, leave=prepared.leave)
    if q is not None:
        given |= dict(scores=prepared.scores)
    tokens = jax.ShapeDtypeStruct((*v.shape[:2], heads, v.shape[-1]), _BF16)
    outs = ["out"] * (q is not None) + ["missing"] * save

    def step(chunk, S, left, put):
        keep, enter, leave = _decays(chunk)
        before = wg.as_left(S, left[0], interpret)

        def products(held, read=None):
            plgpu.wgmma(held, before, chunk["k"].transpose((1, 0)))
            if read is not None:
                plgpu.wgmma(read, before, chunk["q"].transpose((1, 0)))

        zeros = [jnp.zeros(_SQUARE, _F32)] * (1 if q is None else 2)
        held, *read = wg.accumulate(products, *zeros, interpret=interpret)
        read = [x * (enter * scale) for x in read]
        values = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT).astype(_F32)
        missing = wg.as_left(values - held * enter, left[1], interpret)
        solve = lambda x: plgpu.wgmma(x, missing, chunk["inverse"].transpose((1, 0)))  # noqa: E731
        (missing,) = wg.accumulate(solve, jnp.zeros(_SQUARE, _F32), interpret=interpret)
        exact = missing * _columns(chunk["beta"])
        leaving = wg.as_left(exact * leave, left[2], interpret)
        writes = exact.astype(_BF16)
        # What rounding takes from the writes is the largest part of the output's error.
        rest = wg.as_left(exact - writes.astype(_F32), left[3], interpret)
        writes = wg.as_left(writes, left[1], interpret)

        def near(S, out=None):
            if out is not None:
                plgpu.wgmma(out, writes, chunk["scores"].transpose((1, 0)))
                plgpu.wgmma(out, rest, chunk["scores"].transpose((1, 0)))
            plgpu.wgmma(S, leaving, chunk["k"])

        S, *out = wg.accumulate(near, S * keep, *read, interpret=interpret)
        put(before if save else None, *out, *([missing] if save else []))
        return S

    return _walk(
        step, given, initial, tokens, outs, save=save, heads=heads, reverse=False, interpret=interpret
    )  # fmt: skip


def reverse(
    q, k, d_out, prepared: Prepared, d_final, *, heads: int, scale: float, interpret: Any = False
):
    """Against time, from the gradient of the memory after the last chunk.

    Args:
        q: [B, T, *, K].
        k: [B, T, *, K].
        d_out: [B, T, heads, V].
        prepared: of `heads` heads.
        d_final: [B, heads, K, V] float32.
        heads: of d_out; a multiple of those of q and k.
        scale: of q.
        interpret: parameters of the interpreter, or False.

    Returns:
        dv [B, T, heads, V], the turned gradients of the memories after each chunk [B, heads, N, V, K] bfloat16, and that of
        the memory before the first.
    """
    given = dict(q=q, k=k, v=d_out, inverse=prepared.inverse, scores=prepared.scores)
    given |= dict(beta=prepared.beta, enter=prepared.enter, leave=prepared.leave)

    def step(chunk, S, left, put):
        keep, enter, leave = _decays(chunk)
        after = wg.as_left(S, left[0], interpret)
        turned = plgpu.load(chunk["v"].transpose((1, 0)), layout=wg.LAYOUT)
        given = wg.as_left(turned, left[1], interpret)

        def products(later, near):
            plgpu.wgmma(later, after, chunk["k"].transpose((1, 0)))
            plgpu.wgmma(near, given, chunk["scores"])

        later, near = wg.accumulate(
            products, jnp.zeros(_SQUARE, _F32), jnp.zeros(_SQUARE, _F32), interpret=interpret
        )
        writes = (later * leave + near) * _columns(chunk["beta"])
        writes = wg.as_left(writes, left[2], interpret)
        solve = lambda x: plgpu.wgmma(x, writes, chunk["inverse"])  # noqa: E731
        (dv,) = wg.accumulate(solve, jnp.zeros(_SQUARE, _F32), interpret=interpret)
        erased = wg.as_left(dv * -enter, left[2], interpret)
        read = wg.as_left(turned.astype(_F32) * (enter * scale), left[1], interpret)

        def entering(S):
            plgpu.wgmma(S, read, chunk["q"])
            plgpu.wgmma(S, erased, chunk["k"])

        (S,) = wg.accumulate(entering, S * keep, interpret=interpret)
        put(after, dv)
        return S

    tokens = jax.ShapeDtypeStruct(d_out.shape, _BF16)
    return _walk(
        step, given, d_final, tokens, ["dv"], save=True, heads=heads, reverse=True, interpret=interpret
    )  # fmt: skip


def _columns(ref):
    """A vector in shared memory as what multiplies the columns of [64, C]."""
    return wg.spread_columns(plgpu.load(ref, layout=wg.LAYOUT.reduce(0)), _SQUARE)


def _decays(chunk):
    """keep, enter, leave."""
    if "enter" not in chunk:
        return 1.0, 1.0, 1.0
    return chunk["enter"][CHUNK - 1], _columns(chunk["enter"]), _columns(chunk["leave"])


def _walk(step, given, initial, tokens, outs, *, save, heads, reverse, interpret):
    """Carry a memory over all chunks.

    Args:
        step: (chunk: references by name, S, rooms for left operands, put) -> S; it calls `put` with S as a left operand or
            None, and with the outputs, turned.
        given: [B, T, *, D] named q, k and v, [B, heads, T, C] named inverse and scores, vectors [B, heads, T], or None.
        initial: [B, heads, K, V] float32.
        tokens: the shape of an output by token.
        outs: the outputs' names.
        save: also save S before each step.
        heads: of the outputs.
        reverse: walk against time.
        interpret: parameters of the interpreter, or False.

    Returns:
        The outputs, the saved memories [B, heads, N, V, K] if wanted, and the last memory [B, heads, K, V].
    """
    named = {name: x for name, x in given.items() if x is not None}
    batch, length, _, width = tokens.shape
    depth, count = initial.shape[2], length // CHUNK
    blocks = width // _BLOCK
    groups = 1 if blocks % 2 else 2  # warpgroups that share what is loaded
    struct = jax.ShapeDtypeStruct
    out_type: dict[str, Any] = {name: tokens for name in outs}
    if save:
        out_type["states"] = struct((batch, heads, count, width, depth), _BF16)
    initial = jnp.swapaxes(initial, -1, -2)
    out_type["last"] = struct(initial.shape, _F32)
    sizes = dict(q=depth, k=depth, v=groups * _BLOCK, inverse=CHUNK, scores=CHUNK)
    chunk_bytes = sum(2 * CHUNK * sizes.get(name, 2) for name in named)
    out_bytes = 2 * groups * _BLOCK * (CHUNK * len(outs) + depth * save)
    stages = min(_STAGES, count, (_ROOM - out_bytes) // chunk_bytes)
    at = lambda n: count - 1 - n if reverse else n  # noqa: E731

    def kernel(*refs):
        refs = dict(zip([*named, "initial", *out_type], refs, strict=True))
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        group = lax.axis_index("group")
        columns = pl.ds((lax.axis_index("column") * groups + group) * _BLOCK, _BLOCK)
        shared = pl.ds(lax.axis_index("column") * groups * _BLOCK, groups * _BLOCK)

        def scoped(rooms, left):
            out_smem, state_smem = rooms.get("outs"), rooms.get("states")

            def body(indices, *arguments) -> Any:
                *loaded, S = arguments
                chunk: dict[str, Any] = dict(zip(named, loaded, strict=True))
                if groups > 1:
                    chunk["v"] = chunk["v"].at[:, pl.ds(group * _BLOCK, _BLOCK)]
                n = at(indices[0])

                def put(before, *values):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if save:
                        state_smem.at[group][...] = before[...] if interpret else before
                    for index, value in enumerate(values):
                        room = out_smem.at[group, index]
                        room.transpose((1, 0))[...] = value.astype(_BF16)
                    plgpu.commit_smem()
                    if save:
                        plgpu.copy_smem_to_gmem(
                            state_smem.at[group], refs["states"].at[b, h, n, columns]
                        )
                    for index, name in enumerate(outs):
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[group, index],
                            refs[name].at[b, pl.ds(n * CHUNK, CHUNK), h, columns],
                        )

                return step(chunk, S, [room.at[group] for room in left] or [None] * 4, put)

            def compute(pipeline):
                S = pipeline(wg.load_global(refs["initial"].at[b, h, columns]))
                refs["last"].at[b, h, columns][...] = S
                plgpu.wait_smem_to_gmem(0)

            sources, specs = [], []
            for name, x in named.items():
                if name in ("q", "k", "v"):
                    source = refs[name].at[b, :, lax.div(h * x.shape[2], heads)]
                    if name == "v":
                        source = source.at[:, shared]
                    sources.append(source)
                    block = (CHUNK, groups * _BLOCK if name == "v" else depth)
                else:
                    sources.append(refs[name].at[b, h])
                    block = (CHUNK,) if x.ndim == 3 else _SQUARE
                rest = (0,) * (len(block) - 1)
                specs.append(
                    plgpu.BlockSpec(
                        block, lambda n, rest=rest: (at(n), *rest), transforms=wg.TILED if rest else ()
                    )
                )  # fmt: skip
            pipeline: Any = plgpu.emit_pipeline_warp_specialized
            pipeline(
                body, grid=(count,), in_specs=specs, max_concurrent_steps=stages,
                num_compute_wgs=groups, memory_registers=40, wg_axis="group", compute_context=compute,
            )(*sources)  # fmt: skip

        smem: Any = plgpu.SMEM
        room = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        rooms = {}
        if outs:
            rooms["outs"] = room((groups, len(outs), *_SQUARE))
        if save:
            rooms["states"] = room((groups, _BLOCK, depth))
        left = [room((groups, _BLOCK, depth))] + [room((groups, *_SQUARE))] * 3
        pl.run_scoped(scoped, rooms, left if interpret else [], collective_axes="group")

    *found, last = plgpu.kernel(
        kernel,
        out_type=list(out_type.values()),
        grid=(batch * heads, blocks // groups),
        grid_names=("row", "column"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The layout inference of the other semantics finds no solution here (jax 0.11.2).
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*named.values(), initial)
    return *found, jnp.swapaxes(last, -1, -2)
