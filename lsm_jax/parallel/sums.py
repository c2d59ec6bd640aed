"""Sum and gather arrays over mesh axes inside a `jax.shard_map` with unchecked replication, with correct
gradients.

XLA's CPU compiler aborts on a bfloat16 sum over some but not all axes of a mesh (jax 0.11.2), so on CPUs
narrow floating-point numbers are summed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def _summable(x: Any) -> jax.Array:
    """Return `x`, converted to float32 if it is to be summed over devices on a CPU and has a narrower
    floating-point dtype, which XLA's CPU compiler cannot always sum."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow and jax.default_backend() == "cpu" else x


def sum_along(axis: str | tuple[str, ...], x: jax.Array) -> jax.Array:
    """Return the sum of an array `x` over the devices of a mesh axis, in the dtype of `x`; the sum is the
    same on all of them."""
    return jax.lax.psum(_summable(x), axis).astype(x.dtype)


def sum_and_scatter(axis: str, x: jax.Array) -> jax.Array:
    """Sum an array `x` [n P, ...] over the n devices of a mesh axis and divide the result between them:
    device i returns rows i P to (i + 1) P of the sum, [P, ...]."""
    return jax.lax.psum_scatter(_summable(x), axis, scatter_dimension=0, tiled=True).astype(x.dtype)


def gather_along(axis: str, dimension: int, x: jax.Array) -> jax.Array:
    """Return the arrays `x` of all devices of a mesh axis, concatenated along a dimension, on every device.
    In the backward pass the gradients of the devices are summed, and each gets that of its `x`."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather(axis, dimension, x)
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis, dimension, x):
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


def _gather_backward(axis, dimension, _, grad):
    local = jax.lax.psum_scatter(_summable(grad), axis, scatter_dimension=dimension, tiled=True)
    return (local.astype(grad.dtype),)


_gather.defvjp(lambda axis, dimension, x: (_gather(axis, dimension, x), None), _gather_backward)


def map_over(
    names: Collection[str], function: Callable[..., Any], in_specs: tuple, out_specs: Any
) -> Callable[..., Any]:
    """Return a function that calls `function` with each device's part of the arguments, by a
    `jax.shard_map` over the mesh axes `names`; XLA's partitioner handles the other axes.

    If an argument is not sharded over all of `names`, its gradient is summed over the rest.
    """

    def run(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        dtypes = [x.dtype for x in leaves]
        # shard_map sums the gradients of these arguments, in the dtype that they have when they enter it.
        summed = [not set(names) <= _axes_of(spec) for spec in specs]

        def in_given_dtypes(*leaves):
            narrowed = [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
            return function(*tree.unflatten(narrowed))

        mapped = jax.shard_map(
            in_given_dtypes,
            in_specs=tuple(specs),
            out_specs=out_specs,
            axis_names=set(names),
            check_vma=False,
        )
        return mapped(*(_summable(x) if s else x for x, s in zip(leaves, summed, strict=True)))

    return run


def _axes_of(spec: PartitionSpec) -> set[str]:
    """Return the names of the mesh axes over which the partition spec `spec` shards an array."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return {name for entry in entries for name in entry if name is not None}
