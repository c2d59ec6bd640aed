"""The results tables about Linear-MoE: training in several layouts, experts, and decoding after long contexts."""

from __future__ import annotations

import json

from benchmarks.tables.table import Column, Row, Table, column, group, measured

PARALLEL = "python -m benchmarks parallel"
OUTPUT = "--output docs/linear_moe.jsonl"


def _mixer(row: Row) -> str:
    packed = f", documents of {row['document']:,}" if "document" in row else ""
    return "`" + row["variant"].split("mixer=")[1] + "`" + packed


_CHANGED = {"remat", "without", "experts_matmul"}  # fields of rows for `large_steps` alone


def _parallel_key(row: Row) -> tuple:
    mesh = json.dumps(row["mesh"])
    return (
        row["table"],
        row["variant"],
        mesh,
        row["rows"],
        row["length"],
        row.get("document"),
        row.get("remat"),
        row.get("without"),
        row.get("experts_matmul"),
    )


def _thousands(row: Row) -> str:
    return f"{row['tokens_per_second'] / 1e3:.1f}"


def _layout_columns(rows: list[Row]) -> tuple[Column, ...]:
    """Return the columns of the table that compares training with 16,384 tokens per card in different
    layouts: the mixer's name, one column for each length of a sequence ("2,048 x 8" are 8 sequences of
    2,048 tokens) with tokens/s and GiB, and the speed at the longest length divided by that at the
    shortest.
    """
    lengths = sorted({row["length"] for row in rows})

    def cell(length: int) -> Column:
        def text(by_length: dict[int, Row]) -> str:
            row = by_length.get(length)
            return f"{_thousands(row)}, {row['gib']:.1f} GiB" if row else ""

        return Column(f"{length:,} x {16384 // length}", text)

    def ratio(by_length: dict[int, Row]) -> str:
        first, last = by_length[lengths[0]], by_length[lengths[-1]]
        return f"{last['tokens_per_second'] / first['tokens_per_second']:.2f}"

    return (
        Column("mixer", lambda by_length: _mixer(next(iter(by_length.values())))),
        *map(cell, lengths),
        Column("longest / shortest", ratio),
        Column(
            "commits",
            lambda by_length: ", ".join(dict.fromkeys(r["commit"] for r in by_length.values())),
        ),
    )


def _by_mixer(rows: list[Row]) -> list[dict[int, Row]]:
    return [{row["length"]: row for row in of_mixer} for of_mixer in group(rows, _mixer).values()]


def _layouts(name: str, cards: int, command: str) -> Table:
    return Table(
        name,
        ("linear_moe.jsonl",),
        _layout_columns,
        where=lambda row: (
            row["table"] == "layouts"
            and row["mesh"].get("fsdp", 1) == cards
            and row["rows"] * row["length"] == 16_384 * cards
            and not _CHANGED & row.keys()
        ),
        key=_parallel_key,
        lines=_by_mixer,
        not_run="measures GPUs; docs/papers/linear_moe.md runs the program at small sizes on a CPU",
        command=command,
    )


def _cut_rows(rows: list[Row]) -> list[tuple[Row, Row | None]]:
    """Return pairs of stored rows: a training step whose sequences are divided over several cards, and the
    step on one card with the same mixer and as many tokens per card, or None if that was not measured.
    """
    records = []
    for row in sorted(
        rows, key=lambda row: (row["variant"], row.get("document", 0), row["length"])
    ):
        per_card = row["length"] // row["mesh"].get("sequence", 1)
        alone = [
            r
            for r in rows
            if _mixer(r) == _mixer(row) and not r["mesh"] and r["length"] == per_card
        ]
        records.append((row, alone[-1] if alone else None))
    return records


def _share_of_one_card(record: tuple[Row, Row | None]) -> str:
    row, alone = record
    if alone is None or alone is row:
        return ""
    return f"{row['tokens_per_second_a_card'] / alone['tokens_per_second_a_card']:.2f}"


def _decoded(rows: list[Row]) -> list[dict[int, Row]]:
    models = [
        {row["tokens"]: row for row in of_model} for of_model in group(rows, _decoder).values()
    ]
    return sorted(
        models, key=lambda by_tokens: -max(row["state_gib"] for row in by_tokens.values())
    )


