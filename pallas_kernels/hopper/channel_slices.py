"""Slices of 128 channels, for chunk kernels of the delta rules on Mosaic GPU (Hopper).

With a decay for every key channel, keys of 256 channels and values of more than 128 do not fit into a chunk kernel. It is then run once
for each slice of 128 channels. Outputs that are sums over the sliced channels are added, and outputs with these channels are
concatenated. The scan has all channels at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

_WIDTH = 128


def split_channels(channels: int) -> list[slice]:
    """Return slices that cover `channels` channels, of 128 channels each, or one slice of all channels if
    there are fewer. Above 128, `channels` is a multiple of 128.
    """
    width = min(channels, _WIDTH)
    return [slice(n, n + width) for n in range(0, channels, width)]


def sum_trees(*trees: Any) -> Any:
    """Return the sum, leaf by leaf, of pytrees of the same structure, computed in float32 and returned in the dtypes of the first tree's
    leaves.
    """
    if len(trees) == 1:
        return trees[0]

    def add(*leaves):
        return functools.reduce(jnp.add, (x.astype(jnp.float32) for x in leaves)).astype(
            leaves[0].dtype
        )

    return jax.tree.map(add, *trees)


def compute_by_key_slice(
    compute: Callable[..., Any], arrays: Collection[jax.Array], products: Collection[str]
) -> Any:
    """Run a chunk kernel on each slice of at most 128 key channels, and join its results to those of all K channels.

    Args:
        compute: runs the kernel: it is called with a slice of each of `arrays`, and returns a NamedTuple of results.
        arrays: the kernel's inputs with key channels, [B, T, *, K].
        products: the fields of the NamedTuple that are sums over key channels, so that the results are added. The others are
            concatenated: `chunk_decay` is [B, h, N * K] for N chunks; the rest have K as last axis.
    """
    depth = next(iter(arrays)).shape[-1]
    results = [compute(*(x[..., channels] for x in arrays)) for channels in split_channels(depth)]
    if len(results) == 1:
        return results[0]

    def join(name: str, *parts):
        if name in products:
            return sum_trees(*parts)
        if name == "chunk_decay":
            parts = [x.reshape(*x.shape[:2], -1, _WIDTH) for x in parts]
            return jnp.concatenate(parts, axis=-1).reshape(*parts[0].shape[:2], -1)
        return jnp.concatenate(parts, axis=-1)

    kind = type(results[0])
    return kind(*map(join, kind._fields, *results))


def slice_chunk_decay(chunk_decay: jax.Array, depth: int, channels: slice) -> jax.Array:
    """Return the channels `channels` of every chunk's decay over the whole chunk, from `chunk_decay` [B, h, N * K]: N chunks, one after
    another, of K = `depth` channels each.
    """
    by_chunk = chunk_decay.reshape(*chunk_decay.shape[:2], -1, depth)[..., channels]
    return by_chunk.reshape(*chunk_decay.shape[:2], -1)
