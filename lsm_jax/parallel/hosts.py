"""Several hosts: one process each (or more), all running the same program, each with its own devices and its own rows of the data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsm_jax.parallel.mesh import batch_sharding, mesh_axes

# Launcher -> the variable in which it tells each process how many there are.
_COUNTS = {
    "SLURM": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "TPU pod": "TPU_WORKER_HOSTNAMES",
    "TPU slices": "MEGASCALE_NUM_SLICES",
}
_BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Who started this process as one of several: a name, or None where it runs alone.

    Three variables set by hand go first: JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. Of launchers are known SLURM, Open MPI, indexed Kubernetes jobs (`jax.distributed` then needs the package
    `kubernetes`) and TPU pods.

    Raises:
        ValueError: a count that is no number.
    """
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return "JAX_COORDINATOR_ADDRESS"
    for name, variable in _COUNTS.items():
        value = environment.get(variable, "1")
        if variable == "TPU_WORKER_HOSTNAMES":
            several = len(value.split(",")) > 1
        elif value.isdecimal():
            several = int(value) > 1
        else:
            raise ValueError(f"{variable}={value!r}: it must be a number of processes")
        if several:
            return name
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def join_hosts() -> None:
    """Connect to the other processes of this run, if it is one of several. Call it before jax touches any device.

    Raises:
        ValueError: the environment says that there are others, and they cannot be found.
    """
    found = launcher()
    if found is None:
        return
    given: dict[str, Any] = {}
    if found == _BY_HAND[0]:
        numbers = {name: os.environ.get(name, "") for name in _BY_HAND[1:]}
        if any(value and not value.isdecimal() for value in numbers.values()):
            raise ValueError(f"{numbers}: accepted are whole numbers")
        keys = ("num_processes", "process_id")
        given = {k: int(v) for k, v in zip(keys, numbers.values(), strict=True) if v}
    try:
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{found} says that this process is one of several, but they could not be joined: {str(error).rstrip('.')}. Set "
            f"{', '.join(_BY_HAND)} by hand, or run a single process"
        ) from error


def data_shard(mesh: Mesh) -> tuple[int, int]:
    """(index, count): which of `count` equal parts of each batch's rows this process reads.

    Processes whose devices differ in other axes than the batch's, as stages of one sequence do, read the same rows.

    Raises:
        ValueError: a mesh in which the rows of this process are not such a part.
    """
    parts = batch_sharding(mesh).num_devices // _copies(mesh)
    places = batch_sharding(mesh).devices_indices_map((parts,))
    me = jax.process_index()
    mine = sorted(
        {places[d][0].indices(parts)[0] for d in mesh.devices.flat if d.process_index == me}
    )
    first, size = mine[0], len(mine)
    if mine != list(range(first, first + size)) or parts % size or first % size:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: process {me} holds parts {mine} of the batch's {parts}; accepted are meshes that give "
            "each process one even part of the batch. Order the axes so that those of one host divide its devices"
        )
    return first // size, parts // size


def _copies(mesh: Mesh) -> int:
    """Devices that hold the same rows."""
    spec = batch_sharding(mesh).spec[0]
    return mesh.size // int(np.prod([mesh.shape[axis] for axis in spec]))


def place_batch(
    batch: dict[str, np.ndarray], sharding: NamedSharding, num_rows: int
) -> dict[str, jax.Array]:
    """This process's rows [n, T] of a batch of `num_rows`, as its part of arrays over all devices.

    Rows that the devices along time cannot cut evenly are filled up with padding first: id 0, in no loss.
    """
    batch = _filled_up(batch, sharding)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)  # a third of the time of the general way
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (num_rows, *array.shape[1:]))
        for name, array in batch.items()
    }


def _filled_up(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, np.ndarray]:
    """The batch with rows of a multiple of the devices along time."""
    parts = math.prod(sharding.mesh.shape[axis] for axis in mesh_axes("sequence"))
    rows, length = batch["tokens"].shape
    short = -length % parts
    if not short:
        return batch
    batch = {"segment_ids": np.ones((rows, length), np.int32)} | batch
    return {name: np.pad(x, [(0, 0), (0, short)]) for name, x in batch.items()}


class Agreement:
    """Lets all processes act on a number that one of them has, at the same call: the one after it was told.

    Each call costs a sum over all devices that runs beside the step; nothing where there is one process.
    """

    def __init__(self, mesh: Mesh):
        axes = PartitionSpec(mesh.axis_names)
        self._sharding, self._size = NamedSharding(mesh, axes), mesh.size
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._asked: jax.Array | None = None

    def __call__(self, number: int | None) -> int | None:
        """The largest number that any process gave the call before (with one process: `number`); None if none did."""
        if jax.process_count() == 1:
            return number
        told = None if self._asked is None else int(np.asarray(self._asked)) or None
        local = np.full(jax.local_device_count(), number or 0, np.int32)
        every = jax.make_array_from_process_local_data(self._sharding, local, (self._size,))
        self._asked = self._largest(every)
        return told
