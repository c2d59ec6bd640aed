"""Tests of what `lsm_jax.training.step` decides before it compiles."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from configs import lm
from lsm_jax.training import step


@pytest.mark.parametrize(
    ("platform", "devices", "layers", "given", "unrolled"),
    [
        ("gpu", 1, 24, None, True),
        ("gpu", 1, step.UNROLLED + 1, None, False),
        ("gpu", 2, 24, None, False),
        ("cpu", 1, 2, None, False),
        ("cpu", 1, 2, True, True),
        ("gpu", 1, 24, False, False),
    ],
)
def test_layers_are_unrolled_on_one_gpu_unless_the_config_says(platform, devices, layers, given, unrolled):  # fmt: skip
    model = lm.get_config("gla-tiny").model
    model.num_layers, model.unroll_layers = layers, given
    cards = np.array([SimpleNamespace(platform=platform)] * devices)
    mesh = SimpleNamespace(size=devices, devices=cards)
    assert step.unrolls_layers(model, mesh) is unrolled
