"""Linear attention with a scalar decay on Mosaic GPU (Hopper): one kernel, run once forward and three times backward.

A warpgroup keeps a [D, 64] piece of a memory S in registers and walks over the chunks; two of them share what is loaded. All
products are sums over D, so that beyond 128 it is sliced: each slice walks by itself, and what they read is added up. Over one
chunk the kernel computes

    out_i = enter_i x_i S + sum_j exp(cum_i - cum_j) (x_i . y_j) z_j,    S <- keep S + sum_j (leave_j y_j)ᵀ z_j

with j <= i. (x, y, z) = (q, k, v) gives the output and (dO, v, k) the gradient of q. Run against time (j >= i, the difference
turned, `enter` and `leave` exchanged), (v, dO, q) gives the gradient of k and (k, q, dO) that of v, and S is the gradient of the
memory. The decay's own gradient needs no further product: `q . dq - k . dk` summed over the rest of the chunk, and the inner
product of the memory with its gradient at the chunk's end. Mamba2 (arXiv 2405.21060) section 6 has the chunks, GLA (2312.06635)
appendix C the gradient.

Few rows of a long sequence are split: a first pass sums up each part's writes, a scan over parts gives the memory at their
beginnings, and the parts then run side by side.
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
from pallas_kernels.memory_calls import NO_BONUS, in_bfloat16, key_dims, value_dims

CHUNK = 64
_BLOCK = 64  # columns of the memory that a warpgroup holds
_DEPTH = 128  # rows of it at most
SIZES = (64, 128, 256, 512)  # K and V
_STAGES = 3  # chunks on their way or in use
_F32 = jnp.float32
REQUIREMENTS = (
    NO_BONUS,
    in_bfloat16("q", "k", "v"),
    key_dims(*SIZES),
    value_dims(*SIZES),
)


class _Decay(NamedTuple):
    """What the kernel needs to know of decays and documents, for P parts of the sequence that run as rows of the batch.

    Attributes:
        cum: [B * P, G, T / P], sums of the log decay from each chunk's start; None without decay.
        enter: [B * P, G, T / P], how much each token sees of the memory before the chunk.
        leave: [B * P, G, T / P], how much of each token's write is left at the chunk's end.
        keep: [B * P, G, N / P], how much of the memory outlives a chunk.
        run: [B * P, T / P], as given, or None.
    """

    cum: jax.Array | None
    enter: jax.Array
    leave: jax.Array
    keep: jax.Array
    run: jax.Array | None


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`: the decays, and the memory before and after each part [B * P, *, K, V]."""

    decay: _Decay
    starts: jax.Array
    ends: jax.Array


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:
    """The output [B, T, max(H, G), V], the final memories as `initial` and the residuals. T is a multiple of `CHUNK`."""
    del save  # the residuals are there in any case
    batch, length, memories, _ = v.shape
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(batch * heads, length)
    decay = _chunk_decays(log_decay, run, v.shape, parts)
    q, k, v = (row_layout.split_parts(x, parts) for x in (q, k, v))
    scan = functools.partial(
        _scan, decay=decay, heads=heads, chunk_bounds=chunk_bounds, interpret=interpret
    )
    # Several heads that read one memory each carry it along.
    starts = initial = jnp.repeat(initial, heads // memories, axis=1)
    if parts > 1:
        (written,) = scan(None, k, v)
        starts = row_layout.memories_before_parts(written, decay.keep, initial)
    output, ends = scan(q, k, v, initial=starts, read_scale=scale)
    final = ends.reshape(-1, parts, heads, *ends.shape[2:])[:, -1, :: heads // memories]
    return output.reshape(batch, length, heads, -1), final, Residuals(decay, starts, ends)


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, log_decay (None without one, or where it is not wanted) and initial."""
    batch, length, memories, _ = v.shape
    heads = d_output.shape[2]
    decay, starts, ends = residuals
    _, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = starts.shape[0] // initial.shape[0]
    whole = lambda x, n: row_layout.sum_heads(x.reshape(batch, length, *x.shape[2:]), n)  # noqa: E731
    shapes = q.shape[2], k.shape[2]
    q, k, v, d_output = (row_layout.split_parts(x, parts) for x in (q, k, v, d_output))
    scan = functools.partial(
        _scan, decay=decay, heads=heads, chunk_bounds=chunk_bounds, interpret=interpret
    )
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_ends = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    if parts > 1:
        (read,) = scan(None, q, d_output, write_scale=scale, reverse=True)
        d_ends = row_layout.memories_before_parts(read, decay.keep, d_ends, reverse=True)

    forth = dict(initial=jnp.swapaxes(starts, -1, -2), read_scale=scale)
    back = dict(write_scale=scale, reverse=True)
    turned = jnp.swapaxes(d_ends, -1, -2)
    if log_decay is None or not decay_gradient:
        d_decay = None
        dq, _ = scan(d_output, v, k, **forth)
        dk, _ = scan(v, d_output, q, initial=turned, **back)
    else:
        dq, _, reads, states = scan(d_output, v, k, partner=q, save_states=True, **forth)
        dk, _, writes, products = scan(
            v, d_output, q, initial=turned, partner=k, states=states, **back
        )
        # Stretch by stretch: over all of T, the rounding of products would add up.
        at_end = jnp.sum(ends * d_ends, (-1, -2))[:, :, None]
        products = jnp.sum(products, (2, -1))
        if chunk_bounds is None:
            at_end = jnp.concatenate([products[..., 1:], at_end], axis=-1)
        else:  # every chunk is a stretch, and the last of a run its memory's end
            last = jnp.arange(products.shape[2]) == chunk_bounds[:, 1:, None] - 1
            at_end = jnp.where(last[:, :, None], at_end.reshape(*last.shape[:2], heads, 1), 0)
            later = jnp.pad(products[..., 1:], [(0, 0), (0, 0), (0, 1)])
            at_end = jnp.where(jnp.any(last, 1)[:, None], jnp.sum(at_end, 1), later)
        rows = jnp.sum(reads - writes, axis=2)
        rows, at_end = (row_layout.sum_heads(x, memories, axis=1) for x in (rows, at_end))
        d_decay = _decay_gradient(rows, at_end, decay.run).reshape(batch, length, memories)
    dv, d_starts = scan(k, q, d_output, initial=d_ends, **back)
    d_initial = d_starts.reshape(-1, parts, *d_starts.shape[1:])[:, 0]
    return (
        whole(dq, shapes[0]), whole(dk, shapes[1]), whole(dv, memories), d_decay,
        row_layout.sum_heads(d_initial, memories, axis=1),
    )  # fmt: skip


def _stretch(count: int) -> int:
    """In how many chunks the decay's gradient is summed up without a look at the memory."""
    return max(n for n in (1, 2, 4) if count % n == 0)


def _chunk_decays(log_decay, run, shape, parts: int) -> _Decay:
    """Sums of the decay within chunks, and what documents cut off."""
    batch, length, heads, _ = shape
    count = length // CHUNK
    if log_decay is None:
        by_chunk = jnp.zeros((batch, heads, count, CHUNK), _F32)
    else:
        # Below -104 nothing is left in float32; larger sums would cost the others their precision.
        by_chunk = jnp.moveaxis(jnp.maximum(log_decay.astype(_F32), -128.0), 1, 2)
        by_chunk = by_chunk.reshape(batch, heads, count, CHUNK)
    # Sums up to a row and after it, not their difference: nothing cancels. As a product they take one kernel.
    row, other = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)
    sums = jnp.concatenate([row <= other, row > other], axis=1).astype(_F32)
    sums = jnp.einsum("bgnj,ji->bgni", by_chunk, sums, precision="highest")
    cum, after = jnp.split(sums, 2, axis=-1)
    enter, leave, keep = jnp.exp(cum), jnp.exp(after), jnp.exp(cum[..., -1])
    if run is not None:
        of_chunk = run.reshape(batch, 1, count, CHUNK)
        last = of_chunk[..., -1]
        before = jnp.pad(last[..., :-1], [(0, 0), (0, 0), (1, 0)])
        enter = jnp.where(of_chunk == before[..., None], enter, 0)
        leave = jnp.where(of_chunk == last[..., None], leave, 0)
        keep = jnp.where(last == before, keep, 0)

    def by_part(x):  # [B, G, N, ...] -> [B * P, G, *]
        x = jnp.moveaxis(x.reshape(batch, heads, parts, -1), 2, 1)
        return x.reshape(batch * parts, heads, -1)

    return _Decay(
        None if log_decay is None else by_part(cum), by_part(enter), by_part(leave), by_part(keep),
        None if run is None else row_layout.split_parts(run, parts),
    )  # fmt: skip


def _decay_gradient(rows, at_end, run):
    """[B, T, G], the sums of `rows` [B, G, T] from each token to the end of its stretch and document.

    `at_end` [B, G, stretches] is the inner product of the memory with its gradient at the end of each.
    """
    batch, heads, length = rows.shape
    rows = rows.reshape(*at_end.shape, -1)
    size = rows.shape[-1]
    seen = (jnp.arange(size)[:, None] <= jnp.arange(size))[None, None]
    last = at_end[..., None]
    if run is not None:
        run = run.reshape(batch, -1, size)
        seen &= run[..., :, None] == run[..., None, :]
        last = jnp.where((run == run[..., -1:])[:, None], last, 0)
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:])).astype(_F32)
    if run is None:
        summed = jnp.einsum("bgnj,ij->bgni", rows, seen[0, 0], precision="highest") + last
    else:
        summed = jnp.einsum("bgnj,bnij->bgni", rows, seen, precision="highest") + last
    return jnp.moveaxis(summed.reshape(batch, heads, length), 1, 2)


