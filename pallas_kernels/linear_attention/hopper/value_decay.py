"""Linear attention whose decay has a value for every value channel (slot memories), on Mosaic GPU (Hopper).

Let f(q, k, v) be linear attention with a decay of every key channel, which `channel_decay` computes. For fixed d, the number
sum_i d_i . f_i(a, b, c) is linear in each of a, b, c and d. Its gradient in a is what queries d read from a memory with keys c
and values b whose value channels decay. So the forward pass here computes that gradient, with b = v, c = k and d = q. The
backward pass differentiates it: it is one forward and one backward pass of f, with the gradient of the output as a. The memory is
the transpose of that of f.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.hopper import channel_decay as channels
from pallas_kernels.linear_attention.hopper.chunk_backward import chunk_backward
from pallas_kernels.memory_calls import (
    FLOAT32_DECAY,
    KEYS_IN_SLICES,
    NO_BONUS,
    ONE_DECAY,
    VALUES_IN_SLICES,
    in_bfloat16,
)

CHUNK = channels.CHUNK
HAS_EXACT = True
REQUIREMENTS = (
    ONE_DECAY,
    NO_BONUS,
    FLOAT32_DECAY,
    in_bfloat16("q", "k", "v"),
    KEYS_IN_SLICES,
    VALUES_IN_SLICES,
)


class Residuals(NamedTuple):
    """Empty residuals: `backward` of linear attention with a decay per value channel requires only the inputs of `forward`."""


def forward(
    q,
    k,
    v,
    log_decay,
    run,
    initial,
    *,
    scale: float,
    save: bool = True,
    exact: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:
    """Compute linear attention with a decay per value channel (slot memories).

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and empty residuals. The arguments are those
    of `linear_attention`, with log_decay [B, T, G, V] and T a multiple of `CHUNK`. If `exact`, the output is float32. If v is
    float32, it is rounded only where it is written to the memory.
    """
    del save
    batch, length, memories, _ = v.shape
    q, k = _by_head(q, k, memories)
    heads = q.shape[2]
    chunks, states, ends, documents = channels.scan_writes(
        v, k, log_decay, run, _transpose(initial), heads=heads, interpret=interpret
    )
    parts = ends.shape[0] // initial.shape[0]
    split = lambda x: row_layout.split_parts(x, parts)  # noqa: E731
    (output,) = chunk_backward(
        None, split(v), split(k), split(log_decay), split(q), states, None, chunks.chunk_decay, documents,
        scale=scale, exact=exact, interpret=interpret,
    )  # fmt: skip
    final = ends.reshape(-1, parts, heads, *ends.shape[2:])[:, -1, :: heads // memories]
    return output.reshape(batch, length, heads, -1), _transpose(final), Residuals()


def backward(
    q, k, v, log_decay, run, initial, residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a decay per value channel.

    The arguments are those of `forward`, its (empty) residuals, and the gradients of its output and of its final memories. The
    gradient of log_decay is computed whether or not `decay_gradient` is set.
    """
    del residuals, decay_gradient
    value_dtype, v = v.dtype, v.astype(q.dtype)
    head_counts = q.shape[2], k.shape[2]
    q, k = _by_head(q, k, v.shape[2])
    options: dict[str, Any] = dict(scale=scale, interpret=interpret)
    inputs = d_output, v, k, log_decay, run, _transpose(initial)
    dq, _, chunks = channels.forward(*inputs, **options)
    _, dv, dk, d_decay, d_initial = channels.backward(
        *inputs, chunks, q, _transpose(d_final), **options
    )
    dq, dk = (row_layout.sum_heads(x, n) for x, n in zip((dq, dk), head_counts, strict=True))
    return dq, dk, dv.astype(value_dtype), d_decay, _transpose(d_initial)


def _by_head(q, k, memories: int):
    """Return the queries q [B, T, H, K] repeated to one head for each head of the output, and the keys k [B, T, Hk, K] repeated
    to one head for each of the `memories` memories.
    """
    heads = max(q.shape[2], memories)
    return jnp.repeat(q, heads // q.shape[2], 2), jnp.repeat(k, memories // k.shape[2], 2)


def _transpose(memory):
    """Return memories [*, K, V] transposed to [*, V, K], or [*, V, K] transposed to [*, K, V]."""
    return jnp.swapaxes(memory, -1, -2)
