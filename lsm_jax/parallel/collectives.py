"""What runs on the mesh: constraints on activations, and functions mapped over the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import AxisType, PartitionSpec

from lsm_jax.parallel.mesh import BATCH_AXES, mesh_axes, partition_spec


def _auto_axes() -> dict[str, int]:
    """Sizes of the current mesh's axes that are still the partitioner's; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """Pin `x` to the mesh by its logical axes; `x` itself where no mesh is set or an axis does not divide."""
    axes = _auto_axes()
    for size, logical in zip(x.shape, logical_axes, strict=True):
        names = mesh_axes(logical)
        if any(name not in axes for name in names) or size % math.prod(axes[n] for n in names):
            return x
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes)) if axes else x


def over_batch(function: Callable[[Any, Any], Any], batched: Any, shared: Any) -> Any:
    """`function(batched, shared)`, each device on its own rows where a mesh shards the batch.

    Args:
        function: its outputs all lead with the batch axis.
        batched: pytree of arrays [B, ...]; Nones pass through.
        shared: pytree of arrays every device needs whole.
    """
    axes = _auto_axes()
    names = tuple(name for name in BATCH_AXES if axes.get(name, 1) > 1)
    shards = math.prod(axes[name] for name in names)
    leaves = jax.tree.leaves(batched)
    if shards == 1:
        return function(batched, shared)
    if any(leaf.shape[0] % shards for leaf in leaves):
        sizes = sorted({leaf.shape[0] for leaf in leaves})
        logging.log_first_n(
            logging.WARNING, "batch of %s does not divide over %d devices; every device computes it whole", 1, sizes, shards
        )  # fmt: skip
        return function(batched, shared)
    rows = PartitionSpec(names)
    return jax.shard_map(
        function,
        in_specs=(
            jax.tree.map(lambda _: rows, batched),
            jax.tree.map(lambda _: PartitionSpec(), shared),
        ),
        out_specs=rows,
        axis_names=set(names),
        check_vma=False,
    )(batched, shared)
