"""The delta rule whose decay has a value for every key channel (KDA), on Mosaic GPU (Hopper), of chunks of 64 tokens.

As in `hopper`, with what the decay does to queries and keys done before the walks (`hopper_resolve`), so that these need no decay
but what each channel of the memory keeps over a chunk:

    x = X (v - erase S)        O = read S + P (beta ⊙ x)        S' = keep S + writtenᵀ (beta ⊙ x)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.hopper.channel_chunk_backward import chunk_backward
from pallas_kernels.delta_rule.hopper.channel_chunk_forward import (
    DecayedChunks,
    chunk_forward,
    solve_chunks,
)
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SolvedChunks
from pallas_kernels.delta_rule.hopper.scan import scan_backward, scan_forward
from pallas_kernels.hopper import channel_slices, row_layout
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper.parts import multiple
from pallas_kernels.memory_calls import FLOAT32_DECAY, VALUES_IN_SLICES, in_bfloat16, key_dims

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "multiple"]

# In place of a beta of 0 where gradients are made: that of beta is x · dv / beta. It is far below what any sum notices.
_LEAST = 1e-20

REQUIREMENTS = (
    key_dims(64, 128, 256),
    VALUES_IN_SLICES,
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
)


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`, some four arrays of the size of q; `decayed` without N."""

    decayed: DecayedChunks
    solved: SolvedChunks
    parts: hopper_parts.Parts | None


def _not_zero(rows):
    return jnp.where(jnp.abs(rows) < _LEAST, _LEAST, rows)


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:
    """The output [B, T, max(H, G), V], the final memories as `initial` and the residuals. T is a multiple of `multiple`."""
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    documents = row_layout.documents_of(run, 1)
    options: dict[str, Any] = dict(heads=heads, scale=scale, interpret=interpret)
    decayed = chunk_forward(q, k, log_decay, documents, **options)
    rows = jnp.repeat(jnp.swapaxes(beta, 1, 2), heads // memories, axis=1)
    inverse = solve_chunks(decayed.upper, _not_zero(rows), interpret=interpret)
    solved = SolvedChunks(inverse, decayed.scores, rows)
    # Several heads that read one memory each carry it along.
    initial = jnp.repeat(initial, heads // memories, axis=1)
    options |= dict(
        scale=1.0, written=decayed.written, keep=decayed.keep, chunk_bounds=chunk_bounds
    )
    parts = hopper_parts.cut(
        functools.partial(scan_forward, None, decayed.erase, solved=solved, initial=None, **options),
        q, k, v, initial, chunk_bounds, interpret,
    )  # fmt: skip
    starts, count = hopper_parts.starts_of(parts, initial)
    output, *marked, ends = scan_forward(
        decayed.read, decayed.erase, v, solved, starts, parts=count,
        checkpoints=hopper_parts.count_checkpoints(q, k, v, chunk_bounds), **options,
    )  # fmt: skip
    parts = hopper_parts.Parts(None, *marked) if marked else parts
    residuals = Residuals(decayed._replace(upper=None), solved, parts)
    return output, ends[:, count - 1 :: count * heads // memories], residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, beta, log_decay and initial."""
    del beta, decay_gradient
    memories, heads = v.shape[2], d_output.shape[2]
    (decayed, solved, parts), share = residuals, row_layout.sum_heads
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    initial = jnp.repeat(initial, heads // memories, axis=1)
    starts, count = hopper_parts.starts_of(parts, initial)
    options: dict[str, Any] = dict(
        heads=heads, scale=1.0, written=decayed.written, keep=decayed.keep, chunk_bounds=chunk_bounds,
        interpret=interpret,
    )  # fmt: skip
    missing, states, _ = scan_forward(
        None, decayed.erase, v, solved, starts, save=True, parts=count, **options
    )
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_final = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    solved = solved._replace(rows=_not_zero(solved.rows))
    walk = functools.partial(
        scan_backward, decayed.read, decayed.erase, d_output, solved, **options
    )
    d_ends, count = hopper_parts.ends_of(parts, walk, d_final, interpret)
    dv, d_states, d_starts = walk(d_ends, parts=count)
    documents, depth = row_layout.documents_of(run, 1), q.shape[-1]

    def of_chunks(keys, values):
        return chunk_backward(
            q[..., keys], k[..., keys], log_decay[..., keys], solved.rows, missing[..., values], d_output[..., values],
            dv[..., values], states[..., values, keys], d_states[..., values, keys],
            channel_slices.slice_of(decayed.keep, depth, keys), documents, scale=scale, interpret=interpret,
        )  # fmt: skip

    found = [
        channel_slices.sum_of(
            *(of_chunks(keys, at) for at in channel_slices.slices_of(v.shape[-1]))
        )
        for keys in channel_slices.slices_of(depth)
    ]
    # That of beta needs no keys, so that every piece of them has all of it.
    *by_key, (d_beta, *_) = zip(*found, strict=True)
    dq, dk, d_decay = (jnp.concatenate(x, axis=-1) for x in by_key)
    return (
        share(dq, q.shape[2]), share(dk, k.shape[2]), share(dv, memories),
        share(jnp.swapaxes(d_beta, 1, 2), memories), share(d_decay, memories),
        share(d_starts[:, ::count], memories, axis=1),
    )  # fmt: skip
