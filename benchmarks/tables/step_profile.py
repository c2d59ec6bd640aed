"""The results table of where a training step's time goes, beside release 0.1."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.tables.table import Column, Row, Table, group

RELEASE = "release 0.1"  # in place of a commit, in the rows of docs/results/step_profile.jsonl
CATEGORIES = {
    "matrix products": "matrix products",
    "fused kernels": "fused kernels",
    "elementwise and reductions": "elementwise",
    "copies and fills": "copies and fills",
}
"""The categories of `lsm_jax.training.device_times` on one card that the table has, and their columns."""

Pair = tuple[Row | None, Row]
"""The row of release 0.1 of a model, if there is one, and its newest row."""


def lines(rows: list[Row]) -> list[Pair]:
    """Return, for each model, the row of release 0.1, if there is one, and the newest one, in the order of the latter."""
    newest_of: list[Pair] = []
    for of in group(rows, lambda row: (row["variant"], row["rows"], row["length"])).values():
        before = [row for row in of if row["commit"] == RELEASE]
        after = [row for row in of if row["commit"] != RELEASE]
        if after:
            newest_of.append((before[-1] if before else None, after[-1]))
    return newest_of


def left(row: Row) -> float:
    """Return the milliseconds of a row's step that no category has: waits between kernels, and what was not attributed."""
    return row["milliseconds"] - sum(row["categories"].get(name, 0.0) for name in CATEGORIES)


def _column(title: str, value: Callable[[Row], float]) -> Column:
    def cell(pair: Pair) -> str:
        return ", ".join(f"{value(row):.0f}" for row in pair if row is not None)

    return Column(title, cell)


TABLES = [
    Table(
        "model_step_profile",
        ("results/step_profile.jsonl", "model_step.jsonl"),
        (
            Column("model", lambda pair: f"`{pair[1]['variant']}`"),
            Column("rows", lambda pair: f"{pair[1]['rows']} x {pair[1]['length']:,}"),
            _column("step", lambda row: row["milliseconds"]),
            *(
                _column(title, lambda row, name=name: row["categories"].get(name, 0.0))
                for name, title in CATEGORIES.items()
            ),
            _column("rest", left),
            Column("commit", lambda pair: pair[1]["commit"]),
        ),
        where=lambda row: "categories" in row,
        key=lambda row: (
            row["variant"],
            row["rows"],
            row["length"],
            row["commit"] == RELEASE,
        ),
        lines=lines,
        command="python -m benchmarks model_step --variants gla-340m,softmax-340m --lengths 2048 "
        "--remat dots_and_states --profile profiles     # 1.3B: --lengths 4096",
    )
]
