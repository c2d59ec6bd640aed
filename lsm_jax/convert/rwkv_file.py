"""Read the checkpoints of RWKV-7's authors: one .pth file, without a config.

A .pth file is a zip of a pickle and of the tensors' bytes. The pickle is read with the few classes that tensors need; any other
is an error, and no code of the file is run.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.fields import listed
from lsm_jax.files import MEGABYTE, reason

MODEL_TYPE = "rwkv7-pth"
_PICKLE_BYTES = 32 * MEGABYTE
_STORAGES = {
    "FloatStorage": ("F32", np.dtype(np.float32)),
    "HalfStorage": ("F16", np.dtype(np.float16)),
    "BFloat16Storage": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "DoubleStorage": ("F64", np.dtype(np.float64)),
}


class _Stored(NamedTuple):
    """The place of a tensor in a .pth file: its storage's kind and file, its offset in numbers, and its shape."""

    kind: str
    key: str
    offset: int
    shape: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of a .pth file, in which tensors are `_Stored`, and refuses everything that is not a dict of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"it has a {module}.{name}; accepted are tensors of floats")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError("it has an object that is no tensor's storage")
        kind, key = pid[1:3]
        if kind not in _STORAGES or not re.fullmatch(r"\w+", str(key)):
            raise pickle.UnpicklingError("it has a storage of an unknown kind")
        return kind, str(key)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Stored:
    kind, key = storage
    sizes = tuple(shape)
    if not all(type(x) is int and x >= 0 for x in (offset, *sizes)):
        raise pickle.UnpicklingError("a tensor's shape has entries that are no whole numbers")
    contiguous = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    if [n for n, size in zip(stride, sizes, strict=True) if size > 1] != [
        n for n, size in zip(contiguous, sizes, strict=True) if size > 1
    ]:
        raise pickle.UnpicklingError(f"a tensor has strides {tuple(stride)}; accepted are contiguous ones")  # fmt: skip
    return _Stored(kind, key, offset, sizes)


class RWKVFile(Tensors):
    """The tensors of a .pth file of RWKV-7's authors, by their names. `config` has the model's sizes, which follow from the
    tensors' shapes, as fields of flash-linear-attention's rwkv7.

    Raises:
        ValueError: the file cannot be read, or is no RWKV-7 model.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.folder = Path(path).expanduser()
        try:
            self._zip = zipfile.ZipFile(self.folder)
            (name,) = [n for n in self._zip.namelist() if n.endswith("/data.pkl")]
            if self._zip.getinfo(name).file_size > _PICKLE_BYTES:
                raise ValueError(f"its pickle is larger than {_PICKLE_BYTES} bytes")
            tensors = _Unpickler(io.BytesIO(self._zip.read(name))).load()
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.folder} cannot be read: {reason(error)}") from error
        except Exception as error:  # pickle raises errors of many classes for damaged files
            raise ValueError(f"{self.folder} is no .pth file of tensors: {error}") from error
        if not isinstance(tensors, dict) or not all(
            isinstance(n, str) and isinstance(t, _Stored) for n, t in tensors.items()
        ):
            raise ValueError(f"{self.folder} is no .pth file of tensors by name")
        self._prefix = name.removesuffix("data.pkl")
        self._tensors: dict[str, _Stored] = dict(tensors)
        self.shapes = {n: t.shape for n, t in self._tensors.items()}
        self.dtypes = {n: _STORAGES[t.kind][0] for n, t in self._tensors.items()}
        for name, stored in self._tensors.items():
            self._check_size(name, stored)
        self.config = fields_of(self.shapes, self.folder)

    @property
    def config_path(self) -> Path:
        """The .pth file, from whose tensors the config follows."""
        return self.folder

    def _member(self, stored: _Stored) -> str:
        return f"{self._prefix}data/{stored.key}"

    def _check_size(self, name: str, stored: _Stored) -> None:
        try:
            available = self._zip.getinfo(self._member(stored)).file_size
        except KeyError:
            raise ValueError(
                f"{self.folder}: the numbers of {listed([name])} are missing"
            ) from None
        itemsize = _STORAGES[stored.kind][1].itemsize
        if (stored.offset + math.prod(stored.shape)) * itemsize > available:
            raise ValueError(f"{self.folder}: {listed([name])} has shape {stored.shape}, but {available} bytes")  # fmt: skip

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a tensor in its stored dtype."""
        stored = self._tensors[name]
        dtype, row = _STORAGES[stored.kind][1], math.prod(stored.shape[1:])
        count = (stop - start) * row
        with self._zip.open(self._member(stored)) as file:
            file.seek((stored.offset + start * row) * dtype.itemsize)
            data = file.read(count * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(stop - start, *stored.shape[1:])


def fields_of(shapes: dict[str, tuple[int, ...]], where: object) -> dict[str, Any]:
    """Return the sizes of an RWKV-7 model, as fields of flash-linear-attention's rwkv7, from the shapes of its tensors.

    Raises:
        ValueError: tensors are missing; the message names them.
    """
    wanted = ("emb.weight", "blocks.0.att.r_k", *(f"blocks.0.att.{x}1" for x in "wag"), "blocks.0.ffn.key.weight")  # fmt: skip
    absent = [n for n in wanted if len(shapes.get(n, ())) != 2]
    if absent:
        raise ValueError(f"{where} is no RWKV-7 model: it has no matrix {', '.join(absent)}")
    layers = {int(m[1]) for n in shapes if (m := re.match(r"blocks\.(\d+)\.", n))}
    ranks = {x: shapes[f"blocks.0.att.{x}1"][1] for x in "wag"}
    value = [shapes[n] for n in (f"blocks.{i}.att.v1" for i in (1, 0)) if len(shapes.get(n, ())) == 2]  # fmt: skip
    heads, head_dim = shapes["blocks.0.att.r_k"]
    vocab, width = shapes["emb.weight"]
    return dict(
        model_type=MODEL_TYPE,
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=len(layers),
        head_dim=head_dim,
        num_heads=heads,
        decay_low_rank_dim=ranks["w"],
        a_low_rank_dim=ranks["a"],
        gate_low_rank_dim=ranks["g"],
        v_low_rank_dim=value[0][1] if value else None,
        intermediate_size=shapes["blocks.0.ffn.key.weight"][0],
        norm_first="blocks.0.ln0.weight" in shapes,
        first_layer_values="blocks.0.att.v1" in shapes,
    )
