"""Where the tensors of a checkpoint store the parameters of a model. Tables of names are made into a `Layout`, which import
reads and export writes by."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from lsm_jax.convert.checkpoint import FLOATS, Tensors
from lsm_jax.convert.load import Place, StoredRows, keys_of, layers_of
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.step import params_of


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a checkpoint stores a parameter, if it is more than a tensor's name.

    Attributes:
        name: name of the tensor; a tuple has one tensor for each index on the parameter's first axis.
        groups: number of equal parts, such as heads, of the tensor. Each has some rows of each of the parameters that the
            tensor contains.
        shape: shape of the tensor, or of the rows that this parameter has in it; None is that of `stored_shape`.
        place: returns (the tensor's shape, the parameter's place) from the name and the parameter's shape; replaces the other
            attributes.
    """

    name: str | tuple[str, ...]
    groups: int = 1
    shape: tuple[int, ...] | None = None
    place: Callable[[str, tuple[int, ...]], tuple[tuple[int, ...], Place]] | None = None

    def prefixed(self, prefix: str) -> Entry:
        """Return the entry whose names begin with a prefix."""
        if isinstance(self.name, str):
            return dataclasses.replace(self, name=prefix + self.name)
        return dataclasses.replace(self, name=tuple(prefix + name for name in self.name))


Names = Mapping[str, str | Entry | None]
"""A table: by the keys of a parameter, joined by dots, the name of its tensor; None is a parameter that is not stored.
Parameters with the same name are consecutive rows of one tensor, in the order of the table."""


def prefixed(prefix: str, table: Names) -> Names:
    """Return a table whose names begin with a prefix."""
    return {
        key: prefix + entry if isinstance(entry, str) else entry and entry.prefixed(prefix)
        for key, entry in table.items()
    }


