"""Write files of results: each is written to a draft and then renamed, so that a reader never sees part of
one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as an indented JSON file; the file is replaced at once, never in part."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` as a file of JSON lines, one per row; a value that JSON does not have is written as
    text. The file is replaced at once."""
    lines = (json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write `text` as a file in UTF-8; the file is replaced at once, never in part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write the dict `arrays` as a compressed NPZ file of arrays by name; the file is replaced at once,
    never in part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(draft, path)
