"""The results tables about ops and fused kernels: those of docs/results/kernels.md, and the kernels of
other pages.
"""

from __future__ import annotations

from benchmarks.tables.table import (
    Column,
    Row,
    Table,
    column,
    group,
    matches,
    measured,
    newest,
    ordered,
    pair,
    significant,
    times,
)

MAIN_SHAPE = "8x4096x16x128"
OPS = {
    "no decay": "no decay",
    "constant decay": "constant decay (RetNet, Lightning)",
    "scalar decay": "scalar decay (Mamba2)",
    "key decay": "key-channel decay (GLA, HGRN2)",
    "key decay and bonus": "key-channel decay and bonus (RWKV6)",
    "value decay": "value-channel decay",
    "delta rule": "delta rule (DeltaNet)",
    "gated delta rule": "gated delta rule (Gated DeltaNet)",
    "undecayed delta rule": "gated delta rule, undecayed erase (Comba)",
    "kda": "KDA",
    "rwkv7": "RWKV7",
    "slot memory": "slot memory of 64 slots (GSA)",
    "mlstm": "scalar decay, input gate and normaliser (mLSTM)",
}
"""The ops as the pages name them, by their names in the rows; also their order in a table."""


def shape_text(shape: str) -> str:
    """Return the text of a shape with spaces for a table's cell: "8 x 4096 x 16 x 128" for "8x4096x16x128"."""
    return shape.replace("x", " x ")


def op_column() -> Column:
    return Column("op", lambda row: OPS[row["op"]])


def shape_column(title: str = "B x T x H x D") -> Column:
    return Column(title, lambda row: shape_text(row["shape"]))


def attention_gates(row: Row) -> str:
    """Return where the gates of a row of the attention benchmark come from: "text", "made-up" or "recorded"."""
    return row.get("gates", "made-up")


def is_plain(row: Row) -> bool:
    """Return whether a row of the kernels benchmark had no option: one state per row, ordinary gates, and
    as many parts as the kernel selects.
    """
    return not any(name in row for name in ("segments", "stronger", "parts"))


def beside(name: str) -> Column:
    """Return the table column of the times of the peer called `name`: empty where the peer was not measured,
    "no" where the peer does not support the op or shape.
    """

    def cell(row: Row) -> str:
        return times(row[name]) if name in row else "no" if f"{name}_error" in row else ""

    return Column({"jla": "jax-linear-attention", "fla": "FLA"}[name], cell)


def over_kernel(row: Row, peer: str = "fla") -> str:
    """Return, as text, how many times as long as our kernel a peer takes: forward / forward and backward."""
    ratios = [theirs / ours for theirs, ours in zip(row[peer], row["kernel"], strict=True)]
    return " / ".join(map(significant, ratios))


def _by_op(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=ordered(OPS, lambda row: row["op"]))


def main_shape_first(rows: list[Row]) -> list[Row]:
    return sorted(_by_op(rows), key=lambda row: row["shape"] != MAIN_SHAPE)


def _commits(name: str, commits: dict[str, str], command: str) -> Table:
    """Return a table that compares the kernels' times at several commits, with ordinary and with 20 times
    as strong gates.
    """

    def lines(rows: list[Row]) -> list[tuple[str, list[Row]]]:
        return [(op, rows_of) for op, rows_of in group(_by_op(rows), lambda row: row["op"]).items()]

    def times_of(commit: str, stronger: float | None) -> Column:
        strength = "20 times as strong" if stronger else "ordinary gates"
        return Column(
            f"{commits[commit]}, {strength}",
            lambda record: times(
                next(
                    row["kernel"]
                    for row in reversed(record[1])
                    if _commit(row) == commit and row.get("stronger") == stronger
                )
            ),
        )

    return Table(
        name,
        ("kernels.jsonl",),
        (
            Column("op", lambda record: OPS[record[0]]),
            *(times_of(commit, stronger) for stronger in (None, 20.0) for commit in commits),
        ),
        where=lambda row: (
            row["shape"] == MAIN_SHAPE
            and _commit(row) in commits
            and not any(name in row for name in ("segments", "parts", "fla", "fla_error"))
        ),
        key=lambda row: (row["op"], _commit(row), row.get("stronger")),
        lines=lines,
        not_run="requires an NVIDIA Hopper GPU",
        command=command,
    )


def _before_and_after(row: Row) -> str:
    """Return, as text, a row's times after a change of the kernel divided by those before it: forward /
    forward and backward.
    """
    return " / ".join(
        f"{new / old:.3f}" for old, new in zip(row["before"], row["after"], strict=True)
    )


