"""Send rows (the activations of tokens) to the device that has their expert, and the results back. For use
inside `jax.shard_map`."""

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
"""Compiler options that send a ragged all-to-all by NCCL. Without them XLA uses a kernel of its own inside
one host, which has a fortieth of the speed (two H200, jax 0.11.2)."""


def exchange_options(mesh: Mesh, exchanges: Collection[str]) -> dict[str, Any]:
    """Return XLA's compiler options for a program that sends tokens to experts on the mesh's devices by the
    `exchanges` that are named.

    Raises:
        ValueError: `exchanges` has "ragged" and the mesh shards experts over CPUs.
    """
    platform = mesh.devices.flat[0].platform
    if "ragged" in exchanges and platform == "cpu" and mesh.shape["expert"] > 1:
        raise ValueError(
            "exchange='ragged': XLA has no ragged exchange between CPUs; accepted on CPUs is 'padded'"
        )
    return dict(_SENT_BY_NCCL) if "ragged" in exchanges and platform == "gpu" else {}


def shards_of(logical_axis: str) -> int:
    """Return the number of devices over which the current mesh shards a logical axis, such as "expert";
    mesh axes of another type than `Auto` do not count."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = (name for name in mesh_axes(logical_axis) if kinds.get(name) == AxisType.Auto)
    return math.prod(mesh.shape[name] for name in names)


def place_on(logical_axis: str) -> jax.Array:
    """Return the index of this device, from 0, among the devices over which a logical axis such as "expert"
    is sharded."""
    return jax.lax.axis_index(mesh_axes(logical_axis))


def sum_over(logical_axis: str, x: jax.Array) -> jax.Array:
    """Return the sum of an array `x` over the devices among which a logical axis, such as "expert", is
    sharded; the sum is the same on all of them."""
    return sum_along(mesh_axes(logical_axis), x)


def room_for(count: int, buffer: float, shards: int, most: int) -> int:
    """Return how many rows the buffer for one pair of devices has when tokens are sent to experts:
    `min(ceil(buffer count / shards), most)`.

    Args:
        count: number of rows that a device sends.
        buffer: the capacity as a multiple of `count / shards`, which suffices if rows are sent evenly.
        shards: number of devices.
        most: the largest number of rows that a device can send to one other.
    """
    return min(math.ceil(buffer * count / shards), most)


def to_owners(
    rows: jax.Array, ids: jax.Array, owner: jax.Array, none: int, *, room: int, exchange: str
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array], jax.Array]:
    """Send each row (the activation of a token for one expert) to the device that has its expert, in
    buffers of static size; rows that do not fit are reported.

    "padded" is one all-to-all that sends `room` rows from each of P devices to each other. "ragged" sends
    only the rows that exist, by `jax.lax.ragged_all_to_all` (on GPUs, with `exchange_options`, and on TPUs);
    there the P · room rows of a receiver's buffer are filled by its senders in order, so that one sender may
    use more than `room` of them.

    Args:
        rows: the rows to send, [N, D], sorted by owner.
        ids: a number of each row that is sent with it, such as its expert, int32 [N].
        owner: int32 [N], the index of the row's device along the mesh axis of "expert"; P or more if the row
            is not sent.
        none: the id of rows of the buffer into which nothing was received.
        room: capacity in rows for each pair of devices.
        exchange: one of `EXCHANGES`.

    Returns:
        Four values: the received rows [P · room, D], 0 where nothing was received; their ids [P · room]; a
        function that sends results [P · room, F] back to the rows' devices as [N, F], which is 0 for rows
        that were not sent and NaN for rows that did not fit; and bool [N], whether a row did not fit.
    """
    (axis,) = mesh_axes("expert")
    shards = jax.lax.axis_size(axis)
    sizes = jnp.sum(owner[:, None] == jnp.arange(shards), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    make = _padded_exchange if exchange == "padded" else _ragged_exchange
    send, send_back, overflows = make(axis, owner, sizes, starts, room)
    return send(rows, 0), send(ids, none), send_back, overflows


# Both kinds of exchange, for rows [N, ...] that are sorted by `owner` [N], with `sizes` [P] rows for each device from
# `starts` [P] on, return three values:
#   send: (rows [N, ...], fill) -> the received rows [P · room, ...], `fill` where nothing was received;
#   send_back: results [P · room, ...] -> [N, ...];
#   overflows: bool [N].


def _padded_exchange(axis, owner, sizes, starts, room):
    shards, count = jax.lax.axis_size(axis), owner.shape[0]
    target = jnp.minimum(owner, shards - 1)
    place = jnp.arange(count) - starts[target]  # among the rows for the same device
    is_sent = owner < shards
    overflows = is_sent & (place >= room)
    slot = jnp.arange(room)
    index, is_filled = starts[:, None] + slot, slot < sizes[:, None]

    def send(x, fill):
        sent = _gather_rows(x, index, is_filled, fill)
        received = jax.lax.all_to_all(sent, axis, 0, 0, tiled=True)
        return received.reshape(shards * room, *x.shape[1:])

    def send_back(y):
        y = y.reshape(shards, room, *y.shape[1:])
        y = jax.lax.all_to_all(y, axis, 0, 0, tiled=True).reshape(-1, *y.shape[2:])
        y = _gather_rows(y, target * room + place, is_sent & ~overflows, 0)
        return _with_nan(y, overflows)

    return send, send_back, overflows


def _ragged_exchange(axis, owner, sizes, starts, room):
    shards, count = jax.lax.axis_size(axis), owner.shape[0]
    me, capacity = jax.lax.axis_index(axis), shards * room
    wanted = jax.lax.all_gather(sizes, axis)  # [sender, receiver]
    # Where a sender's rows begin in the receiver's buffer, and how many of them fit.
    offsets = jnp.minimum(jnp.cumsum(wanted, axis=0) - wanted, capacity)
    accepted = jnp.minimum(wanted, capacity - offsets)
    all_starts = jax.lax.all_gather(starts, axis)
    target = jnp.minimum(owner, shards - 1)
    place = jnp.arange(count) - starts[target]  # among the rows for the same device
    overflows = (owner < shards) & (place >= accepted[me][target])

    def send(x, fill):
        buffer = jnp.full((capacity, *x.shape[1:]), fill, x.dtype)
        return jax.lax.ragged_all_to_all(
            x, buffer, starts, accepted[me], offsets[me], accepted[:, me], axis_name=axis
        )

    def send_back(y):
        buffer = jnp.zeros((count, *y.shape[1:]), y.dtype)
        y = jax.lax.ragged_all_to_all(
            y,
            buffer,
            offsets[:, me],
            accepted[:, me],
            all_starts[:, me],
            accepted[me],
            axis_name=axis,
        )
        return _with_nan(y, overflows)

    return send, send_back, overflows


def _gather_rows(x: jax.Array, index: jax.Array, valid: jax.Array, fill: Any) -> jax.Array:
    """Return the rows `x[index]` of an array, with `fill` where `valid` is False.

    Each invalid entry has a distinct index beyond `x`: indices are then unique, and the gradient's
    scatter needs no addition.
    """
    index = jnp.where(valid, index, x.shape[0] + jnp.arange(valid.size).reshape(valid.shape))
    return x.at[index].get(mode="fill", fill_value=fill, unique_indices=True)


def _with_nan(y: jax.Array, rows: jax.Array) -> jax.Array:
    """Return `y` [N, ...] with NaN in those of its N rows that `rows`, bool [N], marks as not sent for lack
    of room."""
    mask: Any = rows.reshape(-1, *(1,) * (y.ndim - 1))
    return jnp.where(mask, jnp.nan, y)
