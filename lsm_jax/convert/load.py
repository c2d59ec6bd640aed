"""Load the stored tensors of a pretrained model as a model's parameters, one tensor at a time, each
directly to its devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax.convert.checkpoint import Tensors

_BLOCK = 2**20  # numbers to convert at a time


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """A range of rows of a stored tensor, where a row is an index on the tensor's first axis.

    Attributes:
        name: name of the tensor.
        transposed: whether it is stored as [out, in], or of several experts as [experts, out, in].
        start: the first row.
        stop: the row after the last; None is the end of the tensor.
        groups: number of equal parts, such as heads, into which the rows of the tensor are cut; `start` and `stop` then count the
            rows of a part, and the range is taken from every part.
        columns: (first, after the last) index on the tensor's second axis; None is all of it.
    """

    name: str
    transposed: bool = False
    start: int = 0
    stop: int | None = None
    groups: int = 1
    columns: tuple[int, int] | None = None

    def select(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of a whole tensor: its rows and columns of this range, [groups, rows, ...]."""
        parts = tensor.reshape(self.groups, -1, *tensor.shape[1:])[:, self.start : self.stop]
        return parts if self.columns is None else parts[:, :, slice(*self.columns)]

    def orient(self, values: np.ndarray, rest: tuple[int, ...]) -> np.ndarray:
        """Return a view [rows, *rest] of the values of a parameter, with the axes as they are stored."""
        view = np.matrix_transpose(values) if self.transposed else values.reshape(-1, *rest)
        if view.ndim < 1 + len(rest):  # a depthwise convolution's weight, [channels, 1, width]
            view = view[:, None]
        assert np.shares_memory(view, values)
        return view


Index = tuple[int | slice, ...]
Place = tuple[tuple[Index, StoredRows], ...]
"""Where the values of a parameter, or of one layer of a stacked parameter, are stored: for each piece its index in the
parameter, () for all of it, and its rows. A parameter without a piece is not stored."""


def keys_of(path: Any) -> list[str]:
    """Return the keys on the path of a parameter in a tree of parameters, as strings."""
    return jax.tree_util.keystr(path, simple=True, separator=".").split(".")


def layers_of(path: Any, shape: tuple[int, ...], num_blocks: int) -> list[tuple[list[str], int]]:
    """List the layers whose values a parameter contains: all layers of one place in the period if it is
    stacked over periods, otherwise none.

    Args:
        path: the parameter's path in the tree of parameters.
        shape: the parameter's shape.
        num_blocks: number of layers in a period of the pattern.

    Returns:
        For a parameter stacked over periods: for each period (its first axis) the pair (keys of the path
        inside a layer, number of the layer). For any other parameter one pair, (keys of the path, -1).
    """
    keys = keys_of(path)
    if keys[0] != "periods":
        return [(keys, -1)]
    return [(keys[3:], row * num_blocks + int(keys[2])) for row in range(shape[0])]


def load_tree(
    source: Tensors,
    target: Any,
    place_of: Callable[[list[str], int], Place],
    *,
    num_blocks: int = 1,
    shardings: Any = None,
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Load a tree of a model's parameters from stored tensors.

    In addition to the tree, the host's memory contains one tensor at a time in the dtype of the result, and its copy during the
    transfer to the device.

    Args:
        source: the stored tensors, which must have been checked.
        target: a tree of arrays or shapes; parameters under "periods" are stacked over periods.
        place_of: function of (keys, layer), as from `layers_of`, that returns where the values are stored. Values that are not
            stored are 0.
        num_blocks: number of layers in a period of the pattern.
        shardings: the sharding of each parameter, a tree like `target`; None is the default device.
        dtype: one dtype for all parameters, or a tree like `target`; None is float32.
        progress: called with (numbers loaded so far, all numbers).

    Returns:
        The tree of jax arrays.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(target)
    default = jnp.float32 if dtype is None else dtype
    dtypes = jax.tree.leaves(dtype) if isinstance(dtype, dict) else [default] * len(leaves)
    places = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    total, done, loaded = sum(leaf.size for _, leaf in leaves), 0, []
    for (path, leaf), sharding, kind in zip(leaves, places, map(jnp.dtype, dtypes), strict=True):
        stacked = keys_of(path)[0] == "periods"
        array = _zeros(leaf.shape, kind, sharding) if stacked else None
        for row, (keys, layer) in enumerate(layers_of(path, leaf.shape, num_blocks)):
            shape = leaf.shape[1:] if stacked else leaf.shape
            values = _read(source, place_of(keys, layer), shape, kind)
            if array is None:
                array = _to_device(values, sharding)
            else:
                layer_values = _to_device(values, _without_layer_axis(sharding))
                array = _insert_row(sharding)(array, layer_values, row)
                del layer_values
            # Wait, so that pending copies do not occupy the memory of many tensors.
            array = jax.block_until_ready(array)
            done += values.size
            if progress is not None:
                progress(done, total)
            del values
        loaded.append(array)
    return jax.tree.unflatten(structure, loaded)


def _read(source: Tensors, place: Place, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Read the values of a parameter, or of one layer of a stacked parameter, from the rows of stored
    tensors; return them in the parameter's shape and dtype. Tensors stored as [out, in] are transposed to
    [in, out]."""
    values = np.zeros(shape, dtype)
    for index, rows in place:
        stored_shape, part = source.shapes[rows.name], values[index]
        size = stored_shape[0] // rows.groups
        stop = size if rows.stop is None else rows.stop
        rest = stored_shape[1:]
        if rows.columns is not None:
            rest = (rows.columns[1] - rows.columns[0], *rest[1:])
        view = rows.orient(part, rest)
        step = max(1, _BLOCK // max(1, int(np.prod(stored_shape[1:]))))
        for group in range(rows.groups):
            at = group * (stop - rows.start) - rows.start
            for first in range(rows.start, stop, step):
                last = min(first + step, stop)
                stored = source.rows(rows.name, group * size + first, group * size + last)
                stored = stored if rows.columns is None else stored[:, slice(*rows.columns)]
                view[at + first : at + last] = stored
    return values


def _to_device(values: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is None:
        return jnp.asarray(values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.cache
def _insert_row(sharding: Any) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """Return a compiled function (stack, values, index) that writes one layer's `values` into a parameter
    that is stacked over periods; the old stack is donated."""

    def insert(stack, values, row):
        return jax.lax.dynamic_update_index_in_dim(stack, values, row, 0)

    return jax.jit(insert, donate_argnums=0, out_shardings=sharding)


def _without_layer_axis(sharding: Any) -> Any:
    """Return the sharding of one layer's values of a parameter, given the sharding of the parameter stacked
    over periods: the same without the first axis."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
