"""Read documents from text, JSON, JSONL and parquet files and data sets in any order; long ones are cut into pieces."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from absl import logging

from lsm_jax.data.document_files import (
    ARRAY_SUFFIX,
    JSONL_SUFFIXES,
    is_jsonl,
    is_table,
    list_files,
    opened,
    plain_file,
)
from lsm_jax.data.instructions import alpaca, short_text, text_field
from lsm_jax.data.unpack import cache_root, columns_of
from lsm_jax.files import unique_keys

MAX_LINE_BYTES = 1 << 26  # of a line of a JSONL file
MAX_ARRAY_BYTES = 1 << 27  # of a JSON array, which is read at once
_NEWLINE_SEARCH = 4096  # bytes that are searched for a newline at which to cut
_told: set[Path] = set()  # the files about whose held-out end a warning was logged


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
    """The documents in files and data sets as a sequence of pieces (contiguous parts), in listed order.
    Only the pieces' offsets and lengths are in memory.

    Each line of a JSONL file is a document of one piece, and so is each element of the array in a .json file and each
    row of a parquet file or data set. Every other file is one document, cut at line ends into pieces of about
    `piece_bytes`, so that a single long file can be shuffled and read in parallel. Compressed files, parquet files and
    data sets are first written as plain files to the cache (`lsm_jax.data.unpack`).

    Attributes:
        lengths: [pieces], bytes of each piece in its file.
        begins: [pieces], whether each piece begins its document.
    """

    _divided_at: int | None = None  # where `split` divided a text file, in bytes

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        text_key: str = "text",
        format: str = "text",
        piece_bytes: int | None = 1 << 16,
        cache_dir: str | os.PathLike[str] = "",
    ):
        """Find the files at these paths, and the place of every piece of their documents: a piece is a document, or a
        contiguous part of a long text file.

        Args:
            paths: files, data sets (`lsm_jax.data.datasets_source`), or folders that are searched for files as
                `list_files` says, in sorted order.
            text_key: name of the field or column that has the text.
            format: "text" or "alpaca"; see `DataConfig`. Files in `ARRAY_SUFFIX` are arrays of objects;
                folders are not searched for them.
            piece_bytes: bytes of a piece of a long text file; None does not cut text files.
            cache_dir: folder of the plain files; "" is the user's cache folder.

        Raises:
            ValueError: a path does not exist, a file has the wrong suffix for `format`, is damaged or is no JSON array, or
                all files are empty.
        """
        self.text_key, self.format = text_key, format
        self._piece_bytes = piece_bytes
        self._originals = list_files(paths)
        cache, columns = cache_root(os.fspath(cache_dir)), columns_of(text_key, format)
        self._files = [plain_file(path, columns, cache) for path in self._originals]
        if format != "text" and (other := [p for p in self._files if not self._has_records(p)]):
            suffixes = " or ".join((*JSONL_SUFFIXES, ARRAY_SUFFIX))
            raise ValueError(
                f"data.format={format!r} requires files that end in {suffixes}, parquet files or data sets, but {other[0]} does "
                "not"
            )
        self._tables = [is_table(path) for path in self._originals]
        offsets = [self._offsets(*pair) for pair in zip(self._files, self._originals, strict=True)]
        self._file = np.repeat(np.arange(len(offsets)), [len(o) for o in offsets])
        all_offsets = np.concatenate([np.zeros((0, 3), np.int64), *offsets])
        self._start, self.lengths, self._number = all_offsets.T
        self.begins = np.array([self._has_records(p) for p in self._files], bool)[self._file] | (
            self._start == 0
        )
        if not self.lengths.sum():
            raise ValueError(f"no text in {[str(p) for p in paths]}: every file is empty")

    def _has_records(self, path: Path) -> bool:
        """Return whether a file's documents are JSON values (its lines, or the elements of an array) and
        not plain text."""
        return is_jsonl(path) or self._is_array(path)

    def _is_array(self, path: Path) -> bool:
        return path.suffix.lower() == ARRAY_SUFFIX

    def _offsets(self, path: Path, original: Path) -> np.ndarray:
        """Return where the documents of a file are, cut into pieces, [pieces, 3]: offset and length in
        bytes of each piece, and the number of its line or element from 0. `original` is the file's name in messages."""
        if self._is_array(path):
            return _array_offsets(path, original)
        if is_jsonl(path):
            return _jsonl_offsets(path, original)
        return _text_offsets(path, self._piece_bytes)

    def __len__(self) -> int:
        return len(self._file)

    @property
    def num_documents(self) -> int:
        """The number of different documents to which the pieces belong."""
        return int(self.begins.sum())

    def __getitem__(self, index: int) -> Piece:
        path, original = self._files[self._file[index]], self._originals[self._file[index]]
        start, length = int(self._start[index]), int(self.lengths[index])
        with opened(path) as file:
            if self._has_records(path):
                file.seek(start)
                where = f"{original}, {self._place(index)}"
                text, prompt = self._record_text(file.read(length), where)
                return Piece(text, True, True, prompt)
            size = os.fstat(file.fileno()).st_size
            first, last = (self._border(file, x, size) for x in (start, start + length))
            file.seek(first)
            return Piece(_decode(file.read(last - first), original), start == 0, last == size)

    def _border(self, file: BinaryIO, offset: int, size: int) -> int:
        """Return `_cut` of a piece's border, but no offset behind the place where the text is divided for a border before it."""
        at, divided = _cut(file, offset, size), self._divided_at
        return at if divided is None or offset > divided else min(at, divided)

    def check_all(self) -> None:
        """Read all documents: raise ValueError, with its file and place, if one cannot be read."""
        for index in range(len(self)):
            self[index]

    def _place(self, index: int) -> str:
        """Return the place of a document that is a JSON value in its original file, for error messages."""
        number, file = int(self._number[index]), self._file[index]
        if self._is_array(self._files[file]):
            return f"element {number} of the array"
        if self._tables[file]:
            return f"row {number}"
        return f"line {number + 1}, at byte {self._start[index]}"

    def split(self, fraction: float, row_bytes: int | None = None) -> tuple[Documents, Documents]:
        """Split the documents into (training, held-out) documents by a hash of their names, of which the
        share `fraction` is held out.

        If there is only one document, a text file, its end is held out: the share `fraction` of its bytes from the beginning of a
        line on (of a character, if no line that leaves a row to train on begins within 4,096 bytes), and at least a row, about
        which a warning tells.

        Args:
            fraction: the share.
            row_bytes: bytes of text that fill a row; None does not divide a single document.

        Raises:
            ValueError: there is only one document, and it is shorter than two rows or must not be divided; or it is a record
                that cannot be read, which the message says first.
        """
        count = self.num_documents
        if count == 1:
            return self._split_text(fraction, row_bytes)
        document = np.cumsum(self.begins) - 1
        names = [self._name(i) for i in np.flatnonzero(self.begins).tolist()]
        order = sorted(range(count), key=lambda i: hashlib.blake2b(names[i]).digest())
        held = np.zeros(count, bool)
        held[order[: min(max(round(fraction * count), 1), count - 1)]] = True
        held = held[document]
        return self._subset(~held), self._subset(held)

    def _split_text(self, fraction: float, row_bytes: int | None) -> tuple[Documents, Documents]:
        """Return (training, held-out) documents of a single document, as `split` says."""
        path, size = self._files[self._file[0]], int(self.lengths.sum())
        original = self._originals[self._file[0]]
        elsewhere = "more documents, or data.heldout_path (of the command tokenize: --heldout=none"
        if row_bytes is None or self._has_records(path):
            self.check_all()
            raise ValueError(
                f"{original} is one document of {size} bytes that cannot be divided, so that none is held out; accepted are "
                f"{elsewhere}, or --pack, which divides a text file)"
            )
        wanted = max(round(fraction * size), row_bytes)
        if size - wanted < row_bytes:
            raise ValueError(
                f"{original} is one document of {size} bytes: too short to hold out {wanted} (data.heldout_fraction={fraction}, "
                f"and at least a row) and to train on a row, {row_bytes} bytes; accepted are texts of {2 * row_bytes} bytes or "
                f"more, smaller fractions, shorter rows, {elsewhere})"
            )
        start = _line_before(path, size - wanted, row_bytes)
        if fraction * size < row_bytes and original not in _told:
            _told.add(original)
            logging.warning(
                "%s: its last %d of %d bytes (%.1f %%) are held out: the share data.heldout_fraction=%s is less than a row.",
                original, size - start, size, 100 * (1 - start / size), fraction,
            )  # fmt: skip
        at = int(np.searchsorted(self._start, start, side="left")) - 1  # the piece to divide
        train, held = self._subset(slice(at + 1)), self._subset(slice(at, None))
        train.lengths, held.lengths = train.lengths.copy(), held.lengths.copy()
        train.lengths[-1] = start - self._start[at]
        held.lengths[0] -= train.lengths[-1]
        held._start = np.array([start, *held._start[1:]])
        train._divided_at = held._divided_at = start
        held.begins = np.zeros(len(held), bool)
        return train, held

    def split_first(self, count: int) -> tuple[Documents, Documents]:
        """Return two sets of documents, (training, held-out): the first `count` documents in listed order
        are held out, all others are for training.

        Raises:
            ValueError: no document would remain for training.
        """
        if count >= self.num_documents:
            raise ValueError(
                f"data.heldout_first={count} leaves none of the {self.num_documents} documents in {self._originals[0].parent} for "
                "training; choose a smaller number, or set data.heldout_path"
            )
        held = np.cumsum(self.begins) <= count
        return self._subset(~held), self._subset(held)

    def _subset(self, which: np.ndarray | slice) -> Documents:
        """Return the documents' pieces that a mask, bool [pieces], or a slice selects, as a new object in the same order."""
        subset = object.__new__(Documents)
        subset.__dict__.update(self.__dict__)
        for name in ("_file", "_number", "_start", "lengths", "begins"):
            setattr(subset, name, getattr(self, name)[which])
        return subset

    def _name(self, index: int) -> bytes:
        """Return the name of a piece's document, whose hash decides whether the document is held out:
        folder, file and offset.

        It does not contain the full path, so that a moved folder is split as before.
        """
        file = self._originals[self._file[index]]
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


