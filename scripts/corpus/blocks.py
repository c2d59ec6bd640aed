"""Compress documents in blocks, and write files into parts: tar files of a limited size.

A block has documents of one folder or package, sorted by name, and not consecutive ones of the shuffled order: xz then
finds what files of one program repeat. Each document has its number in the shuffled order, by which `read_block`'s caller
restores it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lsm_jax.files import inside

BLOCK_BYTES = 24_000_000  # of text
_MARGIN = 20_480  # bytes of tar's headers and end
_SEPARATOR = b"\0"  # no document contains it: scripts.corpus.text


@dataclasses.dataclass(frozen=True)
class Line:
    """Where a document stands in a file of documents: its number, name, offset and length in bytes, and its text's bytes."""

    number: int
    name: str
    offset: int
    length: int
    size: int


def groups_of(
    path: Path, sizes: Sequence[float], *, most: int | None = None
) -> tuple[list[list[Line]], list[str]]:
    """Return the first documents of a file in groups, and for each group the SHA-256 of all texts to its end.

    Args:
        path: the file of documents.
        sizes: bytes of text of each group at most; if the last one would be empty it is left out.
        most: documents at most.

    Raises:
        ValueError: a text has the character NUL, a document does not fit into a group before the last one, or not even the first
            document is selected.
    """
    groups: list[list[Line]] = [[]]
    digest, digests, left = hashlib.sha256(), [], sizes[0]
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number == most:
                break
            record = json.loads(line)
            text = record["text"].encode("utf-8")
            if _SEPARATOR in text:
                raise ValueError(f"{path}, line {number + 1}: the text has the character NUL")
            if len(text) > left and groups[-1]:
                digests.append(digest.hexdigest())
                if len(groups) == len(sizes):
                    return groups, digests
                left = sizes[len(groups)]
                groups.append([])
            if len(text) > left:
                if len(groups) < len(sizes):
                    raise ValueError(f"{path}, line {number + 1}: the document has {len(text)} bytes; accepted are groups of as many, not of {left:g}")  # fmt: skip
                break
            left -= len(text)
            digest.update(text + _SEPARATOR)
            groups[-1].append(Line(number, record.get("name", ""), offset, len(line), len(text)))
            offset += len(line)
    if groups[-1]:
        digests.append(digest.hexdigest())
    elif len(groups) == 1:
        raise ValueError(f"{path}: no document is selected; accepted are options that select one or more")  # fmt: skip
    return groups[: len(digests)], digests


def divide(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the documents in order of their names, in blocks of about `BLOCK_BYTES`."""
    blocks: list[list[Line]] = []
    size = BLOCK_BYTES
    for line in sorted(lines, key=lambda line: (line.name, line.number)):
        if size + line.size > BLOCK_BYTES:
            blocks.append([])
            size = 0
        blocks[-1].append(line)
        size += line.size
    return blocks


def compress(data: bytes) -> bytes:
    """Return text as xz, whose model expects bytes of text (lc, pb) and whose window is all of it."""
    window = max(1 << 16, len(data))
    filters = [dict(id=lzma.FILTER_LZMA2, preset=9, lc=4, lp=0, pb=0, nice_len=128, dict_size=window)]  # fmt: skip
    return lzma.compress(data, filters=filters)


def write_block(path: Path, lines: Sequence[Line]) -> bytes:
    """Return a block with these documents of a file."""
    texts = []
    with path.open("rb") as file:
        for line in lines:
            file.seek(line.offset)
            texts.append(json.loads(file.read(line.length))["text"].encode("utf-8"))
    numbers = json.dumps([line.number for line in lines]).encode()
    return compress(numbers + b"\n" + _SEPARATOR.join(texts))


def read_block(path: Path) -> list[tuple[int, bytes]]:
    """Return (number in the shuffled order, text in UTF-8) of a block's documents.

    Raises:
        ValueError: the block is damaged.
    """
    try:
        header, _, content = lzma.decompress(path.read_bytes()).partition(b"\n")
        return list(zip(json.loads(header), content.split(_SEPARATOR), strict=True))
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: the block is damaged: {error}") from error


def size_of_file(length: int) -> int:
    """Return the bytes at most that a file of this length has in a part."""
    return length + 1024


def size_of_part(lengths: Iterable[int]) -> int:
    """Return the bytes at most of a part with files of these lengths."""
    return _MARGIN + sum(map(size_of_file, lengths))


class Parts:
    """Writes files one after another into tar files of at most `limit` bytes."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._limit = folder, limit
        self._files: list[tuple[str, bytes]] = []
        self.count = 0

    def add(self, name: str, data: bytes) -> None:
        """Add a file, in a new part if it does not fit into the present one."""
        if size_of_part([len(data)]) > self._limit:
            raise ValueError(f"--part_bytes={self._limit}: {name} alone has {len(data)} bytes")
        if size_of_part(len(file) for _, file in [*self._files, (name, data)]) > self._limit:
            self.close()
        self._files.append((name, data))

    def close(self) -> None:
        """Write the present part; the next file is in a new one."""
        if not self._files:
            return
        with tarfile.open(self._folder / f"part-{self.count:03}.tar", "w") as archive:
            for name, data in self._files:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        self._files, self.count = [], self.count + 1


def read_parts(folder: Path, target: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield (path below `target`, content) of each file of all parts in a folder.

    Raises:
        ValueError: a part is damaged, or names a file that is not below `target`.
    """
    for path in sorted(folder.glob("part-*.tar")):
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is None:
                        raise ValueError(f"{path}: {member.name} is no plain file; accepted are parts that pack wrote")  # fmt: skip
                    yield inside(target, member.name, what=f"{path}: a file's name"), content.read()
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{path}: the part is damaged: {error}; copy it again") from error
