"""The delta rule without decay, with a scalar decay or with a decay per key channel, by the Triton kernels in `bodies`.

Forward: the triangular systems of all chunks are inverted in parallel, a scan computes the memory before every chunk and what each
token writes, and then all outputs are computed in parallel. Backward: a reversed scan computes the gradients of the memory after every
chunk, of v and of beta, and then all other gradients are computed in parallel. Long rows of few memories are scanned in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from pallas_kernels.delta_rule.triton import passes
from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton import passes as linear
from pallas_kernels.linear_attention.triton.passes import CHUNK

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "length_multiple"]

REQUIREMENTS = linear.REQUIREMENTS


class Residuals(NamedTuple):
    """The arrays that `forward` saves for `backward`.

    Attributes:
        decays: the decays of all tokens and chunks, and the tokens' documents.
        decayed: the tokens as the scans read them, with a decay per key channel; else None.
        inverse: [B, N, G, C, C], the inverses of the triangular systems of all chunks.
        scores: [B, N, heads, C, C] float32, the decayed scores of all chunks with a decay per key channel; else None.
        states: [B, N, G, K, V], the memories before all chunks.
        writes: [B, T, G, V], what the tokens write.
        transitions: [B * P, G, K, K] float32, the transitions of the P parts in which rows are scanned; None of one part.
    """

    decays: linear.Decays
    decayed: passes.Tokens | None
    inverse: jax.Array
    scores: jax.Array | None
    states: jax.Array
    writes: jax.Array
    transitions: jax.Array | None


def length_multiple(*_: Any) -> int:
    """Return the number of which the number of tokens that `forward` computes is a multiple."""
    return CHUNK


def forward(
    q, k, v, beta, log_decay, run, initial, *, scale: float, save: bool = True,
    erase: str = "decayed", interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute the delta rule, and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and the residuals. The arguments are those of
    `delta_rule`, with T a multiple of `CHUNK`; erase="undecayed" requires a scalar decay, and `interpret` has no effect.
    """
    del save, interpret
    heads = max(q.shape[2], v.shape[2])
    if log_decay is not None and log_decay.ndim == 4:
        decays, tokens, scores, alike = passes.channel_tokens(
            q, k, beta, log_decay, run, initial, heads=heads, scale=scale
        )
        decayed = tokens
    else:
        undecayed = erase == "undecayed"
        decays = linear.scalar_decays(log_decay, run, initial, v, undecayed=undecayed)
        tokens = passes.tokens_of(q, k, beta, decays)
        scores = alike = decayed = None
    inverse = passes.solve(k, alike, tokens.beta, decays)
    states, writes, final, transitions = passes.scan(
        tokens, v, inverse, decays, initial, heads=heads
    )
    output = linear.outputs(
        tokens.read,
        k,
        writes,
        scores,
        decays,
        states,
        heads=heads,
        scale=scale,
        exact=True,
        decayed=decays.by_channel,
    )
    residuals = Residuals(decays, decayed, inverse, scores, states, writes, transitions)
    return output.astype(v.dtype), final, residuals


def backward(
    q, k, v, beta, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, erase: str = "decayed", interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, beta, log_decay and initial of the delta rule.

    The gradient of log_decay is None if there is no decay, or if it is a scalar and `decay_gradient` is False. The arguments are those
    of `forward`, the residuals that it returned, and the gradients of its output and of its final memories; the residuals have the
    decays that belong to `erase`.
    """
    del run, initial, erase, interpret
    decays, tokens, inverse, scores, states, writes, transitions = residuals
    heads, memories = d_output.shape[2], v.shape[2]
    if tokens is None:
        tokens = passes.tokens_of(q, k, beta, decays)
    local = passes.local_gradients(q, k, d_output, scores, decays, scale=scale)
    d_ends = row_layout.gradient_by_head(d_final, heads)
    d_states, dv, d_beta, d_initial = passes.scan_backward(
        tokens, d_output, local, writes, inverse, decays, d_ends, transitions, scale=scale
    )
    dq, dk, d_decay = passes.gradients(
        q, k, writes, d_output, dv, decays, states, d_states, scale=scale,
        decay=log_decay is not None and decay_gradient,
    )  # fmt: skip
    join = row_layout.sum_heads
    return (
        join(dq, q.shape[2]),
        join(dk, k.shape[2]),
        join(dv, memories).astype(v.dtype),
        join(d_beta, memories),
        None if d_decay is None else join(d_decay, memories),
        join(d_initial, memories, axis=1),
    )