def _jsonl_offsets(path: Path, original: Path) -> np.ndarray:
    """Return the places of a JSONL file's records, [lines, 3]: offset and length in bytes, and the number, of each line
    that is not blank."""
    with opened(path) as file:
        return _offset_array(_lines(file, original))


def _array_offsets(path: Path, original: Path) -> np.ndarray:
    """Return the places of the elements of a file's JSON array, [elements, 3]: offset and length in bytes
    of each, and its number. `original` is the file's name in error messages.

    Raises:
        ValueError: the file is no JSON array; the message has the number of the element that cannot be read.
    """
    if (size := path.stat().st_size) > MAX_ARRAY_BYTES:
        raise ValueError(
            f"{original} has {size} bytes; accepted are JSON arrays of at most {MAX_ARRAY_BYTES}, and JSONL files of any size"
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{original} is not UTF-8: {error}") from error
    decoder, place, pairs = json.JSONDecoder(), _skip_space(text, 0), []
    if text[place : place + 1] != "[":
        raise ValueError(
            f"{original} is no JSON array; accepted are a list of objects, or JSONL with a name in {' or '.join(JSONL_SUFFIXES)}"
        )
    offset, counted = 0, 0  # bytes of the first `counted` characters
    place = _skip_space(text, place + 1)
    closed = text[place : place + 1] == "]"
    while not closed:
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{original}, element {len(pairs)} of the array, is not JSON: {error}"
            ) from error
        offset += len(text[counted:place].encode())
        length = len(text[place:end].encode())
        pairs.append((offset, length, len(pairs)))
        offset, counted = offset + length, end
        place = _skip_space(text, end)
        closed = text[place : place + 1] == "]"
        if not closed and text[place : place + 1] != ",":
            raise ValueError(
                f"{original}: no comma and no ] after element {len(pairs) - 1} of the array, at character {place}"
            )
        place = place if closed else _skip_space(text, place + 1)
    if (end := _skip_space(text, place + 1)) != len(text):
        raise ValueError(f"{original}: text after the array, at character {end}")
    return _offset_array(pairs)


