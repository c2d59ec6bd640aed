"""Read checkpoint folders in Hugging Face's format: config.json, and tensors in one or more safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Tensors:
    """Base class of the stored tensors of a pretrained model, and of the model's config. A subclass sets
    the attributes and defines `rows`.

    Attributes:
        folder: the folder or file of the tensors.
        config: the contents of config.json.
        shapes: the shape of each tensor, by name.
        dtypes: the dtype of each tensor, by name, as safetensors names it.
    """

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a stored tensor in its stored dtype, or in float32 if it is
        quantised.

        Raises:
            ValueError: the tensor is not of floating-point numbers, or cannot be read.
        """
        raise NotImplementedError

    def tensor(self, name: str) -> np.ndarray:
        """Return a whole stored tensor of floating-point numbers in float32; ValueError if it has another
        kind of numbers or cannot be read."""
        return np.asarray(self.rows(name, 0, self.shapes[name][0]), np.float32)

    def check(self, expected: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Compare the names and shapes of the stored tensors with those that a model requires.

        Args:
            expected: the shape of each tensor that the model requires, by the tensor's name.
            ignored: suffixes of the names of tensors that are not required but accepted.

        Raises:
            ValueError: tensors are missing, unexpected or of another shape; the message names them.
        """
        surplus = [n for n in self.shapes if n not in expected and not n.endswith(ignored)]
        both = [n for n in self.shapes if n in expected and self.shapes[n] != expected[n]]
        kinds = {
            "missing": [f"missing: {n} {s}" for n, s in expected.items() if n not in self.shapes],
            "unexpected": [f"unexpected: {n} {self.shapes[n]}" for n in surplus],
            "of another shape": [
                f"{n} has shape {self.shapes[n]}; the model of the config requires {expected[n]}"
                for n in both
            ],
        }
        lines = []
        for kind, differences in kinds.items():
            lines += differences[:10]
            lines += [f"and {len(differences) - 10} more {kind}"] * (len(differences) > 10)
        if lines:
            raise ValueError(
                f"{self.folder}: the tensors are not those of the model in config.json:\n  "
                + "\n  ".join(lines)
            )


class Checkpoint(Tensors):
    """The tensors of a checkpoint folder in Hugging Face's format. Each tensor is read from disk when it is
    requested.

    Attributes:
        config_file: the name of the file with the config.
        single_file: the name of the file with the tensors, if they are in one file.
        files: the name of each tensor's file, by the tensor's name.
        metadata: the metadata of each safetensors file, by the file's name.

    Raises:
        ValueError: the folder does not exist, or a file is missing or cannot be read.
    """

    config_file, single_file = "config.json", SINGLE_FILE

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise ValueError(
                f"{str(folder)!r} is no folder; accepted is one with {self.config_file} and {self.single_file}"
                + (f" or {INDEX}" if self.single_file == SINGLE_FILE else "")
            )
        self.config = self._json(self.config_file)
        names = [self.single_file]
        if not (self.folder / self.single_file).is_file() and (self.folder / INDEX).is_file():
            files = self._json(INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
                raise ValueError(
                    f"{self.folder / INDEX}: weight_map must be an object of file names by tensor name"
                )
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
            raise ValueError(f"{path} contains a {type(value).__name__}; accepted is an object")
        return value

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a tensor from its safetensors file, in its stored dtype."""
        if self.dtypes[name] not in FLOATS:
            raise ValueError(
                f"{self.folder}: {name} has dtype {self.dtypes[name]}; accepted are {', '.join(FLOATS)}"
            )
        try:
            return self._open[name].get_slice(name)[start:stop]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder}: {name} cannot be read: {error}") from error

    def stored(self, name: str) -> np.ndarray:
        """Return all of a tensor as it is stored in its safetensors file, of any dtype."""
        return self._open[name].get_tensor(name)
