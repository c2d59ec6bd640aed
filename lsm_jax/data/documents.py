"""Text and JSONL files as a random-access list of pieces of documents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from absl import logging

from lsm_jax.data.instructions import alpaca, text_under

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_NEWLINE_SEARCH = 4096  # bytes looked through for a line's end to cut at


class Piece(NamedTuple):
    """Text of one piece, bytes that are no UTF-8 by "surrogateescape"; whether it begins and whether it ends its document.

    `prompt` is read ahead of the text and not predicted.
    """

    text: str
    begins: bool
    ends: bool
    prompt: str = ""


class Documents:
    """Pieces of documents, in listed order; only places and lengths are held in memory.

    A line of a JSONL file is a document. So is any other file, cut into pieces of about
    `piece_bytes` at line ends, that one long file can be shuffled and read in parallel.

    Attributes:
        lengths: [pieces] bytes in the file.
        begins: [pieces] whether the piece begins its document.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        text_key: str = "text",
        format: str = "text",
        piece_bytes: int | None = 1 << 16,
    ):
        """Lists the files and finds their pieces.

        Args:
            paths: files, or folders that are walked for files of `TEXT_SUFFIXES` and
                `JSONL_SUFFIXES`, in sorted order.
            text_key: the JSONL field that holds the text.
            format: "text", or what a JSONL line holds in its place; see `DataConfig`.
            piece_bytes: where long text files are cut; None keeps them whole.

        Raises:
            ValueError: a path that doesn't exist, or no text at all.
        """
        self.text_key, self.format = text_key, format
        self._piece_bytes = piece_bytes
        self._files = list_files(paths)
        if format != "text" and (other := [p for p in self._files if not _is_jsonl(p)]):
            raise ValueError(
                f"data.format={format!r} takes files that end in {', '.join(JSONL_SUFFIXES)}; {other[0]} is another"
            )
        places = [
            _jsonl_places(path) if _is_jsonl(path) else _text_places(path, piece_bytes)
            for path in self._files
        ]
        counts = [len(p) for p in places]
        self._file = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate([np.zeros((0, 2), np.int64), *places])
        self._start, self.lengths = starts[:, 0], starts[:, 1]
        self.begins = np.array([_is_jsonl(self._files[f]) for f in range(len(counts))], bool)[
            self._file
        ] | (self._start == 0)
        if not self.lengths.sum():
            raise ValueError(f"no text in {[str(p) for p in paths]}: every file is empty")

    def __len__(self) -> int:
        return len(self._file)

    @property
    def num_documents(self) -> int:
        """Documents these pieces make."""
        return int(self.begins.sum())

    def __getitem__(self, index: int) -> Piece:
        path = self._files[self._file[index]]
        start, length = int(self._start[index]), int(self.lengths[index])
        with open(path, "rb") as file:
            if _is_jsonl(path):
                file.seek(start)
                text, prompt = self._jsonl_text(file.read(length), path, start)
                return Piece(text, True, True, prompt)
            size = os.fstat(file.fileno()).st_size
            first = _cut(file, start, size)
            last = _cut(file, start + length, size)
            file.seek(first)
            return Piece(_decode(file.read(last - first), path), start == 0, last == size)

    def split(self, fraction: float) -> tuple[Documents, Documents]:
        """(training, held-out) parts; a document stands in one of them, chosen by its name.

        One single document is cut: its last pieces are held out.

        Raises:
            ValueError: too little text to split.
        """
        document = np.cumsum(self.begins) - 1
        count = self.num_documents
        if count > 1:
            names = [self._name(i) for i in np.flatnonzero(self.begins).tolist()]
            order = sorted(range(count), key=lambda i: hashlib.blake2b(names[i]).digest())
            held = np.zeros(count, bool)
            held[order[: min(max(round(fraction * count), 1), count - 1)]] = True
            held = held[document]
        elif len(self) > 1:
            first = len(self) - min(max(round(fraction * len(self)), 1), len(self) - 1)
            held = np.arange(len(self)) >= first
        else:
            raise ValueError(
                f"{self._files[0]} is one document of {self.lengths[0]} bytes, too short to hold "
                "a part of it out; set data.heldout_path"
            )
        return self._take(~held), self._take(held)

    def _take(self, keep: np.ndarray) -> Documents:
        part = object.__new__(Documents)
        part.__dict__.update(self.__dict__)
        for name in ("_file", "_start", "lengths", "begins"):
            setattr(part, name, getattr(self, name)[keep])
        return part

    def _name(self, index: int) -> bytes:
        # Not the whole path, so that a moved folder splits as before.
        file = self._files[self._file[index]]
        return f"{file.parent.name}/{file.name}:{self._start[index]}".encode()

    def _jsonl_text(self, line: bytes, path: Path, start: int) -> tuple[str, str]:
        """(text, prompt) of a line."""
        where = f"{path}, the line at byte {start}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}, is not JSON: {error}") from error
        if self.format == "alpaca":
            return alpaca(fields, where)
        return text_under(fields, self.text_key, where), ""


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Files of these paths, folders walked in sorted order.

    Raises:
        ValueError: a path that doesn't exist, a file that isn't text, or a folder without any.
    """
    files: list[Path] = []
    for given in paths:
        path = Path(given).expanduser().absolute()
        if path.is_file():
            with open(path, "rb") as file:
                if b"\0" in file.read(4096):
                    raise ValueError(f"{path} is not text; accepted: text and JSONL, unpacked")
            files.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"data path {str(given)!r} does not exist")
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        found = [p for p in inside if p.suffix.lower() in TEXT_SUFFIXES + JSONL_SUFFIXES]
        if not found:
            raise ValueError(
                f"{path} is neither a token store nor a folder with text: none of its "
                f"{len(inside)} files ends in {', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}"
            )
        if len(found) < len(inside):
            logging.info("%s: %d other files left out.", path, len(inside) - len(found))
        files += found
    return files


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in JSONL_SUFFIXES


def _jsonl_places(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        return _places(_lines(file))


def _lines(file: BinaryIO) -> Iterable[tuple[int, int]]:
    start = 0
    for line in file:
        if not line.isspace():
            yield start, len(line)
        start += len(line)


def _text_places(path: Path, piece_bytes: int | None) -> np.ndarray:
    size = path.stat().st_size
    step = piece_bytes or max(size, 1)
    return _places((start, min(step, size - start)) for start in range(0, size, step))


def _places(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def _cut(file: BinaryIO, place: int, size: int) -> int:
    """The first line's start at or after `place`, or a character's where the line is long."""
    if place <= 0 or place >= size:
        return min(max(place, 0), size)
    file.seek(place - 1)
    ahead = file.read(_NEWLINE_SEARCH)
    newline = ahead.find(b"\n")
    if newline >= 0:
        return place + newline
    continues = 0
    while continues < 3 and continues + 1 < len(ahead) and ahead[continues + 1] & 0xC0 == 0x80:
        continues += 1
    return place + continues


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        logging.log_first_n(
            logging.WARNING,
            "%s is not UTF-8 (%s); the tokenizer 'bytes' keeps wrong bytes, others read U+FFFD.",
            10,
            path,
            error,
        )
        return raw.decode("utf-8", "surrogateescape")
