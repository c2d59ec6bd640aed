"""Digests of folders, by which the campaign sees every change of a file outside of the folders that a program
was given."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def snapshot(folder: Path) -> dict[str, str]:
    """Return a description of every file, folder and link under `folder`, by its relative path; links are not
    followed."""
    entries = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root) / name
            entries[path.relative_to(folder).as_posix()] = _describe(path)
    return entries


def _describe(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return f"folder, mode {path.stat().st_mode:o}"
    if not path.is_file():
        return "special file"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return one line for each entry that was added, removed or changed between two snapshots."""
    lines = [f"added {name}" for name in sorted(after.keys() - before.keys())]
    lines += [f"removed {name}" for name in sorted(before.keys() - after.keys())]
    both = sorted(before.keys() & after.keys())
    return lines + [f"changed {name}" for name in both if before[name] != after[name]]
