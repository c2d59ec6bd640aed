"""The results tables about training runs: methods on one text, optimizers, FP8, lengths, and the CPU runs."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.tables.table import Column, Row, Table, column, group, measured


def _length_columns(rows: list[Row]) -> tuple[Column, ...]:
    names = {
        "gated_deltanet": "Gated DeltaNet",
        "mom": "MoM around Gated DeltaNet",
        "pro": "FoX (Pro)",
        "llama": "FoX (LLaMA)",
        "transformer-pro": "Transformer (Pro)",
        "transformer-llama": "Transformer (LLaMA)",
    }
    return (
        Column("model", lambda row: names.get(row["model"], row["model"])),
        *(column(f"P({int(n):,})", f"perplexity.{n}", "{:.3f}") for n in rows[0]["perplexity"]),
        column("parameters, M", "parameters", "{:.1f}", 1e6),
        measured(),
    )


def _method_trained(row: Row) -> str:
    """Return a row's method, and the fields of its mixer's config that are not the default's."""
    fields = row["fields"].split("+") if "fields" in row else []
    return ", ".join(f"`{word}`" for word in [row["method"], *fields])


def _of_setting(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Return (setting, its rows by seed) of the comparison of optimizers, the smallest mean held-out loss first."""
    groups = group(rows, lambda row: row["setting"]).items()
    by_seed = [(name, sorted(runs, key=lambda row: row["seed"])) for name, runs in groups]
    return sorted(by_seed, key=lambda record: sum(r["final"] for r in record[1]) / len(record[1]))


def _each_seed(value: Callable[[Row], str]) -> Callable[[tuple[str, list[Row]]], str]:
    return lambda record: ", ".join(map(value, record[1]))


def _pairs(rows: list[Row]) -> list[dict[str, Row]]:
    """Return, for each model, the rows of its runs with products in bfloat16 and in FP8, by `matmul`."""
    return [{row["matmul"]: row for row in runs} for runs in group(rows, lambda row: row["model"]).values()]  # fmt: skip


def heldout_at(row: Row, step: int) -> float:
    """Return the held-out loss of a run of `fp8_curve` after so many steps."""
    return dict(row["heldout"])[step]


def _both_losses(step: int) -> Column:
    def text(runs: dict[str, Row]) -> str:
        return ", ".join(f"{heldout_at(runs[m], step):.3f}" for m in ("default", "fp8") if m in runs)  # fmt: skip

    return Column(f"after {step:,} steps", text)


def _difference(runs: dict[str, Row]) -> str:
    if set(runs) != {"default", "fp8"}:
        return ""
    last = runs["fp8"]["heldout"][-1][0]
    return f"{100 * (heldout_at(runs['fp8'], last) / heldout_at(runs['default'], last) - 1):+.2f} %"


TABLES = [
    Table(
        "optimizers",
        ("optimizers.jsonl",),
        (
            Column("optimizer, schedule", lambda record: record[0].replace("-", ", ")),
            Column("peak rate", lambda record: f"{record[1][0]['peak_lr']:g}"),
            Column(
                "held-out loss, nats per byte, of each seed",
                _each_seed(lambda row: f"{row['final']:.3f}"),
            ),
            Column(
                "numbers stored for each parameter", lambda record: f"{record[1][0]['stored']:.2f}"
            ),
        ),
        key=lambda row: (row["setting"], row["tokens"], row["peak_lr"], row["seed"]),
        lines=_of_setting,
        command="python -m benchmarks optimizers",
    ),
    Table(
        "fp8_curve",
        ("fp8_curve.jsonl",),
        (
            Column("model", lambda runs: f"`{next(iter(runs.values()))['model']}`"),
            *(_both_losses(step) for step in (500, 1000, 1500, 2000)),
            Column("difference at the end", _difference),
        ),
        key=lambda row: (row["model"], row["matmul"]),
        lines=_pairs,
        not_run="trains models of 125M parameters on a corpus",
        command="python -m benchmarks fp8_curve --corpus data/corpus",
    ),
    Table(
        "methods",
        ("methods.jsonl",),
        (
            Column("method", _method_trained),
            column("held-out bits per byte", "held_out_loss", "{:.3f}", math.log(2)),
            column("tokens/s", "tokens_per_second", "{:,.0f}"),
            column("parameters, M", "parameters", "{:.1f}", 1e6),
            column("decode state, KiB", "state_bytes", "{:,.0f}", 1024),
            measured(),
        ),
        key=lambda row: (row["method"], row.get("fields")),
        lines=lambda rows: sorted(rows, key=lambda row: row["held_out_loss"]),
        command="python -m benchmarks methods --output docs/methods.jsonl     # skips methods that have a row",
    ),
    Table(
        "models_10m",
        ("results/models_10m.jsonl",),
        (
            column("model", "variant", "`{}`"),
            column("parameters, M", "parameters", "{:.1f}", 1e6),
            column("held-out loss, nats per byte", "held_out_loss", "{:.3f}"),
            column("bits per byte", "bits_per_byte", "{:.3f}"),
            column("tokens/s", "tokens_per_second", "{:,}"),
            column("model TFLOP/s", "model_tflops", "{:g}"),
            column("device memory, GiB", "gib", "{:g}"),
            column("wall time with compilation, s", "seconds"),
        ),
        command="\n".join(
            f"python train.py --config=configs/lm.py:{method}-10m --workdir=runs/{method} "
            "--config.model.remat=none --config.eval_every=50"
            for method in ("gated_deltanet", "softmax")
        ),
    ),
    Table(
        "lengths",
        ("lengths.jsonl",),
        _length_columns,
        key=lambda row: row["model"],
        lines=lambda rows: sorted(rows, key=lambda row: row["perplexity"][str(row["length"])]),
        command="python -m benchmarks lengths --tokens 16777216 --batch_size 8 --output docs/lengths.jsonl",
    ),
    Table(
        "demo",
        ("results/demo.jsonl",),
        (column("model", "model"), column("held-out bits per byte", "bits_per_byte", "{:.2f}")),
        command="make demo",
    ),
    Table(
        "liger_demo",
        ("results/liger_demo.jsonl",),
        (
            column("model", "model"),
            column("nats per token, all positions", "nats", "{:.3f}"),
            column("beyond position 64", "beyond_64", "{:.3f}"),
        ),
        not_run="downloads SmolLM2-135M, and trains for minutes",
        command="make liger-demo",
    ),
    Table(
        "data_throughput",
        ("results/data_throughput.jsonl",),
        (
            column("order of rows", "order"),
            Column(
                "10⁶ tokens/s",
                lambda row: " to ".join(
                    dict.fromkeys(f"{x:g}" for x in row["million_tokens_per_second"])
                ),
            ),
        ),
        command="python -m benchmarks data_throughput",
    ),
    Table(
        "drift",
        ("results/drift.jsonl",),
        (
            column("memory", "memory"),
            column("form", "form"),
            column("error in the first tenth", "first_tenth", "{:.1e}"),
            column("error in the last tenth", "last_tenth", "{:.1e}"),
        ),
        command="python -m benchmarks drift",
    ),
    Table(
        "decode",
        ("results/decode.jsonl",),
        (
            column("method", "method", "`{}`"),
            column("first 512 tokens, ms", "first_ms", "{:.2f}"),
            column("last 512 tokens, ms", "last_ms", "{:.2f}"),
            column("state before, bytes", "state_bytes_first", "{:,}"),
            column("state after, bytes", "state_bytes_last", "{:,}"),
        ),
        command="python -m benchmarks decode",
    ),
]
