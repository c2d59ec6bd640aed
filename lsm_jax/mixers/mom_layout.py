"""The arrangement of the tokens of G memories for one call of the inner mixer: one row for each memory
(`Rows`), or packed (`Packed`).

A layout arranges arrays by token, [B, T, ...], and arrays by token and memory, [B, T, G, ...], into the rows
of the call. After the call it sums the outputs of each token over its memories, to [B, T, ...].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from lsm_jax.mixers.layers import project
from lsm_jax.ops.experts.grouped_product import segment_product, supports_segments
from lsm_jax.parallel import alone, over_batch, over_mesh, shards_of

_MAX_NUMBERS = 2**29  # of all segments' matrices on a device: 1 GiB in bfloat16


class Rows(NamedTuple):
    """The layout of tokens with one row of all T tokens for each memory; arrays of tokens become
    [B * J, T, ...].

    Attributes:
        num_groups: G, the number of memories.
        group: int [B, J], the J memories of each batch row that have a row in the layout; None means all G,
            in order.
    """

    num_groups: int
    group: Int[Array, "B J"] | None = None

    @property
    def rows(self) -> int:
        """J, the number of memories in the layout for each batch row: G if `group` is None."""
        return self.num_groups if self.group is None else self.group.shape[1]

    def tokens(self, x: Array) -> Array:
        """Repeat the tokens x [B, T, ...] of each batch row for each of the J memories in the layout:
        [B * J, T, ...].
        """
        x = jnp.broadcast_to(x[:, None], (x.shape[0], self.rows, *x.shape[1:]))
        return x.reshape(-1, *x.shape[2:])

    def from_memories(self, x: Array) -> Array:
        """Arrange x [B, T, G, ...], which has a value for each token and memory, as one row of tokens for
        each of the J memories in the layout: [B * J, T, ...].
        """
        x = self.select(jnp.moveaxis(x, 2, 1))
        return x.reshape(-1, *x.shape[2:])

    def total(self, x: Array, dtype) -> Array:
        """Return the sum, over the memories of each token, of an array that has one row of tokens for each
        memory, [B * J, T, ...]: [B, T, ...] in `dtype`.
        """
        return jnp.sum(x.reshape(-1, self.rows, *x.shape[1:]), axis=1).astype(dtype)

    def select(self, x: Array) -> Array:
        """Return, of an array x [B, G, ...] with an entry for each memory, the entries of the J memories in
        the layout: [B, J, ...].
        """
        if self.group is None:
            return x
        return jax.vmap(lambda row, index: row[index])(x, self.group)

    def replace(self, x: Array, new: Array) -> Array:
        """Return x [B, G, ...], an array with an entry for each memory, in which `new` [B, J, ...] replaces
        the entries of the J memories in the layout.
        """
        if self.group is None:
            return new
        return jax.vmap(lambda row, index, values: row.at[index].set(values))(x, self.group, new)

    def project(self, x: Array, kernel: Array, bias: Array | None, dtype) -> Array:
        """Return the product of tokens x [B * J, ..., D], arranged with one row for each memory, with their
        memory's kernel in [G, D, F], plus their memory's bias in [G, F]: [B * J, ..., F].
        """
        if self.group is not None:
            return _select_project(
                x, kernel, bias, dtype, self.group.reshape(-1, *(1,) * (x.ndim - 1))
            )
        rows = jnp.moveaxis(x.reshape(-1, self.rows, *x.shape[1:]), 1, 0)
        y = jax.vmap(lambda x, kernel, bias: project(x, kernel, bias, dtype))(rows, kernel, bias)
        return jnp.moveaxis(y, 0, 1).reshape(*x.shape[:-1], -1)


class Packed(NamedTuple):
    """The packed layout: the tokens of each memory, one memory after another, in time order; each memory
    begins at the start of a chunk.

    Arrays of tokens become [B, L, ...], with L = N C for N chunks of C tokens. L is static because the number
    of (token, memory) pairs is: no token is dropped.

    Attributes:
        place: int [B, T, G], the index from 0 to L - 1 of each token's copy for each memory; L if the token
            is not routed to the memory.
        source: int [B, L], `t G + g` for the index with token t of memory g; T G for empty indices.
        chunk_group: int [B, N], the memory that each chunk belongs to.
    """

    place: Int[Array, "B T G"]
    source: Int[Array, "B L"]
    chunk_group: Int[Array, "B N"]

    def tokens(self, x: Array) -> Array:
        """Arrange tokens x [B, T, ...] in the packed layout, a copy for each memory that a token is routed to: [B, L,
        ...] with zeros at empty places.
        """
        return _take_tokens(x, self.place, self.source)

    def from_memories(self, x: Array) -> Array:
        """Arrange x [B, T, G, ...], which has a value for each token and memory, in the packed layout of the tokens of
        each memory: [B, L, ...] with zeros at empty places.
        """
        return _take_memories(x, self.place, self.source)

    def total(self, x: Array, dtype) -> Array:
        """Return the sum, over the memories that each token is routed to, of an array in the packed layout,
        [B, L, ...]: [B, T, ...] in `dtype`.
        """
        return _total(dtype, x, self.place, self.source)

    def project(self, x: Array, kernel: Array, bias: Array | None, dtype) -> Array:
        """Return the product of tokens x [B, L, D], packed memory after memory, with their memory's kernel in
        [G, D, F], plus their memory's bias in [G, F]: [B, L, F].
        """
        group = jnp.repeat(self.chunk_group, self._chunk_size(), axis=1)[..., None]
        return _select_project(x, kernel, bias, dtype, group)

    def project_tokens(self, rows: Array, kernel: Array) -> Array | None:
        """Multiply the tokens of each memory, which lie one after another in `rows` [B, L, D], by that memory's kernel
        in [G, D, F], with `segment_product`. Return None if no fused kernel supports the call.
        """
        segments = -(-len(rows) // shards_of("batch")) * len(kernel)
        # The gradient of `kernel` is computed for each segment first, and requires memory for all of them. XLA's partitioner can
        # divide the dense form over heads, but not a fused kernel.
        small = segments * kernel[0].size <= _MAX_NUMBERS and rows.shape[1] >= 128
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
    """Return the packed layout of tokens, routed [B, T, G] to memories, in `num_chunks` chunks of `size`
    tokens; `num_chunks` is at least the result of `chunks_needed`.
    """
    batch, length, groups = routed.shape
    total = num_chunks * size
    rank = jnp.cumsum(routed, axis=1, dtype=jnp.int32)
    chunks = -(-rank[:, -1] // size)  # of each memory, [B, G]
    end = jnp.cumsum(chunks, axis=1)
    place = (end - chunks)[:, None] * size + rank - 1
    place = jnp.where(routed, place, total)
    index = jnp.arange(length * groups, dtype=jnp.int32)
    source = jax.vmap(
        lambda where: jnp.full(total, length * groups, jnp.int32).at[where].set(index, mode="drop")
    )(place.reshape(batch, -1))
    chunk = jnp.arange(num_chunks)
    group = jnp.sum(end[:, None] <= chunk[:, None], axis=-1, dtype=jnp.int32)
    # Behind a barrier: XLA would otherwise fuse the sums and divisions into each use, and repeat them for every channel of a token.
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
        """Arrange tokens x [B, T, ...] in the packed layouts of the S devices that have parts of the row:
        [B, S L, ...], with a copy of a token for each memory that it is routed to, and zeros at empty places.
        """
        return self._map(_take_tokens_of_devices, x)

    def from_memories(self, x: Array) -> Array:
        """Arrange x [B, T, G, ...], which has a value for each token and memory, in the packed layouts of the
        S devices that have parts of the row: [B, S L, ...], with zeros at empty places.
        """
        return self._map(_take_memories_of_devices, x)

    def total(self, x: Array, dtype) -> Array:
        """Return the sum, over the memories that each token is routed to, of an array in the packed layouts
        of S devices, [B, S L, ...]: [B, T, ...] in `dtype`.
        """
        return self._map(_total_of_devices, x, jnp.dtype(dtype))

    def project(self, x: Array, kernel: Array, bias: Array | None, dtype) -> Array:
        """Return the product of tokens x [B, S L, D], packed by each of S devices memory after memory, with
        their memory's kernel in [G, D, F], plus their memory's bias in [G, F]: [B, S L, F].
        """
        size = self.source.shape[2] // self.chunk_group.shape[2]
        group = jnp.repeat(self.chunk_group, size, axis=2).reshape(len(x), -1, 1)
        return _select_project(x, kernel, bias, dtype, group)

    def _map(self, function, x: Array, *static) -> Array:
        """Return the results of `function`, called on each device with the device's part of x [B, P, ...] and
        with its packed layout; the results are joined along the axis P.
        """
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
    """Return the packed layout of tokens, routed [B, T, G] to memories, in rows that are divided equally over
    `devices` devices: each device packs its own tokens into `num_chunks` chunks of `size` tokens.
    """
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
    """Merge the axes of batch rows and of the S devices that have parts of them: reshape x [B, S, ...] to [B
    * S, ...].
    """
    return x.reshape(-1, *x.shape[2:])


def _pack_on_device(size: int, num_chunks: int, routed: Array) -> tuple[Array, ...]:
    packed = pack(_join_rows(routed), size, num_chunks)
    return tuple(x.reshape(*routed.shape[:2], *x.shape[1:]) for x in packed)


def _take_tokens_of_devices(x: Array, place: Array, source: Array) -> Array:
    y = _take_tokens(*map(_join_rows, (x, place, source)))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _take_memories_of_devices(x: Array, place: Array, source: Array) -> Array:
    y = _take_memories(*map(_join_rows, (x, place, source)))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _total_of_devices(dtype, x: Array, place: Array, source: Array) -> Array:
    y = _total(dtype, *map(_join_rows, (x, place, source)))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def chunks_needed(length: int, num_memories: int, top_k: int, always_on: bool, size: int) -> int:
    """Return a number of chunks of `size` tokens that suffices to pack `length` tokens by memory, however
    they are routed: each token goes to `top_k` of `num_memories` memories, and to a shared one if
    `always_on`.
    """
    routed = (length * top_k + num_memories * (size - 1)) // size
    return routed + (-(-length // size) if always_on else 0)


def stack_memory_parts(mixers: list[Any], active: float) -> Any:
    """Return one mixer for all G memories of a Mixture-of-Memories: the first of `mixers`, in whose
    `memory_parts` the parameters of all G mixers are stacked as [G, ...].

    Args:
        mixers: equal but for their parameters.
        active: the fraction of the stacked parameters that one token uses.
    """
    graphdef, _ = nnx.split(mixers[0])
    states = [dict(nnx.to_flat_state(nnx.state(mixer))) for mixer in mixers]
    stacked = {
        path: nnx.Param(
            jnp.stack([state[path].get_value() for state in states]),
            logical_axes=(None, *param.logical_axes),
            weight_decay=param.weight_decay,
            active=active,
        )
        for path, param in states[0].items()
        if path[0] in mixers[0].memory_parts
    }
    return nnx.merge(graphdef, nnx.from_flat_state(states[0] | stacked))


def arranged_product(
    layout: Rows | Packed | PackedByDevice, by_memory: bool, tokens: Array | None
) -> Callable:
    """Return a function that multiplies tokens, arranged by memory as in `layout`, by a matrix, with the signature of
    `project`; it replaces the product of the inner mixer's `Dense` layers.

    Args:
        layout: the arrangement of the tokens.
        by_memory: whether kernel and bias are [G, ...], one for each memory.
        tokens: [B, T, D], the tokens before they were arranged, for layers whose input they are: the product
            is then computed once for each token (and memory), and arranged afterwards. None for layers with
            other inputs.
    """

    def product(y: Array, kernel: Array, bias: Array | None, dtype: Any) -> Array:
        if tokens is None:
            return (layout.project if by_memory else project)(y, kernel, bias, dtype)
        if not by_memory:
            return layout.tokens(project(tokens, kernel, bias, dtype))
        if isinstance(layout, Packed) and bias is None and dtype in (None, y.dtype):
            projected = layout.project_tokens(y, kernel)
            if projected is not None:
                return projected
        groups, size, width = kernel.shape
        flat = jnp.moveaxis(kernel, 0, 1).reshape(size, groups * width)
        flat_bias = None if bias is None else bias.reshape(-1)
        projected = project(tokens, flat, flat_bias, dtype)
        return layout.from_memories(projected.reshape(*tokens.shape[:2], groups, width))

    return product


def _select_project(x, kernel, bias, dtype, group):
    """Multiply each token of x [..., D] by the kernel of its memory, whose index is `group` [..., 1]:
    multiply all tokens by each memory's kernel, and select. This is used for one token, and for narrow
    layers.
    """

    def by(g: int) -> Array:
        return project(x, kernel[g], None if bias is None else bias[g], dtype)

    y = by(0)
    for g in range(1, kernel.shape[0]):
        y = jnp.where(group == g, by(g), y)
    return y


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _project_rows(rows: Array, ends: Array, kernel: Array) -> Array:
    """Multiply packed tokens [B, L, D] by the kernels [G, D, F] of their memories, and return [B, L, F]; the
    tokens of each memory end before the block of 64 tokens whose index is in `ends` [B, G].
    """
    first = jnp.arange(len(rows), dtype=jnp.int32)[:, None] * (rows.shape[1] // 64)
    y = segment_product(_flat(rows), kernel, (first + ends).reshape(-1))
    return y.reshape(*rows.shape[:2], -1)


def _rows(x: Array, index: Array) -> Array:
    """Return the entries of x [B, P, ...] along P at the indices `index` [B, ...]; 0 where an index is P."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, index)


