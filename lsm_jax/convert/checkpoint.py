"""Read checkpoint folders in Hugging Face's format: config.json, and tensors in one or more safetensors files."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from lsm_jax.convert.checksums import check_sum, read_sums
from lsm_jax.convert.fields import listed, shown
from lsm_jax.files import MEGABYTE, check_keys, inside, parse_json, read_bytes, reason

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES = 32 * MEGABYTE  # of a safetensors file; that of 100,000 tensors has 12 MB
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
    _verified = False
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a stored tensor in its stored dtype, or in float32 if it is
        quantised.

        Raises:
            ValueError: the tensor is not of floating-point numbers, or cannot be read.
        """
        raise NotImplementedError

    @property
    def config_path(self) -> Path:
        """The file that contains the model's config."""
        return self.folder / "config.json"

    def label(self, name: str) -> str:
        """Return the name that a field of transformers' config.json has in the model's file."""
        return name

    def verify(self) -> None:
        """Compare the files of tensors with the checksums in the file SHA256SUMS beside them, if it is there, the
        first time that this is called. Hashing takes 0.5 to 2 seconds per GB.

        Raises:
            ValueError: a file is not the one that was written; the message names it.
        """
        if not self._verified:
            self._check_sums()
            self._verified = True

    def _check_sums(self) -> None:
        """Raise ValueError if a file of tensors has another checksum than SHA256SUMS has for it."""

    def tensor(self, name: str) -> np.ndarray:
        """Return a whole stored tensor of floating-point numbers in float32; ValueError if it has another
        kind of numbers or cannot be read."""
        return np.asarray(self.rows(name, 0, self.shapes[name][0]), np.float32)

    def check(
        self,
        expected: dict[str, tuple[int, ...]],
        ignored: tuple[str, ...] = (),
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        """Compare the names and shapes of the stored tensors with those that a model requires.

        Args:
            expected: the shape of each tensor that the model requires, by the tensor's name.
            ignored: suffixes of the names of tensors that are not required but accepted.
            ignored_prefixes: beginnings of such names.

        Raises:
            ValueError: tensors are missing, unexpected or of another shape; the message names them.
        """
        named = {n: n if n.isprintable() else repr(n) for n in self.shapes}
        accepted = [n for n in self.shapes if n.endswith(ignored) or n.startswith(ignored_prefixes)]
        surplus = [n for n in self.shapes if n not in expected and n not in set(accepted)]
        both = [n for n in self.shapes if n in expected and self.shapes[n] != expected[n]]
        kinds = {
            "missing": [f"missing: {n} {s}" for n, s in expected.items() if n not in self.shapes],
            "unexpected": [f"unexpected: {named[n]} {self.shapes[n]}" for n in surplus],
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
        sums: the SHA-256 of files by name, from the file SHA256SUMS; empty if there is none.
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
        self.sums = read_sums(self.folder)
        self.config = self.read_json(self.config_file)
        names, weight_map = [self.single_file], {}
        if not (self.folder / self.single_file).is_file() and (self.folder / INDEX).is_file():
            weight_map = self._weight_map()
            names = sorted(set(weight_map.values()))
        self.shapes, self.dtypes, self.files = {}, {}, {}
        self.metadata: dict[str, dict[str, str] | None] = {}
        self._open: dict[str, Any] = {}
        for name in names:
            self._read_header(name)
        if absent := [n for n, file in weight_map.items() if self.files.get(n) != file]:
            raise ValueError(
                f"{self.folder / INDEX}: weight_map has tensors that are not in the files it names: {listed(absent)}"
            )

    @property
    def config_path(self) -> Path:
        """The file that contains the model's config."""
        return self.folder / self.config_file

    def file(self, name: str) -> Path:
        """Return the path of a file for reading, after checking that it is inside the folder.

        Raises:
            ValueError: the file is outside the folder, or a link to such a file.
        """
        return inside(self.folder, name, what=f"{self.folder}", follow_links=True)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the contents of a small file.

        Raises:
            ValueError: the file is outside the folder, larger than `max_bytes`, cannot be read, or has another checksum
                than in SHA256SUMS.
        """
        data = read_bytes(self.file(name), max_bytes=max_bytes)
        check_sum(self.folder / name, name, self.sums, data)
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; raises as `read`, and if the file contains no such object."""
        if not (self.folder / name).exists():
            raise ValueError(f"{self.folder / name} cannot be read: no such file or folder")
        return parse_json(self.read(name, 16 * MEGABYTE), self.folder / name)

    def _weight_map(self) -> dict[str, str]:
        """Return the file of each tensor by the tensor's name, from the index.

        Raises:
            ValueError: the index is not an object of file names, or names a file outside the folder.
        """
        files, where = self.read_json(INDEX).get("weight_map"), self.folder / INDEX
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError(f"{where}: weight_map must be an object of file names by tensor name")
        for name in sorted(set(files.values())):
            inside(self.folder, name, what=f"{where}: weight_map", follow_links=True)
            plain = PurePosixPath(name).as_posix() == name and name.isprintable()
            if not plain or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{where}: weight_map names {shown(name)}; accepted are names that end in .safetensors"
                )
        return files

    def _read_header(self, name: str) -> None:
        """Read the names, shapes and dtypes of the tensors in a safetensors file."""
        path = self.file(name)
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{self.folder / name} cannot be read: it is no regular file")
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > min(_HEADER_BYTES, path.stat().st_size - 8):
                    raise ValueError(
                        f"{path} cannot be read: its header has a length of {size} bytes; accepted are {_HEADER_BYTES}, and no "
                        f"more than the file has, {path.stat().st_size}"
                    )
                header = file.read(size)
            opened = safe_open(path, framework="np")
            check_keys(header, f"{self.folder / name}: the header")
            self.metadata[name] = opened.metadata()
            keys = list(opened.keys())
            parts = [opened.get_slice(key) for key in keys]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder / name} cannot be read: {reason(error)}") from error
        for key, part in zip(keys, parts, strict=True):
            if key in self.files:
                raise ValueError(
                    f"{self.folder}: the tensor {listed([key])} is in {self.files[key]} and in {name}"
                )
            self.shapes[key], self.dtypes[key] = tuple(part.get_shape()), part.get_dtype()
            self.files[key], self._open[key] = name, opened
            if math.prod(self.shapes[key]) == 0:
                raise ValueError(
                    f"{self.folder / name}: the tensor {listed([key])} has shape {self.shapes[key]}; it contains no numbers"
                )

    def _check_sums(self) -> None:
        for name in sorted(set(self.files.values())):
            check_sum(self.file(name), name, self.sums)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a tensor from its safetensors file, in its stored dtype."""
        if self.dtypes[name] not in FLOATS:
            raise ValueError(
                f"{self.folder}: {listed([name])} has dtype {self.dtypes[name]}; accepted are {', '.join(FLOATS)}"
            )
        try:
            return self._open[name].get_slice(name)[start:stop]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder}: {name} cannot be read: {error}") from error

    def stored(self, name: str) -> np.ndarray:
        """Return all of a tensor as it is stored in its safetensors file, of any dtype."""
        return self._open[name].get_tensor(name)
