"""The results tables about associative recall: all methods, and Mixture-of-Memories in comparison with one
memory of equal size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.tables.table import Column, Row, Table, column, measured

MEMORIES = {"1": "one memory", "2": "two memories", "4": "four memories", "8": "eight memories"}


def state_bytes(row: Row) -> int:
    """Return the bytes of the decode state of the model that a row of recall results describes, as the
    published figure counts them: its memories, and three tokens for each gated convolution, at 4 bytes per
    number.
    """
    convolutions = 3 * row["width"] * row["pattern"].count("C")
    return 4 * (sum(row["state_size"]["memory"]) + convolutions)


def memory_name(model: str) -> str:
    """Return a model of `mom_recall` in words: "mom-2-shared" is "two memories, and a shared one"."""
    if model == "inner":
        return "the inner mixer"
    if not model.startswith("mom-"):
        return f"`{model}`"
    return MEMORIES[model.split("-")[1]] + (
        ", and a shared one" if model.endswith("-shared") else ""
    )


def _accuracy(row: Row) -> float:
    return list(row["accuracy"].values())[-1]


def _spread(title: str, of: str) -> Column:
    function = {"median": statistics.median, "lowest": min}[of]
    return Column(
        title, lambda row: f"{function([member['mean'] for member in row['members']]):.3f}"
    )


def _memory_table(name: str, command: str, best: str, *more: Column) -> Table:
    return Table(
        name,
        (f"{name}.jsonl",),
        (
            Column("model", lambda row: memory_name(row["model"])),
            column("numbers in the memory", "memory", "{:,}"),
            column("parameters", "parameters", "{:,}"),
            Column(best, lambda row: f"{_accuracy(row):.3f}"),
            *more,
        ),
        key=lambda row: row["model"],
        lines=lambda rows: sorted(rows, key=lambda row: (row["memory"], row["model"])),
        command=command,
    )


def _by_width(rows: list[Row]) -> list[tuple[Row, Row | None]]:
    """Return pairs (measured recall row, published row or None), ordered by width and then by accuracy, the
    best first.
    """
    published = {(_method(row), row["width"]): row for row in rows if "suite" not in row}
    ours = sorted(
        (row for row in rows if "suite" in row), key=lambda row: (row["width"], -row["mean"])
    )
    return [(row, published.get((_method(row), row["width"]))) for row in ours]


def _of_ours(column: Column) -> Column:
    """Return the table column `column`, made for rows of this library's measurements, as a column for pairs
    (measured row, published row): it reads the measured row.
    """
    return Column(column.title, lambda record: column.cell(record[0]))


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number > 1)} a token"


def _method(row: Row) -> str:
    """Return the method of a recall row as code, with the steps a token and the epochs where they were chosen."""
    steps = f", {_steps(row['num_steps'])}" if "num_steps" in row else ""
    epochs = f", {row['epochs_at_most']} epochs" if "epochs_at_most" in row else ""
    return f"`{row['method']}`{steps}{epochs}"


def _tracking_model(row: Row) -> str:
    """Return a model of state tracking in words: "gated_deltaproduct+negative+2" is "`gated_deltaproduct`, eigenvalues in
    [-1, 1], 2 steps a token"."""
    method, *words = row["model"].split("+")
    spans = dict(negative="eigenvalues in [-1, 1]", positive="eigenvalues in [0, 1]")
    return ", ".join([f"`{method}`", *(spans.get(w) or _steps(int(w)) for w in words)])


def _tracked(place: int, of: str) -> Callable[[Row], str]:
    """Return the function from a row of state tracking to the accuracy of a test: the trained words (place 0) or the longer
    ones (1), of the best member or, in ascending order, of all."""

    def text(row: Row) -> str:
        members = [row] if of == "best" else row["members"]
        return ", ".join(
            f"{x:.3f}" for x in sorted([*m["accuracy"].values()][place] for m in members)
        )

    return text


METHOD = (
    Column("method", _method),
    column("width", "width"),
    Column("state, KB", lambda row: f"{state_bytes(row) / 1e3:.1f}"),
)
COST = (
    column("learning rate", "learning_rate", "{:.1e}"),
    column("parameters, K", "parameters.non_embedding", "{:.0f}", 1e3),
    column("steps", "steps", "{:,}"),
    column("s", "seconds", "{:.0f}"),
    measured(),
)
TRACKING_TASKS = ("parity", "S3", "S5-swaps", "S5", "S5-mixed")
TASKS = ("64x4", "64x8", "64x16", "128x32", "256x64", "512x128", "1024x256")
DELTANET = (
    "python -m benchmarks mom_recall --inner deltanet --form recurrent --head_dim 8 --vocab_size 1024 --length 64 "
    "--pairs 16 --rates 3e-3,8e-3 "
)

TABLES = [
    Table(
        "mqar",
        ("mqar.jsonl",),
        (*METHOD, column("accuracy", "accuracy.64x4", "{:.3f}"), *COST),
        where=lambda row: row["suite"] == "64x4",
        key=lambda row: (row["method"], row["width"]),
        lines=lambda rows: sorted(rows, key=lambda row: (row["width"], -row["mean"])),
        command="python -m benchmarks recall_table --suite 64x4 --output docs/mqar.jsonl",
    ),
    Table(
        "mqar_published",
        ("mqar.jsonl", "results/mqar_published.jsonl"),
        (
            *map(_of_ours, METHOD),
            Column("mean", lambda record: f"{record[0]['mean']:.3f}"),
            Column("published", lambda record: f"{record[1]['mean']:g}" if record[1] else ""),
            *(_of_ours(column(task, f"accuracy.{task}", "{:.3f}")) for task in TASKS),
            *map(_of_ours, COST),
        ),
        where=lambda row: row.get("suite", "published") == "published",
        key=lambda row: ("suite" in row, _method(row), row["width"]),
        lines=_by_width,
        command="python -m benchmarks recall_table --suite published --output docs/mqar.jsonl",
    ),
    Table(
        "tracking",
        ("tracking.jsonl",),
        (
            column("task", "task"),
            Column("model", _tracking_model),
            column("size", "size"),
            Column("trained words", _tracked(0, "best")),
            Column("longer words", _tracked(1, "best")),
            Column("longer words, all members", _tracked(1, "all")),
            column("steps", "steps", "{:,}"),
            column("s", "seconds", "{:.0f}"),
            measured(),
        ),
        key=lambda row: (row["task"], row["size"], row["model"], row.get("epochs_at_most")),
        lines=lambda rows: sorted(
            rows,
            key=lambda row: (TRACKING_TASKS.index(row["task"]), row["size"], -row["mean"]),
        ),
        command="python -m benchmarks tracking --size medium --output docs/tracking.jsonl",
    ),
    _memory_table(
        "mom_recall",
        "python -m benchmarks mom_recall --output docs/mom_recall.jsonl",
        "accuracy, best of two rates",
    ),
    _memory_table(
        "mom_recall_deltanet",
        DELTANET + "--steps 2048 --seeds 2 --output docs/mom_recall_deltanet.jsonl",
        "accuracy, best of four runs",
        _spread("median", "median"),
        _spread("lowest", "lowest"),
        measured(),
    ),
    _memory_table(
        "mom_recall_deltanet_8192",
        DELTANET + "--steps 8192 --seeds 3 --models mom-4-shared,expanded-5,mom-4,expanded-4,inner "
        "--output docs/mom_recall_deltanet_8192.jsonl",
        "accuracy, best of six runs",
        _spread("median", "median"),
        _spread("lowest", "lowest"),
    ),
]
