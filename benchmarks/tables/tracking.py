"""The results tables about state tracking."""

from __future__ import annotations

import statistics

from benchmarks.tables.table import Column, Row, Table, column, measured, ordered

_ORDER = ("parity", "S3", "S5-swaps", "S5")
_EIGENVALUES = {"positive": "[0, 1]", "negative": "[-1, 1]"}


def _words(row: Row) -> list[str]:
    return row["model"].split("+")[1:]


def _eigenvalues(row: Row) -> str:
    return next((_EIGENVALUES[word] for word in _words(row) if word in _EIGENVALUES), "")


def _steps(row: Row) -> str:
    return next((word for word in _words(row) if word.isdecimal()), "")


def _later(accuracy: dict[str, float]) -> float:
    return list(accuracy.values())[-1]


def _spread(row: Row) -> str:
    later = [_later(member["accuracy"]) for member in row["members"]]
    return f"{statistics.median(later):.3f}, {min(later):.3f}"


TABLES = [
    Table(
        name,
        ("tracking.jsonl",),
        (
            column("task", "task"),
            Column("method", lambda row: f"`{row['model'].partition('+')[0]}`"),
            Column("eigenvalues", _eigenvalues),
            Column("steps", _steps),
            Column("trained lengths", lambda row: f"{next(iter(row['accuracy'].values())):.3f}"),
            Column("longer words", lambda row: f"{_later(row['accuracy']):.3f}"),
            Column("longer words, median and lowest", _spread),
            Column("words up to", lambda row: list(row["accuracy"])[-1].rpartition("-")[2]),
            column("training steps", "steps", "{:,}"),
            column("s", "seconds", "{:.0f}"),
            measured(),
        ),
        where=lambda row, size=size: row["size"] == size,
        key=lambda row: (row["task"], row["model"]),
        lines=lambda rows: sorted(
            rows, key=lambda row: (ordered(_ORDER, lambda r: r["task"])(row), -row["mean"])
        ),
        command=f"python -m benchmarks tracking{options} --output docs/tracking.jsonl",
    )
    for name, size, options in (("tracking", "small", ""),)
]
