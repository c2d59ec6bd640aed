"""The mesh, and the one table that maps logical axes to it. Nothing else in the library names a mesh axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp")
BATCH_AXES = ("data", "fsdp")

# Logical axis -> the mesh axes it is spread over; none: replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "embed": ("fsdp",),
    "vocab": (),
    "mlp": (),
    "expert": (),
    "heads": (),
    "norm": (),
    "layers": (),
}


@dataclasses.dataclass(kw_only=True)
class MeshConfig:
    """How many devices stand along each mesh axis.

    Attributes:
        data: batch shards with whole parameters; -1 takes the devices that are left.
        fsdp: batch shards that share the parameters between them.
    """

    data: int = -1
    fsdp: int = 1

    def shape(self, num_devices: int) -> tuple[int, int]:
        """(data, fsdp) with -1 resolved.

        Raises:
            ValueError: the axes do not multiply to `num_devices`.
        """
        if self.fsdp < 1 or (self.data < 1 and self.data != -1):
            raise ValueError(
                f"mesh.data={self.data}, mesh.fsdp={self.fsdp}: accepted are integers from 1, and data=-1"
            )
        data = num_devices // self.fsdp if self.data == -1 else self.data
        if data * self.fsdp != num_devices:
            raise ValueError(
                f"mesh.data={self.data} x mesh.fsdp={self.fsdp} does not fit {num_devices} devices; "
                "the axes must multiply to their number (data=-1 takes what fsdp leaves)"
            )
        return data, self.fsdp


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (all of them), its axes left to the partitioner."""
    devices = jax.devices() if devices is None else devices
    shape = config.shape(len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def mesh_axes(logical_axis: str | None) -> tuple[str, ...]:
    """The mesh axes a logical axis is spread over, none for replicated ones."""
    if logical_axis is None:
        return ()
    if logical_axis not in RULES:
        raise ValueError(f"logical axis {logical_axis!r} has no rule; known are {', '.join(RULES)}")
    return RULES[logical_axis]


def partition_spec(logical_axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axes of an array with these logical axes."""
    return PartitionSpec(*(mesh_axes(axis) or None for axis in logical_axes))


def param_sharding(
    mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int], name: str = "parameter"
) -> NamedSharding:
    """Where a parameter of `shape` lives.

    Raises:
        ValueError: a sharded dimension that its mesh axes do not divide.
    """
    if len(logical_axes) != len(shape):
        raise ValueError(f"{name}: {len(logical_axes)} logical axes for shape {tuple(shape)}")
    for size, logical in zip(shape, logical_axes, strict=True):
        axes = mesh_axes(logical)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ValueError(
                f"{name}: axis {logical!r} of size {size} does not divide over {parts} devices "
                f"of mesh axes {', '.join(axes)}"
            )
    return NamedSharding(mesh, partition_spec(logical_axes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays whose leading axis is the batch."""
    return NamedSharding(mesh, partition_spec(("batch",)))
