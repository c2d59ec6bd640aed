"""The results tables about the speed and the memory of training steps: models of 340M and 1.3B, beside those of peers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.tables.table import Column, Row, Table, column, group, newest

LENGTHS = (2048, 4096, 8192, 16384)
PEER_VARIANTS = {
    "gla-340m": "GLA",
    "gated_deltanet-340m": "Gated DeltaNet",
    "mamba2-340m": "Mamba2",
    "mamba3-340m": "Mamba-3",
    "gated_deltaproduct-340m": "Gated DeltaProduct",
    "gated_deltanet2-340m": "Gated DeltaNet-2",
    "comba-340m": "Comba",
    "gla-1.3b": "GLA 1.3B",
    "gated_deltanet-1.3b": "Gated DeltaNet 1.3B",
    "kda-1.3b": "KDA 1.3B",
    "mamba2-1.3b": "Mamba2 1.3B",
    "rwkv7-1.3b": "RWKV7 1.3B",
    "softmax-1.3b": "softmax attention 1.3B",
}
"""The variants of the table beside flash-linear-attention's models, in its order; those without a stored row have no line."""


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
    "mixer",
}
"""Fields of a row that say which part of the training step it has in another form than by default."""


def is_step(row: Row, tokens: int = TOKENS, remat: str = "dots") -> bool:
    """Return whether a row is of a training step of so many tokens, with one rematerialisation, the default compiler flags, and no
    variant of it.
    """
    plain = row.get("remat") == remat and not row["xla_flags"]
    plain = plain and row["rows"] * row["length"] == tokens
    return plain and not _PARTS & set(row)


def _is_step_but_for(row: Row, part: str) -> bool:
    """Return whether a row is of a training step as `is_step` says, or of one whose only variant is `part`."""
    return "peer" not in row and is_step({name: row[name] for name in row if name != part})


def is_full_remat_step(row: Row) -> bool:
    """Return whether a row is of a training step of any number of tokens that saves no activations, with rematerialisation "full" and the
    default compiler flags, and no variant of it.
    """
    return row.get("remat") == "full" and not row["xla_flags"] and not _PARTS & set(row)


# The report does not import JAX, so counts are stored here; tests/benchmarks/test_training_steps.py computes them.
FLOPS = {
    "gla-340m": 2_097_020_928,
    "gated_deltanet-340m": 2_549_121_024,
    "mamba2-340m": 2_285_469_696,
    "mamba3-340m": 2_312_306_688,
    "gated_deltaproduct-340m": 3_003_875_328,
    "gated_deltanet2-340m": 2_491_613_184,
    "comba-340m": 2_549_121_024,
    "gla-1.3b": 7_987_789_824,
    "gated_deltanet-1.3b": 9_403_367_424,
    "kda-1.3b": 8_083_341_312,
    "mamba2-1.3b": 8_213_397_504,
    "rwkv7-1.3b": 8_046_772_224,
}
"""Floating-point operations of training per token, three times those of the forward pass, by `lsm_jax.models.counts`: of our models beside
flash-linear-attention's of the same sizes, with a vocabulary of 32,000, in rows of any length."""


FLOPS_OF_LENGTH = {"softmax-1.3b": {2048: 8_396_242_944, 4096: 9_000_222_720}}
"""The same of softmax attention, by the length of a row."""


JLA_FLOPS = {
    ("softmax-1.3b", 4096): 8_094_253_056,
    ("gla-1.3b", 4096): 7_987_789_824,
    ("gated_deltanet-1.3b", 4096): 8_277_098_496,
    ("gated_deltanet-1.3b num_heads=16,head_dim=128,expand_v=1.0", 4096): 8_541_044_736,
    ("kda-1.3b", 4096): 8_083_341_312,
    ("mamba2-1.3b", 4096): 8_213_397_504,
    ("rwkv7-1.3b", 4096): 7_886_340_096,
}
"""The same of jax-linear-attention's models (`benchmarks.peers.jla_trainer.SIZES`), by our variant with its fields, and the length of a row."""


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


def _shortest_and_longest(name: str, tokens: int, remat: str, options: str) -> Table:
    """Return a table of the steps of so many tokens with one rematerialisation, in the shortest and in the longest rows."""
    return Table(
        name,
        ("model_step.jsonl",),
        (
            Column("model", lambda steps: f"`{steps[min(steps)]['variant']}`"),
            _speed_at(LENGTHS[0]),
            _speed_at(LENGTHS[-1]),
            Column("16,384 / 2,048", _longest_over_shortest),
            Column("commits", _commits),
        ),
        where=lambda row: "peer" not in row and is_step(row, tokens, remat),
        key=_step_key,
        lines=_steps,
        command=f"python -m benchmarks model_step {options}",
    )


def _gate(row: Row) -> str:
    """Return which gate a row's KDA has, with its option."""
    mixer = row.get("mixer")
    return f"bounded, `{mixer}`" if mixer else "of any size, the default"


