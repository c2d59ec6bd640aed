"""Tests of what the peers' benchmarks can be asked for, without the peers."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.cases import model_step
from benchmarks.peers import fla, fla_worker
from benchmarks.registry import UsageError
from configs import lm


def test_the_models_of_the_peer_are_those_that_its_worker_builds():
    named = {f"{method}-{size}" for size, methods in fla.MODELS.items() for method in methods}
    assert named == set(fla_worker._MODELS)
    for variant in named:
        model = lm.get_config(variant).model
        assert model.num_layers == fla_worker._MODELS[variant]["num_hidden_layers"]
        assert model.hidden_size == fla_worker._WIDTHS[variant.rpartition("-")[2]]


def test_a_size_that_the_peer_lacks_is_named():
    parser = argparse.ArgumentParser()
    model_step.add_arguments(parser)
    arguments = ["--variants", "gla-125m", "--peers", "fla"]
    with pytest.raises(UsageError, match="has models of 340m and 1.3b"):
        model_step.cases(parser.parse_args(arguments))