def _decoder(row: Row) -> str:
    """Return the model of a row of decoding with experts, and which tokens it read."""
    return f"{_decoding_model(row)}, {'text' if row.get('inputs') == 'text' else 'equal rows'}"


def _decoding_model(row: Row) -> str:
    if row["pattern"] == "N":
        return "softmax attention"
    return f"{row['mixer']}, pattern `{row['pattern']}`"


def _decoding_columns(rows: list[Row]) -> tuple[Column, ...]:
    def cell(tokens: int) -> Column:
        def text(by_tokens: dict[int, Row]) -> str:
            row = by_tokens.get(tokens)
            if row is None:
                return ""
            if "error" in row:
                return "out of memory"
            return (
                f"{row['seconds']:.1f} s, {row['ms_a_token']:.2f} ms, {row['in_use_gib']:.1f} GiB"
            )

        return Column(f"{tokens // 1024}K", text)

    lengths = sorted({row["tokens"] for row in rows})
    return (
        Column("model, tokens", lambda by_tokens: _decoder(next(iter(by_tokens.values())))),
        *map(cell, lengths),
        Column(
            "commits",
            lambda by_tokens: ", ".join(dict.fromkeys(r["commit"] for r in by_tokens.values())),
        ),
    )


def _growths(row: Row) -> str:
    """Return the text about an expert layer's buffer in one run: its factor at the start, and each growth
    with its step.
    """
    steps = [f"{growth['expert_buffer']:g} at step {growth['step']}" for growth in row["growths"]]
    return ", ".join([f"{row['expert_buffer']:g}", *steps])


