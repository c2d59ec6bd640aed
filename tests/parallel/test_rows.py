"""Tests of the benchmark `parallel`, which times training on several cards: which cases each of its tables
has, and which fields identify them.
"""

from __future__ import annotations

import argparse

from benchmarks.cases import parallel

ARGS = dict(
    size="tiny", mixers=["gla", "softmax"], pattern="", layouts=["2048x8", "16384x1"], axes=["fsdp", "expert"],
    length=2048, tokens=64, longest=[96], counts=[], rounds=[], experts_matmul="default",
)  # fmt: skip


def test_each_table_has_its_rows():
    args = argparse.Namespace(**ARGS)
    layouts = parallel.groups_of("layouts", args, 4)
    assert [[row[2:] for row in group] for group in layouts] == [[(32, 2048), (4, 16384)]] * 2
    assert [group[0][1].expert for group in parallel.groups_of("axes", args, 4)] == [1, 4] * 2
    stages = argparse.Namespace(**ARGS | dict(mixers=["gla"], axes=["pipeline"], rounds=[2, 3]))
    assert [group[0][1].rounds for group in parallel.groups_of("axes", stages, 2)] == [1, 2, 3]
    assert [group[0][1].rounds for group in parallel.groups_of("axes", stages, 1)] == [1]
    lengths = parallel.groups_of("lengths", args, 4)
    assert [group[0][1].sequence for group in lengths] == [1, 2, 4, 4] * 2
    assert [group[0][3] for group in lengths] == [64, 128, 256, 384] * 2


def test_the_cases_identify_the_rows_by_the_axes_in_use():
    args = argparse.Namespace(
        **ARGS | dict(mixers=["gla"], axes=["expert"]), table=["axes"], cards=4, document=32, exchange="padded",
        remat="dots", without=["grouped_swiglu"],
    )  # fmt: skip
    assert parallel.cases(args) == [
        dict(table="axes", variant="tiny,mixer=gla", mesh={"expert": 4}, rows=4, length=2048, document=32, remat="dots",
             without="grouped_swiglu")
    ]  # fmt: skip
