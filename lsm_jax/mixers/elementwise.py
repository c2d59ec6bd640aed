"""A memory of one number for each channel, `h_t = exp(g_t) h_{t-1} + u_t`, by `selective_memory`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lsm_jax import ops


def elementwise_memory(
    u: jax.Array, log_decay: jax.Array, **call
) -> tuple[jax.Array, ops.SelectiveState]:
    """Return the memory h [B, T, D] after each token and the final state.

    Args:
        u: [B, T, D], what each token adds.
        log_decay: [B, T, D], g, at most 0.
        call: further arguments of `selective_memory`.
    """
    one = jnp.ones((u.shape[2], 1), log_decay.dtype)
    return ops.selective_memory(u, -log_decay, -one, one, one, discretization="none", **call)
