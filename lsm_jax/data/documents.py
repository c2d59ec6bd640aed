"""Read documents from text and JSONL files in any order; long ones are cut into pieces."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from absl import logging

from lsm_jax.data.instructions import alpaca, short_text, text_field
from lsm_jax.files import unique_keys

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
ARRAY_SUFFIX = ".json"
MAX_LINE_BYTES = 1 << 26  # of a line of a JSONL file
MAX_ARRAY_BYTES = 1 << 27  # of a JSON array, which is read at once
_skipped: set[str] = set()  # the warnings that were logged
_NEWLINE_SEARCH = 4096  # bytes that are searched for a newline at which to cut


class Piece(NamedTuple):
    """A contiguous part of a document of text, or all of it.

    Attributes:
        text: the text; bytes that are not UTF-8 are escaped as by Python's "surrogateescape".
        begins: whether the piece begins its document.
        ends: whether the piece ends its document.
        prompt: text that precedes `text` in the row and is not predicted.
    """

    text: str
    begins: bool
    ends: bool
    prompt: str = ""


class Documents:
    """The documents in text and JSONL files as a sequence of pieces (contiguous parts), in listed order.
    Only the pieces' offsets and lengths are in memory.

    Each line of a JSONL file is a document of one piece, and so is each element of the array in a .json file. Every
    other file is one document, cut at line ends into pieces of about `piece_bytes`, so that a single long file can be
    shuffled and read in parallel.

    Attributes:
        lengths: [pieces], bytes of each piece in its file.
        begins: [pieces], whether each piece begins its document.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        text_key: str = "text",
        format: str = "text",
        piece_bytes: int | None = 1 << 16,
    ):
        """Find the text and JSONL files at these paths, and the place of every piece of their documents: a
        piece is a document, or a contiguous part of a long text file.

        Args:
            paths: files, or folders that are searched for files with `TEXT_SUFFIXES` and `JSONL_SUFFIXES`, in sorted
                order.
            text_key: name of the JSONL field that has the text.
            format: "text" or "alpaca"; see `DataConfig`. Files in `ARRAY_SUFFIX` are arrays of objects;
                folders are not searched for them.
            piece_bytes: bytes of a piece of a long text file; None does not cut text files.

        Raises:
            ValueError: a path does not exist, a file has the wrong suffix for `format` or is no JSON array, or all files
                are empty.
        """
        self.text_key, self.format = text_key, format
        self._piece_bytes = piece_bytes
        self._files = list_files(paths)
        if format != "text" and (other := [p for p in self._files if not self._has_records(p)]):
            suffixes = " or ".join((*JSONL_SUFFIXES, ARRAY_SUFFIX))
            raise ValueError(
                f"data.format={format!r} requires files that end in {suffixes}, but {other[0]} does not"
            )
        offsets = [self._offsets(path) for path in self._files]
        counts = [len(o) for o in offsets]
        self._file = np.repeat(np.arange(len(counts)), counts)
        self._number = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)])
        all_offsets = np.concatenate([np.zeros((0, 2), np.int64), *offsets])
        self._start, self.lengths = all_offsets[:, 0], all_offsets[:, 1]
        self.begins = np.array([self._has_records(p) for p in self._files], bool)[self._file] | (
            self._start == 0
        )
        if not self.lengths.sum():
            raise ValueError(f"no text in {[str(p) for p in paths]}: every file is empty")

    def _has_records(self, path: Path) -> bool:
        """Return whether a file's documents are JSON values (its lines, or the elements of an array) and
        not plain text."""
        return _is_jsonl(path) or self._is_array(path)

    def _is_array(self, path: Path) -> bool:
        return path.suffix.lower() == ARRAY_SUFFIX

    def _offsets(self, path: Path) -> np.ndarray:
        """Return where the documents of a file are, cut into pieces, [pieces, 2]: offset and length in
        bytes of each piece."""
        if self._is_array(path):
            return _array_offsets(path)
        return _jsonl_offsets(path) if _is_jsonl(path) else _text_offsets(path, self._piece_bytes)

    def __len__(self) -> int:
        return len(self._file)

    @property
    def num_documents(self) -> int:
        """The number of different documents to which the pieces belong."""
        return int(self.begins.sum())

    def __getitem__(self, index: int) -> Piece:
        path = self._files[self._file[index]]
        start, length = int(self._start[index]), int(self.lengths[index])
        with _opened(path) as file:
            if self._has_records(path):
                file.seek(start)
                where = f"{path}, the line at byte {start}"
                if self._is_array(path):
                    where = f"{path}, element {self._number[index]} of the array"
                text, prompt = self._record_text(file.read(length), where)
                return Piece(text, True, True, prompt)
            size = os.fstat(file.fileno()).st_size
            first = _cut(file, start, size)
            last = _cut(file, start + length, size)
            file.seek(first)
            return Piece(_decode(file.read(last - first), path), start == 0, last == size)

    def split(self, fraction: float) -> tuple[Documents, Documents]:
        """Split the documents into (training, held-out) documents by a hash of their names, of which the
        share `fraction` is held out.

        If there is only one document, its last pieces are held out.

        Raises:
            ValueError: there is only one piece.
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
                "a part of it out; set data.heldout_path (--heldout=none writes a store without held-out documents)"
            )
        return self._subset(~held), self._subset(held)

    def split_first(self, count: int) -> tuple[Documents, Documents]:
        """Return two sets of documents, (training, held-out): the first `count` documents in listed order
        are held out, all others are for training.

        Raises:
            ValueError: no document would remain for training.
        """
        if count >= self.num_documents:
            raise ValueError(
                f"data.heldout_first={count} leaves none of the {self.num_documents} documents in {self._files[0].parent} for "
                "training; choose a smaller number, or set data.heldout_path"
            )
        held = np.cumsum(self.begins) <= count
        return self._subset(~held), self._subset(held)

    def _subset(self, mask: np.ndarray) -> Documents:
        """Return the documents' pieces for which `mask`, bool [pieces], is True, as a new object in the
        same order."""
        subset = object.__new__(Documents)
        subset.__dict__.update(self.__dict__)
        for name in ("_file", "_number", "_start", "lengths", "begins"):
            setattr(subset, name, getattr(self, name)[mask])
        return subset

    def _name(self, index: int) -> bytes:
        """Return the name of a piece's document, whose hash decides whether the document is held out:
        folder, file and offset.

        It does not contain the full path, so that a moved folder is split as before.
        """
        file = self._files[self._file[index]]
        return f"{file.parent.name}/{file.name}:{self._start[index]}".encode()

    def _record_text(self, record: bytes, where: str) -> tuple[str, str]:
        """Return (text, prompt) of a document that is a JSON value, given as bytes; `where` names its place
        in error messages."""
        try:
            fields = json.loads(record, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}, is not JSON: {short_text(error, 200)}") from error
        if self.format == "alpaca":
            return alpaca(fields, where)
        return text_field(fields, self.text_key, where), ""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; an error of the disk inside the `with` block has the file's name."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the text and JSONL files at these paths; a folder stands for the files in it, in sorted order.

    Raises:
        ValueError: a path does not exist, a file is not text, or a folder has no text or JSONL file.
    """
    files: list[Path] = []
    for given in paths:
        path = Path(given).expanduser().absolute()
        if not os.fspath(given):
            raise ValueError("a data path is empty; accepted are text and JSONL files, and folders")
        if path.is_file():
            with _opened(path) as file:
                if b"\0" in file.read(4096):
                    raise ValueError(
                        f"{path} is not text; accepted are text and JSONL files, not compressed"
                    )
            files.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"data path {str(given)!r} does not exist")
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        readable = [p for p in inside if p.suffix.lower() in TEXT_SUFFIXES + JSONL_SUFFIXES]
        if not readable:
            raise ValueError(
                f"{path} is neither a token store nor a folder with text: none of its "
                f"{len(inside)} files ends in {', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}"
            )
        if len(readable) < len(inside):
            others = sorted({p.suffix or p.name for p in inside} - {p.suffix for p in readable})
            message = (
                f"{path}: {len(inside) - len(readable)} of {len(inside)} files are not read, since their names do not end as "
                f"text or JSONL does: {', '.join(others[:8])}"
            )
            if message not in _skipped:
                _skipped.add(message)
                logging.warning("%s", message)
        files += readable
    return files


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in JSONL_SUFFIXES


