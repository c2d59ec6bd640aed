"""Read the data sets of the harness's tasks from a local folder instead of the hub."""

from __future__ import annotations

import contextlib
import csv
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsm_jax.data.documents import MAX_LINE_BYTES
from lsm_jax.files import bounded_json, parse_json, reason

MAX_JSON_BYTES = 1 << 28  # of a .json file, which is read at once
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_FILE_KINDS = ("json", "csv", "parquet", "text")  # data sets of files that the task names
_HUB_SECONDS = 5.0
# LongBench's own files name the question "input"; the harness's tasks read "question".
_RENAMED = {"longbench": {"input": "question"}}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a data set's .jsonl, .json (a list of objects), .parquet or .csv file, one dict
    per row.

    Raises:
        ValueError: the file does not exist, or has another suffix or another content.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: accepted are files that end in {', '.join(_SUFFIXES)}")
    if path.suffix == ".json":
        rows = bounded_json(path, max_bytes=MAX_JSON_BYTES, accepted=object)
    else:
        rows = list(_json_lines(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: accepted is a list of objects, one per row")
    return rows


def _json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line of a .jsonl file that is not blank.

    Raises:
        ValueError: a line is too long, not UTF-8 or no JSON; the message has its number.
    """
    with open(path, "rb") as file:
        number = 1
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}, line {number}, has more than {MAX_LINE_BYTES} bytes; accepted is one row per line"
                )
            if not line.isspace():
                yield parse_json(line, f"{path}: not JSON: line {number}", accepted=object)
            number += 1


def find_splits(folder: Path, name: str, config: str | None) -> dict[str, list[Path]]:
    """Return the files of a data set in a local folder, by split (such as "test"); empty if the folder does
    not have the data set.

    The layouts are those of the hub's repositories: `NAME[/CONFIG][/data]/SPLIT[-00000-of-00001].SUFFIX`,
    where NAME is the hub's, such as cais/mmlu, or its last part. LongBench's own `NAME[/data]/CONFIG.jsonl`
    is the split "test".
    """
    for base in (folder / name, folder / name.rpartition("/")[2]):
        places = [base / config] if config else []
        # The files beside the folders of configs belong to no config, unless there is one config only.
        if not config or not _has_configs(base):
            places.append(base)
        for place in (path for first in places for path in (first, first / "data")):
            splits: dict[str, list[Path]] = {}
            for path in sorted(place.iterdir()) if place.is_dir() else ():
                match = re.fullmatch(
                    r"(train|validation|dev|test|auxiliary_train)(-\d+-of-\d+.*)?", path.stem
                )
                if match and path.suffix in _SUFFIXES:
                    splits.setdefault(match[1], []).append(path)
            if splits:
                return splits
        for path in (base / f"{config}.jsonl", base / "data" / f"{config}.jsonl") if config else ():
            if path.is_file():
                return {"test": [path]}
    return {}


def _has_configs(base: Path) -> bool:
    return base.is_dir() and any(p.is_dir() and p.name != "data" for p in base.iterdir())


class _Splits(dict):
    """The splits of a data set from a local folder, by name; asking for a split that the folder does not
    have raises an error that names the folder."""

    def __init__(self, splits: dict[str, Any], name: str, folder: Path):
        super().__init__(splits)
        self._name, self._folder = name, folder

    def __missing__(self, split: str) -> Any:
        raise ValueError(
            f"lm_eval.data={str(self._folder)!r}: {self._name} has no split {split!r}, only {', '.join(self)}"
        )


def load_local(folder: Path, name: str, config: str | None) -> dict[str, Any] | None:
    """Load a data set from the files of the folder `folder`, as the object with splits that the harness's
    tasks read; None if the folder does not have it."""
    splits = find_splits(folder, name, config)
    if not splits:
        return None
    from datasets import Dataset

    renamed = _RENAMED.get(name.rpartition("/")[2].lower(), {})
    loaded = {}
    for split, paths in splits.items():
        rows = [row for path in paths for row in read_rows(path)]
        if not rows:
            raise ValueError(f"lm_eval.data={str(folder)!r}: {paths[0]} has no rows")
        for old, new in renamed.items():
            rows = [
                {new if k == old and new not in row else k: v for k, v in row.items()}
                for row in rows
            ]
        loaded[split] = Dataset.from_list(rows)
    # The harness reads the training split of every task that names it, even if no prompt has examples.
    loaded.setdefault("train", Dataset.from_list([]))
    return _Splits(loaded, name, folder)


@contextlib.contextmanager
def local_datasets(folder: Path | None) -> Iterator[list[str]]:
    """Replace `datasets.load_dataset`, inside a `with` block, by a function that reads a data set from
    `folder` if the folder has it, and from the hub otherwise.

    If the hub does not answer, data sets in its local cache are still read, and others raise a ConnectionError at once; the
    hub's client would try again for 20 seconds.

    Yields:
        A list, to which the name of each data set that is not read from the folder is appended when it is
        loaded.
    """
    import datasets

    module: Any = datasets  # so that the type checker accepts another function
    original, elsewhere = module.load_dataset, []

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        if folder is not None and path not in _FILE_KINDS:
            local = load_local(folder, path, name)
            if local is not None:
                return local
        elsewhere.append(f"{path}/{name}" if name else path)
        if path in _FILE_KINDS:
            return original(path=path, name=name, **options)
        problem = hub_problem()
        if problem is None:
            return original(path=path, name=name, **options)
        try:
            with _offline():
                return original(path=path, name=name, **options)
        except Exception as error:  # of several types, for a data set that is not in the cache
            raise ConnectionError(
                f"{problem}, and it is not in the local cache of the hub; restore the connection, or give its files by "
                "--lm_eval.data=FOLDER (docs/suites.md)"
            ) from error

    hub_problem = functools.cache(_hub_problem)
    module.load_dataset = load
    try:
        yield elsewhere
    finally:
        module.load_dataset = original


def _hub_problem() -> str | None:
    """Return why the hub cannot be used; None if it answers a request within `_HUB_SECONDS`."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "the hub is not asked, since HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # the HTTP client differs between versions of the hub's package
        return f"the hub {constants.ENDPOINT} cannot be reached ({reason(error)})"
    return None


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let the packages of the hub read only their local cache inside a `with` block."""
    import datasets
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
