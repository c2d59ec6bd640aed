"""A sequence of few rows cut into parts that are walked side by side, on Mosaic GPU (Hopper).

A part takes a memory S [K, V] to `Θ S + W`: W is where it takes an empty one, and Θ [K, K] where it takes the identity as a memory
of K values to which nothing is written. `link_parts` then hands the memory on from part to part, `S_p+1 = Θ_p S_p + W_p`, and against
time its gradient, `dS_p = Θ_pᵀ dS_p+1 + R_p` with R where the walk against time takes 0. With the memory at which each begins
(or its gradient, where it ends) all parts are walked side by side.

Where parts do not pay, the one walk of the forward leaves the memories at which they would begin, so that the backward makes the
memories again in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.row_layout import CHUNK

_BLOCK = 64  # columns of the memory that a warpgroup holds
_SHORTEST = 1024  # tokens of a part
_FEWEST = 4  # parts; fewer cost the forward more than they save it
_DEPTH = 128  # keys at most
_F32, _BF16 = jnp.float32, jnp.bfloat16


class Parts(NamedTuple):
    """P parts of a sequence.

    Attributes:
        transitions: [B, h * P, K, K] float32, Θ; None if the sequence was walked in one, so that the gradient has to be.
        starts: [B, h * P, K, V] float32, the memories at which they begin.
    """

    transitions: jax.Array | None
    starts: jax.Array


def count_parts(q, k, v) -> int:
    """Into how many parts [B, T, *, D] are cut: as many as keep the card busy, none of them short; a power of two.

    Forward a part is walked three times, in the backward three times in place of two; and a chunk takes twice as long where all
    processors are busy.
    """
    batch, length, memories, width = v.shape
    programs = batch * max(q.shape[2], memories) * max(1, width // (2 * _BLOCK))
    parts = 1
    while 2 * parts * programs <= PROCESSORS and length >= 2 * parts * _SHORTEST:
        parts *= 2
    return parts if parts >= _FEWEST and k.shape[-1] <= _DEPTH else 1


def count_checkpoints(q, k, v, chunk_bounds) -> int:
    """At how many places of [B, T, *, D] the one walk of a forward leaves its memory: as many parts as keep the card busy."""
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


def split(walk, q, k, v, initial, chunk_bounds, interpret: Any) -> Parts | None:
    """The parts, or None where there is one alone, or rows have several memories (`chunk_bounds`), which are as many walks.

    Args:
        walk: (v or None, parts=P) -> a list, the last of it what each part makes of an empty memory, or Θ without v.
        q: [B, T, *, K].
        k: [B, T, *, K].
        v: [B, T, *, V].
        initial: [B, h, K, V] float32.
        interpret: parameters of the interpreter, or False.
    """
    count = count_parts(q, k, v)
    if count == 1 or chunk_bounds is not None:
        return None
    written, transitions = (walk(values, parts=count)[-1] for values in (v, None))
    return Parts(transitions, link_parts(transitions, written, initial, interpret=interpret))


def part_starts(parts: Parts | None, initial) -> tuple[jax.Array, int]:
    """The memories at which parts begin, [B, h * P, K, V], and P."""
    if parts is None:
        return initial, 1
    return parts.starts, parts.starts.shape[1] // initial.shape[1]


def part_end_gradients(parts: Parts | None, walk, d_final, interpret: Any) -> tuple[jax.Array, int]:
    """The gradients of the memories at which parts end, and P; `walk`: (None, parts=P, save=False) -> a list, the last of it R."""
    if parts is None or parts.transitions is None:
        return d_final, 1
    count = parts.starts.shape[1] // d_final.shape[1]
    read = walk(None, parts=count, save=False)[-1]
    return link_parts(parts.transitions, read, d_final, reverse=True, interpret=interpret), count


def link_parts(transitions, written, initial, *, reverse: bool = False, interpret: Any = False):
    """The memories at which parts begin; against time, the gradients of those at which they end.

    Args:
        transitions: [B, h * P, K, K] float32, Θ.
        written: [B, h * P, K, V] float32, W; against time R.
        initial: [B, h, K, V] float32, the memory before the first part; against time, the gradient after the last.
        reverse: against time.
        interpret: parameters of the interpreter, or False.

    Returns:
        [B, h * P, K, V] float32.
    """
    batch, heads, depth, width = initial.shape
    parts = written.shape[1] // heads
    turned = jnp.swapaxes(transitions, -1, -2).reshape(batch, heads, parts * depth, depth)
    # In two halves of 16 bits. A difference of conversions XLA would take for 0.
    high = lax.reduce_precision(turned, exponent_bits=8, mantissa_bits=7)
    named = dict(
        high=high.astype(_BF16), low=(turned - high).astype(_BF16), written=jnp.swapaxes(written, -1, -2),
        initial=jnp.swapaxes(initial, -1, -2),
    )  # fmt: skip
    shape = (_BLOCK, depth)

    def kernel(*refs):
        refs = dict(zip([*named, "starts"], refs, strict=True))
        b, h = lax.div(lax.axis_index("row"), heads), lax.rem(lax.axis_index("row"), heads)
        columns = pl.ds(lax.axis_index("column") * _BLOCK, _BLOCK)
        at = lambda n: parts - 1 - n if reverse else n  # noqa: E731

        def scoped(*left):
            def body(indices, high, low, S) -> Any:
                here = b, h * parts + at(indices[0]), columns
                added = wg.load_global(refs["written"].at[*here])
                refs["starts"].at[*here][...] = S
                if reverse:
                    high, low = high.transpose((1, 0)), low.transpose((1, 0))
                above = S.astype(_BF16)
                below = wg.as_left(S - above.astype(_F32), left and left[1], interpret)
                above = wg.as_left(above, left and left[0], interpret)

                def products(S):
                    plgpu.wgmma(S, above, high)
                    plgpu.wgmma(S, above, low)
                    plgpu.wgmma(S, below, high)

                (S,) = wg.accumulate(products, added, interpret=interpret)
                return S

            def compute(pipeline):
                pipeline(wg.load_global(refs["initial"].at[b, h, columns]))

            pipeline: Any = plgpu.emit_pipeline_warp_specialized
            block = plgpu.BlockSpec((depth, depth), lambda n: (at(n), 0), transforms=wg.TILED)
            pipeline(
                body, grid=(parts,), in_specs=[block, block], max_concurrent_steps=2, num_compute_wgs=1,
                memory_registers=40, wg_axis="group", compute_context=compute,
            )(*(refs[name].at[b, h] for name in ("high", "low")))  # fmt: skip

        smem: Any = plgpu.SMEM
        buffer = smem(shape, dtype=_BF16, transforms=wg.TILED)
        pl.run_scoped(scoped, *[buffer] * (2 if interpret else 0), collective_axes="group")

    (starts,) = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((batch, heads * parts, width, depth), _F32)],
        grid=(batch * heads, width // _BLOCK),
        grid_names=("row", "column"),
        num_threads=2,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The layout inference of the other semantics finds no solution here (jax 0.11.2).
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*named.values())
    return jnp.swapaxes(starts, -1, -2)


def length_multiple(q, k, v) -> int:
    """The number that T must be a multiple of."""
    return CHUNK * count_parts(q, k, v)
