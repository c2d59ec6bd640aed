"""Linear attention with a decay per key channel (GLA, HGRN2, RWKV6), by the Triton kernels in `bodies`.

As with a scalar decay, but the decayed scores of all chunks are computed first, level by level of the halving of
`pallas_kernels.tiles.channel_decay`, and saved for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton import channel_passes, passes
from pallas_kernels.linear_attention.triton.passes import CHUNK
from pallas_kernels.memory_calls import FLOAT32_DECAY

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward"]

REQUIREMENTS = (FLOAT32_DECAY, *passes.REQUIREMENTS)


class Residuals(NamedTuple):
    """The arrays that `forward` saves for `backward`.

    Attributes:
        decays: the sums of the log decays of all tokens, and the tokens' documents.
        scores: [B, N, heads, C, C], the decayed scores of all chunks.
        states: [B, N, G, K, V], the memories before all chunks.
    """

    decays: passes.Decays
    scores: jax.Array
    states: jax.Array


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, bonus=None, save: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute linear attention with a decay per key channel, and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and the residuals. The arguments are those of
    `linear_attention`, with T a multiple of `CHUNK`; `interpret` has no effect.
    """
    del save, interpret
    memories = v.shape[2]
    heads, exclusive = max(q.shape[2], memories), bonus is not None
    decays, written, scores = channel_passes.channel_scores(
        q, k, log_decay, run, initial, heads=heads, scale=scale, bonus=bonus
    )
    states, final = passes.scan(written, v, decays, initial, heads=memories, decayed=True)
    output = passes.outputs(
        q, k, v, scores, decays, states, heads=heads, scale=scale, exclusive=exclusive
    )
    return output, final, Residuals(decays, scores, states)


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    bonus=None, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a decay per key channel, and with a bonus, as the
    sixth, the bonus' gradient [G, K].

    The arguments are those of `forward`, the residuals that it returned, and the gradients of its output and of its final
    memories. The gradient of log_decay is computed whether or not `decay_gradient` is set.
    """
    del log_decay, run, initial, decay_gradient, interpret
    heads, memories = d_output.shape[2], v.shape[2]
    decays, scores, states = residuals
    d_ends = row_layout.gradient_by_head(d_final, heads)
    d_states, d_initial = passes.scan(
        q, d_output, decays, d_ends, heads=heads, scale=scale, reverse=True,
        exclusive=bonus is not None,
    )  # fmt: skip
    dv = passes.value_gradients(
        q, k, d_output, scores, decays, d_states, scale=scale, dtype=v.dtype
    )
    d_scores = passes.score_gradients(d_output, v, decays, scale=scale)
    gradients = passes.channel_gradients(
        q, k, v, d_output, d_scores, decays, states, d_states, scale=scale, bonus=bonus
    )
    join = row_layout.sum_heads
    d_bonus = []
    if bonus is not None:
        d_bonus = [join(jnp.sum(gradients["d_bonus"], (0, 1)), memories, axis=0)]
    return (
        join(gradients["dq"], q.shape[2]),
        join(gradients["dk"], k.shape[2]),
        join(dv, memories),
        join(gradients["dg"], memories),
        join(d_initial, memories, axis=1),
        *d_bonus,
    )
