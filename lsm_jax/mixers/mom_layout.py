"""How the tokens of several memories are laid out for one call of the inner mixer: a row a memory, or packed.

A layout arranges what tokens bring ([B, T, ...]) and what they bring to each memory ([B, T, G, ...]) as the rows one call
sees, and sums what each token read from its memories ([B, T, ...]).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from lsm_jax.mixers.layers import project
from lsm_jax.ops.experts.grouped_product import segment_product, supports_segments
from lsm_jax.parallel import alone, over_batch, over_mesh, shards_of

_MOST = 2**29  # numbers of all segments' matrices on a device, 1 GiB in bfloat16


class Rows(NamedTuple):
    """Every token in a row of each memory, or of each memory in `group`; arranged arrays are [B * J, T, ...].

    Attributes:
        num_groups: G.
        group: int [B, J], the memories that have a row; None for all G, in order.
    """

    num_groups: int
    group: Int[Array, "B J"] | None = None

    @property
    def rows(self) -> int:
        """J, the rows of one sequence."""
        return self.num_groups if self.group is None else self.group.shape[1]

    def tokens(self, x: Array) -> Array:
        """[B, T, ...], the same for each memory -> arranged."""
        x = jnp.broadcast_to(x[:, None], (x.shape[0], self.rows, *x.shape[1:]))
        return x.reshape(-1, *x.shape[2:])

    def from_memories(self, x: Array) -> Array:
        """[B, T, G, ...], a value for each memory -> arranged."""
        x = self.select(jnp.moveaxis(x, 2, 1))
        return x.reshape(-1, *x.shape[2:])

    def total(self, x: Array, dtype) -> Array:
        """Arranged -> [B, T, ...], the sum over a token's memories."""
        return jnp.sum(x.reshape(-1, self.rows, *x.shape[1:]), axis=1).astype(dtype)

    def select(self, x: Array) -> Array:
        """[B, G, ...] -> [B, J, ...], those with a row."""
        if self.group is None:
            return x
        return jax.vmap(lambda row, index: row[index])(x, self.group)

    def replace(self, x: Array, new: Array) -> Array:
        """[B, G, ...] with those that have a row replaced by `new`, [B, J, ...]."""
        if self.group is None:
            return new
        return jax.vmap(lambda row, index, values: row.at[index].set(values))(x, self.group, new)

    def project(self, x: Array, kernel: Array, bias: Array | None, dtype) -> Array:
        """Arranged x [..., D] by each memory's kernel [G, D, F] and bias [G, F]."""
        if self.group is not None:
            return _select_project(
                x, kernel, bias, dtype, self.group.reshape(-1, *(1,) * (x.ndim - 1))
            )
        rows = jnp.moveaxis(x.reshape(-1, self.rows, *x.shape[1:]), 1, 0)
        y = jax.vmap(lambda x, kernel, bias: project(x, kernel, bias, dtype))(rows, kernel, bias)
        return jnp.moveaxis(y, 0, 1).reshape(*x.shape[:-1], -1)