_MATRICES = (
    "kernel",
    "embedding",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # the last three of experts


class Layout(NamedTuple):
    """The layout of a checkpoint: in which tensors, and in which of their rows, the parameters of a model are.

    Attributes:
        places: where the values of each parameter are, by (keys, layer); the layer is -1 outside of layers.
        shapes: the shape of each tensor that contains parameters, by name.
        params: the shapes of the parameters, a tree.
        num_blocks: number of layers in a period of the model's pattern.
    """

    places: dict[tuple[tuple[str, ...], int], Place]
    shapes: dict[str, tuple[int, ...]]
    params: Any
    num_blocks: int

    def place(self, keys: list[str], layer: int) -> Place:
        """Return where the values of a parameter are stored, given its keys and layer as from `layers_of`."""
        return self.places[tuple(keys), layer]

    def stored_dtypes(self, source: Tensors) -> Any:
        """Return the dtype of each parameter, a tree: bfloat16 for matrices that are stored in it, else float32.

        Vectors such as norms, biases and decay rates are float32 in any case, in which bfloat16 and float16 are exact, since
        mixers compute with them in their own dtype.
        """

        def dtype(path: Any, leaf: Any) -> Any:
            layers = layers_of(path, leaf.shape, self.num_blocks)
            kinds = {source.dtypes[r.name] for k, i in layers for _, r in self.place(k, i)}
            matrix = layers[0][0][-1] in _MATRICES
            return np.dtype(ml_dtypes.bfloat16 if matrix and kinds == {"BF16"} else np.float32)

        return jax.tree_util.tree_map_with_path(dtype, self.params)

    def dtypes(self, params: Any) -> dict[str, np.dtype]:
        """Return the dtype of each tensor by name, that of the parameters in it; `params` is a tree as `self.params`."""
        dtypes: dict[str, np.dtype] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            for keys, layer in layers_of(path, leaf.shape, self.num_blocks):
                for _, rows in self.place(keys, layer):
                    others = [dtypes[rows.name]] if rows.name in dtypes else []
                    dtypes[rows.name] = np.dtype(np.result_type(leaf.dtype, *others))
        return {name: dtypes[name] for name in self.shapes}

    def writer(self, params: Any) -> Callable[[str, Any], np.ndarray]:
        """Return a function of (a tensor's name, a dtype) that returns the tensor, filled with the values of parameters.

        Args:
            params: the parameters, a tree as `self.params`.
        """
        leaves: dict[Any, tuple[Any, int | None]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            for row, (keys, layer) in enumerate(layers_of(path, leaf.shape, self.num_blocks)):
                leaves[tuple(keys), layer] = (leaf, None if layer < 0 else row)
        pieces: dict[str, list[Any]] = {}
        for where, place in self.places.items():
            for index, rows in place:
                pieces.setdefault(rows.name, []).append((where, index, rows))

        def write(name: str, dtype: Any) -> np.ndarray:
            tensor = np.empty(self.shapes[name], dtype)
            for where, index, rows in pieces[name]:
                leaf, row = leaves[where]
                values = np.asarray(jax.device_get(leaf if row is None else leaf[row]))[index]
                target = rows.select(tensor)
                values = np.matrix_transpose(values) if rows.transposed else values
                target[...] = values.reshape(target.shape)
            return tensor

        return write


def check_dtypes(source: Tensors, layout: Layout) -> None:
    """Raise ValueError unless the tensors that contain parameters are of floating-point numbers."""
    for name in layout.shapes:
        if source.dtypes[name] not in FLOATS:
            raise ValueError(
                f"{source.folder}: {name} has dtype {source.dtypes[name]}; accepted are {', '.join(FLOATS)}"
            )


def stored_shape(key: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the shape that a parameter has in a checkpoint of PyTorch, and whether its axes are transposed there.

    Kernels are [out, in] there, weights of convolutions [channels, 1, width], and the scales and biases of all heads one vector.
    """
    last = key.rpartition(".")[2]
    if last in _MATRICES and last != "embedding":
        return shape[::-1], True
    if key.endswith("conv.weight"):
        return (shape[1], 1, shape[0]), True
    return ((math.prod(shape),) if key.endswith((".scale", ".bias")) else shape), False


def layout_of(
    config: ModelConfig, names: Callable[[int], Names], params: Any = None, what: str = "published"
) -> Layout:
    """Return the layout of a checkpoint of a model.

    Args:
        config: the model.
        names: returns the table of a layer, by the layer's number; -1 is the table of parameters outside the layers. Entries of
            parameters that the model does not have are ignored.
        params: the shapes of the model's parameters, a tree; None is all of them.
        what: the format's name, for error messages.

    Raises:
        ValueError: the tables have no entry for some parameters, which the message lists.
    """
    size = len(config.period())
    params = params_of(abstract(config)) if params is None else params
    given: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for keys, layer in layers_of(path, leaf.shape, size):
            given[tuple(keys), layer] = leaf.shape if layer < 0 else leaf.shape[1:]
    places: dict[tuple[tuple[str, ...], int], Place] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(-1, config.num_layers):
        for key, entry in names(layer).items():
            where = tuple(key.split(".")), layer
            if where in given:
                places[where] = _place(key, given[where], entry, shapes)
    if unnamed := [
        f"{'.'.join(k)} {shape}" for (k, i), shape in given.items() if (k, i) not in places
    ]:
        raise ValueError(
            f"the {what} format has no tensor for these parameters:\n  "
            + "\n  ".join(dict.fromkeys(unnamed))
        )
    return Layout(places, shapes, params, size)


def experts(name: str, part: int = 0, parts: int = 1) -> Entry:
    """Return the entry of a parameter of all experts, [E, in, out], that is stored in one tensor [E, parts * out, in].

    Args:
        name: name of the tensor.
        part: the place of this parameter among those in the tensor.
        parts: number of parameters of this shape in the tensor.
    """

    def place(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Place]:
        count, size, out = shape
        columns = None if parts == 1 else (part * out, (part + 1) * out)
        rows = StoredRows(name, True, 0, count, columns=columns)
        return (count, parts * out, size), (((), rows),)

    return Entry(name, place=place)


def _place(
    key: str, shape: tuple[int, ...], entry: str | Entry | None, shapes: dict[str, tuple[int, ...]]
) -> Place:
    """Return the place of a parameter of this shape, and add its rows to the shapes of tensors."""
    if entry is None:
        return ()
    entry = Entry(entry) if isinstance(entry, str) else entry
    if entry.place is not None:
        assert isinstance(entry.name, str)
        shapes[entry.name], place = entry.place(entry.name, shape)
        return place

    def rows_of(name: str, shape: tuple[int, ...]) -> StoredRows:
        (rows, *rest), transposed = stored_shape(key, shape)
        if entry.shape is not None:
            (rows, *rest), transposed = entry.shape, False
        assert rows % entry.groups == 0, key
        count = rows // entry.groups
        start = shapes[name][0] // entry.groups if name in shapes else 0
        assert name not in shapes or shapes[name][1:] == tuple(rest), name
        shapes[name] = ((start + count) * entry.groups, *rest)
        return StoredRows(name, transposed, start, start + count, entry.groups)

    if isinstance(entry.name, str):
        return (((), rows_of(entry.name, shape)),)
    assert len(entry.name) == shape[0], key
    return tuple(((i,), rows_of(name, shape[1:])) for i, name in enumerate(entry.name))


__all__ = [
    "Entry",
    "Layout",
    "Names",
    "check_dtypes",
    "experts",
    "keys_of",
    "layout_of",
    "prefixed",
    "stored_shape",
]
