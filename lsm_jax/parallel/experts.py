"""Rows that travel to the device that owns their expert, and back. For use inside `jax.shard_map`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from lsm_jax.parallel.mesh import mesh_axes
from lsm_jax.parallel.sums import sum_along

EXCHANGES = ("padded", "ragged")
_SENT_BY_NCCL = dict(
    xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=False,
    xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=True,
    xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl=False,
)
"""XLA's own kernel, which it takes unasked inside one host, has a fortieth of the speed (two H200, jax 0.11.2)."""


def exchange_options(mesh: Mesh, exchanges: Collection[str]) -> dict[str, Any]:
    """What a program with these exchanges is to be compiled with on the mesh's devices.

    Raises:
        ValueError: a ragged exchange between CPUs.
    """
    platform = mesh.devices.flat[0].platform
    if "ragged" in exchanges and platform == "cpu" and mesh.shape["expert"] > 1:
        raise ValueError("exchange='ragged': XLA has none between CPUs; accepted there is 'padded'")
    return dict(_SENT_BY_NCCL) if "ragged" in exchanges and platform == "gpu" else {}


def shards_of(logical_axis: str) -> int:
    """In how many parts the present mesh cuts a logical axis, of those it leaves to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = (name for name in mesh_axes(logical_axis) if kinds.get(name) == AxisType.Auto)
    return math.prod(mesh.shape[name] for name in names)


def place_on(logical_axis: str) -> jax.Array:
    """This device's place along a logical axis."""
    return jax.lax.axis_index(mesh_axes(logical_axis))


def sum_over(logical_axis: str, x: jax.Array) -> jax.Array:
    """The sum of x over the devices of a logical axis, on all of them."""
    return sum_along(mesh_axes(logical_axis), x)


def room_for(count: int, buffer: float, shards: int, most: int) -> int:
    """Rows that a device keeps free for each other one: `buffer` times the even share of `count`, and never more than `most`.

    Args:
        count: rows a device has to send.
        buffer: times the even share, `count / shards`.
        shards: devices.
        most: rows that one device can at all send to another.
    """
    return min(math.ceil(buffer * count / shards), most)


def to_owners(
    rows: jax.Array, ids: jax.Array, owner: jax.Array, none: int, *, room: int, exchange: str
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array], jax.Array]:
    """Send each row to the device that owns it, in buffers of static size: nothing is dropped unseen.

    *padded*: one all-to-all of `room` rows for each pair of devices. *ragged*: only what there is travels
    (`jax.lax.ragged_all_to_all`, for GPUs, there with `exchange_options`, and TPUs), and the `room` for all pairs of one receiver
    is shared by its senders.

    Args:
        rows: [N, D], sorted by owner.
        ids: int32 [N], sent along.
        owner: int32 [N], places along the mesh axis of "expert"; beyond the last device for rows that stay.
        none: what `ids` are where nothing was received.
        room: rows for each pair of devices.
        exchange: one of `EXCHANGES`.

    Returns:
        rows [P · room, D] received (0 where none was) and their ids; a function that takes [P · room, F] back to [N, F], 0 for
        rows that stayed and NaN for those that found no room; and bool [N], those that found none.
    """
    (axis,) = mesh_axes("expert")
    shards, count = jax.lax.axis_size(axis), owner.shape[0]
    sizes = jnp.sum(owner[:, None] == jnp.arange(shards), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    mine = jnp.minimum(owner, shards - 1)
    place = jnp.arange(count) - starts[mine]
    travels = owner < shards

    # Entries not kept are `fill`; no index twice, so that the gradient's scatter adds nothing.
    def take(x, index, keep, fill):
        index = jnp.where(keep, index, x.shape[0] + jnp.arange(keep.size).reshape(keep.shape))
        return x.at[index].get(mode="fill", fill_value=fill, unique_indices=True)

    if exchange == "padded":
        slot = jnp.arange(room)
        index, keep = starts[:, None] + slot, slot < sizes[:, None]

        def send(x, fill):
            sent = take(x, index, keep, fill)
            got = jax.lax.all_to_all(sent, axis, 0, 0, tiled=True)
            return got.reshape(shards * room, *x.shape[1:])

        lost = travels & (place >= room)

        def back(y):
            y = y.reshape(shards, room, *y.shape[1:])
            y = jax.lax.all_to_all(y, axis, 0, 0, tiled=True).reshape(-1, *y.shape[2:])
            return _marked(take(y, mine * room + place, travels & ~lost, 0), lost)

    else:
        me, total = jax.lax.axis_index(axis), shards * room
        wanted = jax.lax.all_gather(sizes, axis)  # [from, to]
        offsets = jnp.minimum(jnp.cumsum(wanted, axis=0) - wanted, total)
        table = jnp.minimum(wanted, total - offsets)
        origins = jax.lax.all_gather(starts, axis)

        def send(x, fill):
            empty = jnp.full((total, *x.shape[1:]), fill, x.dtype)
            return jax.lax.ragged_all_to_all(
                x, empty, starts, table[me], offsets[me], table[:, me], axis_name=axis
            )

        lost = travels & (place >= table[me][mine])

        def back(y):
            empty = jnp.zeros((count, *y.shape[1:]), y.dtype)
            y = jax.lax.ragged_all_to_all(
                y, empty, offsets[:, me], table[:, me], origins[:, me], table[me], axis_name=axis
            )
            return _marked(y, lost)

    return send(rows, 0), send(ids, none), back, lost


def _marked(y: jax.Array, lost: jax.Array) -> jax.Array:
    marks: Any = lost.reshape(-1, *(1,) * (y.ndim - 1))
    return jnp.where(marks, jnp.nan, y)
