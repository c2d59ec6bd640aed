"""Tests of the benchmark that compares training in FP8 with training in bfloat16."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from benchmarks.cases import fp8_curve


def arguments(*words):
    parser = argparse.ArgumentParser()
    fp8_curve.add_arguments(parser)
    return parser.parse_args(words)


def test_the_runs_of_a_model_differ_in_their_products_only():
    args = arguments("--models=gla", "--steps=80")
    default, fp8 = (fp8_curve.config_of(case, args) for case in fp8_curve.cases(args))
    assert (default.model.matmul, fp8.model.matmul) == ("default", "fp8")
    assert dataclasses.replace(fp8.model, matmul="default") == default.model
    assert dataclasses.replace(fp8, model=default.model) == default
    assert default.num_steps == 80


@pytest.mark.slow
def test_rows_have_both_curves():
    args = arguments("--models=gla", "--size=10m", "--steps=2", "--length=16", "--batch_size=2")
    default, fp8 = fp8_curve.rows(args, fp8_curve.cases(args))
    assert [step for step, _ in fp8["heldout"]] == [1, 2]
    assert default["train"][0] == pytest.approx(fp8["train"][0], rel=0.02)
    assert default["train"] != fp8["train"]
