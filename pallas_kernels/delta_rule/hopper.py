"""The delta rule with no decay or a scalar one on Mosaic GPU (Hopper), of chunks of 64 tokens.

Forward: `prepare` solves every chunk's triangular system side by side, `sweep` walks over the chunks. Backward: `sweep` once more,
for the memory before each chunk and what each token found missing; `reverse` against time, for the gradients of the
memories and of v; `finish`, side by side, for the rest. `tiles` has the mathematics.

A sequence is not split into parts here, as `linear_attention` does it: a chunk maps memories by a full matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.hopper_finish import finish
from pallas_kernels.delta_rule.hopper_prepare import CHUNK, Prepared, prepare
from pallas_kernels.delta_rule.hopper_sweeps import reverse, sweep
from pallas_kernels.linear_attention import hopper as linear

__all__ = ["CHUNK", "Residuals", "backward", "forward", "reason"]

_DEPTH = 256  # keys at most


class Residuals(NamedTuple):
    """What `forward` leaves for `backward`: the solved chunks. The memories, twice as large at K = V = 128, are made again."""

    prepared: Prepared


def reason(q, k, v, log_decay, run, initial) -> str | None:
    """Why this backend does not serve these arguments (arrays or their shapes), or None."""
    if q.shape[-1] > _DEPTH:
        return f"K of 64, 128 or {_DEPTH}, not {q.shape[-1]}"
    return linear.reason(q, k, v, log_decay, run, initial)


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:
    """The output [B, T, max(H, G), V], the final memory [B, G, K, V] and the residuals. T is a multiple of `CHUNK`."""
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    prepared = prepare(q, k, beta, log_decay, run, heads=heads, scale=scale, interpret=interpret)
    # Several heads that read one memory each carry it along.
    initial = jnp.repeat(initial, heads // memories, axis=1)
    output, final = sweep(q, k, v, prepared, initial, heads=heads, scale=scale, interpret=interpret)
    return output, final[:, :: heads // memories], Residuals(prepared)


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *,
    scale: float, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Gradients of q, k, v, beta, log_decay (None without one, or where it is not wanted) and initial."""
    memories, heads = v.shape[2], d_output.shape[2]
    prepared = residuals.prepared
    options: dict[str, Any] = dict(scale=scale, interpret=interpret)
    initial = jnp.repeat(initial, heads // memories, axis=1)
    missing, states, _ = sweep(None, k, v, prepared, initial, heads=heads, save=True, **options)
    # Of several heads that carry one memory, the first hands on the gradient from outside.
    first = (jnp.arange(heads) % (heads // memories) == 0)[:, None, None]
    d_final = jnp.where(first, jnp.repeat(d_final, heads // memories, axis=1), 0)
    dv, d_states, d_initial = reverse(q, k, d_output, prepared, d_final, heads=heads, **options)
    decay_gradient = decay_gradient and log_decay is not None
    dq, dk, d_beta, *d_decay = finish(
        q, k, missing, d_output, dv, states, d_states, beta, log_decay, run,
        decay_gradient=decay_gradient, **options,
    )  # fmt: skip
    share = linear._share
    return (
        share(dq, q.shape[2]), share(dk, k.shape[2]), share(dv, memories), share(d_beta, memories),
        share(d_decay[0], memories) if decay_gradient else None, share(d_initial, memories, axis=1),
    )  # fmt: skip
