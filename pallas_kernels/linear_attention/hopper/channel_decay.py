"""Linear attention whose decay has a value for every key channel (GLA, HGRN2, RWKV6), on Mosaic GPU (Hopper).

What is parallel is apart from what is sequential. `_chunk_forward` resolves every chunk by itself: its scores, for rows that the decay
since the chunk's beginning leaves within reach all at once, for others by halving (see `tiles_channels`); and its queries and keys
with their decay to the chunk's chunk_bounds. `_scan` then walks over the chunks with a [K, 64] piece of the memory S in the registers of
a warpgroup:

    out = read S + scores values,    S <- keep S + writtenᵀ values

all three products at once, so that a chunk's chain is one store and one round of products. Run against time with the transposed
scores, read and written exchanged and dO for values it gives dv and the memory's gradient. Both sweeps of the backward save what
they hold at each chunk's border, and `chunk_backward` gives dq, dk and the decay's gradient, again chunk by chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.halving import (
    BLOCK,
    CHUNK,
    LEVELS,
    PARAMETERS,
    SQUARE,
    AllPairs,
    Documents,
    Halving,
    Level,
    left_operand,
    load,
    load_by_column,
    load_by_row,
    same_document,
)
from pallas_kernels.linear_attention.hopper.chunk_backward import chunk_backward
from pallas_kernels.memory_calls import FLOAT32_DECAY, KEYS_IN_SLICES, VALUES_IN_SLICES, in_bfloat16

_STAGES = 3  # chunks on their way or in use
_SIZES = (64, 128)
_F32 = jnp.float32
REQUIREMENTS = (
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
    KEYS_IN_SLICES,
    VALUES_IN_SLICES,
)


class Chunks(NamedTuple):
    """Every chunk of T tokens, for h heads.

    Attributes:
        scores: [B, h, T, 64].
        read: [B, T, h, K], scale q e^b.
        written: [B, T, h, K], k e^(b_C - b).
        keep: [B, h, N * K] float32, e^(b_C).
    """

    scores: jax.Array | None
    read: jax.Array | None
    written: jax.Array
    keep: jax.Array


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`: the chunks, and the memory before each of P parts [B * P, h, K, V].

    To resolve the chunks again would take a quarter of the time of both.
    """

    chunks: Chunks
    starts: jax.Array


