"""Tests of the names of texts in the rows of the benchmark `liger`."""

import argparse

import pytest

from benchmarks.cases import liger


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
