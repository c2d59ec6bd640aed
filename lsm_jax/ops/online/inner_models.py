"""The inner models that `online_memory` trains on the tokens: a matrix or an MLP for each head, and the
gradient of their loss.

`f(x) = norm(gelu(x W₁ + b₁) W₂ + b₂)`, or `norm(x W₁ + b₁)` with one layer; biases and norm may be absent.
The loss of a token is `½ ‖f(k) - target‖²`. Its gradient with respect to a weight has rank one, `xᵀ g`,
where x is the layer's input and g the gradient with respect to the layer's output; it is represented by the
pair (x, g).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lsm_jax.ops.core import checks


class Inner(NamedTuple):
    """The inner models of `online_memory` before any token, one for each memory; their parameters are trained
    as parameters of the model that contains the op.

    Attributes:
        weights: (W,) with W [G, K, V] for one layer, or (W₁, W₂) with [G, K, M] and [G, M, V] for two.
        biases: a tuple of the layers' biases, [G, V], or [G, M] and [G, V]; None for layers without biases.
        norm_scale: [G, V], the scale of a layer norm after the last layer; None for no norm. It is not
            trained on tokens.
        norm_bias: [G, V], the bias of that layer norm; it is not trained on tokens.
    """

    weights: tuple[Float[Array, "G I O"], ...]
    biases: tuple[Float[Array, "G O"], ...] | None = None
    norm_scale: Float[Array, "G V"] | None = None
    norm_bias: Float[Array, "G V"] | None = None


class Layer(NamedTuple):
    """One dense layer of the online memory's inner model: its weight [..., I, O] from I to O channels and its bias
    [..., O] (or None), or arrays of the same shapes, such as their gradients.
    """

    weight: Array
    bias: Array | None


Layers = tuple[Layer, ...]


def layers_of(inner: Inner) -> Layers:
    """Return the trained layers of the inner model with weights [1, G, I, O] and biases [1, G, O]: the first
    axis, of size 1, stands for the rows of a batch.
    """
    biases = inner.biases or (None,) * len(inner.weights)
    layers = tuple(Layer(w, b) for w, b in zip(inner.weights, biases, strict=True))
    return jax.tree.map(lambda x: x[None], layers)


def check_inner(op: str, inner: Inner, heads: int, key_dim: int, value_dim: int) -> None:
    """Raise ValueError unless the shapes of the inner models' weights match the op's numbers of memories, key channels
    and value channels.
    """
    count = len(inner.weights)
    if count not in (1, 2):
        raise ValueError(f"{op}: inner.weights has {count} matrices; accepted are 1 and 2")
    middle = () if count == 1 else (jnp.shape(inner.weights[0])[-1],)
    sizes = (key_dim, *middle, value_dim)
    for i, weight in enumerate(inner.weights):
        shape = (heads, sizes[i], sizes[i + 1])
        checks.check_shape(op, f"inner.weights[{i}]", weight, shape, "G, I, O")
    if inner.biases is not None:
        if len(inner.biases) != count:
            raise ValueError(
                f"{op}: inner.biases has {len(inner.biases)} arrays; accepted are {count}, as many as weights"
            )
        for i, bias in enumerate(inner.biases):
            checks.check_shape(op, f"inner.biases[{i}]", bias, (heads, sizes[i + 1]), "G, O")
    if (inner.norm_scale is None) != (inner.norm_bias is None):
        raise ValueError(f"{op}: inner has one of norm_scale and norm_bias; give both or neither")
    for name in ("norm_scale", "norm_bias"):
        value = getattr(inner, name)
        if value is not None:
            checks.check_shape(op, f"inner.{name}", value, (heads, value_dim), "G, V")


def apply_layer(layer: Layer, x: Array, precision) -> Array:
    """Return the output [..., C, O] of one dense layer of the online memory's inner model for its inputs x [..., C, I]."""
    y = jnp.matmul(x, layer.weight, precision=precision)
    return y if layer.bias is None else y + layer.bias[..., None, :]


def standardize(z: Array, eps: float) -> tuple[Array, Array]:
    """Return z normalised over the last axis, `(z - mean) / sqrt(variance + eps)`, and the factor `1 /
    sqrt(variance + eps)`, which the gradient of the norm requires.
    """
    centered = z - jnp.mean(z, axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return centered * factor, factor


def finish_inner(inner: Inner, z: Array, eps: float) -> Array:
    """Return the inner model's output, [B, G, ..., C, V]: the output z of its last layer, normalised if the
    model has a norm.
    """
    if inner.norm_scale is None or inner.norm_bias is None:
        return z
    return standardize(z, eps)[0] * _by_head(inner.norm_scale, z) + _by_head(inner.norm_bias, z)


def _by_head(x: Array, like: Array) -> Array:
    """Reshape a parameter x [G, V] of each memory so that it broadcasts against an array `like` [B, G, ..., V]."""
    return x.reshape(x.shape[0], *(1,) * (like.ndim - 3), x.shape[1])


def gradients(
    inner: Inner, layers: Layers, k: Array, target: Array, eps: float, precision
) -> tuple[list[Array], list[Array]]:
    """Return the two factors of each token's gradient, for each layer of the inner model: the gradient of the
    token's loss with respect to a weight is xᵀ g, with x the layer's input and g the gradient with respect to
    its output. All are taken at the same weights.

    Args:
        inner: the model; only its norm is used.
        layers: the weights at which the gradients are taken, [B, G, ...].
        k: [B, G, C, K], the model's inputs.
        target: [B, G, C, V], the outputs that the model is trained to return.
        eps: epsilon of the norm.
        precision: the precision of matrix products.

    Returns:
        For each layer its inputs [B, G, C, I], and the gradients of the losses with respect to its outputs
        [B, G, C, O].
    """
    inputs, outputs, x = [], [], k
    for i, layer in enumerate(layers):
        inputs.append(x if i == 0 else jax.nn.gelu(x))
        x = apply_layer(layer, inputs[-1], precision)
        outputs.append(x)
    if inner.norm_scale is None or inner.norm_bias is None:
        d_output = x - target
    else:
        unit, factor = standardize(x, eps)
        scale = _by_head(inner.norm_scale, x)
        d_unit = (unit * scale + _by_head(inner.norm_bias, x) - target) * scale
        along_unit = jnp.mean(d_unit * unit, axis=-1, keepdims=True)
        mean = jnp.mean(d_unit, axis=-1, keepdims=True)
        d_output = (d_unit - mean - unit * along_unit) * factor
    d_outputs = [d_output]
    for layer, output in zip(layers[:0:-1], outputs[-2::-1], strict=True):
        d_input = jnp.matmul(d_outputs[0], jnp.swapaxes(layer.weight, -1, -2), precision=precision)
        d_outputs.insert(0, jax.vjp(jax.nn.gelu, output)[1](d_input)[0])
    return inputs, d_outputs
