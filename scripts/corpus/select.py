"""Select the documents of a corpus: no duplicates, parts by a hash of the document's name, a shuffled order.

The rule of near duplicates: a document is left out if at least half of its characters are in lines that documents before it
have. Only lines of 20 characters or more count, without blanks at their ends, such as the paragraphs of prose or the lines
of code; a document without such lines is compared as a whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PARTS = ("train", "heldout", "long", "records")
LONG_BYTES = 240_000  # of 65,536 tokens of 3.7 bytes; a shorter document is left out of the store
_MIN_LINE = 20
_MOST_KNOWN = 0.5


def position(name: str) -> float:
    """Return a number in [0, 1) that depends on a document's name only, and is even over many names."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest()) / 2**56


class NearDuplicates:
    """The lines of all documents that were kept, as hashes of 64 bits."""

    def __init__(self):
        self._lines: set[bytes] = set()
        self._texts: set[bytes] = set()

    def check(self, text: str) -> str:
        """Return "" for a new document, whose lines are then known; otherwise "duplicate" or "near duplicate"."""
        whole = hashlib.blake2b(text.strip().encode("utf-8", "replace"), digest_size=16).digest()
        if whole in self._texts:
            return "duplicate"
        known = total = 0
        new = []
        for line in text.encode("utf-8", "replace").split(b"\n"):
            line = line.strip()
            if len(line) < _MIN_LINE:
                continue
            key = hashlib.blake2b(line, digest_size=8).digest()
            total += len(line)
            if key in self._lines:
                known += len(line)
            else:
                new.append(key)
        if total and known >= _MOST_KNOWN * total:
            return "near duplicate"
        self._texts.add(whole)
        self._lines.update(new)
        return ""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a selected document stands: its file of documents, offset and length in bytes there."""

    order: float
    source: str
    file: Path
    offset: int
    length: int


def select(
    files: Sequence[tuple[str, Path]],
    *,
    heldout: float,
    long: float,
    progress: Callable[[int, int], None] = lambda size, documents: None,
) -> tuple[dict[str, list[Place]], dict[str, Counter]]:
    """Select documents from files of documents, one JSON object {"name", "text"} in a line, with
    "records" if the text has fields.

    Args:
        files: (package, file) in the order in which the first of two equal documents is kept.
        heldout: share of the documents that are held out.
        long: share of the documents of at least `LONG_BYTES` that are held out in a part of their own.
        progress: called with the size in bytes of each document, and 1.

    Returns:
        The documents of each of `PARTS`, in a shuffled order that depends on their names only; and for each package the
        counts of documents that were left out, by reason.
    """
    parts: dict[str, list[Place]] = {part: [] for part in PARTS}
    left_out: dict[str, Counter] = {}
    known = NearDuplicates()
    for package, file in files:
        counts = left_out.setdefault(package, Counter())
        with file.open("rb") as lines:
            offset = 0
            for line in lines:
                record = json.loads(line)
                reason = known.check(record["text"])
                if reason:
                    counts[reason] += 1
                else:
                    order = position(
                        record["file"]
                    )  # all parts of a file are in one part of the corpus
                    part = _part(record, order, len(line), heldout, long)
                    place = Place(position(f"order {record['name']}"), package, file, offset, len(line))  # fmt: skip
                    parts[part].append(place)
                offset += len(line)
                progress(len(line), 1)
    for places in parts.values():
        places.sort(key=lambda place: (place.order, place.source, place.offset))
    return parts, left_out


def _part(record: dict, order: float, size: int, heldout: float, long: float) -> str:
    if record.get("records"):
        return "records"
    if size >= LONG_BYTES and order < long:
        return "long"
    return "heldout" if order < heldout else "train"


def write_part(places: Iterable[Place], path: Path) -> int:
    """Copy selected documents to one file of documents, in their order, and return its size in bytes."""
    size, opened = 0, {}
    draft = path.with_name(f".{path.name}.partial")
    try:
        with draft.open("wb") as output:
            for place in places:
                if place.file not in opened:
                    opened[place.file] = place.file.open("rb")
                opened[place.file].seek(place.offset)
                size += output.write(opened[place.file].read(place.length))
    finally:
        for file in opened.values():
            file.close()
    draft.replace(path)
    return size
