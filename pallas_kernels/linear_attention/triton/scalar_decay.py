"""Linear attention with a scalar decay or none, by the Triton kernels in `bodies`.

Forward: one scan computes the memory before every chunk, and then all outputs are computed in parallel. Backward: a reversed scan
computes the gradient of the memory after every chunk, and then all gradients are computed in parallel: by one kernel, `joined`, for the
dtypes and numbers of key channels in `tilings.JOINED`, else by three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton import passes, tilings
from pallas_kernels.linear_attention.triton.passes import CHUNK
from pallas_kernels.memory_calls import NO_BONUS

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward"]

REQUIREMENTS = (NO_BONUS, *passes.REQUIREMENTS)


class Residuals(NamedTuple):
    """The arrays that `forward` saves for `backward`.

    Attributes:
        decays: the decays of all tokens and chunks, and the tokens' documents.
        states: [B, N, G, K, V], the memories before all chunks.
    """

    decays: passes.Decays
    states: jax.Array


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:
    """Compute linear attention with a scalar decay or none, and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and the residuals. The arguments are those of
    `linear_attention`, with T a multiple of `CHUNK`; `interpret` has no effect.
    """
    del save, interpret
    memories = v.shape[2]
    decays = passes.scalar_decays(log_decay, run, initial, v)
    states, final = passes.scan(k, v, decays, initial, heads=memories)
    heads = max(q.shape[2], memories)
    output = passes.outputs(q, k, v, None, decays, states, heads=heads, scale=scale)
    return output, final, Residuals(decays, states)


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a scalar decay or none.

    The gradient of log_decay is None if there is no decay or `decay_gradient` is False. The arguments are those of `forward`, the
    residuals that it returned, and the gradients of its output and of its final memories.
    """
    del run, initial, interpret
    heads, memories, (decays, states) = d_output.shape[2], v.shape[2], residuals
    d_ends = row_layout.gradient_by_head(d_final, heads)
    d_states, d_initial = passes.scan(
        q, d_output, decays, d_ends, heads=heads, scale=scale, reverse=True
    )
    decay = log_decay is not None and decay_gradient
    inputs = q, k, v, d_output
    if q.shape[3] in tilings.JOINED.get(jnp.dtype(q.dtype).name, ()):
        dq, dk, dv, d_decay = passes.joined_gradients(
            *inputs, decays, states, d_states, scale=scale, decay=decay
        )
    else:
        dv = passes.value_gradients(
            q, k, d_output, None, decays, d_states, scale=scale, dtype=v.dtype
        )
        d_scores = passes.score_gradients(d_output, v, decays, scale=scale)
        dq, dk, d_decay = passes.scalar_gradients(
            *inputs, d_scores, decays, states, d_states, scale=scale, decay=decay
        )
    join = row_layout.sum_heads
    return (
        join(dq, q.shape[2]),
        join(dk, k.shape[2]),
        join(dv, memories),
        None if d_decay is None else join(d_decay, memories),
        join(d_initial, memories, axis=1),
    )
