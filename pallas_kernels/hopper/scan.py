"""The scan over chunks that the delta rules' kernels share, on Mosaic GPU (Hopper)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.row_layout import CHUNK

_F32, _BF16 = jnp.float32, jnp.bfloat16
_SQUARE = (CHUNK, CHUNK)
_BLOCK = 64  # columns of the memory that a warpgroup holds


_DEEPEST_IN_REGISTERS = 128  # rows beyond which it is in pieces


_STAGES = 3  # chunks on their way or in use, where there is buffer


_SMEM = 226 * 1024  # bytes of shared memory, of 227


_KEY_WIDE = ("q", "k", "written", "reach")  # what of a token is as long as a key


def zip_with_keys(S, others=None):
    """With the keys that each holds; or `others`, of the same keys."""
    keys = (pl.ds(n * x.shape[1], x.shape[1]) for n, x in enumerate(S))
    return list(zip(keys, S if others is None else others, strict=False))


def decay_memory(chunk, S):
    """What is left of the pieces of S after the chunk."""
    if "keep" not in chunk:
        keep = chunk["enter"][CHUNK - 1] if "enter" in chunk else 1.0
        return [x * keep for x in S]
    vectors = (plgpu.load(chunk["keep"].at[keys], layout=wg.LAYOUT.reduce(0)) for keys, _ in zip_with_keys(S))  # fmt: skip
    return [x * wg.spread_columns(keep, x.shape) for keep, x in zip(vectors, S, strict=True)]


def scan(
    step, given, initial, depth, tokens, outs, *, save, heads, reverse, interpret, parts: int = 1,
    checkpoints: int = 1, chunk_bounds=None,
):  # fmt: skip
    """Carry a memory over all chunks.

    Args:
        step: (chunk: references by name, pieces of S, buffers for left operands, hold, store, put) -> pieces of S. `hold` gives what it
            was given as left operands with their keys, as many at a time as there is buffer for, and whether they are the last; it
            calls `store` when their products have begun, and `put` with the outputs, turned.
        given: by name, or None: [B, T, *, D] q, k, v, written and reach, [B, heads, N * K] keep, [B, heads, T * n] rows, and any
            others [B, heads, T, C].
        initial: [B * S, heads * parts, K, V] float32; None is 0, or without v the identity.
        depth: K.
        tokens: the shape of an output by token.
        outs: the outputs' names.
        save: also save S before each step.
        heads: of the outputs.
        reverse: walk against time.
        interpret: parameters of the interpreter, or False.
        parts: a divisor of N; each part of the sequence is walked by itself, side by side with the others.
        checkpoints: a divisor of N; more than one also gives S before as many parts of the sequence, which has one part then.
        chunk_bounds: the chunks [B, S + 1] at which those of a row's S memories begin and end, or None; not in parts then.

    Returns:
        The outputs, the saved memories [B, heads, N, V, K] if wanted, those of the checkpoints [B, heads * checkpoints, K, V], and the last
        ones [B * S, heads * parts, K, V].
    """
    named = {name: x for name, x in given.items() if x is not None}
    batch, length, _, width = tokens.shape
    count = length // CHUNK // parts
    row_count = named["rows"].shape[2] // length if "rows" in named else 0
    blocks = width // _BLOCK
    struct = jax.ShapeDtypeStruct
    out_type: dict[str, Any] = {name: tokens for name in outs}
    if save:
        out_type["states"] = struct((batch, heads, count * parts, width, depth), _BF16)
    if checkpoints > 1:
        out_type["checkpoints"] = struct((batch, heads * checkpoints, width, depth), _F32)
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    out_type["last"] = struct((batch * runs, heads * parts, width, depth), _F32)
    starts = {} if initial is None else dict(initial=jnp.swapaxes(initial, -1, -2))
    starts |= {} if chunk_bounds is None else dict(chunk_bounds=chunk_bounds)

    # A deep memory leaves no buffer for a copy in registers: it is a left operand in shared memory.
    through = bool(interpret) or depth > _DEEPEST_IN_REGISTERS
    size = _BLOCK if through else depth

    def count_stages(groups, buffer_count):
        sizes = dict.fromkeys(named, CHUNK) | dict.fromkeys(_KEY_WIDE, depth)
        sizes |= dict(v=groups * _BLOCK, rows=8, keep=8)
        chunk_bytes = sum(
            2 * CHUNK * sizes[name] for name in named
        )  # vectors stand 1024 bytes apart
        out_bytes = 2 * groups * _BLOCK * (CHUNK * buffer_count + depth * (save and not through))
        return min(_STAGES, count, (_SMEM - out_bytes) // chunk_bytes)

    # Warpgroups that share what is loaded, if there is buffer to load ahead. Two take 1.7 times as long as one that has a processor
    # of its own, so that it depends on how often all processors are filled.
    walks = batch * runs * heads * parts * blocks
    alone = 10 * pl.cdiv(walks, PROCESSORS) < 17 * pl.cdiv(walks, 2 * PROCESSORS)
    buffer_count = 2 if through else max(1, len(outs))
    share = blocks % 2 == 0 and not alone and count_stages(2, buffer_count) >= min(2, count)
    groups = 2 if share else 1
    # Alone, it may have buffer for all pieces of its memory at once, and for outputs that it need not wait for.
    pieces = depth // size
    whole = through and groups == 1 and count_stages(1, pieces + len(outs)) >= min(2, count)
    buffer_count = pieces + len(outs) if whole else buffer_count
    stages = count_stages(groups, buffer_count)

    def kernel(*refs):
        refs = dict(zip([*named, *starts, *out_type], refs, strict=True))
        row, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        own = row, h
        b, steps, at = wg.chunks_of_row(refs.get("chunk_bounds"), row, count, reverse)
        if parts > 1:
            head, part = (f(lax.axis_index("row"), parts) for f in (lax.div, lax.rem))
            b, h = lax.div(head, heads), lax.rem(head, heads)
            own = b, h * parts + part
            at = lambda n: part * count + (count - 1 - n if reverse else n)  # noqa: E731
        group = lax.axis_index("group")
        columns = pl.ds((lax.axis_index("column") * groups + group) * _BLOCK, _BLOCK)
        shared = pl.ds(lax.axis_index("column") * groups * _BLOCK, groups * _BLOCK)

        def scoped(buffers, left):
            buffer_smem, *state_smem = buffers

            def body(indices, *arguments) -> Any:
                *loaded, S = arguments
                chunk: dict[str, Any] = dict(zip(named, loaded, strict=True))
                if groups > 1 and "v" in chunk:
                    chunk["v"] = chunk["v"].at[:, pl.ds(group * _BLOCK, _BLOCK)]
                for index in range(row_count):
                    part = chunk["rows"].at[pl.ds(index * CHUNK, CHUNK)]
                    chunk[("beta", "enter", "leave")[index]] = part
                n = at(indices[0])
                if checkpoints > 1:
                    stride = count // checkpoints

                    @pl.when(lax.rem(n, stride) == 0)
                    def _():
                        mark = b, h * checkpoints + lax.div(n, stride), columns
                        for keys, piece in zip_with_keys(S):
                            refs["checkpoints"].at[*mark, keys][...] = piece

                buffers = [buffer_smem.at[group, index] for index in range(buffer_count)]

                def hold(S):
                    if not through:
                        yield (
                            [(keys, piece.astype(_BF16)) for keys, piece in zip_with_keys(S)],
                            True,
                        )
                        return
                    held = []
                    for index, (keys, piece) in enumerate(zip_with_keys(S)):
                        if not whole:
                            # All but the last copy, which is of the other buffer.
                            plgpu.wait_smem_to_gmem(int(save or index == 0), wait_read_only=True)
                        elif index == 0:
                            plgpu.wait_smem_to_gmem(len(outs), wait_read_only=True)
                        buffer = buffers[index if whole else (index + 1) % 2]
                        buffer[...] = piece.astype(_BF16)
                        held.append((keys, buffer))
                        if whole and index < len(S) - 1:
                            continue
                        plgpu.commit_smem()
                        for keys, buffer in held if save else ():
                            to = refs["states"].at[b, h, n, columns, keys]
                            plgpu.copy_smem_to_gmem(buffer, to)
                        yield held, index == len(S) - 1
                        held = []

                def store(S):
                    if through:
                        return
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if save:
                        buffer = state_smem[0].at[group]
                        for keys, piece in zip_with_keys(S):
                            buffer.at[:, keys][...] = piece.astype(_BF16)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(buffer, refs["states"].at[b, h, n, columns])

                def put(*values):
                    if not values:
                        return
                    if through:
                        # All but this step's copies of pieces, which have buffers of their own.
                        later = pieces if whole and save else 0
                        plgpu.wait_smem_to_gmem(later, wait_read_only=True)
                    free = buffers[pieces:] if whole else buffers
                    for buffer, value in zip(free, values, strict=False):
                        buffer.transpose((1, 0))[...] = value.astype(_BF16)
                    plgpu.commit_smem()
                    for buffer, name in zip(free, outs, strict=False):
                        tokens = refs[name].at[b, pl.ds(n * CHUNK, CHUNK), h, columns]
                        plgpu.copy_smem_to_gmem(buffer, tokens)

                left_of = [buffer.at[group] for buffer in left] or [None] * 3
                return step(chunk, S, left_of, hold, store, put)

            def compute(pipeline):
                def begin(n):
                    if initial is not None:
                        return wg.load_global(refs["initial"].at[*own, columns, pl.ds(n, size)])
                    piece = (_BLOCK, size)
                    if "v" in named:
                        return plgpu.layout_cast(jnp.zeros(piece, _F32), wg.LAYOUT)
                    i, j = (
                        plgpu.broadcasted_iota(jnp.int32, piece, axis, layout=wg.LAYOUT)
                        for axis in (0, 1)
                    )
                    return jnp.where(i + columns.start == j + n, 1.0, 0.0).astype(_F32)

                S = pipeline(tuple(begin(n) for n in range(0, depth, size)))
                for keys, piece in zip_with_keys(S):
                    refs["last"].at[*own, columns, keys][...] = piece
                plgpu.wait_smem_to_gmem(0)

            sources, specs = [], []
            for name, x in named.items():
                if name in ("v", *_KEY_WIDE):
                    source = refs[name].at[b, :, lax.div(h * x.shape[2], heads)]
                    if name == "v":
                        source = source.at[:, shared]
                    sources.append(source)
                    block = (CHUNK, groups * _BLOCK if name == "v" else depth)
                else:
                    sources.append(refs[name].at[b, h])
                    vectors = dict(rows=row_count * CHUNK, keep=depth)
                    block = (vectors[name],) if name in vectors else _SQUARE
                rest = (0,) * (len(block) - 1)
                specs.append(
                    plgpu.BlockSpec(
                        block, lambda n, rest=rest: (at(n), *rest), transforms=wg.TILED if rest else ()
                    )
                )  # fmt: skip
            pipeline: Any = plgpu.emit_pipeline_warp_specialized
            pipeline(
                body, grid=(steps,), in_specs=specs, max_concurrent_steps=stages,
                num_compute_wgs=groups, memory_registers=24 if through else 40, wg_axis="group", compute_context=compute,
            )(*sources)  # fmt: skip

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
        buffers = [buffer((groups, buffer_count, *_SQUARE))]
        if save and not through:
            buffers.append(buffer((groups, _BLOCK, depth)))
        left = [buffer((groups, *_SQUARE))] * 3
        pl.run_scoped(scoped, buffers, left if interpret else [], collective_axes="group")

    *found, last = plgpu.kernel(
        kernel,
        out_type=list(out_type.values()),
        grid=(batch * runs * heads * parts, blocks // groups),
        grid_names=("row", "column"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The layout inference of the other semantics finds no solution here (jax 0.11.2).
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*named.values(), *starts.values())
    if checkpoints > 1:
        found[-1] = jnp.swapaxes(found[-1], -1, -2)
    return *found, jnp.swapaxes(last, -1, -2)
