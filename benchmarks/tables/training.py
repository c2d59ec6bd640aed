"""The results tables about training: steps of 340M models, methods on one text, lengths, and the CPU runs."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.tables.table import Column, Row, Table, column, group, measured, newest

LENGTHS = (2048, 4096, 8192, 16384)
PEER_VARIANTS = {
    "gla-340m": "GLA",
    "gated_deltanet-340m": "Gated DeltaNet",
    "mamba2-340m": "Mamba2",
    "mamba3-340m": "Mamba-3",
    "gated_deltaproduct-340m": "Gated DeltaProduct",
    "gated_deltanet2-340m": "Gated DeltaNet-2",
    "comba-340m": "Comba",
}
"""The variants of the table beside flash-linear-attention's models, in its order; those without a stored row have no column."""


TOKENS = 32_768
"""Tokens of a step in most rows; `model_step_long` has rows of twice as many."""


SAVING_MORE = ("dots_and_convolutions", "dots_and_inputs", "dots_and_states")
"""The values of `model.remat` that save more than "dots" and less than "none"."""


_PARTS = {
    "unrolled",
    "matmul",
    "unit_length",
    "norms",
    "rwkv7",
    "pairs",
    "stacks",
    "swiglu",
    "delta_chunks",
    "loss_chunk_size",
}
"""Fields of a row that say which part of the training step it has in another form than by default."""


def is_step(row: Row, tokens: int = TOKENS) -> bool:
    """Return whether a row is of a training step of so many tokens, with rematerialisation "dots", the default compiler flags, and no
    variant of it.
    """
    plain = row.get("remat") == "dots" and not row["xla_flags"]
    plain = plain and row["rows"] * row["length"] == tokens
    return plain and not _PARTS & set(row)


def is_full_remat_step(row: Row) -> bool:
    """Return whether a row is of a training step of any number of tokens that saves no activations, with rematerialisation "full" and the
    default compiler flags, and no variant of it.
    """
    return row.get("remat") == "full" and not row["xla_flags"] and not _PARTS & set(row)


PEAK = 989.4e12
"""Floating-point operations a second of an H200, of dense products in bfloat16 (`lsm_jax.training.peak_flops`)."""


def _step_key(row: Row) -> tuple:
    return row["variant"], row["length"], row.get("peer")


def _steps(rows: list[Row]) -> list[dict[int, Row]]:
    """Return, for each model, the newest rows of its training step by row length; the model that is
    fastest at its shortest length first.
    """
    methods = [
        {row["length"]: row for row in rows_of}
        for rows_of in group(rows, lambda r: r["variant"]).values()
    ]
    return sorted(methods, key=lambda steps: -steps[min(steps)]["tokens_per_second"])


def _speed_at(length: int) -> Column:
    def cell(steps: dict[int, Row]) -> str:
        return f"{steps[length]['tokens_per_second'] / 1e3:.1f}" if length in steps else ""

    return Column(f"{length:,}", cell)


def _longest_over_shortest(steps: dict[int, Row]) -> str:
    """Return, as text, the speed at the longest rows over that at the shortest, if one commit has both."""
    shortest, longest = (steps.get(length) for length in (LENGTHS[0], LENGTHS[-1]))
    if not shortest or not longest or shortest["commit"] != longest["commit"]:
        return ""
    return f"{longest['tokens_per_second'] / shortest['tokens_per_second']:.2f}"


def _commits(steps: dict[int, Row]) -> str:
    return ", ".join(dict.fromkeys(steps[length]["commit"] for length in sorted(steps)))


def _beside_fla(rows: list[Row]) -> list[tuple[int, dict[tuple[str, bool], Row]]]:
    """Return, for each length of a row, (length, stored training rows by (variant, whether
    flash-linear-attention was measured)).
    """
    return [
        (length, {(row["variant"], "peer" in row): row for row in rows if row["length"] == length})
        for length in LENGTHS
    ]


