"""Fixture for the tests of evaluation: a run that was trained for three steps."""

from __future__ import annotations

import pytest

import lsm_jax
from lsm_jax.data import DataConfig, write_demo_store
from lsm_jax.mixers import RetNetConfig
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.training import TrainConfig, train


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_demo_store(folder / "text", row_length=64, max_bytes=150_000)
    model = ModelConfig(
        vocab_size=257,
        hidden_size=32,
        num_layers=1,
        layers={"L": LayerConfig(mixer=RetNetConfig(num_heads=1), feedforward=None)},
        dtype="float32",
        remat="none",
    )
    config = TrainConfig(
        name="tiny",
        model=model,
        data=DataConfig(path=str(folder / "text"), sequence_length=32, num_threads=0),
        batch_size=8,
        total_tokens=3 * 8 * 32,
        log_every=1,
        eval_every=0,
    )
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def run(workdir):
    return lsm_jax.load_run(workdir)
