"""The results tables of docs/results/kernels.md about the newest versions of Hopper's kernels, beside earlier ones and jax-linear-attention."""

from __future__ import annotations

from benchmarks.tables.kernels import (
    beside,
    is_plain,
    main_shape_first,
    op_column,
    over_kernel,
    shape_column,
)
from benchmarks.tables.table import Column, Row, Table, column, pair, times


def _milliseconds(row: Row, name: str) -> str:
    """Return, as text, the time of a phase of a row; empty where it was not timed."""
    return f"{row[name]:.3f}" if row.get(name) is not None else ""


def _device(row: Row, name: str) -> str:
    """Return, as text, the times of a call's kernels by the profiler, forward / forward and backward."""
    return times([milliseconds for milliseconds, _ in row[f"{name}_device"]])


def _documents(row: Row) -> str:
    """Return how many documents with a state each a row of a call has, in words; empty if it has one document without."""
    return f", {row['segments']} documents" if "segments" in row else ""


def _default(row: Row) -> list[float]:
    """Return the times of what the default computes now. Of rows of --roles that were measured when the default was a scan by columns, these are
    the times of the scan by roles with sums by a kernel; of rows with "short", those of few launches where the rule of short rows
    (`scalar_decay.FEW_LAUNCHES`) has them, with the gradients of all chunks at once if they were timed.
    """
    if "chunks" in row:
        return row["chunks"]
    if "short" in row:
        batch, _, heads, width = map(int, row["shape"].split("x"))
        blocks = batch * heads * width // 64
        forward, both = ("short" if blocks * scans <= 132 else "sums" for scans in (1, 2))
        return [row[forward][0], row[both][1]]
    return row["sums"] if "sums" in row and "columns" not in row else row["kernel"]


TABLES = [
    Table(
        "kernels_mlstm",
        ("kernels.jsonl",),
        (
            shape_column(),
            pair("kernel", "kernel"),
            pair("XLA", "xla"),
            Column("XLA / kernel", lambda row: over_kernel(row, "xla")),
            Column(
                "largest error of a result or gradient",
                lambda row: f"{max(row['kernel_errors']):.1e}",
            ),
            Column("the same, XLA", lambda row: f"{max(row['xla_errors']):.1e}"),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: row["op"] == "mlstm" and "xla" in row and is_plain(row),
        key=lambda row: row["shape"],
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks kernels --ops mlstm --shapes 16x2048x4x128x256,8x4096x16x128 --xla --errors --output docs/kernels.jsonl",
    ),
    Table(
        "kernels_jla",
        ("kernels.jsonl",),
        (
            op_column(),
            shape_column(),
            Column("kernel", lambda row: times(_default(row))),
            beside("jla"),
            Column(
                "jax-linear-attention / kernel",
                lambda row: over_kernel(row | dict(kernel=_default(row)), "jla"),
            ),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: "jla" in row and is_plain(row),
        key=lambda row: (row["op"], row["shape"]),
        lines=main_shape_first,
        not_run="requires an NVIDIA Hopper GPU and jax-linear-attention",
        command="python -m benchmarks kernels --peers jla --output docs/kernels.jsonl",
    ),
    Table(
        "kernels_scans",
        ("kernels.jsonl",),
        (
            Column("op", lambda row: row["op"] + _documents(row)),
            shape_column(),
            Column("warpgroups by columns", lambda row: times(row.get("columns", row["kernel"]))),
            pair("by roles", "roles"),
            pair("by roles, sums of decays by a kernel", "sums"),
            beside("jla"),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: "roles" in row or "columns" in row,
        key=lambda row: (row["op"], row["shape"], row.get("segments")),
        not_run="requires an NVIDIA Hopper GPU and jax-linear-attention",
        command='python -m benchmarks kernels --ops "scalar decay" --roles --errors --device_times --peers jla --output docs/kernels.jsonl',
    ),
    Table(
        "kernels_short",
        ("kernels.jsonl",),
        (
            shape_column(),
            pair("by roles, sums of decays by a kernel", "sums"),
            pair("few launches", "short"),
            Column(
                "gradients of all chunks at once",
                lambda row: times(row["chunks"]) if "chunks" in row else "",
            ),
            beside("jla"),
            Column("sums by a kernel, on the device", lambda row: _device(row, "sums")),
            Column("few launches, on the device", lambda row: _device(row, "short")),
            Column(
                "gradients of all chunks at once, on the device",
                lambda row: _device(row, "chunks") if "chunks" in row else "",
            ),
            Column("jax-linear-attention, on the device", lambda row: _device(row, "jla")),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: "short" in row,
        key=lambda row: (row["op"], row["shape"]),
        not_run="requires an NVIDIA Hopper GPU and jax-linear-attention",
        command='python -m benchmarks kernels --ops "scalar decay" --roles sums,short,chunks --device_times --peers jla --shapes 8x1024x8x64,4x1024x16x64',
    ),
    Table(
        "delta_forward",
        ("delta_forward.jsonl",),
        (
            column("case", "case", "{}"),
            column("version", "kind", "`{}`"),
            Column("solve", lambda row: _milliseconds(row, "solve")),
            Column("scan", lambda row: _milliseconds(row, "scan")),
            Column("forward", lambda row: _milliseconds(row, "forward")),
            Column("forward and backward", lambda row: _milliseconds(row, "both")),
            Column("commit", lambda row: row["commit"]),
        ),
        key=lambda row: (row["case"], row["kind"]),
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks delta_forward",
    ),
    Table(
        "writes",
        ("writes.jsonl",),
        (
            column("B x T x heads", "case", "{}"),
            pair("gradients of each head", "heads"),
            pair("of two heads", "pairs"),
            pair("of two heads, forward by roles", "roles"),
            Column("commit", lambda row: row["commit"]),
        ),
        key=lambda row: row["case"],
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks writes --kinds pairs,heads,roles",
    ),
]
