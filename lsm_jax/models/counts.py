"""Size and cost of a model: axes, weight decay and number of its parameters, and its floating-point
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lsm_jax.models.config import ModelConfig
from lsm_jax.models.decoder import Decoder


def abstract(config: ModelConfig) -> Decoder:
    """Return the model of a config with the shapes and dtypes of its parameters in place of arrays, without computing
    anything.
    """
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def _metadata(model: Any, of: Callable[[nnx.Param], Any]) -> dict:
    params = model if isinstance(model, nnx.State) else nnx.state(model, nnx.Param)
    tree = jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.to_pure_dict(tree)


def logical_axes(model: Any) -> dict:
    """Return the logical axis names of every parameter: tuples, in the structure of
    `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Args:
        model: a module or its state; abstract ones are accepted.
    """
    return _metadata(model, lambda p: tuple(p.logical_axes))


def decay_mask(config: ModelConfig) -> dict:
    """Return a tree of bools: True for parameters with weight decay (embeddings and projections).

    Norms, biases, short convolutions, A_log, dt_bias and D have none.
    """
    return _metadata(abstract(config), lambda p: bool(p.weight_decay))


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Return the numbers of parameters: `total`, `embedding` (the embedding, and the head if it is untied),
    `non_embedding`, and `active`, the number that one token uses.

    If a token uses only a fraction of a parameter's entries (as with experts, or several memories), the
    parameter's metadata `active` is that fraction.
    """
    params = [p for _, p in nnx.to_flat_state(nnx.state(abstract(config), nnx.Param))]
    total = sum(p.get_value().size for p in params)
    active = round(sum(p.get_value().size * p.get_metadata().get("active", 1) for p in params))
    embedding = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return dict(total=total, embedding=embedding, non_embedding=total - embedding, active=active)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Return the floating-point operations of the forward pass per token of a document of `seq_len` tokens;
    training requires three times as many.

    A multiplication and an addition count as two. The products of the definition are counted: projections,
    convolutions, the update and read of each memory token by token, scores of a query with the keys that it
    attends to, and the head. Norms, activations, and products that a chunk form or remat computes a second
    time are not counted.
    """
    total = 2.0 * config.hidden_size * config.vocab_size
    for letter in config.letters():
        layer = config.layers[letter]
        total += layer.mixer.flops_per_token(config.hidden_size, seq_len)
        if layer.feedforward is not None:
            total += layer.feedforward.flops_per_token(config.hidden_size, seq_len)
    return total
