"""A diagonal-plus-low-rank memory (RWKV7) on Mosaic GPU (Hopper), of chunks of 64 tokens.

Forward: `hopper_resolve` resolves and solves every chunk by itself, `scan_forward` walks over the chunks. Backward: `scan_forward` once more, for the
memory before each chunk and what each token read of it; `scan_backward` against time, for the gradients of both; then, side by side,
`values_backward` and `hopper_finish` for the rest. Few rows of a long sequence are walked in parts, as the delta rule's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dplr.hopper.chunk_backward import chunk_backward
from pallas_kernels.dplr.hopper.chunk_forward import (
    CHUNK,
    DecayedChunks,
    SolvedChunks,
    chunk_forward,
    solve_chunks,
)
from pallas_kernels.dplr.hopper.scan import scan_backward, scan_forward, values_backward
from pallas_kernels.hopper import channel_slices, row_layout
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper.parts import multiple
from pallas_kernels.memory_calls import FLOAT32_DECAY, VALUES_IN_SLICES, in_bfloat16, key_dims

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "multiple"]

_F32 = jnp.float32
REQUIREMENTS = (
    in_bfloat16("a", "b"),
    key_dims(64, 128, 256),
    VALUES_IN_SLICES,
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
)


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`, some seven arrays of the size of q; `decayed` without what `solved` is made of."""

    decayed: DecayedChunks
    solved: SolvedChunks
    parts: hopper_parts.Parts | None


def forward(
    q, k, v, a, b, log_decay, run, initial, *, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:
    """The output [B, T, max(H, G), V], the final memories as `initial` and the residuals. T is a multiple of `multiple`."""
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    documents = row_layout.documents_of(run, 1)
    chunks = functools.partial(
        chunk_forward, documents=documents, heads=heads, scale=scale, interpret=interpret
    )
    products = "upper", "upper_values", "scores", "scores_values"
    decayed = channel_slices.by_key_slice(chunks, (q, k, a, b, log_decay), products)
    solved = solve_chunks(
        decayed.upper, decayed.upper_values, decayed.reach, interpret=interpret
    )
    decayed = decayed._replace(upper=None, upper_values=None, reach=None)
    # Several heads that read one memory each carry it along.
    initial = jnp.repeat(initial, heads // memories, axis=1)
    walk = functools.partial(
        scan_forward, decayed, solved, initial=None, read=False, interpret=interpret
    )
    parts = hopper_parts.cut(walk, q, k, v, initial, chunk_bounds, interpret)
    starts, count = hopper_parts.starts_of(parts, initial)
    output, ends = scan_forward(
        decayed, solved, v, starts, parts=count, chunk_bounds=chunk_bounds, interpret=interpret
    )
    final = ends[:, count - 1 :: count * heads // memories]
    return output, final, Residuals(decayed, solved, parts)


def backward(
    q, k, v, a, b, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, a, b, log_decay and initial."""
    memories, heads = v.shape[2], d_output.shape[2]
    decayed, solved, parts = residuals
    share = row_layout.sum_heads
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    initial = jnp.repeat(initial, heads // memories, axis=1)
    starts, count = hopper_parts.starts_of(parts, initial)
    options: dict[str, Any] = dict(chunk_bounds=chunk_bounds, interpret=interpret)
    back, states, _ = scan_forward(decayed, solved, v, starts, save=True, parts=count, **options)
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_final = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    walk = functools.partial(scan_backward, decayed, solved, d_output, **options)
    d_ends, count = hopper_parts.ends_of(parts, walk, d_final, interpret)
    d_back, d_states, d_starts = walk(d_ends, parts=count)
    documents, depth = row_layout.documents_of(run, 1), q.shape[-1]

    def of_values(at):
        """Gradients of these values, and theirs of what has keys."""
        own, d_own, back_own = states[..., at, :], d_states[..., at, :], back[..., at]
        dv, d_reached = values_backward(
            decayed, solved, d_output[..., at], d_back[..., at], d_own, interpret=interpret
        )
        kept = jnp.einsum("bhnvk,bhnvk->bhnk", own, d_own, preferred_element_type=_F32)
        kept = kept.reshape(decayed.keep.shape) * decayed.keep
        found = [
            chunk_backward(
                q[..., keys], k[..., keys], a[..., keys], b[..., keys], log_decay[..., keys], v[..., at], back_own,
                d_output[..., at], d_reached, own[..., keys], d_own[..., keys],
                channel_slices.slice_of(kept, depth, keys), documents, scale=scale, interpret=interpret,
            ) for keys in channel_slices.slices_of(depth)
        ]  # fmt: skip
        return dv, found

    dvs, found = zip(*map(of_values, channel_slices.slices_of(v.shape[-1])), strict=True)
    dv, by_key = jnp.concatenate(dvs, axis=-1), zip(*channel_slices.sum_of(*found), strict=True)
    dq, dk, da, db, d_decay = (jnp.concatenate(x, axis=-1) for x in by_key)
    return (
        share(dq, q.shape[2]), share(dk, k.shape[2]), share(dv, memories), share(da, a.shape[2]),
        share(db, b.shape[2]), share(d_decay, memories), share(d_starts[:, ::count], memories, axis=1),
    )  # fmt: skip
