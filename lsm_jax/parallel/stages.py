"""Pipeline stages that are not whole periods of the layers' pattern: which layers each stage computes, and how
each device receives them.

The parameters of layers of one kind (of equal structure and shapes) are stacked in the order of layers, and the
mesh axis "pipeline" shards a width of them instead of the layers (`mesh.param_sharding`). So shapes, and with them
checkpoints, do not depend on the number of stages. In each step one all-to-all per array sends every device the
complete layers of its stage; its derivative sends their gradients back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lsm_jax.parallel.collectives import constrain
from lsm_jax.parallel.mesh import width_dimension


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: consecutive layers, as many in each stage.

    Every stage has the same number of entries for the layers of one kind: the most that any stage has. Those of a
    stage with fewer layers of the kind are filled with zeros and not used.

    Attributes:
        kinds: the kind of each layer, in their order: numbers from 0, or any other names.
        count: the number of stages, which divides the number of layers.
    """

    kinds: tuple[Any, ...]
    count: int

    def __post_init__(self):
        if self.count < 1 or len(self.kinds) % self.count:
            raise ValueError(
                f"count={self.count}: accepted are numbers of pipeline stages that divide the {len(self.kinds)} layers"
            )

    def of_stage(self, stage: int) -> tuple[Any, ...]:
        """Return the kinds of the layers of a stage, in their order."""
        size = len(self.kinds) // self.count
        return self.kinds[stage * size : (stage + 1) * size]

    def programs(self) -> list[tuple[Any, ...]]:
        """Return the different sequences of kinds that stages compute; equal stages have one program."""
        return list(dict.fromkeys(self.of_stage(stage) for stage in range(self.count)))

    def program_of_stage(self) -> np.ndarray:
        """Return the index of each stage's program, int32 [S]."""
        programs = self.programs()
        found = [programs.index(self.of_stage(stage)) for stage in range(self.count)]
        return np.array(found, np.int32)

    def entries(self, kind: Any) -> int:
        """Return the largest number of layers of a kind in a stage."""
        return max(self.of_stage(stage).count(kind) for stage in range(self.count))

    def layers_of(self, kind: Any) -> np.ndarray:
        """Return the indices of the layers of a kind, in their order, int32 [n]."""
        return np.array([i for i, other in enumerate(self.kinds) if other == kind], np.int32)

    def table(self, kind: Any) -> np.ndarray:
        """Return which layer of a kind each entry of each stage has, int32 [S, entries]: its position among the n
        layers of the kind, and a distinct number from n on for an entry without a layer.
        """
        stage_of = self.layers_of(kind) // (len(self.kinds) // self.count)
        count = self.entries(kind)
        table = np.arange(self.count * count, dtype=np.int32).reshape(self.count, count)
        table += len(stage_of)
        for stage in range(self.count):
            (mine,) = np.nonzero(stage_of == stage)
            table[stage, : len(mine)] = mine
        return table


def stage_spec(
    axis: str, logical_axes: Sequence[str | None], shape: Sequence[int]
) -> PartitionSpec:
    """Return the partition spec, over the mesh axis of the pipeline alone, of parameters of layers [n, ...] that are
    stored by width; those without a width that can be divided are replicated.
    """
    dimension = width_dimension(jax.sharding.get_abstract_mesh().shape, logical_axes, shape)
    return PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, axis)


def receive_layers(
    axis: str,
    spec: PartitionSpec,
    table: np.ndarray,
    logical_axes: Sequence[str | None],
    x: jax.Array,
) -> list[jax.Array]:
    """Return the parameters of this device's layers of one kind, an array [...] for each entry of its stage. For
    use inside `jax.shard_map`.

    Args:
        axis: the mesh axis of the pipeline.
        spec: how `x` is sharded over it, from `stage_spec`.
        table: which layer each entry of each stage has, from `Stages.table`.
        logical_axes: the logical axes of `x`, of which the first is that of layers.
        x: this device's part of the parameters of all layers of the kind, [n, ...].
    """
    pick = functools.partial(_pick, x)
    if not len(spec):
        mine = pick(jnp.asarray(table)[jax.lax.axis_index(axis)])
    else:
        dimension = len(spec) - 1
        parts = jax.lax.all_to_all(pick(jnp.asarray(table)), axis, 0, 0)  # [S, entries, ...]
        parts = jnp.moveaxis(parts, 0, dimension)  # in front of the width's part
        shape = parts.shape
        mine = parts.reshape(
            *shape[:dimension], shape[dimension] * shape[dimension + 1], *shape[dimension + 2 :]
        )
        mine = constrain(mine, logical_axes)
    return [mine[entry] for entry in range(table.shape[1])]


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the layers `x[index]`, with zeros where the index is beyond `x`. All indices are different."""
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)
