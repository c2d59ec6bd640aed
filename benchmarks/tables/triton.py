"""The results tables of docs/results/triton.md: the Triton kernels on a card, and variants of a training step."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.tables.kernels import shape_text
from benchmarks.tables.table import Column, Row, Table, column, group, times

_KERNELS = "triton_kernels.jsonl"
_STEPS = "model_step.jsonl"


def _errors(rows: list[Row], gradients: bool) -> str:
    """Return, as text, the largest relative error of a check's outputs and states, or of its gradients."""
    errors = [
        e for row in rows for n, e in row["errors"].items() if n.startswith("d_") == gradients
    ]
    return f"{max(errors):.1e}"


def _checks(rows: list[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    return list(group(rows, lambda row: (row["op"], row["capability"])).items())


def _all_good(rows: list[Row]) -> str:
    good = sum(row["good"] for row in rows)
    return str(good) if good == len(rows) else f"{good} of {len(rows)}"


def _by_op(rows: list[Row]) -> list[dict[str, Row]]:
    """Return the rows of each op and shape by compute capability."""
    by_case = group(rows, lambda row: (row["op"], row["shape"]))
    return [{row["capability"]: row for row in of_case} for of_case in by_case.values()]


def _first(record: dict[str, Row]) -> Row:
    """Return one of a record's rows: all have its op and shape."""
    return next(iter(record.values()))


def _times_of(name: str, *capabilities: str) -> Callable[[dict[str, Row]], list[float]]:
    """Return the function that returns the times called `name` of the first of these capabilities whose row in a record has them, or []."""
    return lambda record: next(
        (record[c][name] for c in capabilities if name in record.get(c, {})), []
    )


def _newest_of(name: str, *capabilities: str) -> Callable[[dict[str, Row]], list[float]]:
    """Return the function that returns the times called `name` of the newest of these capabilities' rows in a record that has them, the first of
    those of one day, or [].
    """

    def times_of(record: dict[str, Row]) -> list[float]:
        found = [record[c] for c in capabilities if name in record.get(c, {})]
        return max(found, key=lambda row: row["date"])[name] if found else []

    return times_of


_OURS = {c: _newest_of("triton", c, f"fla {c}") for c in ("8.0", "9.0")}
_HOPPER = _times_of("automatic", "any")
_XLA = _times_of("xla", "any", "fla 8.0", "fla 9.0")


def _ratio(record: dict[str, Row]) -> str:
    """Return, as text, how many times as long as the code for 8.0 the XLA form takes, by the call that timed flash-linear-attention too if
    that timed both; blank without one of the two times.
    """
    beside = record.get("fla 8.0", {})
    if {"xla", "triton"} <= beside.keys():
        xla, ours = beside["xla"], beside["triton"]
    else:
        xla, ours = _XLA(record), _OURS["8.0"](record)
    if not xla or not ours:
        return ""
    return " / ".join(f"{x / y:.1f}" for x, y in zip(xla, ours, strict=True))


_TIMES = (
    Column("op", lambda record: _first(record)["op"]),
    Column("B x T x H x D", lambda record: shape_text(_first(record)["shape"])),
    Column("code for 8.0", lambda record: times(_OURS["8.0"](record))),
    Column("code for 9.0", lambda record: times(_OURS["9.0"](record))),
    Column("Hopper's kernels", lambda record: times(_HOPPER(record))),
    Column("XLA", lambda record: times(_XLA(record))),
)
"""The columns of each op and shape: the times of our code and of XLA, blank where no row has them."""


def _timed(row: Row) -> bool:
    """Return whether a row has a time, not only an error."""
    return any(name in row for name in ("triton", "automatic", "xla", "fla"))


def _peer(capability: str, record: dict[str, Row]) -> str:
    row = record.get(f"fla {capability}", {})
    return times(row["fla"]) if "fla" in row else ""


def _peer_ratio(capability: str, record: dict[str, Row]) -> str:
    """Return, as text, how many times as long as ours flash-linear-attention takes with code for a capability; ours of the same call, if it
    timed them.
    """
    row = record.get(f"fla {capability}", {})
    ours = row.get("triton") or _OURS[capability](record)
    if "fla" not in row or not ours:
        return ""
    return " / ".join(f"{x / y:.2f}" for x, y in zip(row["fla"], ours, strict=True))


def _longest(row: Row) -> str:
    times_of = sorted(row["times_of_kernels"].items(), key=lambda item: -item[1])
    return ", ".join(f"`{name}` {ms:.2f}" for name, ms in times_of[:4])


def _short_rows(rows: list[Row]) -> list[dict[str, Row]]:
    """Return the records of calls whose kernels were timed by Triton's code for 9.0 and by Hopper's kernels."""
    return [record for record in _by_op(rows) if {"9.0", "any"} <= set(record)]


def _all_kernels(capability: str) -> Callable[[dict[str, Row]], str]:
    """Return the function that adds up the times of all kernels of a record's row of a capability."""
    return lambda record: f"{sum(record[capability]['times_of_kernels'].values()):.3f}"


def _step_name(row: Row) -> str:
    return row["variant"]


def _loss_at(step: int) -> Column:
    def cell(row: Row) -> str:
        losses = row.get("losses") or []
        return f"{losses[step - 1]:.3f}" if len(losses) >= step else ""

    return Column(f"loss at step {step}", cell)


def _difference(rows: list[Row]) -> list[Row]:
    order = {None: 0, "mosaic_gpu": 1, "triton": 2, "xla": 3}
    return sorted(rows, key=lambda r: (r["variant"], r["unrolled"], order[r.get("implementation")], r.get("matmul", "")))  # fmt: skip


TABLES = (
    Table(
        "triton_checks",
        (_KERNELS,),
        (
            Column("op", lambda record: record[0][0]),
            Column("code for", lambda record: record[0][1]),
            Column("checks passed", lambda record: _all_good(record[1])),
            Column("outputs and states", lambda record: _errors(record[1], gradients=False)),
            Column(
                "gradients",
                lambda record: _errors(record[1], gradients=True) if "d_" in str(record[1]) else "",
            ),
        ),  # fmt: skip
        where=lambda row: "check" in row,
        key=lambda row: (row["check"], row["capability"]),
        lines=_checks,
        not_run="requires an NVIDIA GPU",
        command='python -m benchmarks triton_kernels --capabilities 8.0,9.0 --shapes ""',
    ),
    Table(
        "triton_times",
        (_KERNELS,),
        (
            *_TIMES,
            *(Column(f"FLA, code for {c}", functools.partial(_peer, c)) for c in ("8.0", "9.0")),
            Column("XLA / code for 8.0", _ratio),
            *(
                Column(f"FLA / ours, code for {c}", functools.partial(_peer_ratio, c))
                for c in ("8.0", "9.0")
            ),
        ),
        where=lambda row: _timed(row) and not {"check", "kernels", "tilings", "parts"} & set(row),
        key=lambda row: (row["op"], row["shape"], row["capability"]),
        lines=_by_op,
        not_run="requires an NVIDIA GPU",
        command='python -m benchmarks triton_kernels --capabilities 9.0,8.0 --checks "" --lock LOCK\n'
        "python -m benchmarks triton_kernels --peers fla --capabilities 8.0,9.0 --lock LOCK",
    ),
    Table(
        "triton_device",
        (_KERNELS,),
        (
            *_TIMES,
            Column("XLA / code for 8.0", _ratio),
        ),
        where=lambda row: "kernels" in row and "times_of_kernels" not in row and "error" not in row,
        key=lambda row: (row["op"], row["shape"], row["capability"]),
        lines=_by_op,
        not_run="requires an NVIDIA GPU",
        command='python -m benchmarks triton_kernels --kernels --checks "" --ops "convolution,normalised convolution"',
    ),
    Table(
        "triton_parts",
        (_KERNELS,),
        (
            Column("op", lambda row: row["op"]),
            Column("B x T x H x D", lambda row: shape_text(row["shape"])),
            Column("the longest kernels, ms", _longest),
        ),
        where=lambda row: (
            "times_of_kernels" in row and row["capability"] == "8.0" and "tilings" not in row
        ),
        key=lambda row: (row["op"], row["shape"]),
        not_run="requires an NVIDIA GPU",
        command='python -m benchmarks triton_kernels --kernels --checks "" --shapes 8x4096x16x128',
    ),
    Table(
        "triton_short_rows",
        (_KERNELS,),
        (
            Column("op", lambda record: record["any"]["op"]),
            Column("B x T x H x D", lambda record: shape_text(record["any"]["shape"])),
            Column("Triton's kernels, ms", _all_kernels("9.0")),
            Column("Hopper's kernels, ms", _all_kernels("any")),
        ),
        where=lambda row: (
            "times_of_kernels" in row and "tilings" not in row and row["shape"].split("x")[0] == "2"
        ),
        key=lambda row: (row["op"], row["shape"], row["capability"]),
        lines=_short_rows,
        not_run="requires an NVIDIA GPU",
        command='python -m benchmarks triton_kernels --kernels --checks "" --capabilities 9.0 --shapes 2x512x2x128,2x2048x4x128 '
        '--ops "no decay,scalar decay,key decay,delta rule,gated delta rule"',
    ),
    Table(
        "step_variants",
        (_STEPS,),
        (
            Column("model", _step_name),
            Column(
                "memories or attention by",
                lambda row: row.get("implementation") or "automatic (Hopper's kernels)",
            ),
            Column("rows x tokens", lambda row: f"{row['rows']} x {row['length']:,}"),
            Column("layers", lambda row: "unrolled" if row["unrolled"] else "loop"),
            Column("products", lambda row: row.get("matmul", "bfloat16")),
            Column("card", lambda row: row["device"].removeprefix("NVIDIA ").split()[0]),
            column("ms", "milliseconds", "{:.1f}"),
            column("10³ tokens/s", "tokens_per_second", "{:.1f}", 1e3),
            column("compile, s", "compile_seconds", "{:.0f}"),
            column("GiB", "gib", "{:.1f}"),
            *(_loss_at(step) for step in (1, 8, 20, 50)),
        ),  # fmt: skip
        where=lambda row: "unrolled" in row,
        key=lambda row: (
            row["variant"],
            row["rows"],
            row["length"],
            row["unrolled"],
            row.get("implementation"),
            row.get("matmul"),
            len(row.get("losses") or []),
        ),
        lines=_difference,
        not_run="requires an NVIDIA GPU",
        command="python -m benchmarks model_step --variants gla-340m,gated_deltanet-340m,fox-340m --lengths 2048 --unrolled no "
        "--implementations automatic,triton --losses 50 --output docs/model_step.jsonl\n"
        "python -m benchmarks model_step --variants gla-340m --lengths 2048 --unrolled no,yes --implementations xla,automatic,triton "
        "--losses 20 --output docs/model_step.jsonl\n"
        "python -m benchmarks model_step --variants gla-340m --lengths 2048 --unrolled no,yes --matmul default,fp8 --output docs/model_step.jsonl",
    ),
)
