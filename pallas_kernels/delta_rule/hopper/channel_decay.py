"""The delta rule with a decay per key channel (KDA) on Mosaic GPU (Hopper), in chunks of 64 tokens.

The phases are those of the delta rule with a scalar decay (`scalar_decay`). `channel_chunk_forward` applies the decays to queries
and keys before the scans. A scan then requires no decay but that of the memory's key channels over a chunk (`chunk_decay`):

    x = X (v - erase S)        O = read S + P (beta ⊙ x)        S' = chunk_decay S + writtenᵀ (beta ⊙ x)

where S is the memory before a chunk, S' after it, x the error of its predictions of v, X the inverse of the chunk's triangular
system, P the decayed scores of queries with keys, O the output, and the other names are fields of `DecayedChunks`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.hopper.channel_chunk_backward import chunk_backward
from pallas_kernels.delta_rule.hopper.channel_chunk_forward import DecayedChunks, chunk_forward
from pallas_kernels.delta_rule.hopper.channel_solve import solve_chunks
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SolvedChunks
from pallas_kernels.delta_rule.hopper.scan import SavedMemories, scan_backward, scan_forward
from pallas_kernels.hopper import channel_slices, row_layout
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper.parts import length_multiple
from pallas_kernels.memory_calls import (
    DECAYED_ERASE,
    FLOAT32_DECAY,
    VALUES_IN_SLICES,
    in_bfloat16,
    key_dims,
)

__all__ = [
    "CHUNK", "REQUIREMENTS", "SAVES_MEMORIES", "Residuals", "backward", "forward", "length_multiple",
]  # fmt: skip

SAVES_MEMORIES = True
"""`forward` has the argument `save_memories`."""
# Replaces a smaller |beta|, except in the forward scan: dbeta is x · dv / beta. No sum changes by it.
_SMALLEST_BETA = 1e-20

REQUIREMENTS = (
    key_dims(64, 128, 256),
    VALUES_IN_SLICES,
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
    DECAYED_ERASE,
)


class Residuals(NamedTuple):
    """The arrays that `forward` of the delta rule with a decay per key channel saves for `backward`: some
    four arrays of the size of q.

    Attributes:
        decayed: the decayed scores, queries and keys of all chunks; `upper` (the products of keys with keys)
            is None.
        solved: inverses of the triangular systems, scores and beta of all chunks.
        parts: the memories before each part of a row, if `backward` scans rows in parts that run in parallel;
            None if it scans each row in one.
        memories: the memories before all chunks with `save_memories`, or None, if `backward` computes them
            again.
    """

    decayed: DecayedChunks
    solved: SolvedChunks
    parts: hopper_parts.Parts | None
    memories: SavedMemories | None = None


def _nonzero(beta):
    return jnp.where(jnp.abs(beta) < _SMALLEST_BETA, _SMALLEST_BETA, beta)


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True, save_memories: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute the delta rule with a decay per key channel, and the arrays that `backward` requires.

    Return the output [B, T, max(H, G), V], the final memories in the shape of `initial`, and the residuals,
    which are computed whether or not `save` is set. With `save_memories` they contain the memories before all
    chunks, which the scan of the output stores, also of rows in parts and of several memories. The other
    arguments are those of the op `delta_rule`; T is divisible by `length_multiple(q, k, v)`.
    """
    del save
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    documents = row_layout.documents_of(run, 1)
    options: dict[str, Any] = dict(heads=heads, scale=scale, interpret=interpret)
    decayed = chunk_forward(q, k, log_decay, documents, **options)
    rows = jnp.repeat(jnp.swapaxes(beta, 1, 2), heads // memories, axis=1)
    inverse = solve_chunks(decayed.upper, _nonzero(rows), interpret=interpret)
    solved = SolvedChunks(inverse, decayed.scores, rows)
    # Each of the heads that share a memory computes it.
    initial = jnp.repeat(initial, heads // memories, axis=1)
    options |= dict(
        scale=1.0,
        written=decayed.written,
        chunk_decay=decayed.chunk_decay,
        chunk_bounds=chunk_bounds,
    )
    scan_part = functools.partial(
        scan_forward, None, decayed.erase, solved=solved, initial=None, **options
    )
    parts = hopper_parts.split(scan_part, q, k, v, initial, chunk_bounds, interpret)
    starts, count = hopper_parts.part_starts(parts, initial)
    # Memories at checkpoints are for the scan that computes the others again.
    checkpoints = 1 if save_memories else hopper_parts.count_checkpoints(q, k, v, chunk_bounds)
    output, *saved, ends = scan_forward(
        decayed.read, decayed.erase, v, solved, starts, save=save_memories, parts=count, checkpoints=checkpoints,
        **options,
    )  # fmt: skip
    residuals = Residuals(decayed._replace(upper=None), solved, parts)
    if save_memories:
        residuals = residuals._replace(memories=SavedMemories(*saved))
    elif saved:
        residuals = residuals._replace(parts=hopper_parts.Parts(None, *saved))
    return output, ends[:, count - 1 :: count * heads // memories], residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, beta, log_decay and initial of the delta rule with a decay per key
    channel, each in the shape of its input.

    The arguments are the inputs of `forward`, the residuals that `forward` returned, and the gradients of the
    output, `d_output`, and of the final memories, `d_final`. The gradient of log_decay is computed whether or
    not `decay_gradient` is set.
    """
    del beta, decay_gradient
    memories, heads = v.shape[2], d_output.shape[2]
    decayed, solved, parts, saved = residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    initial = jnp.repeat(initial, heads // memories, axis=1)
    starts, count = hopper_parts.part_starts(parts, initial)
    options: dict[str, Any] = dict(
        heads=heads, scale=1.0, written=decayed.written, chunk_decay=decayed.chunk_decay, chunk_bounds=chunk_bounds,
        interpret=interpret,
    )  # fmt: skip
    if saved is None:
        scanned = scan_forward(
            None, decayed.erase, v, solved, starts, save=True, parts=count, **options
        )
        saved = SavedMemories(*scanned[:2])
    missing, states = saved
    d_final = row_layout.gradient_by_head(d_final, heads)
    solved = solved._replace(rows=_nonzero(solved.rows))
    scan_part = functools.partial(
        scan_backward, decayed.read, decayed.erase, d_output, solved, **options
    )
    d_ends, count = hopper_parts.part_end_gradients(parts, scan_part, d_final, interpret)
    dv, d_states, d_starts = scan_part(d_ends, parts=count)
    documents, depth = row_layout.documents_of(run, 1), q.shape[-1]

    def slice_gradients(keys, values):
        return chunk_backward(
            q[..., keys], k[..., keys], log_decay[..., keys], solved.rows, missing[..., values], d_output[..., values],
            dv[..., values], states[..., values, keys], d_states[..., values, keys],
            channel_slices.slice_chunk_decay(decayed.chunk_decay, depth, keys), documents, scale=scale, interpret=interpret,
        )  # fmt: skip

    value_slices = channel_slices.split_channels(v.shape[-1])
    gradients = [
        channel_slices.sum_trees(*(slice_gradients(keys, values) for values in value_slices))
        for keys in channel_slices.split_channels(depth)
    ]
    # dbeta does not depend on the keys: every slice of them has computed all of it.
    *of_keys, (d_beta, *_) = zip(*gradients, strict=True)
    dq, dk, d_decay = (jnp.concatenate(x, axis=-1) for x in of_keys)
    sum_heads = row_layout.sum_heads
    return (
        sum_heads(dq, q.shape[2]),
        sum_heads(dk, k.shape[2]),
        sum_heads(dv, memories),
        sum_heads(jnp.swapaxes(d_beta, 1, 2), memories),
        sum_heads(d_decay, memories),
        sum_heads(d_starts[:, ::count], memories, axis=1),
    )
