"""Checksums of a pretrained model's files, in the file SHA256SUMS that `sha256sum -c SHA256SUMS` checks too."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from lsm_jax.files import MEGABYTE, inside, read_bytes, reason

SUMS = "SHA256SUMS"
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_BSD_LINE = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


def read_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of files in a folder by their names, from its file SHA256SUMS; empty if it has none.

    Raises:
        ValueError: the file cannot be read, or a line is not in the format of sha256sum.
    """
    path = folder / SUMS
    if not os.path.lexists(path):
        return {}
    try:
        file = inside(folder, SUMS, what=f"{folder}", follow_links=True)
        text = read_bytes(file, max_bytes=16 * MEGABYTE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: byte {error.start} is no UTF-8") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if match := _LINE.fullmatch(line):
            escaped, digest, name = match.groups()
        elif match := _BSD_LINE.fullmatch(line):
            escaped, name, digest = match.groups()
        else:
            raise ValueError(
                f"{path}: line {number} is {line[:100]!r}; accepted is a SHA-256 and a file name, as sha256sum writes them"
            )
        if escaped:
            name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], name)
        name = name.removeprefix("./")
        digest = digest.lower()
        if sums.setdefault(name, digest) != digest:
            raise ValueError(f"{path}: line {number} has a second checksum of {name!r}")
    return sums


def sums_text(sums: dict[str, str]) -> str:
    """Return the contents of a file SHA256SUMS for checksums by file name."""
    lines = []
    for name, digest in sorted(sums.items()):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        mark = "" if escaped == name else "\\"
        lines.append(f"{mark}{digest}  {escaped}\n")
    return "".join(lines)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; the file is read in pieces.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def check_sum(path: Path, name: str, sums: dict[str, str], data: bytes | None = None) -> None:
    """Raise ValueError if a file has another SHA-256 than SHA256SUMS has for it; a file without one is accepted.

    Args:
        path: the file.
        name: its name in SHA256SUMS.
        sums: the contents of SHA256SUMS, as from `read_sums`.
        data: the file's contents, if they have been read; None reads them.
    """
    if name not in sums:
        return
    actual = sha256_of(path) if data is None else hashlib.sha256(data).hexdigest()
    if actual != sums[name]:
        raise ValueError(
            f"{path} is damaged or was changed: its SHA-256 is {actual}, but {sums[name]} in {SUMS} beside it. If you "
            f"changed the file, remove its line from {SUMS}"
        )
