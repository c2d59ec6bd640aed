"""The results table of README.md: one line for each claim, each number from a stored row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tables import evidence, kernels, training_steps
from benchmarks.tables.table import Column, Row, Table, matches, newest, significant


@dataclass(frozen=True)
class Claim:
    """A line of README.md's results table: what was measured, this library's numbers, and the numbers that
    they are compared with.
    """

    what: str | Callable[[list[Row]], str]
    here: Callable[[list[Row]], str]
    compared: Callable[[list[Row]], str]

    def name(self, rows: list[Row]) -> str:
        """Return what was measured, which may depend on the rows."""
        return self.what if isinstance(self.what, str) else self.what(rows)


def _milliseconds(row: Row, field: str) -> str:
    return " / ".join(map(significant, row[field]))


def _kernel(op: str, what: str, *peers: str) -> Claim:
    def row(rows: list[Row]) -> Row:
        with_peers = [r for r in rows if "fla" in r and kernels.is_plain(r)]
        return newest(with_peers, rows_file="kernels.jsonl", op=op, shape=kernels.MAIN_SHAPE)

    names = {"fla": "FLA", "jla": "jax-linear-attention"}
    return Claim(
        what,
        lambda rows: _milliseconds(row(rows), "kernel") + " ms",
        lambda rows: ", ".join(f"{names[peer]} {_milliseconds(row(rows), peer)}" for peer in peers),
    )


def _demo(rows: list[Row], model: str) -> str:
    return f"{newest(rows, rows_file='results/demo.jsonl', model=model)['bits_per_byte']:.2f}"


def _attention(rows: list[Row]) -> Row:
    """Return the newest row of attention beside FLA: with gates of text if there is one, else with made-up gates."""
    shape = "1x16384x16x128"
    with_fla = [row for row in rows if "fla" in row and row.get("shape") == shape]
    of_text = [row for row in with_fla if row.get("gates") == "text"]
    return newest(of_text or with_fla, rows_file="attention.jsonl", shape=shape)


def _beside(rows: list[Row], variant: str, peer: str) -> tuple[str, str]:
    """Return the tokens/s of a model's training step of rows of 4,096 tokens, and of the peer's at the same commit on the same kind of card:
    of flash-linear-attention ("fla") without an optimizer, of jax-linear-attention's trainer ("jla") of a whole step.
    """
    shape = dict(
        rows_file="model_step.jsonl",
        variant=variant,
        length=4096,
        matmul=None,
        mixer=None,
        categories=None,
    )
    theirs = [row for row in rows if matches(row, **shape, peer=peer)]
    fields = "tokens_per_second", "fla_gradient_tokens_per_second"
    other = max(theirs, key=lambda row: max(row.get(name, 0) for name in fields))
    own = newest(rows, **shape, peer=None, commit=other["commit"], device=other["device"])
    field = "fla_gradient_tokens_per_second" if peer == "fla" else "tokens_per_second"
    return significant(own["tokens_per_second"]), significant(other[field])


def _cut_row(rows: list[Row], cards: int, length: int) -> Row:
    mesh = {"sequence": cards} if cards > 1 else {}
    variant = "a0.3b-2b,mixer=linear_attention"
    return newest(
        rows,
        rows_file="linear_moe.jsonl",
        table="lengths",
        variant=variant,
        mesh=mesh,
        length=length,
    )


def _per_card(rows: list[Row]) -> str:
    cut, alone = _cut_row(rows, 4, 524288), _cut_row(rows, 1, 131072)
    return f"{cut['tokens_per_second_a_card'] / alone['tokens_per_second_a_card']:.0%}".replace(
        "%", " %"
    )


def _decoding(rows: list[Row], **layers: bool | None) -> str:
    shape = dict(model="gla-340m", batch=256, float32=None, implementation=None)
    row = newest(rows, rows_file="decode_step.jsonl", **shape, **layers)
    return significant(row["kernel_tokens_s"])


def _largest_runs(rows: list[Row], model: str) -> list[Row]:
    """Return the rows of a model's largest run on real text, one of each seed."""
    found = [r for r in rows if r["rows_file"] == evidence.FILE and r.get("kind") != "rates"]
    runs = evidence.by_model([row for row in found if row["model"] == model])
    return max(runs, key=lambda seeds: seeds[0]["tokens"])