def _beside_jla(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return, for each model and kind of products, (our training step, jax-linear-attention's of the same commit)."""
    pairs = []
    for row in rows:
        if row.get("peer") != "jla":
            continue
        same = ("variant", "rows", "length", "commit", "matmul")
        ours = [r for r in rows if "peer" not in r and all(r.get(n) == row.get(n) for n in same)]
        pairs += [(max(ours, key=lambda r: r["tokens_per_second"]), row)] if ours else []
    return pairs


def _in_fp8(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return, for each model, (its training step with products in bfloat16, with products in FP8) of one commit and rematerialisation."""
    same = ("variant", "rows", "length", "remat", "commit")
    return [
        (plain, row)
        for row in rows
        if row.get("matmul") == "fp8"
        for plain in rows
        if "matmul" not in plain and all(plain[n] == row[n] for n in same)
    ]


def _jla_columns() -> tuple[Column, ...]:
    def flops(pair: tuple[Row, Row]) -> tuple[float, float]:
        """Return the floating-point operations of training per token of both models, each by its library's count."""
        ours, theirs = pair
        own = theirs["own_mfu_percent"] / 100 * PEAK / theirs["tokens_per_second"]
        return ours["flops_per_token"], own

    def both(text: Callable[[Row, float], str]) -> Callable[[tuple[Row, Row]], str]:
        return lambda pair: ", ".join(text(r, n) for r, n in zip(pair, flops(pair), strict=True))

    return (
        Column("model", lambda pair: f"`{pair[0]['variant']}`"),
        Column("products", lambda pair: pair[0].get("matmul", "bfloat16")),
        Column("10³ tokens/s", both(lambda r, n: f"{r['tokens_per_second'] / 1e3:.1f}")),
        Column("ratio", lambda pair: f"{pair[0]['tokens_per_second'] / pair[1]['tokens_per_second']:.2f}"),
        Column("10⁹ FLOP a token", both(lambda r, n: f"{n / 1e9:.2f}")),
        Column("MFU, %", both(lambda r, n: f"{100 * n * r['tokens_per_second'] / PEAK:.1f}")),
        Column("remat", lambda pair: f"`{pair[0]['remat']}`, `{pair[1]['peer_remat']}`"),
        Column("date, commit", lambda pair: f"{pair[1]['date']}, {pair[1]['commit']}"),
    )  # fmt: skip


def _peer_columns(rows: list[Row]) -> tuple[Column, ...]:
    measured_variants = {row["variant"] for row in rows}

    def speed(variant: str, peer: bool) -> Column:
        field = "fla_gradient_tokens_per_second" if peer else "tokens_per_second"

        def cell(record: tuple[int, dict[tuple[str, bool], Row]]) -> str:
            row = record[1].get((variant, peer))
            again = ", layers computed again" if row and row.get("fla_remat") == "layers" else ""
            return f"{row[field] / 1e3:.1f} ({row['commit']}{again})" if row else ""

        return Column(PEER_VARIANTS[variant] + (", FLA" if peer else ""), cell)

    variants = [variant for variant in PEER_VARIANTS if variant in measured_variants]
    columns = [speed(variant, peer) for variant in variants for peer in (False, True)]
    return Column("T", lambda record: f"{record[0]:,}"), *columns


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


def _memory_columns(rows: list[Row]) -> tuple[Column, ...]:
    variants = list(dict.fromkeys(row["variant"] for row in rows))

    def gigabytes(variant: str) -> Column:
        return Column(
            f"`{variant}`", lambda record: f"{newest(record[1], variant=variant)['gb']:.1f}"
        )

    return (
        Column("commit", lambda record: record[0]),
        Column(
            "rows", lambda record: "packed documents" if record[1][0]["packed"] else "one document"
        ),
        *map(gigabytes, variants),
    )


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


_SPEED_AND_MEMORY = (
    column("10³ tokens/s", "tokens_per_second", "{:.1f}", 1e3),
    column("GiB", "gib", "{:.1f}"),
    column("commit", "commit"),
)

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
        "model_step_fp8",
        ("model_step.jsonl",),
        (
            Column("model", lambda pair: f"`{pair[0]['variant']}`"),
            *(
                Column(
                    f"10³ tokens/s, {name}",
                    lambda pair, i=i: f"{pair[i]['tokens_per_second'] / 1e3:.1f}",
                )
                for i, name in enumerate(("bfloat16", "FP8"))
            ),
            Column(
                "ratio",
                lambda pair: f"{pair[1]['tokens_per_second'] / pair[0]['tokens_per_second']:.2f}",
            ),
            Column("GiB", lambda pair: ", ".join(f"{row['gib']:.1f}" for row in pair)),
            Column("date, commit", lambda pair: f"{pair[1]['date']}, {pair[1]['commit']}"),
        ),
        where=lambda row: (
            row.get("remat") == "dots_and_states"
            and not (_PARTS - {"matmul"}) & set(row)
            and "peer" not in row
        ),
        key=lambda row: (*_step_key(row), row.get("matmul"), row["commit"]),
        lines=_in_fp8,
        command="python -m benchmarks model_step --variants softmax-1.3b,gated_deltanet-1.3b --lengths 4096 --remat dots_and_states "
        "--matmul default,fp8",
    ),
    Table(
        "model_step",
        ("model_step.jsonl",),
        (
            Column("model", lambda steps: f"`{steps[min(steps)]['variant']}`"),
            *map(_speed_at, LENGTHS),
            Column("16,384 / 2,048", _longest_over_shortest),
            Column("GiB at the shortest", lambda steps: f"{steps[min(steps)]['gib']:.1f}"),
            Column("commits", _commits),
        ),
        where=lambda row: "peer" not in row and is_step(row),
        key=_step_key,
        lines=_steps,
        command="python -m benchmarks model_step --variants gla-340m,mamba-340m --lengths 2048,4096,8192,16384 "
        "--output docs/model_step.jsonl     # and with the other models",
    ),
    Table(
        "model_step_long",
        ("model_step.jsonl",),
        (
            Column("model", lambda steps: f"`{steps[min(steps)]['variant']}`"),
            _speed_at(LENGTHS[0]),
            _speed_at(LENGTHS[-1]),
            Column("16,384 / 2,048", _longest_over_shortest),
            Column("commits", _commits),
        ),
        where=lambda row: "peer" not in row and is_step(row, 2 * TOKENS),
        key=_step_key,
        lines=_steps,
        command="python -m benchmarks model_step --variants gated_deltaproduct-340m,comba-340m --lengths 2048,16384 --tokens 65536",
    ),
    Table(
        "model_step_fla",
        ("model_step.jsonl",),
        _peer_columns,
        where=lambda row: (
            row["variant"] in PEER_VARIANTS
            and ("fla_gradient_tokens_per_second" in row or ("peer" not in row and is_step(row)))
        ),
        key=_step_key,
        lines=_beside_fla,
        not_run="requires an NVIDIA GPU and flash-linear-attention",
        command="python -m benchmarks model_step --variants gla-340m,gated_deltanet-340m,mamba2-340m --peers fla "
        "--output docs/model_step.jsonl",
    ),
    Table(
        "model_step_jla",
        ("model_step.jsonl",),
        _jla_columns(),
        where=lambda row: (
            row["variant"].endswith("-1.3b")
            and "tokens_per_second" in row
            and (
                row.get("peer") == "jla"
                or (
                    "peer" not in row
                    and not row["xla_flags"]
                    and not (_PARTS - {"matmul"}) & set(row)
                )
            )
        ),
        key=lambda row: (*_step_key(row), row.get("matmul"), row.get("remat"), row["commit"]),
        lines=_beside_jla,
        not_run="requires an NVIDIA GPU and jax-linear-attention",
        command="python -m benchmarks model_step --variants softmax-1.3b,kda-1.3b --lengths 4096 --remat dots_and_inputs --peers jla "
        "--output docs/model_step.jsonl",
    ),
    Table(
        "model_step_saved",
        ("model_step.jsonl",),
        (
            column("model", "variant", "`{}`"),
            column("`model.remat`", "remat", "`{}`"),
            column("rows", "rows", "{}"),
            column("tokens a row", "length", "{:,}"),
            *_SPEED_AND_MEMORY,
        ),
        where=lambda row: row.get("remat") in SAVING_MORE and not _PARTS & set(row),
        key=lambda row: (*_step_key(row), row["remat"]),
        command="python -m benchmarks model_step --variants gated_deltanet-1.3b,kda-1.3b,mamba2-1.3b,rwkv7-1.3b --lengths 4096 "
        "--remat dots_and_convolutions,dots_and_inputs,dots_and_states",
    ),
    Table(
        "model_step_no_remat",
        ("model_step.jsonl",),
        (
            column("model", "variant", "`{}`"),
            *_SPEED_AND_MEMORY,
        ),
        where=lambda row: row.get("remat") == "none" and not _PARTS & set(row),
        key=_step_key,
        command="XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks model_step "
        "--variants gla-340m,gated_deltanet-340m,mamba2-340m,rwkv7-340m,softmax-340m --lengths 2048 --remat none",
    ),
    Table(
        "step_memory",
        ("results/step_memory.jsonl",),
        _memory_columns,
        lines=lambda rows: group(rows, lambda row: row["commit"]).items(),
        not_run="needs the compilers of GPUs and TPUs",
        command="make test-aot",
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
