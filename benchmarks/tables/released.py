"""The results tables of docs/results/released_models.md: shapes of released models with random weights on one card."""

from __future__ import annotations

from benchmarks.tables.table import Column, Row, Table, column, measured, ordered, significant

_COMMAND = "python -m benchmarks released_models --output docs/released_models.jsonl"
_NOT_RUN = "requires a GPU for models of such sizes; tests run the program with --tiny"
_MODELS = ("qwen3.5-4b", "granite-4.0-h-small", "qwen3-next")


def _key(row: Row) -> tuple:
    fields = (
        "model",
        "layers",
        "work",
        "tokens",
        "rows",
        "kernels",
        "attention",
        "decode",
        "device",
        "packages",
    )
    return tuple(str(row.get(field)) for field in fields)


def _sorted(rows: list[Row]) -> list[Row]:
    place = ordered(_MODELS, lambda row: row["model"])
    return sorted(rows, key=lambda r: (place(r), r["layers"], r["rows"], r["tokens"], r["kernels"] == "off", r.get("attention", ""), r.get("decode", "")))  # fmt: skip


def _kernels(row: Row) -> str:
    """Return by which backend the memories of a row's linear layers ran, and its attention."""
    memories = ("delta_memory", "linear_memory", "dplr_memory", "selective_memory")
    texts = []
    for part, choices in row["implementations"].items():
        if part == "step":  # a step differentiates
            choices = {
                op: "xla" if "where differentiated" in text else text
                for op, text in choices.items()
            }
        named = {op: text.split(" ")[0].strip(",") for op, text in choices.items()}
        found = [named[op] for op in memories if op in named] + [f"attention {named[op]}" for op in ("attention",) if op in named]  # fmt: skip
        texts.append(f"{part}: {', '.join(found)}")
    return "; ".join(texts)


def _beside_transformers(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return pairs (a row of transformers, our row with kernels of the same model, length, card and commit)."""
    shared = ("model", "layers", "tokens", "rows", "device", "commit")
    ours = {
        tuple(r[f] for f in shared): r
        for r in rows
        if r["kernels"] == "on" and not {"attention", "decode"} & set(r)
    }
    theirs = [row for row in rows if row["kernels"] == "transformers"]
    pairs = [(row, ours.get(tuple(row[f] for f in shared))) for row in theirs]
    return [(peer, row) for peer, row in pairs if row is not None]


def _pair(title: str, field: str) -> Column:
    def cell(pair: tuple[Row, Row]) -> str:
        if "error" in pair[0]:
            return f"{pair[0]['error'].split(':')[0]} / {pair[1][field]:,}"
        return f"{pair[0][field]:,} / {pair[1][field]:,}"

    return Column(title, cell)


def _number(title: str, field: str) -> Column:
    return Column(title, lambda row: significant(row[field]))


_FIRST = (
    Column("model, layers", lambda row: f"{row['model']}, {row['layers']}"),
    column("tokens", "tokens", "{:,}"),
    column("kernels", "kernels"),
)
_LAYERS = Column("decoded in", lambda row: "unrolled layers" if "decode" in row else "a loop")

TABLES = [
    Table(
        "released_models",
        ("released_models.jsonl",),
        (
            *_FIRST,
            _number("prefill, ms", "prefill_ms"),
            column("prefill, tokens/s", "prefill_tokens_per_second", "{:,}"),
            _number("decode, tokens/s", "decode_tokens_per_second"),
            _LAYERS,
            column("state, GiB", "state_gib", "{:.2f}"),
            column("GiB", "gib", "{:.1f}"),
            Column("ran on", _kernels),
            measured(),
        ),
        where=lambda row: (
            row["work"] == "inference"
            and "error" not in row
            and row["device"] == "NVIDIA H200"
            and row["kernels"] != "transformers"
        ),
        key=_key,
        lines=_sorted,
        not_run=_NOT_RUN,
        command=_COMMAND,
    ),
    Table(
        "released_models_peers",
        ("released_models.jsonl",),
        (
            Column("model, layers", lambda pair: f"{pair[0]['model']}, {pair[0]['layers']}"),
            Column("tokens", lambda pair: f"{pair[0]['tokens']:,}"),
            Column("card", lambda pair: pair[0]["device"].removeprefix("NVIDIA ")),
            Column("packages", lambda pair: ", ".join(pair[0]["packages"]) or "none"),
            _pair("prefill, tokens/s", "prefill_tokens_per_second"),
            _pair("decode, tokens/s", "decode_tokens_per_second"),
        ),
        where=lambda row: row["work"] == "inference",
        key=_key,
        lines=_beside_transformers,
        not_run="requires PyTorch, transformers and an NVIDIA GPU",
        command=f"{_COMMAND} --models qwen3.5-4b,qwen3-next,granite-4.0-h-small --kernels on --lengths 1024,16384 --lora= "
        "--peers transformers",
    ),
    Table(
        "released_models_lora",
        ("released_models.jsonl",),
        (
            *_FIRST,
            _number("step, ms", "milliseconds"),
            column("tokens/s", "tokens_per_second", "{:,}"),
            column("GiB", "gib", "{:.1f}"),
            Column("ran on", _kernels),
            measured(),
        ),
        where=lambda row: row["work"] == "lora",
        key=_key,
        lines=_sorted,
        not_run=_NOT_RUN,
        command=f"{_COMMAND} --lengths=",
    ),
]