TABLES = [
    _layouts(
        "layouts",
        1,
        f"{PARALLEL} {OUTPUT}\n"
        f"{PARALLEL} --mixers softmax,linear_attention,gla --layouts 2048x8,4096x4,8192x2,16384x1 {OUTPUT}",
    ),
    _layouts(
        "layouts_two_cards",
        2,
        f"{PARALLEL} --cards 2 --layouts 2048x8,4096x4,8192x2,16384x1 {OUTPUT}",
    ),
    Table(
        "large_steps",
        ("linear_moe.jsonl",),
        (
            Column("mixer", _mixer),
            Column("rows x tokens", lambda row: f"{row['rows']} x {row['length']:,}"),
            Column("recomputed", lambda row: row.get("remat", "full")),
            Column("in XLA", lambda row: row.get("without", "")),
            Column("experts' products", lambda row: row.get("experts_matmul", "")),
            Column("10³ tokens/s", _thousands),
            column("ms", "step_ms", "{:.0f}"),
            column("GiB", "gib", "{:.1f}"),
            measured(),
        ),
        where=lambda row: (
            row["table"] == "layouts" and not row["mesh"] and row["rows"] * row["length"] > 16_384
        ),
        key=_parallel_key,
        not_run="measures GPUs; docs/papers/linear_moe.md runs the program at small sizes on a CPU",
        command=f"{PARALLEL} --cards 1 --mixers gla --layouts 2048x32 {OUTPUT}     # and with --remat=dots, also with --experts_matmul fp8",
    ),
    Table(
        "axes",
        ("linear_moe.jsonl",),
        (
            Column("mixer", _mixer),
            Column(
                "mesh",
                lambda row: ", ".join(f"{a} {n}" for a, n in row["mesh"].items()) or "one card",
            ),
            Column("rows x tokens", lambda row: f"{row['rows']} x {row['length']:,}"),
            Column("10³ tokens/s", _thousands),
            column("GiB per card", "gib", "{:.1f}"),
            measured(),
        ),
        where=lambda row: row["table"] == "axes" and not _CHANGED & row.keys(),
        key=_parallel_key,
        lines=lambda rows: sorted(rows, key=lambda row: next((n for n in row["mesh"].values()), 1)),
        not_run="measures GPUs; docs/papers/linear_moe.md runs the program at small sizes on a CPU",
        command=f"{PARALLEL} --table axes --mixers linear_attention {OUTPUT}     # and with --cards 1 or 2\n"
        f"{PARALLEL} --table axes --axes pipeline --rounds 2 --mixers linear_attention {OUTPUT}\n"
        f"{PARALLEL} --table axes --axes expert --exchange ragged --mixers linear_attention {OUTPUT}",
    ),
    Table(
        "cut_rows",
        ("linear_moe.jsonl",),
        (
            Column("mixer", lambda record: _mixer(record[0])),
            Column("cards", lambda record: str(record[0]["mesh"].get("sequence", 1))),
            Column("tokens in the row", lambda record: f"{record[0]['length']:,}"),
            Column("10³ tokens/s", lambda record: _thousands(record[0])),
            Column("GiB per card", lambda record: f"{record[0]['gib']:.1f}"),
            Column("speed per card / one card", _share_of_one_card),
            Column("date, commit", lambda record: measured().cell(record[0])),
        ),
        where=lambda row: row["table"] == "lengths" and not _CHANGED & row.keys(),
        key=_parallel_key,
        lines=_cut_rows,
        not_run="measures GPUs; docs/papers/linear_moe.md runs the program at small sizes on a CPU",
        command=f"{PARALLEL} --table lengths --mixers gla,gated_deltanet --counts 1,2 {OUTPUT}\n"
        f"{PARALLEL} --table lengths --mixers deltanet,mamba2,rwkv6,hgrn2,retnet --counts 1,2 --steps 3 {OUTPUT}\n"
        f"{PARALLEL} --table lengths --mixers gla,gated_deltanet --document 4096 --counts 1,2 --steps 3 {OUTPUT}\n"
        f"{PARALLEL} --table lengths --mixers gla --pattern LLLN --tokens 65536 --counts 1,2 {OUTPUT}\n"
        f"{PARALLEL} --table lengths --mixers linear_attention --longest 262144,393216 --steps 2 {OUTPUT}\n"
        f"{PARALLEL} --table lengths --mixers linear_attention --counts 2 --tokens 524288 --longest 589824 --steps 2 "
        f"{OUTPUT}     # and with --counts 1 --longest 589824,655360",
    ),
    Table(
        "expert_overflow",
        ("linear_moe_overflow.jsonl",),
        (
            column("balance loss", "balance_scale", "{:g}"),
            column("devices", "devices"),
            Column("width, layers", lambda row: f"{row['width']:,}, {row['layers']}"),
            column("steps", "ended_at_step"),
            column("choices that did not fit", "overflow_count"),
            Column("growths", _growths),
            column("largest load of an expert", "largest_load", "{:.3f}"),
            column("held-out loss", "heldout_loss", "{:.3f}"),
            measured(),
        ),
        key=lambda row: (row["balance_scale"], row["devices"], row["width"], row["layers"]),
        command="XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks expert_overflow\n"
        "python -m benchmarks expert_overflow --variant a0.3b-2b,mixer=gla --batch_size 8 --length 2048 --vocab_size 32000 "
        "--peak_lr 1e-4     # one H200; four with --unsaved",
    ),
    Table(
        "linear_moe_decode",
        ("linear_moe_decode.jsonl",),
        _decoding_columns,
        key=lambda row: (row["mixer"], row["pattern"], row.get("inputs"), row["tokens"]),
        lines=_decoded,
        command="python -m benchmarks linear_moe_decode --models softmax:N,linear_attention:L,linear_attention:LLLN",
    ),
    Table(
        "linear_moe_curve",
        ("linear_moe_curve.jsonl",),
        (
            Column("model", lambda row: f"`{row['model']}`, pattern `{row['pattern']}`"),
            Column("tokens, M", lambda row: f"{row['heldout']['tokens'][-1] / 1e6:.1f}"),
            Column("held-out loss, nats per byte", lambda row: f"{row['heldout']['loss'][-1]:.3f}"),
            column("parameters, M", "parameters.total", "{:.1f}", 1e6),
            column("active parameters, M", "parameters.active", "{:.1f}", 1e6),
            measured(),
        ),
        key=lambda row: (row["model"], row["pattern"]),
        lines=lambda rows: sorted(rows, key=lambda row: row["heldout"]["loss"][-1]),
        command="python -m benchmarks linear_moe_curve --output docs/linear_moe_curve.jsonl",
    ),
]
