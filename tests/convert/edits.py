"""Changed files of pretrained models, for the tests of damaged ones: fields of JSON, and small GGUF files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

INDEX, SUMS = "model.safetensors.index.json", "SHA256SUMS"


def edit(path: Path, **fields) -> Path:
    """Change fields of a JSON file, and return its path."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


def gguf(*parts: bytes, fields: int = 1, tensors: int = 0) -> bytes:
    """Return a GGUF file with the given bytes after its counts."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + b"".join(parts)


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def with_field(content: bytes, name: str, value: int) -> bytes:
    """Return a GGUF file in which an integer field of 32 bits has another value."""
    at = content.index(name.encode()) + len(name) + 4
    return content[:at] + struct.pack("<I", value) + content[at + 4 :]
