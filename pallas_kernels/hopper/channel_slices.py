"""Keys of 256 channels that decay one by one, and values of more than 128: what a chunk makes by itself is made of 128 channels at a
time, on Mosaic GPU (Hopper).

Products over channels are added, what each channel has is put side by side; the walks see whole keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

_WIDTH = 128


def split_channels(channels: int) -> list[slice]:
    """The channels of each channels."""
    width = min(channels, _WIDTH)
    return [slice(n, n + width) for n in range(0, channels, width)]


def sum_trees(*parts: Any) -> Any:
    """The sum of equal pytrees, made in float32, in their dtypes."""
    if len(parts) == 1:
        return parts[0]

    def add(*leaves):
        return functools.reduce(jnp.add, (x.astype(jnp.float32) for x in leaves)).astype(
            leaves[0].dtype
        )

    return jax.tree.map(add, *parts)


def compute_by_key_slice(
    make: Callable[..., Any], arrays: Collection[jax.Array], products: Collection[str]
) -> Any:
    """The `Resolved` of whole keys.

    Args:
        make: that of slices of the arrays.
        arrays: [B, T, *, K].
        products: the fields that are sums over keys. `keep` is [B, h, N * K], the others have K as their last axis.
    """
    depth = next(iter(arrays)).shape[-1]
    found = [make(*(x[..., channels] for x in arrays)) for channels in split_channels(depth)]
    if len(found) == 1:
        return found[0]

    def join(name: str, *parts):
        if name in products:
            return sum_trees(*parts)
        if name == "keep":
            parts = [x.reshape(*x.shape[:2], -1, _WIDTH) for x in parts]
            return jnp.concatenate(parts, axis=-1).reshape(*parts[0].shape[:2], -1)
        return jnp.concatenate(parts, axis=-1)

    kind = type(found[0])
    return kind(*map(join, kind._fields, *found))


def slice_keep(x: jax.Array, depth: int, channels: slice) -> jax.Array:
    """A channels of [B, h, N * K]."""
    by_chunk = x.reshape(*x.shape[:2], -1, depth)[..., channels]
    return by_chunk.reshape(*x.shape[:2], -1)
