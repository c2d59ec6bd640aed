"""Describe a results table, read its stored rows and write it as markdown.

A row is one JSON object of a file of JSON lines: what was measured, with its date, commit and device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Record = Any
"""The content of a line of a table: a row, or several rows that a table's `lines` joined."""


@dataclass(frozen=True)
class Column:
    """A column of a results table: its title, and the function from a record (one line of the table) to the
    text of its cell.
    """

    title: str
    cell: Callable[[Record], str]


@dataclass(frozen=True)
class Table:
    """A results table that is generated from stored rows.

    `files` are paths relative to docs/. The rows with `where(row)` true are read. Of rows with the same
    `key(row)` only the newest is used; without `key` all are. `lines` turns the rows into records, one for
    each line of the table, in order. `columns` is a tuple, or a function of the rows for a table whose columns
    depend on them. `command` is the command that measures the rows, one or several lines, or a function of the
    rows and the folder docs/ that returns it; `not_run` says why no test runs it, if none does; `caption` says whether the command and the origin of the rows are written
    around the table.
    """

    name: str
    files: tuple[str, ...]
    columns: tuple[Column, ...] | Callable[[list[Row]], tuple[Column, ...]]
    where: Callable[[Row], bool] = lambda row: True
    key: Callable[[Row], Hashable] | None = None
    lines: Callable[[list[Row]], Iterable[Record]] = list
    command: str | Callable[[list[Row], Path], str] = ""
    not_run: str = ""
    caption: bool = True

    def rows(self, docs: Path) -> list[Row]:
        """Return the stored rows that this table shows, oldest first; each has its file's name as
        `rows_file`.
        """
        rows = [row for name in self.files for row in read_rows(docs, name) if self.where(row)]
        rows.sort(
            key=lambda row: row.get("date", "")
        )  # stable: rows of one day stay in their file's order
        if self.key is not None:
            newest = {self.key(row): row for row in rows}
            rows = [row for row in rows if newest[self.key(row)] is row]
        return rows

    def markdown(self, docs: Path, page: Path) -> str:
        """Return this results table as markdown for the file `page`, with its command and the origin of its
        rows.

        Raises:
          ValueError: If no stored row belongs to the table.
        """
        rows = self.rows(docs)
        if not rows:
            raise ValueError(f"table {self.name}: no row of {', '.join(self.files)} belongs to it")
        columns = self.columns(rows) if callable(self.columns) else self.columns
        cells = [[column.title for column in columns], ["---"] * len(columns)]
        cells += [[column.cell(record) for column in columns] for record in self.lines(rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in cells)
        if not self.caption:
            return table
        given = self.command(rows, docs) if callable(self.command) else self.command
        command = "\n".join("    " + line for line in given.splitlines())
        reason = f"<!-- not run: {self.not_run} -->" if command and self.not_run else ""
        return "\n\n".join(
            part for part in (reason, command, table, origin(rows, docs, page)) if part
        )


@dataclass(frozen=True)
class Section(Table):
    """A table below a heading and a text, all of which a page has only if there is a row."""

    heading: str = ""
    text: str = ""

    def markdown(self, docs: Path, page: Path) -> str:
        """Return heading, text and table; "" without a row."""
        if not self.rows(docs):
            return ""
        return "\n\n".join((self.heading, self.text, super().markdown(docs, page)))


def read_rows(docs: Path, name: str) -> list[Row]:
    """Return the stored rows of the file of JSON lines `name` in the folder `docs`, in the file's order."""
    lines = (docs / name).read_text().splitlines()
    return [{**json.loads(line), "rows_file": name} for line in lines if line.strip()]


def origin(rows: list[Row], docs: Path, page: Path) -> str:
    """Return a markdown sentence that says where `rows` were measured: devices, dates and commits, with
    links to their files.
    """
    devices = dict.fromkeys(row["device"] for row in rows if "device" in row)
    days: dict[str, dict[str, None]] = {}
    for row in rows:
        if "date" in row:
            days.setdefault(row["date"], {})[row["commit"] or "commit not recorded"] = None
    when = "; ".join(f"{date} ({', '.join(commits)})" for date, commits in sorted(days.items()))
    files = []
    for name, of_file in group(rows, lambda row: row["rows_file"]).items():
        target = Path(docs / name).relative_to(page.parent, walk_up=True)
        sources = dict.fromkeys(row["source"] for row in of_file if "source" in row)
        copied = f" (copied from {' and '.join(sources)})" if sources else ""
        files.append(f"[{Path(name).name}]({target.as_posix()}){copied}")
    return f"{', '.join(devices)}; {when}. Rows: {', '.join(files)}."


def newest(rows: Iterable[Row], **fields: Any) -> Row:
    """Return the last of the stored rows whose fields have these values; a missing field counts as None.

    Raises:
      LookupError: If there is no such row.
    """
    matching = [row for row in rows if matches(row, **fields)]
    if not matching:
        raise LookupError(f"no stored row with {fields}")
    return matching[-1]


def matches(row: Row, **fields: Any) -> bool:
    """Return whether the fields of `row` have these values; a missing field counts as None."""
    return all(row.get(name) == value for name, value in fields.items())


def group(rows: Iterable[Row], by: Callable[[Row], Hashable]) -> dict[Any, list[Row]]:
    """Return a dict from each value that the function `by` returns for the rows of a results file to the list
    of rows with that value, in order of first appearance.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return groups


def ordered(order: Iterable[Any], value: Callable[[Row], Any]) -> Callable[[Row], int]:
    """Return a function that sorts rows: it gives the position of `value(row)` in `order`; values that are
    not in it come last.
    """
    positions = {item: i for i, item in enumerate(order)}
    return lambda row: positions.get(value(row), len(positions))


def column(title: str, field: str, form: str = "{}", scale: float = 1) -> Column:
    """Return a table column with one field of the rows, divided by `scale` and formatted by `form`; empty
    where a row lacks the field.

    `field` may be a path with dots into nested objects: "packed.forward_ms".
    """

    def cell(row: Row) -> str:
        value: Any = row
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return ""
        return form.format(value if scale == 1 else value / scale)

    return Column(title, cell)


def pair(title: str, field: str) -> Column:
    """Return a table column, with this title, for a field of stored rows that has two times in ms: forward,
    and forward and backward.
    """
    return Column(title, lambda row: times(row[field]) if field in row else "")


def measured() -> Column:
    """Return the table column that says when a row was measured and at which commit."""
    return Column("date, commit", lambda row: f"{row['date']}, {row['commit']}")


def times(values: Iterable[float]) -> str:
    """Return the text of a cell with two times in ms, "forward / forward and backward"."""
    return " / ".join(map(time_text, values))


def time_text(value: float) -> str:
    """Return the text of a time with four significant digits, at most three of them decimals: 0.169, 13.16,
    118.0.
    """
    return f"{value:.{min(3, max(0, 3 - _exponent(value)))}f}"


def significant(value: float, digits: int = 3) -> str:
    """Return the text of a number rounded to `digits` significant digits, without an exponent: 0.606, 13.2,
    30,600.
    """
    decimals = digits - 1 - _exponent(value)
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0