def _jsonl_offsets(path: Path) -> np.ndarray:
    """Return the places of a JSONL file's records, [lines, 2]: offset and length in bytes of each line that
    is not blank."""
    with _opened(path) as file:
        return _offset_array(_lines(file, path))


def _array_offsets(path: Path) -> np.ndarray:
    """Return the places of the elements of a file's JSON array, [elements, 2]: offset and length in bytes
    of each.

    Raises:
        ValueError: the file is no JSON array; the message has the number of the element that cannot be read.
    """
    if (size := path.stat().st_size) > MAX_ARRAY_BYTES:
        raise ValueError(
            f"{path} has {size} bytes; accepted are JSON arrays of at most {MAX_ARRAY_BYTES}, and JSONL files of any size"
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    decoder, place, pairs = json.JSONDecoder(), _skip_space(text, 0), []
    if text[place : place + 1] != "[":
        raise ValueError(
            f"{path} is no JSON array; accepted are a list of objects, or JSONL with a name in {' or '.join(JSONL_SUFFIXES)}"
        )
    offset, counted = 0, 0  # bytes of the first `counted` characters
    place = _skip_space(text, place + 1)
    closed = text[place : place + 1] == "]"
    while not closed:
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, element {len(pairs)} of the array, is not JSON: {error}"
            ) from error
        offset += len(text[counted:place].encode())
        length = len(text[place:end].encode())
        pairs.append((offset, length))
        offset, counted = offset + length, end
        place = _skip_space(text, end)
        closed = text[place : place + 1] == "]"
        if not closed and text[place : place + 1] != ",":
            raise ValueError(
                f"{path}: no comma and no ] after element {len(pairs) - 1} of the array, at character {place}"
            )
        place = place if closed else _skip_space(text, place + 1)
    if (end := _skip_space(text, place + 1)) != len(text):
        raise ValueError(f"{path}: text after the array, at character {end}")
    return _offset_array(pairs)


