"""The benchmark of training on several cards: the rows of each table, and the printed report."""

from __future__ import annotations

import argparse
import json

from benchmarks import parallel

ARGS = dict(
    size="tiny", mixers="gla,softmax", pattern="", layouts="2048x8,16384x1", axes="fsdp,expert", length=2048,
    tokens=64, longest="96", counts="", rounds="",
)  # fmt: skip


def test_each_table_has_its_rows():
    args = argparse.Namespace(**ARGS)
    layouts = parallel.groups_of("layouts", args, 4)
    assert [[row[2:] for row in group] for group in layouts] == [[(32, 2048), (4, 16384)]] * 2
    assert [group[0][1].expert for group in parallel.groups_of("axes", args, 4)] == [1, 4] * 2
    stages = argparse.Namespace(**ARGS | dict(mixers="gla", axes="pipeline", rounds="2,3"))
    assert [group[0][1].rounds for group in parallel.groups_of("axes", stages, 2)] == [1, 2, 3]
    assert [group[0][1].rounds for group in parallel.groups_of("axes", stages, 1)] == [1]
    lengths = parallel.groups_of("lengths", args, 4)
    assert [group[0][1].sequence for group in lengths] == [1, 2, 4, 4] * 2
    assert [group[0][3] for group in lengths] == [64, 128, 256, 384] * 2


def test_the_report_divides_speeds_and_uses_the_latest_row(tmp_path):
    def row(table, rows, length, speed, **more):
        values = dict(tokens_per_second=speed, tokens_per_second_a_card=speed, gib=1.0)
        key = dict(table=table, variant="tiny,mixer=gla", mesh={}, rows=rows, length=length)
        return key | values | more

    rows = [
        row("layouts", 8, 2048, 1000), row("layouts", 8, 2048, 2000), row("layouts", 1, 16384, 1900),
        row("lengths", 1, 64, 1000),
        row("lengths", 1, 128, 1800, mesh=dict(sequence=2), tokens_per_second_a_card=900),
        row("axes", 4, 2048, 0, error="XlaRuntimeError: out of memory"),
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = parallel.report(path)
    assert "| `gla` | 2.0 | 1.0 | 1.9 | 1.0 | 0.95 |" in text
    assert "| `gla` | 2 | 128 | 1.8 | 1.0 | 0.90 |" in text
    assert "| `gla` | one card | 4 x 2,048 | XlaRuntimeError |  |" in text
