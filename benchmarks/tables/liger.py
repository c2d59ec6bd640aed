"""The results tables about Liger."""

from __future__ import annotations

from benchmarks.tables.table import Column, Row, Section, Table, column, group, newest

WINDOW = "method=window,lr=3e-3"
WEIGHTED = "gate=gla,lr=3e-3,memory_weight=0.03,window_weight=1"


def _options(row: Row) -> dict[str, str]:
    """Return the options of a Liger row by name."""
    return dict(part.split("=") for part in row["options"].split(","))


def _rate(row: Row) -> float:
    """Return the learning rate of a Liger row."""
    return float(_options(row).get("lr", "1e-3"))


def _liger_order(row: Row) -> tuple:
    """Return the sort key of a Liger row: untuned first, then by rate, kind of model, name, seed and tokens."""
    kind = {"softmax": 0, "window": 1, "lolcats": 2}.get(_options(row).get("method", ""), 3)
    return row["tokens"] > 0, _rate(row), kind, row["name"], row["seed"], row["tokens"]


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


def _with_margins(rows: list[Row]) -> list[Row]:
    """Return the rows in the order of `_liger_order`, each with `margin`: the loss beyond 256 of the window with equal rate, seed and
    tokens, minus that of the row, where there is such a window and the row is another model."""
    windows = {
        (_rate(row), row["millions"], row["seed"]): row["beyond_256"]
        for row in rows
        if row["tokens"] and _options(row).get("method") == "window"
    }

    def margin(row: Row) -> dict[str, float]:
        window = windows.get((_rate(row), row["millions"], row["seed"]))
        alone = not row["tokens"] or _options(row).get("method") == "window"
        return {} if window is None or alone else dict(margin=window - row["beyond_256"])

    return [row | margin(row) for row in sorted(rows, key=_liger_order)]


TABLES = [
    Section(
        "liger_corpus",
        ("liger.jsonl",),
        (
            *_liger_columns(bins=False),
            column("margin over the window", "margin", "{:+.3f}"),
            column("card seconds of training", "train_seconds", "{:.0f}"),
        ),
        where=lambda row: row.get("text") == "corpus",
        key=_liger_key,
        lines=_with_margins,
        command="python -m benchmarks liger --text corpus --source SmolLM2.gguf --store STORE --tokenizer TOKENIZER.json "
        "--rows 0,1,2,30,32,31,33,18,20,19,21 --output docs/liger.jsonl",
        heading="### On more text",
        text="The same models, tuned on the beginning of [docs/corpus.md](../corpus.md)'s training text in place of a library and essays, and scored on "
        "its held-out text, so that losses are not comparable with those above. The margin is the loss beyond position 256 of the window with "
        "equal rate, seed and number of tokens minus that of the row: a positive number means that the row is better.",
    ),
    Table(
        "liger",
        ("liger.jsonl",),
        _liger_columns(bins=True),
        where=lambda row: "text" not in row,
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
        where=lambda row: row["options"] in (WINDOW, WEIGHTED) and "text" not in row,
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
