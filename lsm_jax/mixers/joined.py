"""One product for several narrow dense layers that multiply the same tokens."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lsm_jax.mixers.layers import Dense, OrthogonalDense, matmul_to_float32, project
from lsm_jax.ops.core.saved import row_major, saved
from lsm_jax.parallel import shards_of

LEAST_TOKENS = 1024
"""The smallest number of tokens for which layers are joined: with fewer, to join the kernels costs more than to load the tokens again."""


def project_together(
    x: jax.Array, *layers: tuple[Dense, DTypeLike | None], apart: bool = False
) -> tuple[jax.Array, ...]:
    """Return what each of several dense layers returns for tokens x [B, T, D] in a dtype (None is x's): `layer(x, dtype=dtype)`.

    Where devices do not divide the heads, for 16-bit x and `LEAST_TOKENS` tokens or more, plain layers are one product with their kernels
    side by side. It loads x once instead of once a layer; the backward pass stores and adds one gradient of x instead of one a layer. The
    product's float32 result is saved for the backward pass where products with weights are.

    With `apart` the gradient of the kernels is a product of its own. Otherwise XLA may join it to that of another layer with tokens x, for
    which it copies the gradients of both layers' results into one array. The results are then saved each in its dtype, not the product. XLA
    stores the product by tokens: stored by channels, for a result that becomes [B, heads, T], the others would be transposed twice.
    """
    if not _joins(x, [layer for layer, _ in layers]):
        return tuple(layer(x, dtype=dtype) for layer, dtype in layers)
    kernels = [layer.kernel[...].astype(x.dtype) for layer, _ in layers]
    product = _product_apart if apart else matmul_to_float32
    y = product(x, jnp.concatenate(kernels, axis=1))
    y = row_major(y) if apart else saved(y)
    ends = list(itertools.accumulate(k.shape[1] for k in kernels))[:-1]
    dtypes = (x.dtype if d is None else d for _, d in layers)
    parts = zip(jnp.split(y, ends, axis=-1), dtypes, strict=True)
    results = tuple(part.astype(dtype) for part, dtype in parts)
    return tuple(map(saved, results)) if apart else results


def unjoined(x: jax.Array, layer: Dense, barriers: int = 1) -> jax.Array:
    """Return 16-bit tokens x [B, T, D], `LEAST_TOKENS` or more, as an array of its own for a plain dense layer, so that XLA joins no product
    of it to another of the same tokens; other tokens unchanged, and for other layers: those in FP8 share the tokens' 8-bit floats.

    XLA joins products of one array that are small enough, and copies the parts of the result apart where a kernel reads them, and in the
    backward pass their gradients into one array.

    Args:
        x: the tokens.
        layer: the layer that multiplies them.
        barriers: the number of optimization barriers, another one for each product of x that is to be apart: XLA takes equal numbers of
            barriers in front of one array for one array.
    """
    if not _are_many(x) or not is_plain(layer, biased=True):
        return x
    for _ in range(barriers):
        x = jax.lax.optimization_barrier(x)
    return x


@jax.custom_vjp
def _product_apart(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return `matmul_to_float32(x, kernel)`, of which XLA joins no gradient to another product of x."""
    return matmul_to_float32(x, kernel)


def _product_apart_backward(operands, grad):
    x, kernel = operands
    # XLA joins products of one array: behind a barrier x is another, of its own, so that the pass that computes x again may also wait for the
    # gradient of x. The gradient of the product is stored once, for two products.
    x, grad = (jax.lax.optimization_barrier(a) for a in (x, grad.astype(x.dtype)))
    _, pull = jax.vjp(matmul_to_float32, x, kernel)
    return pull(grad.astype(jnp.float32))


_product_apart.defvjp(
    lambda x, kernel: (_product_apart(x, kernel), (x, kernel)), _product_apart_backward
)


def _joins(x: jax.Array, layers: list[Dense]) -> bool:
    """Return whether `project_together` computes these layers by one product."""
    plain = len(layers) > 1 and all(map(is_plain, layers))
    return plain and _are_many(x) and shards_of("heads") == 1


def _are_many(x: jax.Array) -> bool:
    """Return whether tokens x [B, T, D] are in 16 bits and at least `LEAST_TOKENS`."""
    return x.dtype.itemsize == 2 and x.shape[0] * x.shape[1] >= LEAST_TOKENS


def is_plain(layer: Dense, *, biased: bool = False) -> bool:
    """Return whether a dense layer is a product with its kernel in x's dtype and nothing else, with `biased` but perhaps a bias."""
    return layer.product is project and is_one_product(layer, biased=biased)


def is_one_product(layer: Dense, *, biased: bool = False) -> bool:
    """Return whether a dense layer is one product with its kernel, by `layer.product`, without an adapter, and without a bias unless `biased`."""
    one = type(layer) in (Dense, OrthogonalDense) and layer.lora is None
    return one and (biased or layer.bias is None)
