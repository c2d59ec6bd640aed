"""The optimizer of training runs: AdamW, and its learning rate as a function of the number of tokens seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lsm_jax.models import decay_mask
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.partition import split


def learning_rate(config: TrainConfig, step: jax.Array | int) -> jax.Array:
    """Return the learning rate of a training step, whose number counts from 0: linear in the tokens seen
    during warm-up, then a cosine to the end of the run."""
    optimizer, tokens = config.optimizer, float(config.tokens_per_step)
    step = jnp.asarray(step, jnp.float32)
    steps = step if optimizer.warmup_from_zero else step + 1
    warmup = jnp.minimum(1.0, steps * (tokens / max(optimizer.warmup_tokens, tokens)))
    if optimizer.start_lr_ratio:
        warmup = optimizer.start_lr_ratio + (1 - optimizer.start_lr_ratio) * warmup
    decay_tokens = float(config.total_tokens - optimizer.warmup_tokens)
    progress = jnp.clip((step * tokens - float(optimizer.warmup_tokens)) / decay_tokens, 0, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return (
        optimizer.peak_lr
        * warmup
        * (optimizer.end_lr_ratio + (1 - optimizer.end_lr_ratio) * cosine)
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return AdamW, after clipping the gradients' global norm, as an optax transformation of gradients to updates
    for a learning rate of 1; the training step multiplies the updates by `learning_rate`."""
    optimizer = config.optimizer
    mask, _ = split(decay_mask(config.model), config.trainable)
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=mask),
    )
