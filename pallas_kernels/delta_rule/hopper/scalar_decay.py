"""The delta rule with no decay or a scalar one on Mosaic GPU (Hopper), of chunks of 64 tokens.

Forward: `chunk_forward` solves every chunk's triangular system side by side, `scan_forward` walks over the chunks. Backward: `scan_forward` once more,
for the memory before each chunk and what each token found missing; `scan_backward` against time, for the gradients of the
memories and of v; `chunk_backward`, side by side, for the rest. `tiles` has the mathematics.

Few rows of a long sequence are walked in parts, side by side (`hopper_parts`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.hopper.chunk_backward import chunk_backward
from pallas_kernels.delta_rule.hopper.chunk_forward import CHUNK, SolvedChunks, chunk_forward
from pallas_kernels.delta_rule.hopper.scan import scan_backward, scan_forward
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper.parts import multiple
from pallas_kernels.memory_calls import in_bfloat16, key_dims, value_dims

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "multiple"]

_DEPTH = 256  # keys at most
REQUIREMENTS = (
    key_dims(64, 128, 256),
    in_bfloat16("q", "k", "v"),
    value_dims(64, 128, 256, 512),
)


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`. The memories, twice as large at K = V = 128, are made again.

    Attributes:
        solved: the solved chunks.
        parts: of a sequence in parts, or of one whose memories are made again in parts.
    """

    solved: SolvedChunks
    parts: hopper_parts.Parts | None


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:
    """The output [B, T, max(H, G), V], the final memories as `initial` and the residuals. T is a multiple of `multiple`."""
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    solved = chunk_forward(
        q, k, beta, log_decay, run, heads=heads, scale=scale, interpret=interpret
    )
    # Several heads that read one memory each carry it along.
    initial = jnp.repeat(initial, heads // memories, axis=1)
    options: dict[str, Any] = dict(
        heads=heads, scale=scale, chunk_bounds=chunk_bounds, interpret=interpret
    )
    parts = hopper_parts.cut(
        functools.partial(scan_forward, None, k, solved=solved, initial=None, **options), q, k, v, initial,
        chunk_bounds, interpret,
    )  # fmt: skip
    starts, count = hopper_parts.starts_of(parts, initial)
    checkpoints = hopper_parts.count_checkpoints(q, k, v, chunk_bounds)
    output, *marked, ends = scan_forward(
        q, k, v, solved, starts, parts=count, checkpoints=checkpoints, **options
    )
    parts = hopper_parts.Parts(None, *marked) if marked else parts
    return output, ends[:, count - 1 :: count * heads // memories], Residuals(solved, parts)


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, beta, log_decay (None without one, or where it is not wanted) and initial."""
    memories, heads = v.shape[2], d_output.shape[2]
    solved, parts = residuals
    run, chunk_bounds = row_layout.split_runs(run, initial, len(v))
    options: dict[str, Any] = dict(scale=scale, interpret=interpret)
    initial = jnp.repeat(initial, heads // memories, axis=1)
    starts, count = hopper_parts.starts_of(parts, initial)
    walks: dict[str, Any] = options | dict(heads=heads, chunk_bounds=chunk_bounds)
    missing, states, _ = scan_forward(None, k, v, solved, starts, save=True, parts=count, **walks)
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_final = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    walk = functools.partial(scan_backward, q, k, d_output, solved, **walks)
    d_ends, count = hopper_parts.ends_of(parts, walk, d_final, interpret)
    dv, d_states, d_starts = walk(d_ends, parts=count)
    decay_gradient = decay_gradient and log_decay is not None
    dq, dk, d_beta, *d_decay = chunk_backward(
        q, k, missing, d_output, dv, states, d_states, beta, log_decay, run,
        decay_gradient=decay_gradient, **options,
    )  # fmt: skip
    share = row_layout.sum_heads
    return (
        share(dq, q.shape[2]), share(dk, k.shape[2]), share(dv, memories), share(d_beta, memories),
        share(d_decay[0], memories) if decay_gradient else None, share(d_starts[:, ::count], memories, axis=1),
    )  # fmt: skip
