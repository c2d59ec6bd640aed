"""Files of results: each is written to a draft and then renamed, so that a reader never sees part of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` as JSON lines; a value that is not JSON is written as text."""
    lines = (json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write `arrays` as a compressed NPZ."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(draft, path)
