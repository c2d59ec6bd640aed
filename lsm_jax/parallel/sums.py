"""Sums over devices inside a `jax.shard_map` with unchecked replication, gradients' too.

XLA's CPU compiler aborts where bfloat16 is to be summed over some axes of a mesh and not all (jax 0.11.2): sums between CPUs
are of float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def _wide(x: Any) -> jax.Array:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow and jax.default_backend() == "cpu" else x


def sum_along(axis: str | tuple[str, ...], x: jax.Array) -> jax.Array:
    """The sum of x over the devices of a mesh axis, on all of them."""
    return jax.lax.psum(_wide(x), axis).astype(x.dtype)


def sum_and_scatter(axis: str, x: jax.Array) -> jax.Array:
    """[n P, ...] -> [P, ...]: each of n devices has its part of the sum."""
    return jax.lax.psum_scatter(_wide(x), axis, scatter_dimension=0, tiled=True).astype(x.dtype)


def gather_along(axis: str, dimension: int, x: jax.Array) -> jax.Array:
    """All devices' x, one after another along a dimension; its gradients are summed and scattered."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather(axis, dimension, x)
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis, dimension, x):
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


def _gather_backward(axis, dimension, _, grad):
    own = jax.lax.psum_scatter(_wide(grad), axis, scatter_dimension=dimension, tiled=True)
    return (own.astype(grad.dtype),)


_gather.defvjp(lambda axis, dimension, x: (_gather(axis, dimension, x), None), _gather_backward)


def map_over(
    names: Collection[str], function: Callable[..., Any], in_specs: tuple, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` over the mesh axes `names`, the others left to the partitioner.

    The gradient of an argument that is whole along one of them is summed over it.
    """

    def run(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        dtypes = [x.dtype for x in leaves]
        summed = [not set(names) <= _axes_of(spec) for spec in specs]

        def narrowed(*leaves):
            own = [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
            return function(*tree.unflatten(own))

        mapped = jax.shard_map(
            narrowed, in_specs=tuple(specs), out_specs=out_specs, axis_names=set(names), check_vma=False
        )  # fmt: skip
        return mapped(*(_wide(x) if s else x for x, s in zip(leaves, summed, strict=True)))

    return run


def _axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that an array is cut over."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return {name for entry in entries for name in entry if name is not None}
