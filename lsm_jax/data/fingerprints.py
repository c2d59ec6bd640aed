"""Fingerprints of a run's training data: names and sizes of its files, and its tokenizer. A resumed run
compares them to check that its data are the same as before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lsm_jax.data.config import DataConfig
from lsm_jax.data.datasets_source import data_set, files_of
from lsm_jax.data.document_files import list_files
from lsm_jax.data.sources import locate, parts_of, tokenizer_of
from lsm_jax.data.store import is_store
from lsm_jax.data.store_files import CHECKSUMS
from lsm_jax.files import bounded_json

_MOST_NAMES = 10_000  # for more files, store a digest of names and sizes
_SHOWN = 3  # file names per line of a message


def fingerprint(config: DataConfig) -> dict[str, Any]:
    """Return the fingerprint of a run's training data: the names and sizes of its files, a store's
    metadata, and the tokenizer's name.

    The contents of the files are not read. A store's `checksums.json` is left out, since it can be added later.

    Returns:
        A dict of JSON values: kind, tokenizer, bytes, files (size of each file by its name relative to `config.path`, or
        a digest of them), and for a store its .zarray and .zattrs. For a data set of the hub: kind, tokenizer and data_set,
        its name with its commit. For a mixture: kind, tokenizer, mixture, and the fingerprint of each source, by its name.

    Raises:
        ValueError: the path or the tokenizer does not exist.
    """
    tokenizer = tokenizer_of(config).name
    if config.mixture:
        sources = {part.name: fingerprint(part.config) for part in parts_of(config)}
        return {
            "kind": "mixture",
            "tokenizer": tokenizer,
            "mixture": config.mixture,
            "sources": sources,
        }
    path, _ = locate(config, heldout=False)
    found = data_set(path)
    saved = None if found is None else found.where
    if saved is not None and not isinstance(saved, Path):
        return {"kind": "data set", "tokenizer": tokenizer, "data_set": str(path)}
    if is_store(path):
        files = [p for p in path.rglob("*") if p.is_file() and p.name != CHECKSUMS]
        description: dict[str, Any] = {"kind": "token store"}
        for name in (".zarray", ".zattrs"):
            if (path / name).is_file():
                description[name] = bounded_json(path / name)
    elif saved is not None:
        path = saved
        files, description = [path / name for name, *_ in files_of(path)], {"kind": "data set"}
    else:
        files, description = list_files([path]), {"kind": "text"}
    root = path if path.is_dir() else path.parent
    sizes = {p.relative_to(root).as_posix(): p.stat().st_size for p in sorted(files)}
    return {
        **description,
        "tokenizer": tokenizer,
        "bytes": sum(sizes.values()),
        "files": sizes
        if len(sizes) <= _MOST_NAMES
        else hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
    }


def fingerprint_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return one line of text for each difference between two fingerprints of training data."""
    before, after = old.get("files"), new.get("files")
    lines = []
    if isinstance(old.get("sources"), dict) and isinstance(new.get("sources"), dict):
        pairs = {
            name: (old["sources"].get(name), new["sources"].get(name)) for name in new["sources"]
        }
        lines = [
            f"{name}: {line}"
            for name, (a, b) in pairs.items()
            if isinstance(a, dict) and isinstance(b, dict)
            for line in fingerprint_changes(a, b)
        ]
    lines += [
        f"{name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
        for name in dict.fromkeys([*old, *new])
        if name not in ("files", "sources") and old.get(name) != new.get(name)
    ]
    if isinstance(before, dict) and isinstance(after, dict):
        both = before.keys() & after.keys()
        groups = {
            "missing files": before.keys() - after.keys(),
            "new files": after.keys() - before.keys(),
            "files whose size changed": {name for name in both if before[name] != after[name]},
        }
        lines += [
            f"{what}: {', '.join(sorted(names)[:_SHOWN])}"
            + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for what, names in groups.items()
            if names
        ]
    elif before != after:
        lines.append("names or sizes of files changed")
    return lines
