"""What training data looks like from outside, so that a run goes on on the data it began with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from lsm_jax.data.config import DataConfig
from lsm_jax.data.documents import list_files
from lsm_jax.data.sources import locate
from lsm_jax.data.store import is_store
from lsm_jax.data.tokenizers import load_tokenizer

_MOST_NAMES = 10_000  # of more files, a digest of names and sizes is kept
_SHOWN = 3


def fingerprint(config: DataConfig) -> dict[str, Any]:
    """Names and sizes of the training data's files, a store's metadata and the tokenizer's name; no content is read.

    Returns:
        JSON values: kind, tokenizer, bytes, files (sizes by name within `config.path`, or a digest), and a store's metadata.

    Raises:
        ValueError: nothing there, or no tokenizer.
    """
    path, _ = locate(config, heldout=False)
    if is_store(path):
        files = [p for p in path.rglob("*") if p.is_file()]
        about: dict[str, Any] = {"kind": "token store"}
        for name in (".zarray", ".zattrs"):
            if (path / name).is_file():
                about[name] = json.loads((path / name).read_text())
    else:
        files = list_files([path])
        about = {"kind": "text"}
    root = path if path.is_dir() else path.parent
    sizes = {p.relative_to(root).as_posix(): p.stat().st_size for p in sorted(files)}
    return {
        **about,
        "tokenizer": load_tokenizer(config.tokenizer, json_escape=config.json_escape).name,
        "bytes": sum(sizes.values()),
        "files": sizes
        if len(sizes) <= _MOST_NAMES
        else hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
    }


def fingerprint_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """How two fingerprints differ, a line each."""
    before, after = old.get("files"), new.get("files")
    lines = [
        f"{name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
        for name in dict.fromkeys([*old, *new])
        if name != "files" and old.get(name) != new.get(name)
    ]
    if isinstance(before, dict) and isinstance(after, dict):
        both = before.keys() & after.keys()
        groups = {
            "gone": before.keys() - after.keys(),
            "new": after.keys() - before.keys(),
            "of another size": {name for name in both if before[name] != after[name]},
        }
        lines += [
            f"{what}: {', '.join(sorted(names)[:_SHOWN])}"
            + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for what, names in groups.items()
            if names
        ]
    elif before != after:
        lines.append("names or sizes of its files")
    return lines