def _skip_space(text: str, start: int) -> int:
    """Return the index of the first character of a JSON text from `start` on that is no white space."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def _lines(file: BinaryIO, path: Path) -> Iterable[tuple[int, int]]:
    """Yield (offset, length) in bytes of each line of the open binary file `path`, except blank lines.

    Raises:
        ValueError: a line is longer than `MAX_LINE_BYTES`.
    """
    start = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{path}, the line at byte {start}, has more than {MAX_LINE_BYTES} bytes; write one document to a line, or a "
                "long document to a text file of its own"
            )
        if not line.isspace():
            yield start, len(line)
        start += len(line)


def _text_offsets(path: Path, piece_bytes: int | None) -> np.ndarray:
    """Return the pieces of a text file, int [pieces, 2]: the offset and length in bytes of each, all of
    `piece_bytes` except the last. The borders are moved to line ends later, when a piece is read."""
    size = path.stat().st_size
    step = piece_bytes or max(size, 1)
    return _offset_array((start, min(step, size - start)) for start in range(0, size, step))


def _offset_array(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def _cut(file: BinaryIO, offset: int, size: int) -> int:
    """Return the first offset in bytes, at or after `offset`, at which a line of a text file begins; if none
    does within 4,096 bytes, the first one at which a UTF-8 character begins. `size` is the file's size."""
    if offset <= 0 or offset >= size:
        return min(max(offset, 0), size)
    file.seek(offset - 1)
    ahead = file.read(_NEWLINE_SEARCH)
    newline = ahead.find(b"\n")
    if newline >= 0:
        return offset + newline
    # Skip the continuation bytes of a UTF-8 character.
    skipped = 0
    while skipped < 3 and skipped + 1 < len(ahead) and ahead[skipped + 1] & 0xC0 == 0x80:
        skipped += 1
    return offset + skipped


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        logging.log_first_n(
            logging.WARNING,
            "%s is not UTF-8 (%s); the tokenizer 'bytes' encodes invalid bytes unchanged, others replace them by U+FFFD.",
            10,
            path,
            error,
        )
        return raw.decode("utf-8", "surrogateescape")
