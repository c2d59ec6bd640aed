"""Make the mesh of devices, and map the logical axes of arrays, which are all that model code names, to
mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")
"""The mesh's axes, outermost first: devices along the inner axes, which communicate most often, are
neighbours."""

BATCH_AXES = ("pipeline", "data", "fsdp", "expert")
"""The mesh axes over which the rows of a batch are sharded. Devices with different experts or pipeline stages
have different rows, too; outside the stages, each device computes the embedding and the loss of its rows."""

# Logical axis -> the mesh axes over which it is sharded; an empty tuple: replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": ("sequence",),
    "tokens": ("sequence", "tensor"),  # tokens, in layers without heads
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
    """The config of the mesh: the number of devices along each mesh axis. The product of these is the
    number of all devices.

    Attributes:
        data: shards of the batch with replicated parameters; -1 is the number of devices divided by the other
            axes.
        fsdp: shards of the batch, over which the parameters are sharded, too.
        sequence: shards of each row's tokens; training pads rows that are not divisible.
        tensor: shards of the heads and of the feedforwards' widths.
        expert: shards of the batch, over which the experts are sharded, too.
        pipeline: stages into which the layers are divided, as many layers in each.
        microbatches: parts of the batch that pass through the stages one after another, a multiple of
            `pipeline`; 0 is `pipeline`.
        rounds: how often a microbatch passes through all stages; each stage has as many groups of layers, which with
            more than one round are whole periods of the pattern.
            With S stages, M microbatches and R rounds, a device waits (S - 1) / (R M + S - 1) of the time.
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
        """Return the number of devices along each mesh axis, in the order of `AXES`, with the size -1
        replaced by the number of devices that are left.

        Raises:
            ValueError: the product of the axes is not `num_devices`, or microbatches or rounds do not match
                the stages.
        """
        sizes = {axis: getattr(self, axis) for axis in AXES}
        given = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)
        given = given or "mesh.data=1"
        if any(size < 1 and (axis, size) != ("data", -1) for axis, size in sizes.items()):
            raise ValueError(
                f"{given}: accepted are integers from 1 for each mesh axis, and -1 for mesh.data"
            )
        rest = math.prod(size for axis, size in sizes.items() if axis != "data")
        if sizes["data"] == -1:
            sizes["data"] = num_devices // rest
        if sizes["data"] * rest != num_devices:
            raise ValueError(
                f"{given} does not fit {num_devices} devices: the product of all mesh axes must be that number (mesh.data=-1 is "
                "the number divided by the other axes)"
            )
        if self.microbatches < 0 or self.microbatches % self.pipeline:
            raise ValueError(
                f"mesh.microbatches={self.microbatches}: accepted are multiples of mesh.pipeline={self.pipeline}, "
                f"and 0 for {self.pipeline}"
            )
        if self.rounds < 1 or (self.rounds > 1 and self.pipeline == 1):
            raise ValueError(
                f"mesh.rounds={self.rounds} with mesh.pipeline={self.pipeline}: accepted are integers from 1, and only 1 with one "
                "stage"
            )
        return sizes

    def pieces(self) -> int:
        """Return the number of microbatches that pass through the pipeline's stages; the value 0 stands for
        the number of stages."""
        return self.microbatches or self.pipeline


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return max(n for n in range(1, min(number, max(1, most)) + 1) if number % n == 0)


def batch_shards(sizes: dict[str, int]) -> int:
    """Return into how many parts the rows of a batch are divided on a mesh with these sizes of its axes."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the mesh of the mesh config over `devices` (None: all devices); its axes are of type `Auto`, so
    XLA's partitioner handles them."""
    devices = jax.devices() if devices is None else devices
    sizes = config.shape(len(devices))
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=devices)


def mesh_axes(logical_axis: str | None) -> tuple[str, ...]:
    """Return the names of the mesh axes over which a logical axis, such as "heads", is sharded; () if it is
    replicated, as the axis None is."""
    if logical_axis is None:
        return ()
    if logical_axis not in RULES:
        raise ValueError(
            f"logical axis {logical_axis!r} has no rule; accepted are {', '.join(RULES)}"
        )
    return RULES[logical_axis]


def partition_spec(logical_axes: Sequence[str | None]) -> PartitionSpec:
    """Return the partition spec of an array whose dimensions have these logical axes, one name or None
    each."""
    return PartitionSpec(*(mesh_axes(axis) or None for axis in logical_axes))


def param_sharding(
    mesh: Mesh | AbstractMesh,
    logical_axes: Sequence[str | None],
    shape: Sequence[int],
    name: str = "parameter",
) -> NamedSharding:
    """Return the sharding of a parameter on `mesh`, by its logical axes and its shape.

    Where the pipeline's stages do not divide the axis "layers", they shard another dimension (`width_dimension`).

    Raises:
        ValueError: a sharded dimension is not divisible by the devices along its mesh axes; `name` is the
            parameter's, for the message.
    """
    if len(logical_axes) != len(shape):
        raise ValueError(
            f"{name}: logical axes {tuple(logical_axes)} for shape {tuple(shape)}; accepted is one per dimension"
        )
    spec = list(partition_spec(logical_axes))
    for place, (size, logical) in enumerate(zip(shape, logical_axes, strict=True)):
        axes = mesh_axes(logical)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts == 0:
            continue
        if logical != "layers":
            raise ValueError(
                f"{name}: axis {logical!r} of size {size} does not divide over {parts} devices of "
                f"{', '.join(f'mesh.{axis}={mesh.shape[axis]}' for axis in axes)}"
            )
        spec[place] = None
        width = width_dimension(mesh.shape, logical_axes, shape)
        if width is not None:
            spec[width] = (*axes, *mesh_axes(logical_axes[width]))
    return NamedSharding(mesh, PartitionSpec(*spec))


def width_dimension(
    sizes: Mapping[str, int], logical_axes: Sequence[str | None], shape: Sequence[int]
) -> int | None:
    """Return which dimension of parameters of layers [n, ...] the mesh axis "pipeline" shards where it does not
    divide n: the first that it divides and that no other axis shards, otherwise the first that it divides together
    with the other axes; None if there is none.

    Args:
        sizes: number of devices along each mesh axis, by its name.
        logical_axes: the logical axes of the parameters, of which the first is "layers".
        shape: the shape of the parameters.
    """
    stages = math.prod(sizes[axis] for axis in mesh_axes("layers"))
    found = []
    for place, (size, logical) in enumerate(zip(shape, logical_axes, strict=True)):
        parts = math.prod(sizes[axis] for axis in mesh_axes(logical))
        if logical != "layers" and size % (parts * stages) == 0:
            found.append((parts > 1, place))
    return min(found)[1] if found else None


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding on `mesh` of arrays [B, ...] that are divided over their rows only."""
    return NamedSharding(mesh, partition_spec(("batch",)))


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding on `mesh` of arrays [B, T, ...] that are divided over rows and over the tokens of
    each row."""
    return NamedSharding(mesh, partition_spec(("batch", "sequence")))
