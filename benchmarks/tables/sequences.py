"""The results tables about Linear-MoE, Mixture-of-Memories, Liger and decoding after long contexts."""

from __future__ import annotations

import json

from benchmarks.tables.table import Column, Row, Table, column, group, measured, newest, times


def _mixer(row: Row) -> str:
    packed = f", documents of {row['document']:,}" if "document" in row else ""
    return "`" + row["variant"].split("mixer=")[1] + "`" + packed


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
            and not {"remat", "without"} & row.keys()
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


def _liger_order(row: Row) -> tuple:
    """Return the sort key of a Liger row: untuned first, then by rate, kind of model, name, seed and tokens."""
    options = dict(part.split("=") for part in row["options"].split(","))
    kind = {"softmax": 0, "window": 1, "lolcats": 2}.get(options.get("method", ""), 3)
    rate = float(options.get("lr", "1e-3"))
    return row["tokens"] > 0, rate, kind, row["name"], row["seed"], row["tokens"]


def _liger_columns(bins: bool) -> tuple[Column, ...]:
    names = ("0-64", "64-128", "128-256", "256-512", "512-1024") if bins else ()
    return (
        column("model", "name"),
        column("options", "options", "`{}`"),
        column("tokens, M", "tokens", "{:.1f}", 1e6),
        column("seed", "seed"),
        column("all positions", "nats", "{:.3f}"),
        column("beyond 256", "beyond_256", "{:.3f}"),
        *(column(name, f"by_position.{name}", "{:.3f}") for name in names),
    )


def _liger_key(row: Row) -> tuple:
    return row["name"], row["options"], row["seed"], row["tokens"]


WINDOW = "method=window,lr=3e-3"
WEIGHTED = "gate=gla,lr=3e-3,memory_weight=0.03,window_weight=1"


def _margins(rows: list[Row]) -> list[tuple[float, dict[int, float]]]:
    """Return pairs (number of tuning tokens in millions, advantage of Liger-GLA by seed), by number of
    tokens. The advantage is the held-out loss of window attention alone minus that of Liger-GLA, at
    positions beyond 256.
    """
    loss = {(row["options"], row["millions"], row["seed"]): row["beyond_256"] for row in rows}
    return [
        (
            millions,
            {
                seed: loss[WINDOW, millions, seed] - loss[WEIGHTED, millions, seed]
                for seed in (0, 1)
            },
        )
        for millions in sorted({row["millions"] for row in rows if row["options"] == WEIGHTED})
    ]


def _liger_decoding(rows: list[Row]) -> list[tuple[int, Row, Row]]:
    """Return, for each context length in tokens, (tokens, decoding row of softmax attention, decoding row
    of Liger-GLA).
    """
    return [
        (tokens, newest(of_tokens, model="softmax"), newest(of_tokens, model="Liger-GLA"))
        for tokens, of_tokens in sorted(group(rows, lambda row: row["tokens"]).items())
    ]


def _layer_times(field: str, title: str) -> Column:
    return Column(
        title, lambda row: f"{row[field]['forward_ms']:.2f} / {row[field]['training_ms']:.2f}"
    )


PARALLEL = "python -m benchmarks parallel"
OUTPUT = "--output docs/linear_moe.jsonl"


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
        command=f"{PARALLEL} --cards 1 --mixers gla --layouts 2048x32 {OUTPUT}     # and with --remat=dots",
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
        where=lambda row: row["table"] == "axes" and not {"remat", "without"} & row.keys(),
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
        where=lambda row: row["table"] == "lengths" and not {"remat", "without"} & row.keys(),
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
    Table(
        "liger",
        ("liger.jsonl",),
        _liger_columns(bins=True),
        key=_liger_key,
        lines=lambda rows: sorted(rows, key=_liger_order),
        command="python -m benchmarks liger --source SmolLM2.gguf --store STORE --tokenizer TOKENIZER.json --rows 0,1,2 "
        "--output docs/liger.jsonl\n"
        "python -m benchmarks liger ... --rows 3,4,5,6,7,8,9,10,11,12     # as published\n"
        "python -m benchmarks liger ... --rows 13,14,15,16,17     # ablations\n"
        "python -m benchmarks liger ... --rows 18,19,20,21,22 --marks 5,10     # rate 3e-3\n"
        "python -m benchmarks liger ... --rows 23,24,25,26     # rate 1e-2\n"
        f'python -m benchmarks liger ... --marks 5,10 --row "Liger-GLA, weights 0.03 and 1:{WEIGHTED}:20:0"',
    ),
    Table(
        "liger_margins",
        ("liger.jsonl",),
        (
            Column("tokens, M", lambda record: f"{record[0]:g}"),
            *(
                Column(f"seed {seed}", lambda record, seed=seed: f"{record[1][seed]:+.3f}")
                for seed in (0, 1)
            ),
        ),
        where=lambda row: row["options"] in (WINDOW, WEIGHTED),
        key=_liger_key,
        lines=_margins,
    ),
    Table(
        "liger_ablations",
        ("liger_ablations.jsonl",),
        _liger_columns(bins=False),
        key=_liger_key,
        lines=lambda rows: sorted(rows, key=_liger_order),
        not_run="NAME and OPTIONS stand for those of a row",
        command='python -m benchmarks liger ... --row "NAME:OPTIONS:5:0" --output docs/liger_ablations.jsonl',
    ),
    Table(
        "liger_branches",
        ("liger_branches.jsonl",),
        (
            column("options", "options", "`{}`"),
            *(
                column(f"{title}, positions {name}", f"{field}.{name}", "{:.2f}")
                for field, title in (("mass", "sum of weights"), ("age", "mean age, tokens"))
                for name in ("0-64", "512-1024")
            ),
        ),
        key=lambda row: row["options"],
        command="python -m benchmarks liger_branches --source SmolLM2.gguf --store STORE --tokenizer TOKENIZER.json "
        "--output docs/liger_branches.jsonl",
    ),
    Table(
        "liger_decode",
        ("liger_decode.jsonl",),
        (
            Column("tokens", lambda record: f"{record[0]:,}"),
            *(
                Column(
                    f"{name}: {title}",
                    lambda record, i=i, field=field, form=form: form.format(record[i][field]),
                )
                for i, name in ((1, "softmax"), (2, "Liger-GLA"))
                for title, field, form in (
                    ("seconds", "seconds", "{:.1f}"),
                    ("ms per token", "ms_a_token", "{:.2f}"),
                    ("GiB", "in_use_gib", "{:.1f}"),
                )
            ),
        ),
        key=lambda row: (row["model"], row["tokens"]),
        where=lambda row: "sample" not in row["model"],
        lines=_liger_decoding,
        command="python -m benchmarks liger_decode --models softmax,liger --output docs/liger_decode.jsonl",
    ),
    Table(
        "liger_sample",
        ("liger_decode.jsonl",),
        (
            column("model", "model"),
            column("tokens", "tokens", "{:,}"),
            column("seconds", "seconds", "{:.1f}"),
            column("ms per token", "ms_a_token", "{:.2f}"),
            column("GiB", "in_use_gib", "{:.1f}"),
        ),
        key=lambda row: (row["model"], row["tokens"]),
        where=lambda row: "sample" in row["model"],
        command="python -m benchmarks liger_decode --models liger-sample,softmax-sample --sample_tokens 2048 "
        "--output docs/liger_decode.jsonl",
    ),
]
