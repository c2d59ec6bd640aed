"""The end of a mixer: the norm of each head, its gate, and the product behind them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lsm_jax.mixers import fp8
from lsm_jax.mixers.joined import is_one_product, is_plain
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, project
from lsm_jax.ops.core.saved import saved
from lsm_jax.ops.normalization.gated_product import (
    PLAIN,
    Product,
    fuses_product,
    gated_norm_product,
)
from lsm_jax.ops.normalization.xla import NormOptions

_PRODUCTS = {project: PLAIN, fp8.project: fp8.PRODUCT}  # by `Dense.product`


def product_of(layer: Dense) -> Product | None:
    """Return the product of a dense layer, for a gated norm that is computed together with it; None if the layer is not one product, or
    there is no such form of it."""
    return _PRODUCTS.get(layer.product) if is_one_product(layer) else None


def normed_product(
    norm: RMSNorm,
    layer: Dense,
    o: jax.Array,
    gate: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "silu",
) -> jax.Array:
    """Return a mixer's output [B, T, D], `layer(norm(o, gate + bias))` with the heads side by side.

    Where a kernel serves the norm, its gradient stores the norm's output, which the gradient of the layer's weights requires.

    Args:
        norm: the norm of each head.
        layer: the output projection.
        o: [B, T, H, V], the output of the mixer's memory.
        gate: [B, T, H, V], before its activation.
        bias: [H, V], of the gate, or None.
        activation: of the gate: "silu" or "sigmoid".
    """
    product = product_of(layer)
    if product is not None and o.ndim == 4 and fuses_product(o, gate, 1):
        options: Any = NormOptions(norm.eps, 1, activation, gate_first=False)
        scale = saved(jnp.broadcast_to(norm.factors(), o.shape[2:]))
        kernel = layer.kernel[...].astype(o.dtype)
        return gated_norm_product(options, product, o, gate, scale, kernel, bias)
    gate = gate if bias is None else gate + bias
    return layer(merge_heads(norm(o, gate, activation=activation)))


def apart_from_bias(
    layer: Dense, x: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """Return the output [..., F] of a dense layer for x [..., D] in a dtype, and the bias [F] that must still be added to it, or
    None.
    """
    if layer.bias is None or not is_plain(layer, biased=True):
        return layer(x, dtype=dtype), None
    return project(x, layer.kernel[...], None, dtype), layer.bias[...].astype(dtype)
