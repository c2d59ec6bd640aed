"""The router of a mixture of experts: from the logits of all experts to the chosen ones, their weights and the losses.

Three functions, named by `MoEConfig.router`. *softmax_topk* (Qwen2, DeepSeek-V2) and *topk_softmax* (Mixtral) choose the k largest
logits; the weights are their softmax over all experts or over the chosen ones. *sigmoid* (DeepSeek-V3, arXiv 2412.19437, equations
12 to 16, without the update of the bias) chooses by `sigmoid(logits) + bias` in the groups of experts with the largest scores, and
weighs by `sigmoid(logits)`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid")
_NO_SUM = 1e-20  # added to the sum of sigmoids that divides the weights, as in DeepSeek-V3's code


def route(
    config: Any, logits: jax.Array, bias: jax.Array | None, counted: jax.Array, num_layers: int
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Select the experts of each token.

    Args:
        config: a `MoEConfig`.
        logits: float32 [B, T, E].
        bias: float32 [E], which is added to the scores in the choice; None is none.
        counted: bool [B, T], the tokens that losses and statistics are computed from.
        num_layers: the model's depth, by which losses are divided.

    Returns:
        The weights [B, T, k] and indices [B, T, k] of the selected experts, the most probable first; losses and statistics.
    """
    if config.router == "sigmoid":
        score = jax.nn.sigmoid(logits)
        probability = score / (jnp.sum(score, axis=-1, keepdims=True) + _NO_SUM)
        log_probability = jnp.log(probability + _NO_SUM)
        preferred = _in_best_groups(config, score if bias is None else score + bias)
    else:
        log_probability = jax.nn.log_softmax(logits, axis=-1)
        score = probability = jnp.exp(log_probability)
        preferred = logits
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(preferred), config.top_k)
    selected = chosen[..., None] == jnp.arange(config.num_experts)  # [B, T, k, E]

    def of_chosen(values):  # the gradient of a gather would be a scatter, which is slow on GPUs
        return jnp.sum(jnp.where(selected, values[..., None, :], 0), axis=-1)

    if config.router == "topk_softmax":
        weight = jax.nn.softmax(of_chosen(logits), axis=-1)
    else:
        weight = of_chosen(score)
        if config.renormalize:
            extra = _NO_SUM if config.router == "sigmoid" else 0
            weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + extra)
    weight = weight if config.weight_scale == 1 else config.weight_scale * weight

    count = jnp.maximum(jnp.sum(counted), 1).astype(logits.dtype)

    def mean(values):  # [B, T, ...] -> [...], over the counted tokens
        mask = counted.reshape(*counted.shape, *(1,) * (values.ndim - 2))
        return jnp.sum(jnp.where(mask, values, 0), axis=(0, 1)) / count

    load = mean(selected.any(axis=-2).astype(logits.dtype)) / config.top_k
    balance = config.num_experts * jnp.sum(load * mean(probability))
    square = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    aux = {
        "moe/balance_loss": config.balance_scale / num_layers * balance,
        "moe/z_loss": config.z_scale / num_layers * mean(square),
        "moe/load": load,
        "moe/entropy": -mean(jnp.sum(probability * log_probability, axis=-1)),
    }
    return weight, chosen, aux


def _in_best_groups(config: Any, score: jax.Array) -> jax.Array:
    """Return the scores [B, T, E] of experts, with -inf outside of the `top_groups` groups of consecutive experts in which the sum
    of the two largest scores is largest.
    """
    if config.top_groups == config.num_groups:
        return score
    score = jax.lax.stop_gradient(score)
    groups = score.reshape(*score.shape[:-1], config.num_groups, -1)
    best, _ = jax.lax.top_k(groups, min(2, groups.shape[-1]))
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), config.top_groups)
    kept = jnp.any(chosen[..., None] == jnp.arange(config.num_groups), axis=-2)
    return jnp.where(kept[..., None], groups, -jnp.inf).reshape(score.shape)
