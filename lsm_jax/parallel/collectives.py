"""What runs on the mesh: constraints on activations, and functions mapped over the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from lsm_jax.parallel.mesh import BATCH_AXES, mesh_axes, partition_spec


def _axes(mesh: AbstractMesh, kind: AxisType) -> dict[str, int]:
    """Sizes of the mesh's axes of one kind; `Auto` ones are still the partitioner's."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, of in kinds if of == kind}


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
    """Pin `x` to the mesh by its logical axes; `x` itself where no mesh is set or an axis does not divide."""
    axes = _axes(jax.sharding.get_abstract_mesh(), AxisType.Auto)
    for size, logical in zip(x.shape, logical_axes, strict=True):
        names = mesh_axes(logical)
        if any(name not in axes for name in names) or size % math.prod(axes[n] for n in names):
            return x
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes)) if axes else x


def _varying(x: jax.Array) -> frozenset[str]:
    """The axes of a caller's checked `jax.shard_map` over which `x` differs."""
    return jax.typeof(x).manual_axis_type.varying


def over_batch(function: Callable[..., Any], batched: dict, shared: dict, *static: Hashable) -> Any:
    """`function(*static, **batched, **shared)`, each device on its own rows where a mesh shards the batch.

    Under a mesh with explicit axes these are the partitioner's inside, and what comes out is sharded as the batch that went
    in, its other axes whole. Inside a caller's own `jax.shard_map` every argument varies over whatever one of them varies over.

    Args:
        function: its outputs all lead with the batch axis. It is the compiler's key for a mesh, so no lambda or closure.
        batched: pytrees of arrays [B, ...] by name; Nones pass through.
        shared: pytrees of arrays every device needs whole, by name.
        static: what is no array, hashable.
    """
    leaves = jax.tree.leaves((batched, shared))
    current = jax.sharding.get_abstract_mesh()
    # Explicit axes are part of an array's type, with the mesh set or not.
    for mesh in (current, *(jax.typeof(x).sharding.mesh for x in leaves)):
        if explicit := _axes(mesh, AxisType.Explicit):
            specs = (jax.typeof(x).sharding.spec for x in jax.tree.leaves(batched))
            rows = PartitionSpec(next((spec[0] for spec in specs if spec and spec[0]), None))
            with jax.sharding.use_abstract_mesh(mesh):
                return _on_explicit_axes(function, static, tuple(explicit), rows, batched, shared)
    if current.empty:
        return function(*static, **batched, **shared)
    varying = frozenset().union(*(_varying(x) for x in leaves))
    if varying:  # so that a scan's first carry has the type of the next ones
        batched, shared = jax.tree.map(
            lambda x: jax.lax.pcast(x, tuple(varying - _varying(x)), to="varying"),
            (batched, shared),
        )
        return function(*static, **batched, **shared)  # an axis that is left is the partitioner's
    axes = _axes(current, AxisType.Auto)
    names = tuple(name for name in BATCH_AXES if axes.get(name, 1) > 1)
    shards = math.prod(axes[name] for name in names)
    sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(batched)})
    if any(size % shards for size in sizes):
        logging.log_first_n(
            logging.WARNING, "batch of %s does not divide over %d devices; every device computes it whole", 1, sizes, shards
        )  # fmt: skip
        names = ()
    if not names:
        return function(*static, **batched, **shared)
    return _on_rows(function, static, names, batched, shared)


# Compiled, since outside `jax.jit` jax cannot map over some axes of a mesh and leave others to the partitioner.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_rows(function, static, names, batched, shared):
    rows = PartitionSpec(names)
    return jax.shard_map(
        lambda batched, shared: function(*static, **batched, **shared),
        in_specs=(
            jax.tree.map(lambda _: rows, batched),
            jax.tree.map(lambda _: PartitionSpec(), shared),
        ),
        out_specs=rows,
        axis_names=set(names),
        check_vma=False,
    )(batched, shared)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _on_explicit_axes(function, static, axes, rows, batched, shared):
    run: Any = jax.sharding.auto_axes(
        lambda batched, shared: over_batch(function, batched, shared, *static),
        axes=axes,
        out_sharding=rows,
    )
    return run(batched, shared)