def _skip_space(text: str, start: int) -> int:
    """Return the index of the first character of a JSON text from `start` on that is no white space."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def _lines(file: BinaryIO, path: Path) -> Iterable[tuple[int, int, int]]:
    """Yield (offset, length, number) of each line of the open binary file `path`, in bytes and from 0, except blank lines.

    Raises:
        ValueError: a line is longer than `MAX_LINE_BYTES`.
    """
    start = number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{path}, line {number + 1}, at byte {start}, has more than {MAX_LINE_BYTES} bytes; write one document to a line, or a "
                "long document to a text file of its own"
            )
        if not line.isspace():
            yield start, len(line), number
        start += len(line)
        number += 1


def _text_offsets(path: Path, piece_bytes: int | None) -> np.ndarray:
    """Return the pieces of a text file, int [pieces, 3]: the offset and length in bytes and the number of each, all of
    `piece_bytes` except the last. The borders are moved to line ends later, when a piece is read."""
    size = path.stat().st_size
    step = piece_bytes or max(size, 1)
    return _offset_array(
        (start, min(step, size - start), start // step) for start in range(0, size, step)
    )


def _offset_array(places: Iterable[tuple[int, int, int]]) -> np.ndarray:
    return np.array(list(places), np.int64).reshape(-1, 3)


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


def _line_before(path: Path, offset: int, least: int) -> int:
    """Return the last offset in bytes, at or before `offset` and from `least` on, at which a line of a text file begins; if none
    does within 4,096 bytes, the last one at which a UTF-8 character begins."""
    first = max(offset - _NEWLINE_SEARCH, least - 1)
    with opened(path) as file:
        file.seek(first)
        ahead = file.read(offset - first + 1)
    newline = ahead.rfind(b"\n", 0, offset - first)
    if newline >= 0:
        return first + newline + 1
    # Skip the continuation bytes of a UTF-8 character backwards.
    skipped = 0
    while skipped < min(3, offset - least) and ahead[offset - first - skipped] & 0xC0 == 0x80:
        skipped += 1
    return offset - skipped


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
