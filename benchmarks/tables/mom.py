"""The results tables about Mixture-of-Memories."""

from __future__ import annotations

from benchmarks.tables.table import Column, Table, column, measured, times


def _layer_times(field: str, title: str) -> Column:
    return Column(
        title, lambda row: f"{row[field]['forward_ms']:.2f} / {row[field]['training_ms']:.2f}"
    )


TABLES = [
    Table(
        "mom",
        ("mom.jsonl",),
        (
            column("T", "length", "{:,}"),
            _layer_times("inner_mixer", "inner mixer, ms"),
            _layer_times("packed", "MoM packed, ms"),
            Column(
                "packed / inner mixer",
                lambda row: (
                    f"{row['packed']['forward_over_inner']:.2f} / {row['packed']['training_over_inner']:.2f}"
                ),
            ),
            _layer_times("masked", "MoM masked, ms"),
            Column("FLA's MoM, ms", lambda row: " / ".join(f"{x:.2f}" for x in row["fla"])),
        ),
        where=lambda row: "fla" in row,
        key=lambda row: (row["inner"], row["length"]),
        not_run="requires an NVIDIA GPU and flash-linear-attention",
        command="python -m benchmarks mom --peers fla --output docs/mom.jsonl",
    ),
    Table(
        "mom_sequence",
        ("mom_sequence.jsonl",),
        (
            Column(
                "documents", lambda row: f"{row['document']:,} tokens" if row["document"] else "one"
            ),
            column("devices", "devices"),
            column("form", "form"),
            Column(
                "forward / training, ms", lambda row: times((row["forward_ms"], row["training_ms"]))
            ),
            column("difference of the output", "error", "{:.1e}"),
            measured(),
        ),
        key=lambda row: (
            row["inner"],
            row["width"],
            row["length"],
            row["document"],
            row["devices"],
            row["form"],
        ),
        lines=lambda rows: sorted(
            rows, key=lambda row: (row["document"], row["form"] == "masked", row["devices"])
        ),
        command="python -m benchmarks mom_sequence --calls 5 --output docs/mom_sequence.jsonl     # four GPUs",
    ),
    Table(
        "mom_generate",
        ("mom_generate.jsonl",),
        (
            column("model", "model"),
            column("context", "context", "{:,}"),
            column("seconds for 1,024 tokens", "seconds", "{:.2f}"),
            column("ms per token", "ms_a_token", "{:.2f}"),
            column("state, GiB", "state_bytes", "{:.2f}", 2**30),
            column("all memory, GiB", "program_bytes", "{:.2f}", 2**30),
            measured(),
        ),
        key=lambda row: (row["model"], row["batch_size"], row["context"]),
        lines=lambda rows: sorted(rows, key=lambda row: (row["model"], row["context"])),
        command="python -m benchmarks mom_generate --models MoM --batch_size 4     # and --models softmax",
    ),
]
