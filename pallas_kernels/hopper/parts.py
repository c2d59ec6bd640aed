"""Long rows in parts that the delta rules compute at the same time, on Mosaic GPU (Hopper).

A part changes a memory S [K, V] to `Θ S + W`. Its scan from an empty memory computes W, and its scan from the
identity, as a memory of K values to which nothing is written, computes Θ [K, K]. `link_parts` then computes
the memory before each part, `S_p+1 = Θ_p S_p + W_p`. The gradient of the memory before part p is `dS_p = Θ_pᵀ
dS_p+1 + R_p`, with R the result of the reverse scan from a gradient of 0. From these memories (or gradients)
a scan computes all parts at the same time.

If parts would make the forward pass slower, the row is scanned as one, and this scan returns the memories at
which parts would begin, so that the backward pass can compute the other memories again in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import row_and_head
from pallas_kernels.hopper.launch import launch, with_smem
from pallas_kernels.hopper.row_layout import CHUNK

_BLOCK = 64  # columns of the memory (value channels) that a warpgroup computes
_SHORTEST = 1024  # tokens of a part, at least
_FEWEST = 4  # parts; fewer cost the forward pass more than they save
_LARGEST_KEY = 128  # K up to which rows are divided into parts
_F32, _BF16 = jnp.float32, jnp.bfloat16


class Parts(NamedTuple):
    """The arrays that the forward pass of a delta rule's scan over P parts of each row saves for the backward pass.

    Attributes:
        transitions: [B, h * P, K, K] float32, the matrix Θ by which each part multiplies the memory; None if the forward pass was a
            single scan, so that the reverse scan must be one.
        starts: [B, h * P, K, V] float32, the memory before each part.
    """

    transitions: jax.Array | None
    starts: jax.Array


def count_parts(q, k, v) -> int:
    """Return the number of parts into which the rows of q, k and v [B, T, *, D] are divided: a power of two,
    as many as the card's processors can compute at once. It is 1 if parts would be too short or too few, or K
    is above 128.

    With parts the forward pass has three scans instead of one, and the backward pass three instead of two,
    and a chunk takes twice as long if all processors are busy. So few parts would save no time.
    """
    batch, length, memories, width = v.shape
    programs = batch * max(q.shape[2], memories) * max(1, width // (2 * _BLOCK))
    parts = 1
    while 2 * parts * programs <= PROCESSORS and length >= 2 * parts * _SHORTEST:
        parts *= 2
    return parts if parts >= _FEWEST and k.shape[-1] <= _LARGEST_KEY else 1


def count_checkpoints(q, k, v, chunk_bounds) -> int:
    """Return the number of memories along each row that the single scan of a forward pass over q, k and v [B, T, *, D] returns, so that
    the backward pass can compute in parts; 1 if it returns none.
    """
    batch, length, memories, width = v.shape
    programs = batch * max(q.shape[2], memories) * max(1, width // _BLOCK)
    checkpoints, chunks = 1, length // CHUNK
    if chunk_bounds is not None or count_parts(q, k, v) > 1:
        return checkpoints
    while (
        2 * checkpoints * programs <= PROCESSORS
        and chunks % (2 * checkpoints) == 0
        and length >= 2 * checkpoints * _SHORTEST
    ):
        checkpoints *= 2
    return checkpoints


def length_multiple(q, k, v) -> int:
    """Return the number that the row length T must be a multiple of, so that each part of a row has whole chunks."""
    return CHUNK * count_parts(q, k, v)


def split(scan, q, k, v, initial, chunk_bounds, interpret: Any) -> Parts | None:
    """Compute the transition of each part of the rows and the memory before it, with two scans; return None if there is only one part, or
    if rows have several memories (`chunk_bounds`).

    Args:
        scan: runs the scan over all parts at once: `scan(v, parts=P)` returns as its last result the memory W after each part that begins
            with an empty one; `scan(None, parts=P)` returns the transition Θ of each part.
        q: [B, T, *, K], the queries.
        k: [B, T, *, K], the keys.
        v: [B, T, *, V], the values.
        initial: [B, h, K, V] float32, the memory before each row.
        chunk_bounds: the chunks at which a row's memories begin and end, of `row_layout.split_runs`, or None.
        interpret: parameters of the interpreter, or False.
    """
    count = count_parts(q, k, v)
    if count == 1 or chunk_bounds is not None:
        return None
    written, transitions = (scan(values, parts=count)[-1] for values in (v, None))
    return Parts(transitions, link_parts(transitions, written, initial, interpret=interpret))


def part_starts(parts: Parts | None, initial) -> tuple[jax.Array, int]:
    """Return the memory before each part of the rows, [B, h * P, K, V], and the number of parts P of each
    row. If `parts` is None, rows are not divided: return `initial` [B, h, K, V], the memory before each row,
    and 1.
    """
    if parts is None:
        return initial, 1
    return parts.starts, parts.starts.shape[1] // initial.shape[1]


def part_end_gradients(parts: Parts | None, scan, d_final, interpret: Any) -> tuple[jax.Array, int]:
    """Return the gradient of the memory after each part of the rows, [B, h * P, K, V], and the number of parts P.

    Args:
        parts: the transitions and memories of the forward pass's parts. If it is None or has no transitions, P is 1.
        scan: runs the reverse scan over all parts at once; the last result of `scan(None, parts=P, save=False)` is the gradient R of the
            memory before each part if that of the memory after it is 0.
        d_final: [B, h, K, V] float32, the gradient of the memory after each row.
        interpret: parameters of the interpreter, or False.
    """
    if parts is None or parts.transitions is None:
        return d_final, 1
    count = parts.starts.shape[1] // d_final.shape[1]
    read = scan(None, parts=count, save=False)[-1]
    ends = link_parts(parts.transitions, read, d_final, reverse=True, interpret=interpret)
    return ends, count


def link_parts(transitions, written, initial, *, reverse: bool = False, interpret: Any = False):
    """Compute the memory before each part of the rows, from what each part does to a memory; if `reverse`, the gradient of the memory
    after each part.

    Args:
        transitions: [B, h * P, K, K] float32, the matrix Θ by which each part multiplies the memory.
        written: [B, h * P, K, V] float32, the memory W after each part that begins with an empty one; if `reverse`, the gradient R of the
            memory before each part if that of the memory after it is 0.
        initial: [B, h, K, V] float32, the memory before the first part; if `reverse`, the gradient of the memory after the last part.
        reverse: whether gradients are computed, from the last part to the first.
        interpret: parameters of the interpreter, or False.

    Returns:
        The memories, or their gradients, [B, h * P, K, V] float32.
    """
    batch, heads, depth, width = initial.shape
    parts = written.shape[1] // heads
    transposed = jnp.swapaxes(transitions, -1, -2).reshape(batch, heads, parts * depth, depth)
    # Θ as the sum of two bfloat16 matrices. XLA would simplify a difference of conversions to 0.
    high = lax.reduce_precision(transposed, exponent_bits=8, mantissa_bits=7)
    left = plgpu.SMEM((_BLOCK, depth), dtype=_BF16, transforms=wg.TILED)
    smem = dict(high=left, low=left) if interpret else {}

    def kernel(refs):
        b, h = row_and_head(heads)
        columns = pl.ds(lax.axis_index("column") * _BLOCK, _BLOCK)
        part = lambda n: parts - 1 - n if reverse else n  # noqa: E731

        def run(buffers):
            def body(indices, high, low, S) -> Any:
                index = b, h * parts + part(indices[0]), columns
                written = wg.load_global(refs["written"].at[*index])
                refs["starts"].at[*index][...] = S
                if reverse:
                    high, low = high.transpose((1, 0)), low.transpose((1, 0))
                rounded = S.astype(_BF16)
                rest = wg.as_left(S - rounded.astype(_F32), buffers.get("low"), interpret)
                rounded = wg.as_left(rounded, buffers.get("high"), interpret)

                def products(S):
                    plgpu.wgmma(S, rounded, high)
                    plgpu.wgmma(S, rounded, low)
                    plgpu.wgmma(S, rest, high)

                (S,) = wg.accumulate(products, written, interpret=interpret)
                return S

            def compute(pipeline):
                pipeline(wg.load_global(refs["initial"].at[b, h, columns]))

            pipeline: Any = plgpu.emit_pipeline_warp_specialized
            block = plgpu.BlockSpec((depth, depth), lambda n: (part(n), 0), transforms=wg.TILED)
            pipeline(
                body, grid=(parts,), in_specs=[block, block], max_concurrent_steps=2, num_compute_wgs=1,
                memory_registers=40, wg_axis="group", compute_context=compute,
            )(*(refs[name].at[b, h] for name in ("high", "low")))  # fmt: skip

        with_smem(run, smem)

    results = launch(
        kernel,
        inputs=dict(
            high=high.astype(_BF16),
            low=(transposed - high).astype(_BF16),
            written=jnp.swapaxes(written, -1, -2),
            initial=jnp.swapaxes(initial, -1, -2),
        ),
        outputs=dict(starts=jax.ShapeDtypeStruct((batch, heads * parts, width, depth), _F32)),
        grid=dict(row=batch * heads, column=width // _BLOCK),
        num_threads=2,
        name="link_parts",
        interpret=interpret,
    )
    return jnp.swapaxes(results["starts"], -1, -2)
