"""Stored tensors into a model's parameters, one at a time, each straight to where it lives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax.convert.checkpoint import Tensors

_BLOCK = 2**20  # numbers converted at a time


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where the values of a parameter, or of one layer of it, are stored.

    Attributes:
        name: of the tensor.
        transposed: it is stored as [out, in].
        start: the first of its rows.
        stop: the row after the last; None is the tensor's end.
    """

    name: str
    transposed: bool = False
    start: int = 0
    stop: int | None = None


def keys_of(path: Any) -> list[str]:
    """The keys of a parameter's path in the tree, as strings."""
    return jax.tree_util.keystr(path, simple=True, separator=".").split(".")


def places(path: Any, shape: tuple[int, ...], num_blocks: int) -> list[tuple[list[str], int]]:
    """(keys within the block, layer) of each layer of a parameter stacked over periods; (keys, -1) of another.

    Args:
        path: of the parameter.
        shape: its shape.
        num_blocks: layers of a period.
    """
    keys = keys_of(path)
    if keys[0] != "periods":
        return [(keys, -1)]
    return [(keys[3:], row * num_blocks + int(keys[2])) for row in range(shape[0])]


def load_tree(
    source: Tensors,
    target: Any,
    pieces: Callable[[list[str], int], Piece],
    *,
    num_blocks: int = 1,
    shardings: Any = None,
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Fill a tree of parameters.

    Beside the tree itself the host holds one tensor at a time, in its dtype of the result, and its copy on the way to the device.

    Args:
        source: the stored tensors, already checked.
        target: the tree, of arrays or their shapes; what is under "periods" is stacked over periods.
        pieces: (keys, layer), as in `places`, -> where the values are.
        num_blocks: layers of a period.
        shardings: where each parameter lives, a tree like `target`; None is the default device.
        dtype: of the result, one for all or a tree like `target`; None is float32.
        progress: called with the numbers read so far and all there are.

    Returns:
        The tree, of jax arrays.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(target)
    one = jnp.float32 if dtype is None else dtype
    kinds = jax.tree.leaves(dtype) if isinstance(dtype, dict) else [one] * len(leaves)
    homes = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    total, done, loaded = sum(leaf.size for _, leaf in leaves), 0, []
    for (path, leaf), home, kind in zip(leaves, homes, map(jnp.dtype, kinds), strict=True):
        stacked = keys_of(path)[0] == "periods"
        whole = _zeros(leaf.shape, kind, home) if stacked else None
        for row, (keys, layer) in enumerate(places(path, leaf.shape, num_blocks)):
            shape = leaf.shape[1:] if stacked else leaf.shape
            values = _read(source, pieces(keys, layer), shape, kind)
            if whole is None:
                whole = _put(values, home)
            else:
                whole = _insert(home)(whole, _put(values, _without_layers(home)), row)
            # Else copies under way would hold on to many tensors.
            whole = jax.block_until_ready(whole)
            done += values.size
            if progress is not None:
                progress(done, total)
            del values
        loaded.append(whole)
    return jax.tree.unflatten(structure, loaded)


def _read(source: Tensors, piece: Piece, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The values of one piece in our layout."""
    theirs = source.shapes[piece.name]
    stop = theirs[0] if piece.stop is None else piece.stop
    values = np.empty(shape, dtype)
    view = values.T if piece.transposed else values.reshape(stop - piece.start, *theirs[1:])
    step = max(1, _BLOCK // max(1, int(np.prod(theirs[1:]))))
    for first in range(piece.start, stop, step):
        last = min(first + step, stop)
        view[first - piece.start : last - piece.start] = source.rows(piece.name, first, last)
    return values


def _put(values: np.ndarray, home: Any) -> jax.Array:
    if home is None:
        return jnp.asarray(values)
    return jax.make_array_from_callback(values.shape, home, lambda index: values[index])


def _zeros(shape: tuple[int, ...], dtype: Any, home: Any) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=home)()


@functools.cache
def _insert(home: Any) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    def insert(whole, values, row):
        return jax.lax.dynamic_update_index_in_dim(whole, values, row, 0)

    return jax.jit(insert, donate_argnums=0, out_shardings=home)


def _without_layers(home: Any) -> Any:
    if not isinstance(home, jax.sharding.NamedSharding):
        return home
    return jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec(*home.spec[1:]))
