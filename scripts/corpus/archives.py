"""Read the files inside a package: .deb, .whl, .tgz, and the source archives inside a .deb."""

from __future__ import annotations

import contextlib
import gzip
import io
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from scripts.corpus.sources import Source

MAX_FILE_BYTES = 1 << 26  # of one file


def members(package: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of each file of a package that the source selects, in the archive's order.

    A .gz or .dz file has its inner file's path and content. Paths have no leading "./", those in an inner archive are
    relative to it, and files of over 64 MiB are left out.

    Raises:
        ValueError: the package is no such archive, or is damaged.
    """
    try:
        if source.registry == "pip":
            yield from _zip_members(package, source.has)
        elif source.registry == "npm":
            with package.open("rb") as file:
                yield from _tar_members(file, source, "r|gz")
        else:
            with _deb(package) as stream:
                yield from _tar_members(stream, source, "r|")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{package}: the package is damaged: {error}") from error


@contextlib.contextmanager
def _deb(package: Path) -> Iterator[IO[bytes]]:
    """Open the files of a Debian package as a stream in tar's format."""
    if shutil.which("dpkg-deb") is None:
        raise ValueError("the program dpkg-deb, which reads packages of apt, is not installed")
    process = subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        yield process.stdout
        process.stdout.read()  # the padding after the archive's end
        if process.wait():
            message = process.stderr.read().decode("utf-8", "replace").strip()
            raise ValueError(f"{package}: the package is damaged: {message}")
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
        process.stderr.close()


def _tar_members(stream: IO[bytes], source: Source, mode: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            if not member.isfile():
                continue
            content = archive.extractfile(member)
            assert content is not None
            if source.has_archive(path) and path.endswith(".zip"):
                yield from _zip_members(io.BytesIO(content.read()), source.has)
            elif source.has_archive(path):
                yield from _tar_members(io.BytesIO(content.read()), source, "r:*")
            elif member.size <= MAX_FILE_BYTES and source.has(_plain_name(path)):
                yield _plain(path, content.read())


def _zip_members(file: Path | IO[bytes], has: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.file_size <= MAX_FILE_BYTES and has(_plain_name(member.filename)):
                yield _plain(member.filename, archive.read(member))


def _plain(path: str, content: bytes) -> tuple[str, bytes]:
    """Return a file's path and content, of a .gz file those of its inner file."""
    name = _plain_name(path)
    return (path, content) if name == path else (name, gzip.decompress(content))


def _plain_name(path: str) -> str:
    return path.removesuffix(".gz").removesuffix(".dz")
