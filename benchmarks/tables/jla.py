"""The results table of jax-linear-attention's training steps by its policies for the backward pass."""

from __future__ import annotations

from benchmarks.tables.table import Column, Row, Table
from benchmarks.tables.training_steps import with_mixer


def _speed(row: Row) -> str:
    """Return the speed of a row, or that its step requires more memory than the card has."""
    if "tokens_per_second" in row:
        return f"{row['tokens_per_second'] / 1e3:.1f}"
    return "does not fit" if "RESOURCE_EXHAUSTED" in row["error"] else "failed"


TABLES = [
    Table(
        "model_step_jla_policies",
        ("model_step.jsonl",),
        (
            Column("model", lambda row: f"`{with_mixer(row)}`"),
            Column("products", lambda row: row.get("matmul", "bfloat16")),
            Column("policy", lambda row: f"`{row['peer_remat']}`"),
            Column("10³ tokens/s", _speed),
            Column("date, commit", lambda row: f"{row['date']}, {row['commit']}"),
        ),
        where=lambda row: row.get("peer") == "jla",
        key=lambda row: tuple(map(row.get, ("variant", "rows", "length", "mixer", "matmul", "peer_remat"))),
        lines=lambda rows: sorted(rows, key=lambda row: tuple(str(row.get(n, "")) for n in ("matmul", "variant", "mixer", "peer_remat"))),
        not_run="requires an NVIDIA GPU and jax-linear-attention",
        command="python -m benchmarks model_step --variants softmax-1.3b,kda-1.3b,gated_deltanet-1.3b,mamba2-1.3b,rwkv7-1.3b,gla-1.3b --lengths 4096 "
        "--remat dots_and_states --peers jla --jla_remat none+lean_vjp,dots_kernels,dots --output docs/model_step.jsonl",
    )
]  # fmt: skip
