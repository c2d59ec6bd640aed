"""The optimizers of training runs, and their learning rate as a function of the number of tokens seen."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lsm_jax.models import abstract, decay_mask
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.optimizer_config import OptimizerConfig
from lsm_jax.training.partition import leaves_of, split

_ADAFACTOR_EPS = 1e-30  # added to squared gradients (arXiv 1804.04235, section 9)
_MUON_RMS = (
    0.2  # of an entry of Muon's update, as AdamW's usually has it (arXiv 2502.16982, section 2.2)
)
_LARGEST_UPDATE = 1e30  # far below the largest float32, 3.4e38


def learning_rate(config: TrainConfig, step: jax.Array | int) -> jax.Array:
    """Return the learning rate of a training step, whose number counts from 0: linear in the tokens seen
    during warm-up, then by the config's schedule to the end of the run."""
    optimizer, tokens = config.optimizer, float(config.tokens_per_step)
    step = jnp.asarray(step, jnp.float32)
    steps = step if optimizer.warmup_from_zero else step + 1
    warmup = jnp.minimum(1.0, steps * (tokens / max(optimizer.warmup_tokens, tokens)))
    if optimizer.start_lr_ratio:
        warmup = optimizer.start_lr_ratio + (1 - optimizer.start_lr_ratio) * warmup
    if optimizer.schedule == "constant":
        return optimizer.peak_lr * warmup
    if optimizer.schedule == "inverse_sqrt":
        seen = jnp.maximum(steps * tokens, float(optimizer.warmup_tokens))
        return optimizer.peak_lr * warmup * jnp.sqrt(float(optimizer.warmup_tokens) / seen)
    decay_tokens = float(config.total_tokens - optimizer.warmup_tokens)
    if optimizer.schedule == "wsd":
        decay_tokens = optimizer.decay_fraction * config.total_tokens
    decay_start = float(config.total_tokens) - decay_tokens
    progress = jnp.clip((step * tokens - decay_start) / decay_tokens, 0, 1)
    remaining = (
        0.5 * (1 + jnp.cos(jnp.pi * progress)) if optimizer.schedule == "cosine" else 1 - progress
    )
    return (
        optimizer.peak_lr
        * warmup
        * (optimizer.end_lr_ratio + (1 - optimizer.end_lr_ratio) * remaining)
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the config's optimizer, after clipping the gradients' global norm, as an optax transformation of gradients to
    updates for a learning rate of 1; the training step multiplies the updates by `learning_rate`."""
    optimizer = config.optimizer
    mask, _ = split(decay_mask(config.model), config.trainable)
    adam = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    scale = adam
    if optimizer.name == "lion":
        scale = optax.scale_by_lion(b1=optimizer.b1, b2=optimizer.b2)
    elif optimizer.name == "muon":
        scale = optax.partition(
            {True: _muon(optimizer.momentum), False: adam}, muon_matrices(config)
        )
    elif optimizer.name == "adafactor":
        scale = _adafactor(optimizer)
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        scale,
        optax.add_decayed_weights(optimizer.weight_decay, mask=mask),
    )


def stays_finite(config: TrainConfig) -> bool:
    """Return whether a step whose loss and gradients are finite leaves finite parameters finite, so that it may overwrite them
    before it has computed all of them.

    AdamW's update of a parameter is a mean of its gradients, at most `clip_norm`, divided by at least `eps`, and Lion's is 1.
    The step adds at most `_LARGEST_UPDATE` to it, which only parameters can exceed whose loss has not been finite for long;
    and weight decay makes none larger.
    """
    optimizer = config.optimizer
    rate = optimizer.peak_lr * max(1.0, optimizer.end_lr_ratio, optimizer.start_lr_ratio)
    updates = dict(adamw=optimizer.clip_norm / optimizer.eps, lion=1.0)
    largest = rate * updates.get(optimizer.name, math.inf)
    # In float32, closer to 1 is 1, and the bias corrections divide by 0; so do gradients of 0 by smaller numbers than the least.
    decays = max(optimizer.b1, optimizer.b2) <= 1 - 1e-6
    exact = min(optimizer.eps, optimizer.clip_norm) >= jnp.finfo(jnp.float32).tiny
    bounded = largest <= _LARGEST_UPDATE and rate * optimizer.weight_decay <= 1
    return bool(decays and exact and bounded)


def muon_matrices(config: TrainConfig) -> dict[str, Any]:
    """Return a tree of bools with the structure of a config's trained parameters, True for those that Muon updates: the
    matrices of layers, which are stacked over the periods of the pattern. Vectors and convolutions, which have no weight
    decay, are no matrices."""
    params = nnx.to_pure_dict(nnx.state(abstract(config.model), nnx.Param))
    matrices = jax.tree.map(
        lambda leaf, decayed: bool(decayed) and leaf.ndim >= 3, params, decay_mask(config.model)
    )
    for name in set(matrices) - {"periods"}:
        matrices[name] = jax.tree.map(lambda _: False, matrices[name])
    return split(matrices, config.trainable)[0]


def _muon(momentum: float) -> optax.GradientTransformation:
    """Return Muon's transformation of the gradients of matrices [..., D, F] (arXiv 2502.16982): their momentum, orthogonalised
    by Newton-Schulz iterations, with entries of a root mean square of about 0.2."""

    def dimensions(params):
        numbers = optax.contrib.MuonDimensionNumbers
        return jax.tree.map(
            lambda x: numbers(reduction_axis=x.ndim - 2, output_axis=x.ndim - 1), params
        )

    def rms(updates, params=None):
        del params
        return jax.tree.map(lambda u: _MUON_RMS * max(u.shape[-2:]) ** 0.5 * u, updates)

    return optax.chain(
        optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=dimensions),
        optax.stateless(rms),
    )


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return Adafactor's transformation of gradients (arXiv 1804.04235, algorithm 4, without its relative step size): factored
    second moments, updates of a limited root mean square, and a first moment unless b1 is 0."""
    factored = optax.scale_by_factored_rms(
        decay_rate=config.adafactor_decay,
        min_dim_size_to_factor=config.adafactor_min_size,
        epsilon=_ADAFACTOR_EPS,
    )

    def clip(updates, params=None):
        del params
        return jax.tree_util.tree_map_with_path(clip_leaf, updates)

    def clip_leaf(path, update):
        stacked = (
            path[0].key == "periods"
        )  # the layers of a pattern's letter, each of which is clipped alone
        axes = tuple(range(int(stacked), update.ndim))
        rms = jnp.sqrt(jnp.mean(update**2, axis=axes, keepdims=True))
        return update / jnp.maximum(1.0, rms / config.adafactor_clip)

    mean = optax.ema(config.b1) if config.b1 else optax.identity()
    return optax.chain(factored, optax.stateless(clip), mean)


def moments_of(config: TrainConfig) -> dict[str, float]:
    """Return the numbers that the optimizer stores for each number of a trained parameter, by the parameter's path."""
    optimizer = config.optimizer
    shapes = split(nnx.to_pure_dict(nnx.state(abstract(config.model), nnx.Param)), config.trainable)
    matrices = leaves_of(muon_matrices(config))

    def count(name: str, shape: tuple[int, ...]) -> float:
        if optimizer.name == "adafactor":
            second, first = sorted((1, 1, *shape))[-2:]
            small = len(shape) < 2 or second < optimizer.adafactor_min_size
            return float(optimizer.b1 > 0) + (1 if small else 1 / first + 1 / second)
        return 1 if optimizer.name == "lion" or (optimizer.name == "muon" and matrices[name]) else 2

    return {name: count(name, leaf.shape) for name, leaf in leaves_of(shapes[0]).items()}


def ema_decay_at(config: TrainConfig, step: jax.Array) -> jax.Array:
    """Return the decay of the parameters' moving average after a training step, whose number counts from 0: smaller in the
    first steps, in which the parameters are still far from those that count."""
    step = jnp.asarray(step, jnp.float32)
    return jnp.minimum(config.ema_decay, (1 + step) / (10 + step))