def _held_out_loss(rows: list[Row], model: str) -> str:
    return f"{evidence.mean(_largest_runs(rows, model), evidence.heldout_loss):.3f}"


CLAIMS = (
    Claim(
        "demo, 0.9 M parameters, two CPU cores, held out",
        lambda rows: _demo(rows, "the demo's model, 0.9 M parameters") + " bits per byte",
        lambda rows: (
            f"order-2 byte model {_demo(rows, 'order-2 byte model')}; `xz -9` {_demo(rows, 'xz -9')}"
        ),
    ),
    _kernel(
        "key decay", "GLA's memory, 8 x 4096 x 16 x 128, forward / with backward", "fla", "jla"
    ),
    _kernel("kda", "KDA's memory at the same shape", "fla", "jla"),
    _kernel("rwkv7", "RWKV7's memory at the same shape", "fla"),
    Claim(
        lambda rows: (
            "forgetting attention, 16,384 tokens, 16 heads of 128, pruned, gates: "
            + kernels.attention_gates(_attention(rows))
        ),
        lambda rows: _milliseconds(_attention(rows), "pruned") + " ms",
        lambda rows: f"FLA, which computes all keys: {_milliseconds(_attention(rows), 'fla')}",
    ),
    Claim(
        lambda rows: (
            f"FoX (Pro) 125M, {_largest_runs(rows, 'fox:pro-125m')[0]['tokens'] / 1e6:.0f} M tokens of manuals and code, held out"
        ),
        lambda rows: f"{_held_out_loss(rows, 'fox:pro-125m')} nats a token",
        lambda rows: f"Transformer (Pro) {_held_out_loss(rows, 'fox:transformer-pro-125m')}",
    ),
    Claim(
        "training steps, Gated DeltaNet 1.3B, 8 rows of 4,096, whole steps",
        lambda rows: f"{_beside(rows, 'gated_deltanet-1.3b', 'fla')[0]} tokens/s",
        lambda rows: (
            f"FLA, gradients alone: {_beside(rows, 'gated_deltanet-1.3b', 'fla')[1]}; jax-linear-attention, in another run: {_beside(rows, 'gated_deltanet-1.3b', 'jla')[1]}"
        ),
    ),
    Claim(
        "one document of 524,288 tokens, Linear-MoE A0.3B-2B, four H200",
        lambda rows: f"{significant(_cut_row(rows, 4, 524288)['tokens_per_second'])} tokens/s",
        lambda rows: f"{_per_card(rows)} of one card's speed per card",
    ),
    Claim(
        "GLA 340M, 256 rows decoding",
        lambda rows: f"{_decoding(rows, unrolled=True, by_kernels=True)} tokens/s",
        lambda rows: (
            f"by layers, in another run, {_decoding(rows, unrolled=True, by_kernels=None)}"
        ),
    ),
)

TABLES = [
    Table(
        "readme",
        (
            "results/demo.jsonl",
            "kernels.jsonl",
            "attention.jsonl",
            evidence.FILE,
            "model_step.jsonl",
            "linear_moe.jsonl",
            "decode_step.jsonl",
        ),
        (
            Column(
                "what, on one NVIDIA H200 unless it says otherwise",
                lambda record: record[0].name(record[1]),
            ),
            Column("lsm_jax", lambda record: record[0].here(record[1])),
            Column("compared with", lambda record: record[0].compared(record[1])),
        ),
        where=lambda row: (
            row["rows_file"] != "model_step.jsonl"
            or "peer" in row
            or training_steps.stands_beside_fla(row)
        ),
        lines=lambda rows: [(claim, rows) for claim in CLAIMS],
        caption=False,
    )
]
