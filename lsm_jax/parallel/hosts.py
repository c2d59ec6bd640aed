"""Run a program over several hosts: one or more processes per host run the same program, each on its own
devices and its own rows of the data."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsm_jax.parallel.mesh import batch_sharding, mesh_axes

# Launcher -> the environment variable in which it stores the number of processes.
_COUNTS = {
    "SLURM": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "TPU pod": "TPU_WORKER_HOSTNAMES",
    "TPU slices": "MEGASCALE_NUM_SLICES",
}
_TEXT_BYTES = 2048
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the launcher that started this process as one of several; None for a single
    process.

    If JAX_COORDINATOR_ADDRESS (host:port of the first process) is set, that is the name, and
    JAX_NUM_PROCESSES and JAX_PROCESS_ID should be set, too. Otherwise SLURM, Open MPI, indexed Kubernetes
    jobs (for which `jax.distributed` requires the package `kubernetes`) and TPU pods are recognised.

    Raises:
        ValueError: a launcher's number of processes is not a number.
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
            raise ValueError(f"{variable}={value!r}: it must be the number of processes")
        if several:
            return name
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def join_hosts() -> None:
    """Connect this process to the other processes of the run, if there are any. Call it before jax uses any
    device.

    The first process listens for the others, without encryption. With JAX_COORDINATOR_ADDRESS it listens at that address
    only, or at JAX_COORDINATOR_BIND_ADDRESS if that is set; JAX would listen on all network interfaces. Under other
    launchers JAX finds the address, and listens on all interfaces unless JAX_COORDINATOR_BIND_ADDRESS is set.

    Raises:
        ValueError: the environment says that there are several processes, but they cannot be connected.
    """
    name = launcher()
    if name is None:
        return
    arguments: dict[str, Any] = {}
    if name == _VARIABLES[0]:
        numbers = {variable: os.environ.get(variable, "") for variable in _VARIABLES[1:]}
        for variable, value in numbers.items():
            if value and not value.isdecimal():
                raise ValueError(f"{variable}={value!r}: it must be an integer from 0")
        keys = ("num_processes", "process_id")
        arguments = {k: int(v) for k, v in zip(keys, numbers.values(), strict=True) if v}
        address = os.environ[name]
        if not re.fullmatch(r".+:\d{1,5}", address):
            raise ValueError(f"{name}={address!r}: accepted is HOST:PORT of the first process")
        arguments["coordinator_bind_address"] = os.environ.get(_BIND_ADDRESS, address)
    try:
        jax.distributed.initialize(**arguments)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} says that this process is one of several, but it cannot connect to them: {str(error).rstrip('.')}. Set "
            f"{', '.join(_VARIABLES)}, or run a single process; {_BIND_ADDRESS} is the first process's address, if the others "
            "reach it by another name"
        ) from error


def data_shard(mesh: Mesh) -> tuple[int, int]:
    """Return (index, count): this process reads part `index`, from 0, of `count` equal parts of the
    sequences of each batch.

    Processes whose devices differ only along axes that do not shard the batch, such as "sequence", read the
    same rows.

    Raises:
        ValueError: the rows of this process's devices are not such a part.
    """
    num_shards = batch_sharding(mesh).num_devices // _copies(mesh)
    slices = batch_sharding(mesh).devices_indices_map((num_shards,))
    me = jax.process_index()
    shards = sorted(
        {slices[d][0].indices(num_shards)[0] for d in mesh.devices.flat if d.process_index == me}
    )
    first, size = shards[0], len(shards)
    if shards != list(range(first, first + size)) or num_shards % size or first % size:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: the devices of process {me} have shards {shards} of the batch's {num_shards}; accepted are "
            "meshes in which each process has an equal, contiguous part of the batch, so choose sizes of the inner mesh axes "
            "that divide the devices of one host"
        )
    return first // size, num_shards // size


def _copies(mesh: Mesh) -> int:
    """Return how many devices of the mesh receive the same rows of the batch: all that differ only along axes
    that do not shard the batch.
    """
    spec = batch_sharding(mesh).spec[0]
    return mesh.size // int(np.prod([mesh.shape[axis] for axis in spec]))


def place_batch(
    batch: dict[str, np.ndarray], sharding: NamedSharding, num_rows: int
) -> dict[str, jax.Array]:
    """Move a batch to the devices: from this process's rows [n, T], make the arrays [num_rows, T] of all
    processes' rows, with the given sharding.

    If T is not divisible by the devices of the mesh axis "sequence", rows are padded first, with segment id 0
    and loss mask 0.
    """
    batch = _padded(batch, sharding)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)  # in a third of the time of the general case below
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (num_rows, *array.shape[1:]))
        for name, array in batch.items()
    }


def _padded(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, np.ndarray]:
    """Pad the rows of a batch with tokens of segment id 0 and loss mask 0, so that their length is a
    multiple of the devices over which a row's tokens are sharded."""
    devices = math.prod(sharding.mesh.shape[axis] for axis in mesh_axes("sequence"))
    rows, length = batch["tokens"].shape
    padding = -length % devices
    if not padding:
        return batch
    batch = {"segment_ids": np.ones((rows, length), np.int32)} | batch
    return {name: np.pad(x, [(0, 0), (0, padding)]) for name, x in batch.items()}


def first_process_text(text: str, mesh: Mesh) -> str:
    """Return the `text` of the run's first process to all its processes, which must call this together; at most
    `_TEXT_BYTES` of it. With one process, return `text`.
    """
    if jax.process_count() == 1:
        return text
    data = text.encode()[:_TEXT_BYTES] if jax.process_index() == 0 else b""
    local = np.zeros((jax.local_device_count(), _TEXT_BYTES), np.uint8)
    local[:, : len(data)] = np.frombuffer(data, np.uint8)
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    codes = jax.make_array_from_process_local_data(by_device, local, (mesh.size, _TEXT_BYTES))
    largest = jax.jit(lambda x: x.max(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    return bytes(np.asarray(largest(codes))).rstrip(b"\0").decode(errors="ignore")


class Agreement:
    """Send a number from any process to all processes, so that all of them act on it at the same call, such
    as the signal that ends the run.

    The result of a call is that of the previous call's numbers: the maximum over devices is computed while
    the next step runs. With one process a call computes nothing and returns its number at once.
    """

    def __init__(self, mesh: Mesh):
        axes = PartitionSpec(mesh.axis_names)
        self._sharding, self._size = NamedSharding(mesh, axes), mesh.size
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: jax.Array | None = None

    def __call__(self, number: int | None) -> int | None:
        """Return the largest number that any process of the run passed to the previous call, or None if all
        passed None.

        With one process, return `number`.
        """
        if jax.process_count() == 1:
            return number
        agreed = None if self._pending is None else int(np.asarray(self._pending)) or None
        local = np.full(jax.local_device_count(), number or 0, np.int32)
        numbers = jax.make_array_from_process_local_data(self._sharding, local, (self._size,))
        self._pending = self._largest(numbers)
        return agreed
