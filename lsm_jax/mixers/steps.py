"""Several updates of a memory for each token, as rows of an op that has one update for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.parallel import sequence_shards


def run_steps(
    op: Callable[..., Any],
    arguments: dict[str, jax.Array],
    log_decay: jax.Array | None,
    *,
    segment_ids: jax.Array | None = None,
    update_mask: jax.Array | None = None,
    **call,
) -> tuple[jax.Array, Any]:
    """Call an op on rows of n T tokens: decay the memory once for each token, then update and read it n times.

    Args:
        op: `linear_memory` or `delta_memory`.
        arguments: the op's arrays by name, [B, T, n, ...].
        log_decay: [B, T, G], the decay before a token's first update, or None.
        segment_ids: [B, T] or None.
        update_mask: [B, T] or None.
        call: the op's other arguments; its chunks have as many updates as it would have tokens.

    Returns:
        The outputs [B, T, n, ...] after each update, and the final state.
    """
    batch, length, steps = next(iter(arguments.values())).shape[:3]
    # XLA's partitioner cannot join unequal parts of rows, so that tokens are added if devices do not divide them.
    padding = -length % sequence_shards(length)
    if padding and segment_ids is None and update_mask is None:
        update_mask = jnp.ones((batch, length), jnp.int32)

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) if padding else x

    def joined(x):  # [B, T, n, ...] to [B, n T, ...]
        x = padded(x)
        return x.reshape(batch, -1, *x.shape[3:])

    def repeated(x):
        return None if x is None else jnp.repeat(padded(x), steps, axis=1)

    if log_decay is not None:
        first = [(0, 0), (0, 0), (0, steps - 1)] + [(0, 0)] * (log_decay.ndim - 2)
        log_decay = joined(jnp.pad(log_decay[:, :, None], first))
    o, state = op(
        **{name: joined(x) for name, x in arguments.items()},
        log_decay=log_decay,
        segment_ids=repeated(segment_ids),
        update_mask=repeated(update_mask),
        **call,
    )
    return o.reshape(batch, -1, steps, *o.shape[2:])[:, :length], state