def with_mixer(row: Row) -> str:
    """Return the variant of a row, and the fields of its mixers that differ from the variant's: the key of `jla_trainer.PRESETS`."""
    return f"{row['variant']} {row.get('mixer', '')}".strip()


def flops(row: Row) -> float:
    """Return the floating-point operations of training per token of a row's model, by this library's count.

    Raises:
        KeyError: nobody has counted the row's model.
    """
    if "flops_per_token" in row:
        return row["flops_per_token"]
    if row.get("peer") == "jla":
        return JLA_FLOPS[with_mixer(row), row["length"]]
    if row["variant"] in FLOPS_OF_LENGTH:
        return FLOPS_OF_LENGTH[row["variant"]][row["length"]]
    return FLOPS[row["variant"]]


def _mfu(row: Row) -> float:
    """Return the MFU of a row's model, in percent of the peak of bfloat16."""
    speed = row.get("tokens_per_second") or row["fla_gradient_tokens_per_second"]
    return 100 * flops(row) * speed / PEAK


def stands_beside_fla(row: Row) -> bool:
    """Return whether a row is of our training step that can stand beside flash-linear-attention's: without variants, with rematerialisation
    "dots_and_states", or "dots" at 340M."""
    policies = (
        {"dots_and_states"} if row["variant"].endswith("-1.3b") else {"dots_and_states", "dots"}
    )
    return "peer" not in row and any(is_step(row, remat=remat) for remat in policies)


def _beside_fla(rows: list[Row]) -> list[tuple[Row | None, Row | None]]:
    """Return, for each variant and length of a row, (our training row, flash-linear-attention's fastest): ours with "dots_and_states" of the
    same commit, or otherwise the newest with it, or otherwise the newest."""
    pairs: list[tuple[Row | None, Row | None]] = []
    for variant in PEER_VARIANTS:
        for length in LENGTHS:
            of = [row for row in rows if (row["variant"], row["length"]) == (variant, length)]
            ours, theirs = ([r for r in of if ("peer" in r) is peer] for peer in (False, True))
            peer = max(theirs, key=lambda r: r["fla_gradient_tokens_per_second"], default=None)
            states = [row for row in ours if row["remat"] == "dots_and_states"]
            same = [row for row in states if peer and row["commit"] == peer["commit"]]
            if of:
                pairs.append((next(reversed(same or states or ours), None), peer))
    return pairs