# The transposes of these gathers are gathers by the inverse map, `place` for `source`; differentiation by JAX would scatter.
@jax.custom_vjp
def _take_tokens(x, place, source):
    # Behind a barrier: otherwise XLA would repeat the gather for every tap of a convolution that follows. Likewise below.
    return jax.lax.optimization_barrier(_rows(x, source // place.shape[2]))


@jax.custom_vjp
def _sum_tokens(x, place, source):
    return jnp.sum(_rows(x, place), axis=2)


@jax.custom_vjp
def _take_memories(x, place, source):
    return jax.lax.optimization_barrier(_rows(x.reshape(x.shape[0], -1, *x.shape[3:]), source))


def _keep_maps(function):
    return lambda x, place, source: (function(x, place, source), (place, source))


_take_tokens.defvjp(_keep_maps(_take_tokens), lambda maps, g: (_sum_tokens(g, *maps), None, None))
_sum_tokens.defvjp(_keep_maps(_sum_tokens), lambda maps, g: (_take_tokens(g, *maps), None, None))
_take_memories.defvjp(_keep_maps(_take_memories), lambda maps, g: (_rows(g, maps[0]), None, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(dtype, x, place, source):
    return _sum_tokens(x, place, source).astype(dtype)


def _total_backward(dtype, saved, g):
    # The gradient is gathered in its own dtype, behind a barrier: otherwise XLA would compute it again for every memory.
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