def _commit(row: Row) -> str:
    """Return the commit at which a row was measured, without the "+" that marks uncommitted changes."""
    return row["commit"].removesuffix("+")


def _parts(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of stored rows with the same op and shape: measured with each sequence in one part, and
    with each sequence divided into several parts that one device computes in parallel.
    """
    split = [row for row in rows if row["parts"] > 1]
    return [(newest(rows, op=row["op"], shape=row["shape"], parts=1), row) for row in _by_op(split)]


def _scans(rows: list[Row]) -> list[dict[str, Row]]:
    """Return, for each op and shape of the selective scan, the newest stored rows of three kinds: "whole"
    (measured with one document per row of tokens), "packed" (with several) and "xla" (with times of XLA).
    """
    return [
        {
            "whole": newest(of_shape, packed=False),
            "packed": newest(of_shape, packed=True),
            "xla": [row for row in of_shape if "xla" in row][-1],
        }
        for of_shape in group(rows, lambda row: (row["op"], row["shape"])).values()
    ]


SCANS = {
    "mamba": "Mamba, 2,048 channels of 16 numbers",
    "gateloop": "GateLoop, 1,024 complex channels",
}

TABLES = [
    Table(
        "redesign",
        ("results/redesign.jsonl",),
        (
            Column(
                "what",
                lambda row: OPS[row["op"]] if "op" in row else f"training step, {row['variant']}",
            ),
            Column("release 0.1", lambda row: times(row["before"])),
            Column("this release", lambda row: times(row["after"])),
            Column("ratio", _before_and_after),
        ),
        not_run="requires an NVIDIA Hopper GPU and an older checkout",
        command="python -m scripts.compare_speed --old TREE_OF_A5B7204 --output FOLDER --shapes 8x4096x16x128 "
        "--variants gla-340m --turns 1",
    ),
    Table(
        "ops",
        ("results/ops.jsonl",),
        (
            Column(
                "op",
                lambda row: row["op"] + (" (cuDNN)" if row["implementation"] == "cudnn" else ""),
            ),
            Column("forward, ms", lambda row: significant(row["forward_ms"])),
            Column("forward and backward, ms", lambda row: significant(row["both_ms"])),
            Column("error in bfloat16", lambda row: f"{row['error']:.1e}"),
        ),
        command="python -m benchmarks ops",
    ),
    Table(
        "kernels",
        ("kernels.jsonl",),
        (
            op_column(),
            shape_column(),
            pair("kernel", "kernel"),
            beside("jla"),
            beside("fla"),
            Column("FLA / kernel", over_kernel),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: "fla" in row and row["op"] in OPS and is_plain(row),
        key=lambda row: (row["op"], row["shape"]),
        lines=main_shape_first,
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks kernels --peers jla,fla --output docs/kernels.jsonl",
    ),
    Table(
        "kernels_alone",
        ("kernels.jsonl",),
        (
            op_column(),
            shape_column(),
            pair("kernel", "kernel"),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: (
            is_plain(row)
            and (
                "fla_error" in row
                or (row["op"] in ("delta rule", "gated delta rule") and "fla" not in row)
            )
            and (row["op"] == "value decay" or row["shape"] == "8x2048x32x256")
        ),
        key=lambda row: (row["op"], row["shape"]),
        lines=_by_op,
        not_run="requires an NVIDIA Hopper GPU",
        command='python -m benchmarks kernels --ops "value decay,delta rule,gated delta rule" '
        f"--shapes {MAIN_SHAPE},8x2048x32x256 --output docs/kernels.jsonl",
    ),
    _commits(
        "kernels_pairs",
        {"5a36895": "all pairs at once (5a36895)", "449d72f": "always halving (449d72f)"},
        'python -m benchmarks kernels --ops "key decay,key decay and bonus,slot memory,value decay" '
        f"--shapes {MAIN_SHAPE}     # and with --stronger 20",
    ),
    _commits(
        "kernels_sizes",
        {"84aa3aa": "84aa3aa", "98293c2": "98293c2"},
        'python -m benchmarks kernels --ops "key decay,key decay and bonus,slot memory,kda,rwkv7" '
        f"--shapes {MAIN_SHAPE}     # and with --stronger 20",
    ),
    Table(
        "parts",
        ("kernels.jsonl", "results/parts.jsonl"),
        (
            Column("op", lambda record: OPS[record[1]["op"]]),
            Column("B x T x H x D", lambda record: shape_text(record[1]["shape"])),
            Column("one part", lambda record: times(record[0]["kernel"])),
            Column("parts", lambda record: str(record[1]["parts"])),
            Column("in parts", lambda record: times(record[1]["kernel"])),
        ),
        where=lambda row: "parts" in row,
        lines=_parts,
        not_run="requires an NVIDIA Hopper GPU",
        command='python -m benchmarks kernels --ops "gated delta rule,delta rule,kda,rwkv7" '
        "--shapes 1x16384x8x128,1x16384x16x128,2x16384x16x128     # and with --parts 1",
    ),
    Table(
        "segments",
        ("kernels.jsonl",),
        (
            op_column(),
            pair("kernel", "kernel"),
            pair("XLA", "xla"),
            Column("commit", lambda row: row["commit"]),
        ),
        where=lambda row: matches(row, segments=8, shape=MAIN_SHAPE) and "roles" not in row,
        key=lambda row: row["op"],
        lines=_by_op,
        not_run="requires an NVIDIA Hopper GPU",
        command=f"python -m benchmarks kernels --segments 8 --xla --shapes {MAIN_SHAPE} "
        '--ops "scalar decay,key decay,gated delta rule,kda,rwkv7"',
    ),
    Table(
        "convolution",
        ("results/convolution.jsonl",),
        (
            Column(
                "B x T x D",
                lambda row: (
                    shape_text(row["shape"]) + (", packed documents" if row["packed"] else "")
                ),
            ),
            pair("XLA, SiLU", "xla_silu"),
            pair("kernel, SiLU", "kernel_silu"),
            pair("XLA, SiLU and unit length", "xla_unit"),
            pair("kernel, SiLU and unit length", "kernel_unit"),
        ),
        command="python -m benchmarks convolution",
    ),
    Table(
        "unit_length",
        ("convolution.jsonl",),
        (
            Column(
                "B x T x D",
                lambda row: (
                    shape_text(row["shape"]) + (", packed documents" if row["packed"] else "")
                ),
            ),
            Column("heads of", lambda row: str(row["head_dim"] or "")),
            pair("kernel", "kernel"),
            Column(
                "kernel, unit length by XLA",
                lambda row: times(row["separate"]) if "separate" in row else "",
            ),
            measured(),
        ),
        key=lambda row: (row["shape"], row["packed"], row["head_dim"]),
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks convolution --shapes 16x2048x768,8x4096x1536,2x16384x768 --head_dims 256 --kinds kernel,separate "
        "--output docs/convolution.jsonl\npython -m benchmarks convolution --kinds kernel --output docs/convolution.jsonl",
    ),
    Table(
        "scans",
        ("scans.jsonl",),
        (
            Column("op", lambda record: SCANS[record["whole"]["op"]]),
            Column("B x T", lambda record: shape_text(record["whole"]["shape"])),
            Column("kernel, whole rows", lambda record: times(record["whole"]["kernel"])),
            Column("kernel, packed documents", lambda record: times(record["packed"]["kernel"])),
            Column("XLA, whole rows", lambda record: times(record["xla"]["xla"])),
            Column("lower bound, forward", lambda record: f"{record['whole']['floor']:.3f}"),
        ),
        where=lambda row: "packed" in row or "xla" in row,
        lines=_scans,
        command="python -m benchmarks scans --output docs/scans.jsonl",
    ),
    Table(
        "attention",
        ("attention.jsonl",),
        (
            shape_column(),
            Column("gates", attention_gates),
            pair("kernel", "kernel"),
            pair("kernel, pruned", "pruned"),
            column("tiles pruned", "pruned_share", "{:.1%}"),
            pair("cuDNN, no gates", "cudnn, no gates"),
            pair("FLA", "fla"),
        ),
        where=lambda row: "fla" in row or row.get("gates") == "text",
        key=lambda row: (row["shape"], attention_gates(row)),
        lines=lambda rows: sorted(
            rows, key=lambda r: (attention_gates(r), [int(n) for n in r["shape"].split("x")][::-1])
        ),
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks attention --gates made-up,text --peers fla --output docs/attention.jsonl",
    ),
    Table(
        "attention_recorded",
        ("attention.jsonl",),
        (
            Column("layer", lambda record: record[0]),
            Column("mean gate", lambda record: record[1]),
            Column("tiles pruned", lambda record: record[2]),
            Column("kernel, pruned", lambda record: record[3]),
            Column("kernel", lambda record: record[4]),
            Column("cuDNN, no gates", lambda record: record[5]),
        ),
        where=lambda row: row.get("gates") == "recorded",
        key=lambda row: row["shape"],
        lines=lambda rows: [
            (
                str(layer["layer"])
                + (" (median)" if layer["layer"] == row["median_layer"] else ""),
                f"{layer['mean_gate']:.3f}",
                f"{layer['pruned_share']:.1%}",
                times(layer["pruned"]),
                times(row["kernel"]) if layer["layer"] == row["median_layer"] else "",
                times(row["cudnn, no gates"]) if layer["layer"] == row["median_layer"] else "",
            )
            for row in rows
            for layer in row["layers"]
        ],
        not_run="requires an NVIDIA Hopper GPU",
        command="python -m benchmarks lengths --models pro --length 16384 --tokens 16777216 --beyond 1 "
        "--batches 2 --batch_size 2 --keep DIR --output DIR/lengths.jsonl\n"
        "python -m benchmarks attention --run DIR/pro --output docs/attention.jsonl",
    ),
    Table(
        "decode_step",
        ("decode_step.jsonl",),
        (
            column("op", "op"),
            column("batch", "batch"),
            column("XLA, alone", "xla_us", "{:.0f}"),
            column("kernel, alone", "kernel_us", "{:.0f}"),
            column("XLA, in a stack", "xla_stacked_us", "{:.0f}"),
            column("kernel, in a stack", "kernel_stacked_us", "{:.0f}"),
            column("lower bound", "floor_us", "{:.1f}"),
        ),
        where=lambda row: "op" in row,
        key=lambda row: (row["op"], row["batch"]),
        command="python -m benchmarks decode_step --output docs/decode_step.jsonl",
    ),
    Table(
        "decode_step_models",
        ("decode_step.jsonl",),
        (
            column("model", "model", "`{}`"),
            column("rows", "batch"),
            Column(
                "layers",
                lambda row: (
                    "unrolled, few kernels"
                    + (f", a write in {row['group']} tokens" if "group" in row else "")
                    if row.get("by_kernels")
                    else "unrolled"
                    if row.get("unrolled")
                    else "in a loop"
                ),
            ),
            Column("parameters", lambda row: "float32" if row.get("float32") else "bfloat16"),
            Column(
                "XLA's step, tokens/s",
                lambda row: f"{row['xla_tokens_s']:,}" if "xla_tokens_s" in row else "",
            ),
            column("kernels, tokens/s", "kernel_tokens_s", "{:,}"),
            measured(),
        ),
        where=lambda row: "model" in row and "implementation" not in row,
        key=lambda row: (
            row["model"],
            row["batch"],
            row.get("unrolled", False),
            row.get("by_kernels", False),
            row.get("group", 1),
            row.get("float32", False),
            "xla_tokens_s" in row,
        ),
        lines=lambda rows: sorted(
            rows,
            key=lambda row: (row["model"], row["batch"], row.get("unrolled", False), row["date"]),
        ),
        command="python -m benchmarks decode_step --models gla,gated_deltanet --batches 1,2,4,64,128,256 "
        "--kinds kernel --output docs/decode_step.jsonl     # and with --unrolled, --unrolled --by_layers, --unrolled --group 1, 4 and 8, --float32",
    ),
    Table(
        "experts",
        ("linear_moe_experts.jsonl",),
        (
            Column(
                "layer",
                lambda row: {
                    "dense": "dense SwiGLU of the same active width",
                    "grouped": "64 experts, grouped products",
                    "fp8": "64 experts, grouped products in FP8",
                    "apart": "64 experts, grouped products, SwiGLU apart",
                    "loop": "64 experts, a loop over experts",
                }[row["layer"]],
            ),
            column("tokens", "tokens", "{:,}"),
            column("forward, ms", "forward_ms", "{:.2f}"),
            column("forward and backward, ms", "both_ms", "{:.2f}"),
            column("training speed / dense", "part_of_dense", "{:.2f}"),
        ),
        key=lambda row: (row["tokens"], row["layer"]),
        lines=lambda rows: sorted(rows, key=lambda row: (row["tokens"], -row["both_ms"])),
        where=lambda row: "lead" not in row,
        command="python -m benchmarks experts --output docs/linear_moe_experts.jsonl     # and with --tokens 65536",
    ),
    Table(
        "exchange",
        ("results/exchange.jsonl",),
        (
            column("exchange", "exchange"),
            column("one way, ms", "one_way_ms", "{:g}"),
            column("both ways, ms", "both_ways_ms", "{:g}"),
        ),
    ),
]
