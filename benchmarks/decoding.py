"""Greedy decoding of one token after another with random weights, by one loop on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers import Context
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.step import params_of


def random_params(config: ModelConfig) -> dict[str, Any]:
    """Return random parameters in bfloat16 for a model of this config, with the usual scale, drawn one
    after another.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def draw(shape, key):
        # All matrices of a stack are equal, since values do not change the time of a step.
        matrix = 0.02 * jax.random.normal(key, shape[-2:], jnp.bfloat16)
        return jnp.broadcast_to(matrix, shape)

    shapes = params_of(abstract(config))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree, [draw(leaf.shape, key) for leaf, key in zip(leaves, keys, strict=True)]
    )


def gib_in_use() -> float:
    """Return the GiB of device memory in use now; 0 if the device does not report them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return round(stats.get("bytes_in_use", 0) / 2**30, 3)


def split_layers(params: dict[str, Any]) -> tuple[dict[str, Any], list]:
    """Return a model's parameters without its layers, and a list of each layer's parameters in order.

    A step that slices the stack of layers would copy them.
    """
    blocks = params["periods"]["blocks"]
    periods = len(jax.tree.leaves(blocks)[0])
    layers = [
        jax.tree.map(lambda p, i=i: p[i], blocks[j]) for i in range(periods) for j in sorted(blocks)
    ]
    return {k: v for k, v in params.items() if k != "periods"}, layers


def decoder(config: ModelConfig, count: int, mix: Any):
    """Return the jitted program that decodes `count` tokens greedily, one after another, and updates the
    layers' states in place.

    Args:
        config: the model's config; all its layers have the same mixer and feedforward.
        count: number of tokens that one call of the program decodes.
        mix: `layer_step` or `softmax_step`, the step of a mixer.

    Returns:
        A function (parameters without the layers', list of each layer's parameters, last token, list of each layer's
        state, position of that token) -> (token, states, position) after `count` tokens.
    """
    model = abstract(config)
    graph, block_graph = nnx.graphdef(model), nnx.graphdef(model.periods.blocks[0])
    stacked = params_of(model)["periods"]

    @jax.jit  # traced and lowered once for all layers
    def layer(params, x, state, position):
        block = nnx.merge(block_graph, params)
        y, state = mix(block.mixer, block.mixer_norm(x), state, position)
        x = x + y
        return x + block.feedforward(block.feedforward_norm(x))[0], state

    def step(rest, layers, carry):
        token, states, position = carry
        model = nnx.merge(graph, {**rest, "periods": stacked})
        x, after = model.embedding[...][token].astype(model.dtype), []
        for params, state in zip(layers, states, strict=True):
            x, state = layer(params, x, state, position)
            after.append(state)
        logits = model.logits(model.norm(x))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), after, position + 1

    def decode(rest, layers, token, states, position):
        def body(carry, _):
            return step(rest, layers, carry), None

        return jax.lax.scan(body, (token, states, position), length=count)[0]

    return jax.jit(decode, donate_argnums=3)


def layer_step(mixer: Any, x: jax.Array, state: Any, position: jax.Array):
    """Apply one mixer of this library to one token, with the input x [B, 1, D] and the mixer's decode state;
    return (output, new state). It is one of the functions that `decoder` accepts as `mix`.
    """
    y, state, _ = mixer(x, state=state)
    return y, state


def softmax_step(mixer: Any, x: jax.Array, cache: tuple, position: jax.Array):
    """Write one token's key and value into a cache [B, G, N, K] of each at `position`, and let its query
    attend to the cache; returns (output, cache). It is a `mix` of `decoder`.
    """
    context = Context(positions=jnp.broadcast_to(position, x.shape[:2]))
    q, context = mixer.read(x, context)
    new, context = mixer.write(x, context)
    cache = tuple(
        jax.lax.dynamic_update_slice_in_dim(array, jnp.moveaxis(new[name], 1, 2), position, axis=2)
        for name, array in zip("kv", cache, strict=True)
    )
    keys, values = cache
    grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("bgrk,bgsk->bgrs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(keys.shape[2]) <= position, scores, -jnp.inf)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(values.dtype)
    o = jnp.einsum("bgrs,bgsv->bgrv", weights, values)
    return mixer.finish(o.reshape(q.shape), x, context)[0], cache
