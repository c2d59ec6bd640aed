"""The state that `online_memory` carries from call to call: how far a small model's weights have been trained on the
tokens so far.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.online.inner_models import Layer, Layers


class OnlineState(NamedTuple):
    """The state of `online_memory` between calls, in float32: the changes of the inner model's weights, and
    the number of tokens in the present mini-batch.

    Weights are stored as the difference from the decayed weights of `inner`, so that an empty state is 0. The
    arrays have the leading axes [B], or [B, S] with one state per segment.

    Attributes:
        start: one `Layer` for each layer of the inner model: the weights at the start of the mini-batch, less
            the decayed ones of `inner`.
        current: one `Layer` for each layer: the current weights of Titans, less the decayed ones of `inner`;
            None for TTT.
        sums: one `Layer` for each layer: the sums of gradient steps, A of TTT or S of Titans.
        start_log_kept: [B, G], the log of the factor by which the weights of `inner` had decayed at the start
            of the mini-batch; None for TTT.
        log_kept: [B, G], the log of the factor by which the weights of `inner` have decayed so far; None for
            TTT.
        position: [B], the number of written tokens of the present mini-batch, 0 to mini_batch - 1.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    start: Layers
    current: Layers | None
    sums: Layers
    start_log_kept: Float[Array, ...] | None
    log_kept: Float[Array, ...] | None
    position: Int[Array, ...]
    segment_id: Int[Array, " B"]


def online_state(
    batch_size: int,
    num_heads: int,
    sizes: tuple[int, ...],
    *,
    bias: bool = False,
    momentum: bool = False,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> OnlineState:
    """Return the state of `online_memory` before any gradient step, an `OnlineState` of zeros.

    Args:
        batch_size: B.
        num_heads: G, the number of memories.
        sizes: (K, V), or (K, M, V) for two layers.
        bias: whether the layers have biases.
        momentum: whether the state is for Titans' rule instead of TTT's.
        num_segments: states per row; None is one state per row.
        dtype: the dtype of the weights.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)

    def empty() -> Layers:
        return tuple(
            Layer(
                jnp.zeros((*rows, num_heads, before, after), dtype),
                jnp.zeros((*rows, num_heads, after), dtype) if bias else None,
            )
            for before, after in itertools.pairwise(sizes)
        )

    kept = jnp.zeros((*rows, num_heads), dtype) if momentum else None
    return OnlineState(
        empty(),
        empty() if momentum else None,
        empty(),
        kept,
        kept,
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
    )