def _beside_jla(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return, for each model and kind of products, (our training step, jax-linear-attention's of the same commit), of each the fastest of
    the policies that were timed: of several commits, those of the one in which the peer was fastest."""
    same = ("variant", "rows", "length", "commit", "matmul", "mixer")
    pairs: dict[tuple, tuple[Row, Row]] = {}
    for of_commit in group(rows, lambda row: tuple(map(row.get, same))).values():
        both = [
            [r for r in of_commit if (r.get("peer") == "jla") is theirs] for theirs in (False, True)
        ]
        if all(both):
            ours, theirs = (max(found, key=lambda r: r["tokens_per_second"]) for found in both)
            model = tuple(ours.get(n) for n in same if n != "commit")
            before = pairs.get(model)
            if before is None or before[1]["tokens_per_second"] < theirs["tokens_per_second"]:
                pairs[model] = ours, theirs
    return list(pairs.values())


def _in_fp8(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return, for each model and kind of products, the newest (training step with products in bfloat16, with products in FP8) of one commit
    and rematerialisation."""
    same = ("variant", "rows", "length", "remat", "commit")
    plain = {tuple(map(row.get, same)): row for row in rows if "matmul" not in row}
    pairs = {
        (row["variant"], row["matmul"]): (plain[found], row)
        for row in rows
        if "matmul" in row and (found := tuple(map(row.get, same))) in plain
    }
    return list(pairs.values())


def _jla_columns() -> tuple[Column, ...]:
    def both(text: Callable[[Row], str]) -> Callable[[tuple[Row, Row]], str]:
        return lambda pair: ", ".join(map(text, pair))

    def count(row: Row) -> str:
        return f"{flops(row) / 1e9:.2f}"

    return (
        Column("model", lambda pair: f"`{with_mixer(pair[0])}`"),
        Column("products", lambda pair: pair[0].get("matmul", "bfloat16")),
        Column("10³ tokens/s", both(lambda row: f"{row['tokens_per_second'] / 1e3:.1f}")),
        Column("ratio", lambda pair: f"{pair[0]['tokens_per_second'] / pair[1]['tokens_per_second']:.2f}"),
        Column("10⁹ FLOP a token", both(count)),
        Column("MFU, %", both(lambda row: f"{_mfu(row):.1f}")),
        Column("MFU by the peer, %", lambda pair: f"{pair[1]['own_mfu_percent']:.1f}"),
        Column("remat", lambda pair: f"`{pair[0]['remat']}`, `{pair[1]['peer_remat']}`"),
        Column("date, commit", lambda pair: f"{pair[1]['date']}, {pair[1]['commit']}"),
    )  # fmt: skip


def _fla_columns() -> tuple[Column, ...]:
    def speed(place: int) -> Callable[[tuple[Row | None, Row | None]], str]:
        field = "fla_gradient_tokens_per_second" if place else "tokens_per_second"

        def cell(pair: tuple[Row | None, Row | None]) -> str:
            row = pair[place]
            again = ", layers computed again" if row and row.get("fla_remat") == "layers" else ""
            return f"{row[field] / 1e3:.1f} ({row['commit']}{again})" if row else ""

        return cell

    def mfu(place: int) -> Callable[[tuple[Row | None, Row | None]], str]:
        return lambda pair: f"{_mfu(row):.1f}" if (row := pair[place]) else ""

    def either(pair: tuple[Row | None, Row | None]) -> Row:
        return pair[0] or pair[1] or {}

    return (
        Column("model", lambda pair: PEER_VARIANTS[either(pair)["variant"]]),
        Column("T", lambda pair: f"{either(pair)['length']:,}"),
        Column("10³ tokens/s", speed(0)),
        Column("10³ tokens/s, FLA", speed(1)),
        Column("MFU, %", mfu(0)),
        Column("MFU, %, FLA", mfu(1)),
    )


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


_SPEED_AND_MEMORY = (
    column("10³ tokens/s", "tokens_per_second", "{:.1f}", 1e3),
    column("GiB", "gib", "{:.1f}"),
    column("commit", "commit"),
)

TABLES = [
    Table(
        "model_step_fp8",
        ("model_step.jsonl",),
        (
            Column("model", lambda pair: f"`{pair[0]['variant']}`"),
            Column("head", lambda pair: "FP8" if pair[1]["matmul"] == "fp8_head" else "bfloat16"),
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
            and not row["xla_flags"]
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
    _shortest_and_longest(
        "model_step_long",
        2 * TOKENS,
        "dots",
        "--variants gated_deltaproduct-340m,comba-340m --lengths 2048,16384 --tokens 65536",
    ),
    _shortest_and_longest(
        "model_step_long_saved",
        2 * TOKENS,
        "dots_and_states",
        "--variants gla-340m,gated_deltanet-340m,kda-340m,mamba2-340m,rwkv7-340m --lengths 2048,16384 --tokens 65536 --remat dots_and_states",
    ),
    _shortest_and_longest(
        "model_step_full_remat",
        TOKENS,
        "full",
        "--variants log_linear_mamba2-340m,log_linear_gated_deltanet-340m --lengths 2048,16384 --remat full",
    ),
    _shortest_and_longest(
        "model_step_momentum",
        TOKENS // 2,
        "full",
        "--variants momentum_deltanet-340m --lengths 2048,16384 --tokens 16384 --remat full --batch_steps 2",
    ),
    _shortest_and_longest(
        "model_step_mimo",
        TOKENS * 3 // 2,
        "dots",
        "--variants mamba3_mimo-340m --lengths 2048,16384 --tokens 49152 --batch_steps 4",
    ),
    Table(
        "model_step_bounded",
        ("model_step.jsonl",),
        (
            Column("gate", lambda steps: _gate(next(iter(steps.values())))),
            _speed_at(LENGTHS[0]),
            _speed_at(LENGTHS[-1]),
            Column("16,384 / 2,048", _longest_over_shortest),
            Column("GiB at the shortest", lambda steps: f"{steps[min(steps)]['gib']:.1f}"),
            Column("commits", _commits),
        ),
        where=lambda row: (
            row["variant"] == "kda-340m"
            and row["length"] in (LENGTHS[0], LENGTHS[-1])
            and _is_step_but_for(row, "mixer")
        ),
        key=lambda row: (row.get("mixer"), row["length"]),
        lines=lambda rows: [
            {row["length"]: row for row in of}
            for of in group(rows, lambda row: row.get("mixer")).values()
        ],
        command="python -m benchmarks model_step --variants kda-340m --lengths 2048,16384     # and with --mixer lower_bound=-5.0",
    ),
    Table(
        "model_step_fla",
        ("model_step.jsonl",),
        _fla_columns(),
        where=lambda row: (
            row["variant"] in PEER_VARIANTS
            and ("fla_gradient_tokens_per_second" in row or stands_beside_fla(row))
        ),
        key=lambda row: (*_step_key(row), row.get("remat"), row["commit"]),
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
                    and not (_PARTS - {"matmul", "mixer"}) & set(row)
                )
            )
        ),
        key=lambda row: (
            *_step_key(row),
            *map(row.get, ("mixer", "matmul", "remat", "peer_remat", "commit")),
        ),
        lines=_beside_jla,
        not_run="requires an NVIDIA GPU and jax-linear-attention",
        command="python -m benchmarks model_step --variants softmax-1.3b,kda-1.3b --lengths 4096 --remat dots_and_inputs --peers jla "
        "--output docs/model_step.jsonl     # others: --remat dots_and_states; FP8: --remat dots --matmul fp8",
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
        where=lambda row: row.get("remat") in SAVING_MORE and is_step(row, remat=row["remat"]),
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
]
