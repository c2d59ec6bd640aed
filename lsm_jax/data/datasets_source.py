"""Read data sets of Hugging Face's package `datasets`: a folder that `save_to_disk` wrote, or one of the hub by its id,
streamed. Their documents are written to the cache as JSONL (`lsm_jax.data.unpack`), with the columns that are read.

    my_dataset                                              the split "train"
    my_dataset:validation
    HuggingFaceFW/fineweb-edu/sample-10BT@REVISION:train[:10000]      OWNER/NAME[/SUBSET][@REVISION][:SPLIT]
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lsm_jax import hub
from lsm_jax.data.instructions import short_text
from lsm_jax.data.unpack import check_columns, write_rows, written_once
from lsm_jax.files import write_atomically

_SPLIT = re.compile(r"(\w[\w.-]*)(?:\[(\d*):(\d*)\])?", re.ASCII)
_MARKS = ("dataset_dict.json", "state.json")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A split of a data set, as `FOLDER[:SPLIT]` or `OWNER/NAME[/SUBSET][@REVISION][:SPLIT]` names it.

    Attributes:
        where: the folder that `save_to_disk` wrote, or the data set of the hub.
        split: the name of the split; "" is "train".
        first: the number of the first row that is read, from 0.
        last: the number of the row after the last; None is the end.
    """

    where: Path | hub.Reference
    split: str = ""
    first: int = 0
    last: int | None = None

    def __str__(self) -> str:
        rows = f"[{self.first or ''}:{'' if self.last is None else self.last}]"
        sliced = rows if rows != "[:]" else ""
        return (
            f"{self.where}:{self.split or 'train'}{sliced}"
            if self.split or sliced
            else str(self.where)
        )


def data_set(text: str | os.PathLike[str]) -> DataSet | None:
    """Return the data set that a text names; None if it names none, such as the path of another file or folder.

    Raises:
        ValueError: the split has not the form NAME or NAME[FIRST:LAST].
    """
    text = os.fspath(text)
    place, colon, split = text, "", ""
    if not os.path.lexists(Path(text).expanduser()):
        place, colon, split = text.partition(":")
    folder = Path(place).expanduser()
    where = folder.absolute() if _is_saved(folder) else hub.reference(place)
    if where is None:
        return None
    match = _SPLIT.fullmatch(split)
    if match is None:
        if colon:
            raise ValueError(
                f"{text}: the split is {split!r}; accepted are a name, such as train, and train[FIRST:LAST]"
            )
        return DataSet(where)
    last = int(match[3]) if match[3] else None
    return DataSet(where, match[1], int(match[2] or 0), last)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def pinned_data(text: str, argument: str, cache: Path, *, before: str = "") -> str:
    """Return the name of a data set of the hub with the commit that its revision is now; other texts are returned unchanged.

    Args:
        text: the name, or any other text, such as a path.
        argument: the name of the argument that contains it, for error messages.
        cache: the folder for plain files.
        before: the name with its commit that the same run had earlier, which is used if it is of the same data set.

    Raises:
        ValueError: the hub has no such data set or revision, or cannot be reached and the cache does not have it.
    """
    found = data_set(text) if text else None
    if found is None or not isinstance(found.where, hub.Reference) or found.where.is_pinned:
        return text
    old = data_set(before) if before else None
    if old and isinstance(old.where, hub.Reference) and hub.is_same(found.where, old.where):
        return str(dataclasses.replace(found, where=old.where))
    return str(_pinned(found, argument, cache))


def _pinned(found: DataSet, argument: str, cache: Path) -> DataSet:
    """Return the data set with its revision's commit. A commit that was found once is stored in the cache, for later
    calls without a network."""
    where = found.where
    assert isinstance(where, hub.Reference)
    if where.is_pinned:
        return found
    name = f"{where.id}@{where.revision or 'main'}".replace("/", "--")
    stored = cache / "unpacked" / "revisions" / name
    try:
        commit = hub.commit_of(where, argument, data=True)
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stored, commit)
    except ValueError as error:
        if (error.__cause__ and hub.is_refusal(error.__cause__)) or not stored.is_file():
            raise
        commit = stored.read_text()
    return dataclasses.replace(found, where=dataclasses.replace(where, revision=commit))


def unpacked_data_set(found: DataSet, columns: Sequence[str], cache: Path) -> Path:
    """Return the JSONL file with the documents of a data set; the first call writes it.

    Args:
        found: the data set.
        columns: the fields of a document that are read.
        cache: the folder for plain files.

    Raises:
        ValueError: the data set, a split or a column does not exist, a row has no text (the message names it), or the
            package `datasets` is not installed.
    """
    if isinstance(found.where, Path):
        identity = [str(found.where), *map(list, files_of(found.where))]
    else:
        found = _pinned(found, "data set", cache)
        identity = [str(found.where)]

    def write(file: BinaryIO) -> None:
        rows = _open(found)
        names = rows.column_names
        if names is not None:
            check_columns(names, columns, found)
            rows = rows.select_columns([name for name in columns if name in names])
        selected = itertools.islice(rows, found.first, found.last)
        try:
            write_rows(selected, columns, found, file, first=found.first)
        except Exception as error:  # of the network, or of the reader of any file format
            raise _explained(error, found) from error
        if not file.tell():
            raise ValueError(f"{found} has no rows")

    rows = [found.split or "train", found.first, found.last]
    return written_once(cache, [*identity, *rows, list(columns)], "rows.jsonl", write, found)


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return (name, size, time of change) of each file in the folder of a data set that `save_to_disk` wrote."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    status = [p.stat() for p in files]
    names = [p.relative_to(folder).as_posix() for p in files]
    return [(n, s.st_size, s.st_mtime_ns) for n, s in zip(names, status, strict=True)]


def _open(found: DataSet) -> Any:
    """Return the rows of a data set: a Dataset of its folder, or an IterableDataset of the hub."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{found} requires the package datasets, of the extra [datasets]: pip install 'lsm_jax[datasets]'"
        ) from error
    split = found.split or "train"
    try:
        if isinstance(found.where, hub.Reference):
            return datasets.load_dataset(
                found.where.id,
                found.where.rest or None,
                split=split,
                revision=found.where.revision,
                streaming=True,
            )
        rows = datasets.load_from_disk(str(found.where))
    except Exception as error:
        raise _explained(error, found) from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise ValueError(
                f"{found.where} has no split {split!r}; it has {', '.join(map(str, rows))}"
            )
        rows = rows[split]
    elif found.split and str(rows.split) != found.split:
        raise ValueError(
            f"{found.where} is the split {str(rows.split)!r} alone, not {found.split!r}"
        )
    return rows.with_format(None)


def _explained(error: Exception, found: DataSet) -> ValueError:
    """Return the error of one line for an error of the package datasets."""
    if isinstance(error, ValueError) and str(found) in str(error):
        return error
    cause: BaseException | None = error
    while cause is not None and isinstance(found.where, hub.Reference):
        if hub.is_refusal(cause):
            return ValueError(hub.explain(cause, found.where, "data set", "dataset"))
        cause = cause.__cause__ or cause.__context__
    return ValueError(f"the data set {found} cannot be read: {short_text(error, 300)}")