def _scan(
    x, y, z, decay: _Decay, *, heads: int, initial=None, read_scale: float = 1.0,
    write_scale: float = 1.0, reverse: bool = False, partner=None, save_states: bool = False,
    states=None, chunk_bounds=None, interpret: Any = False,
):  # fmt: skip
    """The kernel, over all chunks.

    Args:
        x: [B, T, *, D]; None only sums up the writes.
        y: [B, T, *, D].
        z: [B, T, *, V].
        decay: of G heads.
        heads: of the output; a multiple of those of x, y, z and of G.
        initial: [B * S, heads, D, V] float32, S before the first chunk (in reverse, after the last); None is 0.
        read_scale: multiplies the output.
        write_scale: multiplies what is written, within the chunk too.
        reverse: walk against time.
        partner: [B, T, *, V]; also return its inner products with out, unrounded, [B, heads, D / 128 * V / 64, T].
        save_states: also return S before each stretch of `_stretch(N)` chunks, [B, heads, stretches, D, V].
        states: those; also return their inner products with S as it is there, [B, heads, V / 64, stretches, D].
        chunk_bounds: of `split_runs`, or None; with them every chunk is a stretch.
        interpret: parameters of the interpreter, or False.

    Returns:
        A list: out [B, T, heads, V] if x is given, the last S [B * S, heads, D, V] in float32, and what else was asked for.
    """
    batch, length, _, whole = y.shape
    width, count = z.shape[-1], length // CHUNK
    depth = min(whole, _DEPTH)
    slices = whole // depth
    blocks, stretch = width // _BLOCK, 1 if chunk_bounds is not None else _stretch(count)
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    stretches = count // stretch
    groups = 1 if blocks % 2 else 2  # warpgroups that share x and y
    square, wide = (CHUNK, CHUNK), (CHUNK, _BLOCK)
    before, after = (decay.leave, decay.enter) if reverse else (decay.enter, decay.leave)
    tiles = dict(x=x, y=y, z=z)
    vectors: dict[str, Any] = dict(
        leave=after * write_scale, enter=before * read_scale, cum=decay.cum, run=decay.run
    )
    if x is None:
        vectors = dict(leave=vectors["leave"])
    far = dict(
        keep=decay.keep, initial=initial, partner=partner, states=states, chunk_bounds=chunk_bounds
    )
    named = {n: a for n, a in (tiles | vectors | far).items() if a is not None}
    streamed = [n for n in named if n not in far]
    struct = jax.ShapeDtypeStruct
    out_type = {
        "out": x is not None and struct((batch, length, heads * slices, width), z.dtype),
        "last": struct((batch * runs, heads, whole, width), _F32),
        "dots": partner is not None and struct((batch, heads, slices * blocks, length), _F32),
        "saved": save_states and struct((batch, heads, stretches, whole, width), z.dtype),
        "products": states is not None and struct((batch, heads, blocks, stretches, whole), _F32),
    }
    out_type = {name: kind for name, kind in out_type.items() if kind}

    def kernel(*refs):
        refs = dict(zip([*named, *out_type], refs, strict=True))
        row, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        b, steps, at = wg.chunks_of_row(refs.get("chunk_bounds"), row, count, reverse)
        group, piece = lax.axis_index("group"), lax.axis_index("slice")
        rows = pl.ds(piece * depth, depth)
        column = lax.axis_index("column") * groups + group
        columns = pl.ds(column * _BLOCK, _BLOCK)
        shared = pl.ds(lax.axis_index("column") * groups * _BLOCK, groups * _BLOCK)
        own = lambda n: lax.div(h * n, heads)  # noqa: E731 - which of n heads serves this one
        keep_ref = refs["keep"].at[b, own(decay.keep.shape[1])]

        def scoped(memory_smem, written_smem, out_smem, *weights_smem):
            def body(indices, *arguments) -> Any:
                *loaded, (S, keep) = arguments
                chunk = dict(zip(streamed, loaded, strict=True))
                n = at(indices[0])
                tokens = pl.ds(n * CHUNK, CHUNK)
                y, z = chunk["y"], chunk["z"]
                if groups > 1:
                    z = z.at[:, pl.ds(group * _BLOCK, _BLOCK)]
                memory, written, out_buffer = (
                    ref.at[group] for ref in (memory_smem, written_smem, out_smem)
                )
                # A scalar comes from far: it is asked for a chunk ahead.
                next_keep = keep_ref[at(jnp.minimum(indices[0] + 1, steps - 1))]
                leaves = plgpu.load(z, layout=wg.LAYOUT).astype(_F32)
                leaves *= wg.spread_rows(wg.load_rows(chunk["leave"]), wide)
                written[...] = leaves.astype(written.dtype)
                if x is None:
                    plgpu.commit_smem()
                    write = lambda S: plgpu.wgmma(S, y.transpose((1, 0)), written)  # noqa: E731
                    (S,) = wg.accumulate(write, S * keep, interpret=interpret)
                    return S, next_keep
                memory[...] = S.astype(memory.dtype)
                plgpu.commit_smem()
                # Always, where each chunk is a stretch; but said so, what is loaded below would come before the products.
                begins = lax.rem(n, stretch) == 0 if stretch > 1 else keep >= 0.0
                if save_states:

                    @pl.when(begins)
                    def _():
                        saved = refs["saved"].at[b, h, lax.div(n, stretch), rows, columns]
                        plgpu.copy_smem_to_gmem(memory, saved)

                def products(scores, carried, S):
                    plgpu.wgmma(scores, chunk["x"], y.transpose((1, 0)))
                    plgpu.wgmma(carried, chunk["x"], memory)
                    plgpu.wgmma(S, y.transpose((1, 0)), written)

                scores, carried, S = wg.accumulate(
                    products, jnp.zeros(square, _F32), jnp.zeros(wide, _F32), S * keep,
                    interpret=interpret,
                )  # fmt: skip
                if states is not None:

                    @pl.when(begins)
                    def _():
                        at_stretch = lax.div(n, stretch)
                        state = wg.load_global(refs["states"].at[b, h, at_stretch, rows, columns])
                        product = jnp.sum(S * state.astype(_F32), axis=1)
                        refs["products"].at[b, h, column, at_stretch, rows][...] = product

                i = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=wg.LAYOUT)
                j = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=wg.LAYOUT)
                seen = i <= j if reverse else i >= j
                if "run" in chunk:
                    seen &= wg.row_differences(chunk["run"], square) == 0
                if "cum" in chunk:
                    since = wg.row_differences(chunk["cum"], square)
                    weights = jnp.exp(jnp.where(seen, -since if reverse else since, wg.NEVER))
                    weights *= read_scale * write_scale
                else:
                    weights = jnp.where(seen, read_scale * write_scale, 0.0)
                weights = (scores * weights).astype(written.dtype)
                if interpret:  # which takes a left operand from shared memory only
                    weights_smem[0].at[group][...] = weights
                    weights = weights_smem[0].at[group]
                    plgpu.commit_smem()

                carried *= wg.spread_rows(wg.load_rows(chunk["enter"]), wide)
                near = lambda out: plgpu.wgmma(out, weights, z)  # noqa: E731
                (out,) = wg.accumulate(near, carried, interpret=interpret)
                if partner is not None:
                    other = wg.load_global(
                        refs["partner"].at[b, tokens, own(partner.shape[2]), columns]
                    )
                    dots = jnp.sum(out * other.astype(_F32), axis=1)
                    refs["dots"].at[b, h, piece * blocks + column, tokens][...] = dots
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_buffer[...] = out.astype(out_buffer.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_buffer, refs["out"].at[b, tokens, h * slices + piece, columns]
                )
                return S, next_keep

            def compute(pipeline):
                if initial is None:
                    S = plgpu.layout_cast(jnp.zeros((depth, _BLOCK), _F32), wg.LAYOUT)
                else:
                    S = wg.load_global(refs["initial"].at[row, h, rows, columns])
                S, _ = pipeline((S, keep_ref[at(0)]))
                refs["last"].at[row, h, rows, columns][...] = S
                plgpu.wait_smem_to_gmem(0)

            sources, specs = [], []
            for name in streamed:
                if name in tiles:
                    size = groups * _BLOCK if name == "z" else depth
                    source = refs[name].at[b, :, own(tiles[name].shape[2])]
                    sources.append(source.at[:, shared if name == "z" else rows])
                    block = plgpu.BlockSpec(
                        (CHUNK, size), lambda n: (at(n), 0), transforms=wg.TILED
                    )
                else:
                    place = (b,) if name == "run" else (b, own(vectors[name].shape[1]))
                    sources.append(refs[name].at[place])
                    block = plgpu.BlockSpec((CHUNK,), lambda n: (at(n),))
                specs.append(block)
            pipeline: Any = plgpu.emit_pipeline_warp_specialized
            pipeline(
                body, grid=(steps,), in_specs=specs, max_concurrent_steps=min(_STAGES, count),
                num_compute_wgs=groups, memory_registers=40, wg_axis="group", compute_context=compute,
            )(*sources)  # fmt: skip

        smem: Any = plgpu.SMEM
        buffer = functools.partial(smem, dtype=z.dtype, transforms=wg.TILED)
        buffers = [
            buffer((groups, depth, _BLOCK)),
            buffer((groups, *wide)),
            buffer((groups, *wide)),
        ]
        if interpret:
            buffers.append(buffer((groups, *square)))
        pl.run_scoped(scoped, *buffers, collective_axes="group")

    found = plgpu.kernel(
        kernel,
        out_type=list(out_type.values()),
        grid=(batch * runs * heads, slices, blocks // groups),
        grid_names=("row", "slice", "column"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The layout inference of the other semantics finds no solution here (jax 0.11.2).
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*named.values())
    if x is not None:
        found[0] = row_layout.sum_heads(found[0], heads)
    return found
