"""Tests of the names of texts in the rows of the benchmark `liger`."""

import argparse
import json

import pytest

from benchmarks.cases import liger
from benchmarks.tables import TABLES


def parsed(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    liger.add_arguments(parser)
    return parser.parse_args(["--source=x", "--store=y", "--tokenizer=z", *words])


def test_rows_of_two_texts_are_not_each_other():
    (first,), (other,) = (
        liger.cases(parsed("--rows=30", *words)) for words in ((), ("--text=corpus",))
    )
    assert "text" not in first and other == first | {"text": "corpus"}
    row = dict(other, nats=1.0)
    assert liger.BENCHMARK.identity(row) == liger.BENCHMARK.identity(other)
    assert liger.BENCHMARK.identity(row) != liger.BENCHMARK.identity(first)


def test_a_text_is_named_by_a_word():
    with pytest.raises(argparse.ArgumentError, match="'a b'; accepted is a word"):
        parsed("--text=a b")


def test_rows_of_the_corpus_make_a_section_with_their_margins(tmp_path):
    def row(options, loss, **more):
        fields = dict(name=options, options=options, millions=20.0, seed=0, tokens=2 * 10**7, nats=2.0, beyond_256=loss, by_position={}, train_seconds=99.6)  # fmt: skip
        return fields | dict(date="2026-01-01", commit="a", device="H200") | more

    path, page, table = tmp_path / "liger.jsonl", tmp_path / "page.md", TABLES["liger_corpus"]
    path.write_text(json.dumps(row("method=window", 1.8)) + "\n")
    assert table.markdown(tmp_path, page) == ""  # rows of the first text
    rows = [
        row("method=window", 1.8), row("gate=gla", 1.75), row("gate=gla", 1.75, seed=1), row("gate=gla,lr=3e-3", 1.7),
        row("method=window,lr=3e-3", 1.9), row("method=window", 4.0, tokens=0, millions=0, train_seconds=None), row("gate=gla", 9.0, tokens=0, millions=0),
    ]  # fmt: skip
    with path.open("a") as file:
        file.writelines(json.dumps(one | dict(text="corpus")) + "\n" for one in rows)
    text = table.markdown(tmp_path, page)
    assert text.startswith("### On more text\n\n")
    cells = [line.split(" | ") for line in text.splitlines() if "`" in line and "|" in line]
    assert [(line[1], line[6]) for line in cells] == [
        ("`method=window`", ""), ("`gate=gla`", ""), ("`method=window`", ""), ("`gate=gla`", "+0.050"), ("`gate=gla`", ""),
        ("`method=window,lr=3e-3`", ""), ("`gate=gla,lr=3e-3`", "+0.200"),
    ]  # fmt: skip
    assert cells[2][-1] == "100 |"
    (other,) = TABLES["liger"].rows(tmp_path)
    assert "text" not in other
