"""Parse GGUF files (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3.

Every length, count and offset is compared with the file's size before it is used, so that a damaged file is an error that
names the field or tensor and the byte, in little time and memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lsm_jax.convert.fields import listed, shown
from lsm_jax.files import reason

# Scalar types of metadata, by their number: the format of `struct`.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Tensor types that are stored as plain numbers.
_PLAIN = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
_NAME_BYTES, _TEXT_BYTES = 2**16 - 1, 2**24
# Published models have up to 2^20 entries (tokens, scores, types and merges) in at most 100 fields.
_MAX_ENTRIES, _MAX_FIELDS, _MAX_TENSORS, _MAX_DIMENSIONS = 2**22, 2**14, 2**18, 4


class StoredTensor(NamedTuple):
    """A tensor in a GGUF file.

    Attributes:
        kind: the type, a member of `gguf.GGMLQuantizationType`.
        shape: the numbers along each axis, in numpy's order.
        data: the numbers, or for quantised types the bytes of each row.
    """

    kind: Any
    shape: tuple[int, ...]
    data: np.ndarray


class _Cursor:
    """A position in the bytes of a GGUF file, from which values are read one after the other."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.position, self.order = path, data, 0, "<"
        self.entries = 0  # of arrays so far

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as a GGUF file: {text}")

    def skip(self, size: int, what: str) -> int:
        """Move over `size` bytes, and return the position before them."""
        start = self.position
        if size > len(self.data) - start:
            raise self.error(
                f"{what} requires {size} bytes from byte {start} on, but the file has {len(self.data)} bytes"
            )
        self.position += size
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self.skip(struct.calcsize("=" + code), what)
        return struct.unpack_from(self.order + code, self.data, start)[0]

    def text(self, limit: int, what: str) -> str:
        start, size = self.position, self.scalar("Q", what)
        if size > limit:
            raise self.error(
                f"{what} at byte {start} has a length of {size} bytes; accepted are {limit}"
            )
        start = self.skip(size, what)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is no UTF-8: {error.reason}") from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(_TEXT_BYTES, what)
        if kind == _ARRAY:
            return self.array(what)
        raise self.error(f"{what} has type {kind}; accepted are 0 to 12")

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        self.entries += count
        if self.entries > _MAX_ENTRIES:
            raise self.error(
                f"{what} is an array of {count} entries; accepted are {_MAX_ENTRIES} in all fields"
            )
        if kind == _STRING:
            self.check_remaining(8 * count, what)
            return [self.text(_TEXT_BYTES, what) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.error(f"{what} is an array of type {kind}; accepted are 0 to 8 and 10 to 12")
        code = f"{self.order}{count}{_SCALARS[kind]}"
        start = self.skip(struct.calcsize(code), what)
        return list(struct.unpack_from(code, self.data, start))

    def check_remaining(self, size: int, what: str) -> None:
        """Raise ValueError if fewer than `size` bytes follow."""
        self.skip(size, what)
        self.position -= size


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata of a GGUF file by key, and its tensors by name. The tensors' data are read from disk when
    they are used.

    Raises:
        ValueError: the file cannot be read; the message names the field or tensor, and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise ValueError(f"{path} cannot be read as a GGUF file: {reason(error)}") from error
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise cursor.error("it does not begin with the bytes GGUF")
    cursor.position = 4
    version = cursor.scalar("I", "the version")
    if version and version & 0xFFFF == 0:  # a file of the other byte order
        cursor.order = ">"
        version = int.from_bytes(data[4:8], "big")
    if version not in (2, 3):
        raise cursor.error(f"its version is {version}; accepted are 2 and 3")
    num_tensors = cursor.scalar("Q", "the number of tensors")
    num_fields = cursor.scalar("Q", "the number of fields")
    for count, limit, what in (
        (num_tensors, _MAX_TENSORS, "tensors"),
        (num_fields, _MAX_FIELDS, "fields"),
    ):
        if count > limit:
            raise cursor.error(f"the number of {what} is {count}; accepted are at most {limit}")
    fields: dict[str, Any] = {}
    for i in range(num_fields):
        name = cursor.text(_NAME_BYTES, f"the name of field {i}")
        if name in fields:
            raise cursor.error(f"the field {listed([name])} occurs twice")
        what = f"the field {listed([name])}"
        fields[name] = cursor.value(cursor.scalar("I", what), what)
    return fields, _read_tensors(cursor, num_tensors, fields)


def _read_tensors(cursor: _Cursor, number: int, fields: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors that follow the metadata, by name."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found: list[tuple[str, Any, tuple[int, ...], int]] = []
    for i in range(number):
        name = cursor.text(_NAME_BYTES, f"the name of tensor {i}")
        what = f"the tensor {listed([name])}"
        rank = cursor.scalar("I", what)
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise cursor.error(f"{what} has {rank} axes; accepted are 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([cursor.scalar("Q", what) for _ in range(rank)]))
        code, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
        try:
            kind = GGMLQuantizationType(code)
            block, _ = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise cursor.error(
                f"{what} has type {code}, which the package gguf does not know"
            ) from error
        if 0 in shape or math.prod(shape) > 8 * len(cursor.data) * block or shape[-1] % block:
            raise cursor.error(
                f"{what} of type {kind.name} has shape {shape}; accepted are rows of multiples of {block} numbers that the "
                f"file of {len(cursor.data)} bytes can contain"
            )
        found.append((name, kind, shape, offset))
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment={shown(alignment)}; accepted are powers of two up to 2^20"
        )
    cursor.position += -cursor.position % alignment
    begin, tensors, expected = cursor.position, {}, 0
    for name, kind, shape, offset in found:
        what = f"the tensor {listed([name])}"
        if name in tensors:
            raise cursor.error(f"{what} occurs twice")
        if offset != expected:
            raise cursor.error(
                f"{what} is at byte {offset} of the tensors' data; accepted is {expected}, after the tensor before it"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // block * block_bytes
        cursor.position = begin + offset
        start = cursor.skip(size, what)
        dtype = np.dtype(cursor.order + _PLAIN.get(kind.name, "u1"))
        stored = shape if kind.name in _PLAIN else (*shape[:-1], shape[-1] // block * block_bytes)
        data = np.frombuffer(cursor.data, dtype, math.prod(stored), start).reshape(stored)
        tensors[name] = StoredTensor(kind, shape, data)
        expected = offset + size + -size % alignment
    if cursor.order == ">" and any(t.kind.name not in _PLAIN for t in tensors.values()):
        raise cursor.error(
            "it is big-endian and has quantised tensors; accepted are little-endian files"
        )
    return tensors