class Packed(NamedTuple):
    """The tokens of each memory one after another, in time order, each memory starting at a chunk's start.

    Arranged arrays are [B, L, ...]. L is static, since the number of routed pairs is: no capacity, nothing dropped.

    Attributes:
        place: int [B, T, G], a token's index in the row for each memory; L where it is not routed there.
        source: int [B, L], t * G + g for token t of memory g at each index; T * G at empty ones.
        chunk_group: int [B, N], the memory each chunk belongs to.
    """

    place: Int[Array, "B T G"]
    source: Int[Array, "B L"]
    chunk_group: Int[Array, "B N"]

    def tokens(self, x: Array) -> Array:
        """[B, T, ...], the same for each memory -> arranged, 0 in empty places."""
        return _take_tokens(x, self.place, self.source)

    def from_memories(self, x: Array) -> Array:
        """[B, T, G, ...], a value for each memory -> arranged, 0 in empty places."""
        return _take_own(x, self.place, self.source)

    def total(self, x: Array, dtype) -> Array:
        """Arranged -> [B, T, ...], the sum over a token's memories."""
        return _total(dtype, x, self.place, self.source)

    def project(self, x: Array, kernel: Array, bias: Array | None, dtype) -> Array:
        """Arranged x [B, L, D] by each memory's kernel [G, D, F] and bias [G, F]."""
        group = jnp.repeat(self.chunk_group, self._chunk_size(), axis=1)[..., None]
        return _select_project(x, kernel, bias, dtype, group)

    def project_tokens(self, rows: Array, kernel: Array) -> Array | None:
        """`project` without a bias, for arranged tokens, by a kernel that multiplies each by its memory's matrix; None where that kernel
        does not support the call."""
        segments = -(-len(rows) // shards_of("batch")) * len(kernel)
        # A gradient of the kernel is made for each segment first; the partitioner cuts the dense form over heads, not a kernel.
        small = segments * kernel[0].size <= _MOST and rows.shape[1] >= 128
        if self._chunk_size() % 64 or not small or shards_of("heads") > 1:
            return None
        if not supports_segments(_flat(rows), kernel.astype(rows.dtype)):
            return None
        ends = jnp.sum(self.chunk_group[..., None] <= jnp.arange(len(kernel)), axis=1)
        blocks = ends.astype(jnp.int32) * (self._chunk_size() // 64)
        kernel = kernel.astype(rows.dtype)
        return over_batch(_project_rows, dict(rows=rows, ends=blocks), dict(kernel=kernel))

    def _chunk_size(self) -> int:
        return self.source.shape[1] // self.chunk_group.shape[1]


def pack(routed: Bool[Array, "B T G"], size: int, num_chunks: int) -> Packed:
    """Lay the routed tokens out in `num_chunks` chunks of `size`, which must be enough."""
    batch, length, groups = routed.shape
    total = num_chunks * size
    rank = jnp.cumsum(routed, axis=1, dtype=jnp.int32)
    taken = -(-rank[:, -1] // size)  # [B, G] chunks
    end = jnp.cumsum(taken, axis=1)
    place = (end - taken)[:, None] * size + rank - 1
    place = jnp.where(routed, place, total)
    index = jnp.arange(length * groups, dtype=jnp.int32)
    source = jax.vmap(
        lambda where: jnp.full(total, length * groups, jnp.int32).at[where].set(index, mode="drop")
    )(place.reshape(batch, -1))
    chunk = jnp.arange(num_chunks)
    group = jnp.sum(end[:, None] <= chunk[:, None], axis=-1, dtype=jnp.int32)
    # Arrays of their own: a kernel that reads them would sum and divide again for every channel of every token.
    return Packed(*jax.lax.optimization_barrier((place, source, jnp.minimum(group, groups - 1))))


class PackedByDevice(NamedTuple):
    """The layout of `Packed` for rows whose tokens are sharded over S devices: each device packs its own tokens.

    A memory's tokens are then S parts of the arranged row [B, S L], in time order: one segment with one state for each memory,
    which the op hands on from device to device.

    Attributes:
        place: int [B, S, T / S, G], as in `Packed`, on each device.
        source: int [B, S, L], likewise.
        chunk_group: int [B, S, N], likewise.
    """

    place: Int[Array, "B S t G"]
    source: Int[Array, "B S L"]
    chunk_group: Int[Array, "B S N"]

    def tokens(self, x: Array) -> Array:
        """[B, T, ...], the same for each memory -> arranged, 0 in empty places."""
        return self._map(_take_tokens_of_devices, x)

    def from_memories(self, x: Array) -> Array:
        """[B, T, G, ...], a value for each memory -> arranged, 0 in empty places."""
        return self._map(_take_own_of_devices, x)

    def total(self, x: Array, dtype) -> Array:
        """Arranged -> [B, T, ...], the sum over a token's memories."""
        return self._map(_total_of_devices, x, jnp.dtype(dtype))

    def project(self, x: Array, kernel: Array, bias: Array | None, dtype) -> Array:
        """Arranged x [B, S L, D] by each memory's kernel [G, D, F] and bias [G, F]."""
        size = self.source.shape[2] // self.chunk_group.shape[2]
        group = jnp.repeat(self.chunk_group, size, axis=2).reshape(len(x), -1, 1)
        return _select_project(x, kernel, bias, dtype, group)

    def _map(self, function, x: Array, *static) -> Array:
        """Call `function` on each device with its part of x [B, P, ...]; the results are joined along P."""
        batch, devices = self.place.shape[:2]
        batched = dict(
            x=x.reshape(batch, devices, -1, *x.shape[2:]), place=self.place, source=self.source
        )
        y = over_mesh(
            function,
            batched,
            {},
            *static,
            axes=dict.fromkeys(batched, ("batch", "sequence")),
            out_axes=("batch", "sequence"),
            in_sequence=alone,
        )
        return y.reshape(batch, -1, *y.shape[3:])


def pack_by_device(
    routed: Bool[Array, "B T G"], size: int, num_chunks: int, devices: int
) -> PackedByDevice:
    """Lay the routed tokens of each of `devices` equal parts of the rows out in `num_chunks` chunks of `size`."""
    batch, length, groups = routed.shape
    axes = ("batch", "sequence")
    places = over_mesh(
        _pack_on_device,
        dict(routed=routed.reshape(batch, devices, length // devices, groups)),
        {},
        size,
        num_chunks,
        axes=dict(routed=axes),
        out_axes=(axes, axes, axes),
        in_sequence=alone,
    )
    return PackedByDevice(*places)


def _join_rows(x: Array) -> Array:
    """[B, S, ...] -> [B * S, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _pack_on_device(size: int, num_chunks: int, routed: Array) -> tuple[Array, ...]:
    packed = pack(_join_rows(routed), size, num_chunks)
    return tuple(x.reshape(*routed.shape[:2], *x.shape[1:]) for x in packed)


def _take_tokens_of_devices(x: Array, place: Array, source: Array) -> Array:
    y = _take_tokens(*map(_join_rows, (x, place, source)))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _take_own_of_devices(x: Array, place: Array, source: Array) -> Array:
    y = _take_own(*map(_join_rows, (x, place, source)))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _total_of_devices(dtype, x: Array, place: Array, source: Array) -> Array:
    y = _total(dtype, *map(_join_rows, (x, place, source)))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def chunks_needed(length: int, num_memories: int, top_k: int, always_on: bool, size: int) -> int:
    """Chunks that always suffice: each token goes to `top_k` of the memories, and to one more where that is always on."""
    routed = (length * top_k + num_memories * (size - 1)) // size
    return routed + (-(-length // size) if always_on else 0)


def _select_project(x, kernel, bias, dtype, group):
    """x [..., D] by the kernel of its group, one product a memory: for the narrow layers behind the first, and for one token."""

    def by(g: int) -> Array:
        return project(x, kernel[g], None if bias is None else bias[g], dtype)

    y = by(0)
    for g in range(1, kernel.shape[0]):
        y = jnp.where(group == g, by(g), y)
    return y


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _project_rows(rows: Array, ends: Array, kernel: Array) -> Array:
    """Rows [B, L, D] whose memories end before the blocks [B, G]."""
    first = jnp.arange(len(rows), dtype=jnp.int32)[:, None] * (rows.shape[1] // 64)
    y = segment_product(_flat(rows), kernel, (first + ends).reshape(-1))
    return y.reshape(*rows.shape[:2], -1)


def _rows(x: Array, index: Array) -> Array:
    """x [B, P, ...] at index [B, ...], 0 where the index is P."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, index)


# Each is the transpose of the next or of itself, by the map the other way: a gather where autodiff would scatter.
@jax.custom_vjp
def _take_tokens(x, place, source):
    # Arranged once, not again for every tap of a convolution behind; so below.
    return jax.lax.optimization_barrier(_rows(x, source // place.shape[2]))


@jax.custom_vjp
def _sum_tokens(x, place, source):
    return jnp.sum(_rows(x, place), axis=2)


@jax.custom_vjp
def _take_own(x, place, source):
    return jax.lax.optimization_barrier(_rows(x.reshape(x.shape[0], -1, *x.shape[3:]), source))


def _keep_maps(function):
    return lambda x, place, source: (function(x, place, source), (place, source))


_take_tokens.defvjp(_keep_maps(_take_tokens), lambda maps, g: (_sum_tokens(g, *maps), None, None))
_sum_tokens.defvjp(_keep_maps(_sum_tokens), lambda maps, g: (_take_tokens(g, *maps), None, None))
_take_own.defvjp(_keep_maps(_take_own), lambda maps, g: (_rows(g, maps[0]), None, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(dtype, x, place, source):
    return _sum_tokens(x, place, source).astype(dtype)


def _total_backward(dtype, saved, g):
    # What comes back is of the sum's dtype: gathered in it, and as an array of its own, not made again for every memory.
    like, place, source = saved
    g = _take_tokens(jax.lax.optimization_barrier(g), place, source)
    return g.astype(like.dtype), None, None


_total.defvjp(
    lambda dtype, x, place, source: (
        _total(dtype, x, place, source),
        (jnp.zeros(0, x.dtype), place, source),
    ),
    _total_backward,
)