def _pieces(q, v) -> int:
    return max(1, v.shape[3] // _SIZES[-1]) if q.shape[2] <= v.shape[2] else 1


def _cut(x, pieces: int):
    """[B, T, G, V] -> [B, T, G * pieces, V / pieces]."""
    return x.reshape(*x.shape[:2], x.shape[2] * pieces, -1)


def _cut_memory(memory, pieces: int):
    """[B, G, K, V] -> [B, G * pieces, K, V / pieces]."""
    batch, memories, depth, width = memory.shape
    by_piece = jnp.swapaxes(memory.reshape(batch, memories, depth, pieces, -1), 2, 3)
    return by_piece.reshape(batch, memories * pieces, depth, width // pieces)


def _join_memory(memory, pieces: int):
    """Back from `_cut_memory`."""
    batch, count, depth, width = memory.shape
    by_piece = jnp.swapaxes(memory.reshape(batch, count // pieces, pieces, depth, width), 2, 3)
    return by_piece.reshape(batch, count // pieces, depth, pieces * width)


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, bonus=None, save: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """The output [B, T, max(H, G), V], the final memories as `initial` and the residuals. T is a multiple of `CHUNK`.

    With a bonus [G, K] reads come before writes.
    """
    del save  # the residuals are there in any case
    pieces = _pieces(q, v)
    v, initial = _cut(v, pieces), _cut_memory(initial, pieces)
    batch, length, memories, _ = v.shape
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(batch * heads, length)
    split = functools.partial(row_layout.split_parts, parts=parts)
    chunks = _chunk_forward(
        split(q), split(k), split(log_decay), row_layout.documents_of(run, parts), heads=heads // pieces, scale=scale, bonus=bonus,
        interpret=interpret,
    )  # fmt: skip
    values = split(v)
    scan = functools.partial(_scan, chunk_bounds=chunk_bounds, interpret=interpret)
    # Several heads that read one memory each carry it along.
    starts = initial = jnp.repeat(initial, heads // memories, axis=1)
    if parts > 1:
        (written,) = scan(None, chunks.written, values, None, chunks.keep)
        starts = row_layout.memories_before_parts(written, _by_channel(chunks), initial)
    output, ends = scan(
        chunks.read, chunks.written, values, chunks.scores, chunks.keep, initial=starts
    )
    final = ends.reshape(-1, parts, heads, *ends.shape[2:])[:, -1, :: heads // memories]
    output = output.reshape(batch, length, heads // pieces, -1)
    return output, _join_memory(final, pieces), Residuals(chunks, starts)


def scan_writes(k, v, log_decay, run, initial, *, heads: int, interpret: Any = False):
    """What `heads` heads hold of keys k and values v: chunks that are only written, the memories before and after, documents.

    For P parts of the sequence: memories before each chunk [B * P, heads, N / P, K, V], and the last [B * P, heads, K, V].
    """
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(len(v) * heads, v.shape[1])
    split = functools.partial(row_layout.split_parts, parts=parts)
    values, documents = split(v), row_layout.documents_of(run, parts)
    chunks = _chunk_forward(
        None, split(k), split(log_decay), documents, heads=heads, scale=1.0, interpret=interpret
    )
    write = functools.partial(
        _scan, None, chunks.written, values, None, chunks.keep, chunk_bounds=chunk_bounds,
        interpret=interpret,
    )  # fmt: skip
    starts = jnp.repeat(initial, heads // initial.shape[1], axis=1)
    if parts > 1:
        starts = row_layout.memories_before_parts(write()[0], _by_channel(chunks), starts)
    ends, states = write(initial=starts, save=True)
    return chunks, states, ends, documents


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    bonus=None, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, log_decay and initial, and of a bonus if there is one."""
    del decay_gradient
    pieces = _pieces(q, v)
    v, d_output, d_final = _cut(v, pieces), _cut(d_output, pieces), _cut_memory(d_final, pieces)
    batch, length, memories, _ = v.shape
    heads, (chunks, starts) = d_output.shape[2], residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = starts.shape[0] // initial.shape[0]
    split = functools.partial(row_layout.split_parts, parts=parts)
    values, d_out = split(v), split(d_output)
    scan = functools.partial(_scan, chunk_bounds=chunk_bounds, interpret=interpret)
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_ends = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    if parts > 1:
        (read,) = scan(None, chunks.read, d_out, None, chunks.keep, reverse=True)
        d_ends = row_layout.memories_before_parts(read, _by_channel(chunks), d_ends, reverse=True)
    _, states = scan(None, chunks.written, values, None, chunks.keep, initial=starts, save=True)
    dv, d_starts, d_states = scan(
        chunks.written, chunks.read, d_out, chunks.scores, chunks.keep,
        initial=d_ends, save=True, reverse=True,
    )  # fmt: skip
    dq, dk, d_decay, *d_bonus = chunk_backward(
        split(q), split(k), values, split(log_decay), d_out, states, d_states, chunks.keep,
        row_layout.documents_of(run, parts), scale=scale, bonus=bonus, pieces=1 if pieces % 2 else 2, interpret=interpret,
    )  # fmt: skip
    given = memories // pieces
    d_bonus = [jnp.sum(x.reshape(x.shape[0], given, -1, x.shape[-1]), (0, 2)) for x in d_bonus]
    d_initial = d_starts.reshape(-1, parts, *d_starts.shape[1:])[:, 0]
    whole = lambda x, n: row_layout.sum_heads(x.reshape(batch, length, *x.shape[2:]), n)  # noqa: E731
    dv = whole(dv, memories).reshape(batch, length, given, -1)
    d_initial = _join_memory(row_layout.sum_heads(d_initial, memories, axis=1), pieces)
    return (
        whole(dq, q.shape[2]),
        whole(dk, k.shape[2]),
        dv,
        whole(d_decay, given),
        d_initial,
        *d_bonus,
    )


def _by_channel(chunks: Chunks):
    """`keep` with chunks last, [B, h, K, N]."""
    batch, _, heads, depth = chunks.written.shape
    return jnp.swapaxes(chunks.keep.reshape(batch, heads, -1, depth), 2, 3)


def _chunk_forward(
    q, k, log_decay, documents: Documents | None, *, heads: int, scale: float, bonus=None,
    interpret: Any = False,
) -> Chunks:  # fmt: skip
    """Resolve all chunks for `heads` heads, a multiple of those of q, k and log_decay [B, T, *, K] and of bonus [*, K].

    Without q (None) they have no scores and are not read, and k may be float32.
    """
    batch, length, _, depth = k.shape
    count, groups = length // CHUNK, depth // BLOCK
    total = batch * count * heads
    # As many warpgroups as leave each thread 128 registers.
    items = next(n for n in (4 // groups, 2 // groups, 1) if n and total % n == 0)
    named = dict(k=k, g=log_decay) | ({} if q is None else dict(q=q))
    named |= {} if documents is None else documents._asdict()
    named |= {} if bonus is None else dict(bonus=bonus)
    struct: Any = jax.ShapeDtypeStruct
    wide = struct((batch, length, heads, depth), jnp.bfloat16)
    out_type = dict(written=wide, keep=struct((batch, heads, count * depth), _F32))
    if q is not None:
        out_type |= dict(scores=struct((batch, heads, length, CHUNK), jnp.bfloat16), read=wide)

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        warpgroup = lax.axis_index("warpgroup")
        item, group = lax.div(warpgroup, groups), lax.rem(warpgroup, groups)
        columns = pl.ds(group * BLOCK, BLOCK)

        index = lax.axis_index("block") * items + item
        h, n = lax.rem(index, heads), lax.rem(lax.div(index, heads), count)
        b, tokens = lax.div(index, heads * count), pl.ds(n * CHUNK, CHUNK)
        own = lambda heads_of: lax.div(h * heads_of, heads)  # noqa: E731 - which of these serves this one

        def scoped(q_buffer, k_buffer, parts, buffer, lowest, other, loaded, added, *left_buffer):
            q_buffer, k_buffer, parts, buffer, lowest, loaded = (
                x.at[warpgroup] for x in (q_buffer, k_buffer, parts, buffer, lowest, loaded)
            )
            for name, x in (("k", k_buffer), ("q", q_buffer)):
                if name in refs:
                    source = refs[name].at[b, tokens, own(named[name].shape[2]), columns]
                    plgpu.copy_gmem_to_smem(source, x, loaded)
            left = left_operand(left_buffer[0].at[warpgroup] if interpret else None, interpret)
            halving = Halving(parts, buffer, left, bonus is not None, interpret, lowest)
            g = wg.load_global(refs["g"].at[b, tokens, own(log_decay.shape[2]), columns])
            halving.split_decay(g)
            keep = jnp.exp2(halving.column_sums())
            if documents is not None:
                keep *= refs["enters"].at[b][n * CHUNK + CHUNK - 1]
            refs["keep"].at[b, h, pl.ds(n * depth + group * BLOCK, BLOCK)][...] = keep
            plgpu.barrier_wait(loaded)

            def resolve():
                since, reached = halving.check_range(q_buffer, k_buffer)

                def add(step, scores, serves):
                    rows = left(step.rows(load(q_buffer), load(k_buffer)).astype(buffer.dtype))
                    buffer[...] = step.columns(load(q_buffer), load(k_buffer)).astype(buffer.dtype)
                    plgpu.commit_smem()
                    (near,) = halving.accumulate(
                        lambda out: plgpu.wgmma(out, rows, buffer.transpose((1, 0)))
                    )
                    return scores + jnp.where(serves(), step.mask(near), 0.0)

                def level(at, scores):
                    return add(Level(halving, at), scores, lambda: ~halving.pairs_in_range())

                # A loop: the levels unrolled take more registers than there are.
                scores = plgpu.layout_cast(jnp.zeros(SQUARE, _F32), wg.LAYOUT)
                scores = add(AllPairs(halving, 0, since), scores, halving.pairs_in_range)
                scores = lax.fori_loop(reached * LEVELS, LEVELS, level, scores)
                current = load(q_buffer).astype(_F32) * load(k_buffer).astype(_F32)
                if bonus is not None:
                    current *= load_by_column(refs["bonus"].at[own(bonus.shape[0]), columns])
                current = wg.spread_rows(jnp.sum(current, axis=1), SQUARE)
                i, j = halving.i, halving.j
                scores = jnp.where(i > j, scores, jnp.where(i == j, current, 0.0)) * scale
                if documents is not None:
                    scores = jnp.where(same_document(refs["run"].at[b, tokens]), scores, 0.0)
                return scores

            scores: Any = None if q is None else resolve()

            def hand_over():
                other.at[item][...] = scores
                plgpu.barrier_arrive(added.at[item])

            if groups > 1 and q is not None:
                pl.when(group == 1)(hand_over)
            # What is apart from the other warpgroup goes first, so that it need not wait long.
            for name, x, later in (("read", q_buffer, True), ("written", k_buffer, False)):
                if name not in refs:
                    continue
                factor = halving.boundary_decay(later)
                if documents is not None:
                    flags = refs["enters" if later else "stays"].at[b, tokens]
                    factor *= wg.spread_rows(load_by_row(flags), SQUARE)
                if later:
                    factor *= scale
                into = q_buffer if q is None else x
                into[...] = (load(x).astype(_F32) * factor).astype(into.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(into, refs[name].at[b, tokens, h, columns])

            def save():
                whole = scores
                if groups > 1:
                    plgpu.barrier_wait(added.at[item])
                    whole += load(other.at[item])
                buffer[...] = whole.astype(buffer.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, refs["scores"].at[b, h, tokens])

            if q is not None:
                pl.when(group == 0)(save)
            plgpu.wait_smem_to_gmem(0)

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=jnp.bfloat16, transforms=wg.TILED)
        each = items * groups
        buffers = [
            buffer((each, *SQUARE)),
            buffer((each, *SQUARE), dtype=k.dtype, transforms=wg.smem_transforms(k.dtype)),
            buffer((each, 2, *SQUARE)),
            buffer((each, *SQUARE)),
            smem((each, 2, CHUNK), _F32),
            smem((items if groups > 1 else 1, *SQUARE), _F32, transforms=wg.TILED_WIDE),
            plgpu.Barrier(num_arrivals=1 if q is None else 2, num_barriers=each),
            plgpu.Barrier(num_barriers=items),
        ]
        if interpret:
            buffers.append(buffer((each, *SQUARE)))
        pl.run_scoped(scoped, *buffers, collective_axes="warpgroup")

    written, keep, *rest = plgpu.kernel(
        kernel,
        out_type=list(out_type.values()),
        grid=(total // items,),
        grid_names=("block",),
        num_threads=items * groups,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*named.values())
    scores, read = rest or (None, None)
    return Chunks(scores, read, written, keep)


def _scan(
    read, written, values, scores, keep, *, initial=None, reverse: bool = False, save: bool = False,
    chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """Walk over all chunks, with a memory for each of h heads, the most that an argument has; the others' numbers divide h.

    Args:
        read: [B, T, *, K]; None with `scores` only writes.
        written: [B, T, *, K].
        values: [B, T, *, V].
        scores: [B, *, T, 64], transposed in use if `reverse`.
        keep: [B, *, N * K].
        initial: [B * S, h, K, V] float32, S before the first chunk (in reverse, after the last); None is 0.
        reverse: walk against time.
        save: also return S before each chunk (in reverse, after it).
        chunk_bounds: of `row_layout.split_runs`, or None.
        interpret: parameters of the interpreter, or False.

    Returns:
        A list: out [B, T, h, V] if `read` is given, the last S [B * S, h, K, V] in float32, and the saved ones [B, h, N, K, V].
    """
    batch, length, own, depth = written.shape
    heads, width, count = max(own, values.shape[2]), values.shape[-1], length // CHUNK
    blocks = width // BLOCK
    groups = 1 if blocks % 2 else 2  # warpgroups that share what is loaded
    wide = (CHUNK, BLOCK)
    streams = dict(read=read, written=written, values=values, scores=scores, keep=keep)
    streams = {name: x for name, x in streams.items() if x is not None}
    named = streams | ({} if initial is None else dict(initial=initial))
    named |= {} if chunk_bounds is None else dict(chunk_bounds=chunk_bounds)
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    struct = jax.ShapeDtypeStruct
    out_type = {
        "out": read is not None and struct((batch, length, heads, width), values.dtype),
        "last": struct((batch * runs, heads, depth, width), _F32),
        "saved": save and struct((batch, heads, count, depth, width), values.dtype),
    }
    out_type = {name: kind for name, kind in out_type.items() if kind}

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        row, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        b, steps, at = wg.chunks_of_row(refs.get("chunk_bounds"), row, count, reverse)
        group = lax.axis_index("group")
        columns = pl.ds((lax.axis_index("column") * groups + group) * BLOCK, BLOCK)
        shared = pl.ds(lax.axis_index("column") * groups * BLOCK, groups * BLOCK)

        def scoped(memory_smem, out_smem):
            def body(indices, *arguments) -> Any:
                *loaded, S = arguments
                chunk = dict(zip(streams, loaded, strict=True))
                n = at(indices[0])
                written, z = chunk["written"], chunk["values"]
                if groups > 1:
                    z = z.at[:, pl.ds(group * BLOCK, BLOCK)]
                memory, out_buffer = memory_smem.at[group], out_smem.at[group]
                if save:
                    # All but the output's copy, which came after the memory's.
                    plgpu.wait_smem_to_gmem(0 if read is None else 1, wait_read_only=True)
                if save or read is not None:
                    memory[...] = S.astype(memory.dtype)
                    plgpu.commit_smem()
                if save:
                    plgpu.copy_smem_to_gmem(memory, refs["saved"].at[b, h, n, :, columns])
                S = S * wg.spread_rows(wg.load_rows(chunk["keep"]), (depth, BLOCK))
                write = lambda S: plgpu.wgmma(S, written.transpose((1, 0)), z)  # noqa: E731
                if read is None:
                    return wg.accumulate(write, S, interpret=interpret)[0]
                near = chunk["scores"].transpose((1, 0)) if reverse else chunk["scores"]

                def products(out, S):
                    plgpu.wgmma(out, near, z)
                    plgpu.wgmma(out, chunk["read"], memory)
                    write(S)

                out, S = wg.accumulate(products, jnp.zeros(wide, _F32), S, interpret=interpret)
                plgpu.wait_smem_to_gmem(1 if save else 0, wait_read_only=True)
                out_buffer[...] = out.astype(out_buffer.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_buffer, refs["out"].at[b, pl.ds(n * CHUNK, CHUNK), h, columns])  # fmt: skip
                return S

            def compute(pipeline):
                if initial is None:
                    S = plgpu.layout_cast(jnp.zeros((depth, BLOCK), _F32), wg.LAYOUT)
                else:
                    S = wg.load_global(refs["initial"].at[row, h, :, columns])
                refs["last"].at[row, h, :, columns][...] = pipeline(S)
                plgpu.wait_smem_to_gmem(0)

            sources, specs = [], []
            for name in streams:
                source = refs[name]
                if name in ("scores", "keep"):
                    source = source.at[b, lax.div(h * own, heads)]
                else:
                    source = source.at[b, :, lax.div(h * streams[name].shape[2], heads)]
                if name == "keep":
                    specs.append(plgpu.BlockSpec((depth,), lambda n: (at(n),)))
                else:
                    size = dict(scores=CHUNK, values=groups * BLOCK).get(name, depth)
                    source = source.at[:, shared] if name == "values" else source
                    specs.append(
                        plgpu.BlockSpec((CHUNK, size), lambda n: (at(n), 0), transforms=wg.TILED)
                    )
                sources.append(source)
            pipeline: Any = plgpu.emit_pipeline_warp_specialized
            pipeline(
                body, grid=(steps,), in_specs=specs, max_concurrent_steps=min(_STAGES, count),
                num_compute_wgs=groups, memory_registers=40, wg_axis="group", compute_context=compute,
            )(*sources)  # fmt: skip

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=values.dtype, transforms=wg.TILED)
        buffers = buffer((groups, depth, BLOCK)), buffer((groups, *wide))
        pl.run_scoped(scoped, *buffers, collective_axes="group")

    return plgpu.kernel(
        kernel,
        out_type=list(out_type.values()),
        grid=(batch * runs * heads, blocks // groups),
        grid_names=("row", "column"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*named.values())
