"""The mesh, and the one table that maps logical axes to it. Nothing else in the library names a mesh axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")
"""The mesh's axes, outermost first: devices that talk most often stand next to each other."""

BATCH_AXES = ("pipeline", "data", "fsdp", "expert")
"""Those that split the batch. Experts are spread over devices that have rows of their own, and so are pipeline stages: outside
the stages, embedding and loss are shared out between them by rows."""

# Logical axis -> the mesh axes it is spread over; none: replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": ("sequence",),
    "tokens": ("sequence", "tensor"),  # time, where no heads share out the work
    "embed": ("fsdp",),
    "vocab": (),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "heads": ("tensor",),
    "norm": (),
    "layers": ("pipeline",),
}


@dataclasses.dataclass(kw_only=True)
class MeshConfig:
    """How many devices stand along each mesh axis; they multiply to the number of devices.

    Attributes:
        data: batch shards with whole parameters; -1 takes the devices that are left.
        fsdp: batch shards that share the parameters between them.
        sequence: parts that each row is cut into along time; training fills rows up that do not divide.
        tensor: parts that heads and feedforward widths are cut into.
        expert: batch shards that share the experts between them.
        pipeline: stages that the layers are cut into, whole pattern periods each.
        microbatches: pieces in which a batch passes through the stages, a multiple of `pipeline`; 0 takes `pipeline`.
        rounds: times that a piece goes round the stages, each of which then has so many groups of layers: of S stages with M pieces
            in R rounds each waits (S - 1) / (R M + S - 1) of the time.
    """

    data: int = -1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    microbatches: int = 0
    rounds: int = 1

    def shape(self, num_devices: int) -> dict[str, int]:
        """Devices along each of `AXES`, with data=-1 resolved.

        Raises:
            ValueError: the axes do not multiply to `num_devices`, or microbatches or rounds do not fit the stages.
        """
        sizes = {axis: getattr(self, axis) for axis in AXES}
        given = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)
        given = given or "mesh.data=1"
        if any(size < 1 and (axis, size) != ("data", -1) for axis, size in sizes.items()):
            raise ValueError(f"{given}: accepted are integers from 1, and data=-1")
        rest = math.prod(size for axis, size in sizes.items() if axis != "data")
        if sizes["data"] == -1:
            sizes["data"] = num_devices // rest
        if sizes["data"] * rest != num_devices:
            raise ValueError(
                f"{given} does not fit {num_devices} devices; "
                "the axes must multiply to their number (data=-1 takes what the others leave)"
            )
        if self.microbatches < 0 or self.microbatches % self.pipeline:
            raise ValueError(
                f"mesh.microbatches={self.microbatches}: accepted are multiples of mesh.pipeline={self.pipeline}, "
                "and 0 for so many"
            )
        if self.rounds < 1 or (self.rounds > 1 and self.pipeline == 1):
            raise ValueError(
                f"mesh.rounds={self.rounds} with mesh.pipeline={self.pipeline}: accepted are integers from 1, and only 1 where "
                "there is one stage"
            )
        return sizes

    def pieces(self) -> int:
        """Microbatches of a batch, with 0 resolved."""
        return self.microbatches or self.pipeline


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(n for n in range(1, min(number, max(1, most)) + 1) if number % n == 0)


def batch_shards(sizes: dict[str, int]) -> int:
    """Parts that the batch is cut into on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (all of them), its axes left to the partitioner."""
    devices = jax.devices() if devices is None else devices
    sizes = config.shape(len(devices))
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=devices)


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
    mesh: Mesh | AbstractMesh,
    logical_axes: Sequence[str | None],
    shape: Sequence[int],
    name: str = "parameter",
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
                f"{name}: axis {logical!r} of size {size} does not divide over {parts} devices of "
                f"{', '.join(f'mesh.{axis}={mesh.shape[axis]}' for axis in axes)}"
            )
    return NamedSharding(mesh, partition_spec(logical_axes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays whose leading axis is the batch, their other axes whole."""
    return NamedSharding(mesh, partition_spec(("batch",)))


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays [B, T, ...]: rows and time."""
    return NamedSharding(mesh, partition_spec(("batch", "sequence")))
