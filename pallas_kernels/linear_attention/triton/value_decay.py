"""Linear attention with a decay per value channel, by the Triton kernels in `bodies`.

It is computed from linear attention f with a decay per key channel: as `pallas_kernels.linear_attention.hopper.value_decay` explains,
the output here is the gradient of f's queries, where f's keys are the values here, its values the keys here, and the gradient of its
output the queries here. The backward pass is one forward and one backward pass of f. f's memory is the transpose of the memory here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton import channel_decay, channel_passes, passes
from pallas_kernels.linear_attention.triton.passes import CHUNK
from pallas_kernels.memory_calls import FLOAT32_DECAY, NO_BONUS, ONE_DECAY

__all__ = ["CHUNK", "HAS_EXACT", "REQUIREMENTS", "Residuals", "backward", "forward"]

HAS_EXACT = True  # `forward` can return the output in float32
REQUIREMENTS = (ONE_DECAY, NO_BONUS, FLOAT32_DECAY, *passes.REQUIREMENTS)


class Residuals(NamedTuple):
    """Empty residuals: `backward` requires only the inputs of `forward`."""


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, save: bool = True, exact: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute linear attention with a decay per value channel.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and empty residuals. The arguments are those of
    `linear_attention`, with log_decay [B, T, G, V] and T a multiple of `CHUNK`; `interpret` has no effect. If
    `exact`, the output is float32, and bfloat16 products have the decayed values in two terms. If v is float32, it is rounded only where
    it is written to the memory.
    """
    del save, interpret
    q = jnp.repeat(q, max(q.shape[2], v.shape[2]) // q.shape[2], 2)
    decays = channel_passes.channel_decays(log_decay, run, initial)
    k = jnp.repeat(k, v.shape[2] // k.shape[2], 2)
    states, final = passes.scan(v, k, decays, _transpose(initial), heads=v.shape[2])
    d_scores = passes.score_gradients(q, k, decays, scale=scale)
    output = passes.channel_gradients(
        None, v, k, q, d_scores, decays, states, None, scale=scale, only_query=True, exact=exact
    )["dq"]
    return output, _transpose(final), Residuals()


def backward(
    q, k, v, log_decay, run, initial, residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a decay per value channel.

    The arguments are those of `forward`, its (empty) residuals, and the gradients of its output and of its final memories. The
    gradient of log_decay is computed whether or not `decay_gradient` is set.
    """
    del residuals, decay_gradient, interpret
    value_dtype, v = v.dtype, v.astype(q.dtype)
    heads, memories = d_output.shape[2], v.shape[2]
    query_heads, key_heads = q.shape[2], k.shape[2]
    q, k = jnp.repeat(q, heads // query_heads, 2), jnp.repeat(k, memories // key_heads, 2)
    inputs = d_output, v, k, log_decay, run, _transpose(initial)
    dq, _, saved = channel_decay.forward(*inputs, scale=scale)
    _, dv, dk, d_decay, d_initial = channel_decay.backward(
        *inputs, saved, q, _transpose(d_final), scale=scale
    )
    dq, dk = row_layout.sum_heads(dq, query_heads), row_layout.sum_heads(dk, key_heads)
    return dq, dk, dv.astype(value_dtype), d_decay, _transpose(d_initial)


def _transpose(memory):
    """Return memories [*, K, V] transposed to [*, V, K], or [*, V, K] transposed to [*, K, V]."""
    return jnp.swapaxes(memory, -1, -2)
