"""Stages of layers on devices of their own: one device's loss and gradients. The default run's case cuts heads as well."""

from __future__ import annotations

import pytest

from tests.parallel.test_tensor import meshes


def test_four_microbatches_through_two_stages():
    assert meshes("linear_attention:pipeline=2,microbatches=4,tensor=2") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "gla/softmax:pipeline=2",  # a stage is a period
        "rwkv7:pipeline=4,microbatches=4",  # the first layer's values travel with the tokens
        "hgrn2:pipeline=2",  # bounds over all layers
        "linear_attention+moe:pipeline=2,microbatches=4",  # statistics of the experts
        "titans+none:data=2,pipeline=2",
    ],
)
def test_stages_equal_one_device(case):
    assert meshes(case) == 1
