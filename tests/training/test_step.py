"""Tests of what `lsm_jax.training.step` decides before it compiles."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from lsm_jax import mixers
from lsm_jax.training import step


@pytest.mark.parametrize(
    ("method", "platform", "devices", "layers", "given", "unrolled"),
    [
        ("gla", "gpu", 1, 24, None, True),
        ("gla", "gpu", 1, step.UNROLLED + 1, None, False),
        ("gla", "gpu", 2, 24, None, False),
        ("gla", "cpu", 1, 2, None, False),
        ("gla", "cpu", 1, 2, True, True),
        ("gla", "gpu", 1, 24, False, False),
        ("mamba3_mimo", "gpu", 1, 24, None, False),
        ("mamba3_mimo", "gpu", 1, 24, True, True),
    ],
)
def test_layers_are_unrolled_on_one_gpu_unless_the_config_says(method, platform, devices, layers, given, unrolled):  # fmt: skip
    model = lm.get_config(f"{method}-tiny").model
    model.num_layers, model.unroll_layers = layers, given
    cards = np.array([SimpleNamespace(platform=platform)] * devices)
    mesh = SimpleNamespace(size=devices, devices=cards)
    assert step.unrolls_layers(model, mesh) is unrolled


@pytest.mark.parametrize("method", ["log_linear_mamba2", "mamba3_mimo"])
def test_only_layers_of_the_pattern_count_also_within_memories(method):
    """A letter of `model.layers` that the pattern lacks decides nothing; the mixer inside of Mixture-of-Memories does."""
    model = lm.get_config(f"{method}-tiny").model
    inner = model.layers["L"].mixer
    assert not step.unrolls_on_one_gpu(model)
    model.pattern = "N"
    assert step.unrolls_on_one_gpu(model)
    model.pattern, model.layers["L"].mixer = "L", mixers.MoMConfig(mixer=inner)
    assert not step.unrolls_on_one_gpu(model)
    model.layers["L"].mixer = mixers.MoMConfig()
    assert step.unrolls_on_one_gpu(model)


def test_fusions_that_take_minutes_to_tune_are_not_tuned_on_gpus():
    gpu, cpu = (
        SimpleNamespace(devices=np.array([SimpleNamespace(platform=name)]))
        for name in ("gpu", "cpu")
    )
    slow, fast = (lm.get_config(f"{name}-nano").model for name in ("mamba3_mimo", "mamba3"))
    options = step.compiler_options(slow, gpu)
    assert options == {"xla_gpu_experimental_enable_fusion_autotuner": False}
    jax.jit(jnp.sin, compiler_options=options)(1.0)  # XLA knows the name
    assert not step.compiler_options(fast, gpu)
    assert not step.compiler_options(slow, cpu)


def test_products_in_fp8_are_not_tritons():
    gpu = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="gpu")]), axis_names=(), shape={}
    )
    model = dataclasses.replace(lm.get_config("gla-nano").model, matmul="fp8")
    options = step.compiler_options(model, gpu)
    assert options == {"xla_gpu_enable_triton_gemm": False}
    jax.jit(jnp.sin, compiler_options=options)(1.0)  # XLA knows the name
