"""A checkpoint folder as Hugging Face's libraries write it: config.json, and tensors in one or more safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Tensors:
    """Named tensors and the config of their model; a subclass sets the attributes and gives `rows`.

    Attributes:
        folder: the folder or file they are in.
        config: as config.json has it.
        shapes: of every tensor, by name.
        dtypes: of every tensor, as safetensors calls them.
    """

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor, in the dtype it is stored in, or float32 where that is no array's.

        Raises:
            ValueError: it holds no floating-point numbers, or cannot be read.
        """
        raise NotImplementedError

    def tensor(self, name: str) -> np.ndarray:
        """One tensor in float32; raises as `rows` does."""
        return np.asarray(self.rows(name, 0, self.shapes[name][0]), np.float32)

    def check(self, wanted: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Compare the tensors' names and shapes with those of a model.

        Args:
            wanted: shapes by name.
            ignored: endings of names that may be there besides.

        Raises:
            ValueError: some are missing, unexpected or of another shape; the message names them.
        """
        surplus = [n for n in self.shapes if n not in wanted and not n.endswith(ignored)]
        both = [n for n in self.shapes if n in wanted and self.shapes[n] != wanted[n]]
        kinds = {
            "missing": [f"missing: {n} {s}" for n, s in wanted.items() if n not in self.shapes],
            "unexpected": [f"unexpected: {n} {self.shapes[n]}" for n in surplus],
            "of another shape": [
                f"{n} has shape {self.shapes[n]}, the config's model {wanted[n]}" for n in both
            ],
        }
        lines = []
        for kind, of in kinds.items():
            lines += of[:10] + [f"and {len(of) - 10} more {kind}"] * (len(of) > 10)
        if lines:
            raise ValueError(
                f"{self.folder}: its tensors are not those of its config.json:\n  "
                + "\n  ".join(lines)
            )


class Checkpoint(Tensors):
    """A checkpoint folder; tensors are read when they are asked for.

    Attributes:
        files: the name of the file each tensor is in.
        metadata: of every file, by name.

    Raises:
        ValueError: no such folder, or a file that is missing or cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise ValueError(
                f"{str(folder)!r} is no folder; accepted is one with config.json and {WHOLE}, or {INDEX}"
            )
        self.config = self._json("config.json")
        names = [WHOLE]
        if not (self.folder / WHOLE).is_file() and (self.folder / INDEX).is_file():
            files = self._json(INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
                raise ValueError(f"{self.folder / INDEX}: weight_map is no table of files' names")
            names = sorted(set(files.values()))
        self.shapes, self.dtypes, self.files = {}, {}, {}
        self.metadata: dict[str, dict[str, str] | None] = {}
        self._open: dict[str, Any] = {}
        for name in names:
            try:
                file = safe_open(self.folder / name, framework="np")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.folder / name} cannot be read: {error}") from error
            self.metadata[name] = file.metadata()
            for key in file.keys():
                part = file.get_slice(key)
                self.shapes[key], self.dtypes[key] = tuple(part.get_shape()), part.get_dtype()
                self.files[key], self._open[key] = name, file

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path} holds a {type(value).__name__}; accepted is an object")
        return value

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor, as stored."""
        if self.dtypes[name] not in FLOATS:
            raise ValueError(
                f"{self.folder}: {name} has dtype {self.dtypes[name]}; accepted are {', '.join(FLOATS)}"
            )
        try:
            return self._open[name].get_slice(name)[start:stop]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder}: {name} cannot be read: {error}") from error

    def stored(self, name: str) -> np.ndarray:
        """A whole tensor of any dtype, as stored."""
        return self._open[name].get_tensor(name)
