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

from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.scalar_scan import Decays, scalar_scan
from pallas_kernels.memory_calls import NO_BONUS, in_bfloat16, key_dims, value_dims

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward"]

SIZES = (64, 128, 256, 512)  # K and V
_F32 = jnp.float32
REQUIREMENTS = (
    NO_BONUS,
    in_bfloat16("q", "k", "v"),
    key_dims(*SIZES),
    value_dims(*SIZES),
)


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`: the decays, and the memory before and after each part [B * P, *, K, V]."""

    decay: Decays
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
        scalar_scan, decay=decay, heads=heads, chunk_bounds=chunk_bounds, interpret=interpret
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
        scalar_scan, decay=decay, heads=heads, chunk_bounds=chunk_bounds, interpret=interpret
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


def _chunk_decays(log_decay, run, shape, parts: int) -> Decays:
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

    return Decays(
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
