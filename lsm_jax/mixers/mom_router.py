"""The router of a Mixture-of-Memories: the memories that each token is sent to, their weights, and the
balance loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.mixers.base import Context


class Route(NamedTuple):
    """The memories that each token is routed to and their weights, for G memories, the shared one last.

    Attributes:
        weight: float32 [B, T, G], 0 where a token is not routed to a memory.
        routed: bool [B, T, G], whether the token is routed to the memory.
        indices: int32 [B, T, J], the memories that a token is routed to, the shared one last.
    """

    weight: jax.Array
    routed: jax.Array
    indices: jax.Array


def route_tokens(
    logits: jax.Array, config: Any, context: Context, loss_layers: int
) -> tuple[Route, dict[str, jax.Array]]:
    """Send each token to the `top_k` memories with the largest logits, weighted by their softmax divided by
    its sum over them.

    Args:
        logits: [B, T, M], at least float32.
        config: a `MoMConfig`.
        context: the context of the call.
        loss_layers: the number of layers over which the balance loss is averaged.

    Returns:
        The memories of each token, and the balance loss and the router's statistics by name.
    """
    probability = jax.nn.softmax(logits, axis=-1)
    rank = _ranks(logits)
    routed = rank < config.top_k
    indices = jnp.argmax(rank[..., None, :] == jnp.arange(config.top_k)[:, None], axis=-1)
    selected = jnp.where(routed, probability, 0)
    weight = selected / jnp.sum(selected, axis=-1, keepdims=True)

    real = jnp.ones(logits.shape[:2], bool)
    if context.segment_ids is not None:
        real = context.segment_ids != 0
    live = real if context.update_mask is None else real & (context.update_mask != 0)
    live = live[..., None].astype(logits.dtype)
    count = jnp.maximum(jnp.sum(live), 1)
    load = jnp.sum(routed * live, axis=(0, 1)) / count
    mean = jnp.sum(probability * live, axis=(0, 1)) / count
    entropy = -jnp.sum(probability * jax.nn.log_softmax(logits, axis=-1), axis=-1)
    if config.balance == "model":
        balance = {"mom/probability": mean}
    else:
        loss = config.num_memories * jnp.sum(load * mean)
        balance = {"mom/balance_loss": config.balance_scale / loss_layers * loss}
    statistics = {
        **balance,
        "mom/load": load / config.top_k,
        "mom/entropy": jnp.sum(entropy * live[..., 0]) / count,
        "mom/tokens/routed": routed & real[..., None],
    }
    if config.shared_memory:
        ones = jnp.ones_like(weight[..., :1])
        weight = jnp.concatenate([weight, ones], axis=-1)
        routed = jnp.concatenate([routed, ones.astype(bool)], axis=-1)
        last = jnp.full_like(indices[..., :1], config.num_memories)
        indices = jnp.concatenate([indices, last], axis=-1)
    routed = routed & real[..., None]
    return Route(jnp.where(routed, weight, 0), routed, indices), statistics


def _ranks(logits: jax.Array) -> jax.Array:
    """Return each memory's rank among a token's logits [..., M], 0 for the largest; of equal logits the first
    has the lower rank.

    The logits are compared in pairs: a sort would be computed on all devices of a mesh.
    """
    index = jnp.arange(logits.shape[-1])
    logit, other = logits[..., :, None], logits[..., None, :]
    ahead = (other > logit) | ((other == logit) & (index < index[:, None]))
    return jnp.sum(ahead, axis=-1, dtype=jnp.int32)
