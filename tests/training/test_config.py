"""Tests of training configs: overrides, errors before compilation, JSON, schedules."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from configs import lm
from lsm_jax import mixers
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training import from_dict, learning_rate, make_program, to_dict
from tests import doc_commands
from tests.conftest import AS_USERS
from tests.training import tiny


@pytest.mark.parametrize("method", mixers.METHODS)
@pytest.mark.parametrize(
    "size",
    [
        size if size in ("nano", "340m") else pytest.param(size, marks=pytest.mark.slow)
        for size in lm.RECIPES
    ],
)
def test_every_named_size_is_valid_and_survives_json(method, size):
    config = lm.get_config(f"{method}-{size}")
    config.validate()
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("method", ["ttt_linear", "ttt_mlp", "titans"])
def test_documents_are_aligned_to_mini_batches(method, caplog):
    config = lm.get_config(f"{method}-340m,pattern=LLLN")
    assert config.data.align_documents == 16
    assert lm.get_config("gla-340m").data.align_documents == 1
    config.validate()
    assert "align_documents" not in caplog.text
    config.data.align_documents = 8
    config.validate()
    assert "mixer.mini_batch=16" in caplog.text and "set data.align_documents=16" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c, "batch_size", 0), "batch_size=0: it must be at least 1"),
        (lambda c: setattr(c, "batch_size", 7), "batch_size=7: it must be divisible by 8 devices"),
        (lambda c: setattr(c, "mesh", MeshConfig(fsdp=3)), "mesh.fsdp=3 does not fit 8 devices"),
        (lambda c: setattr(c, "total_tokens", 5), "one step takes batch_size=8 x data.sequence_length=32"),
        (lambda c: setattr(c.optimizer, "warmup_tokens", 10**9), "optimizer.warmup_tokens=1000000000"),
        (lambda c: setattr(c.optimizer, "peak_lr", 0.0), "optimizer.peak_lr=0.0: it must be greater than 0"),
        (lambda c: setattr(c.model, "pattern", "LNX"), "letters that model.layers lacks: X; accepted are L, N"),
        (lambda c: setattr(c.model, "num_layers", 10**8), "model.num_layers=100000000: accepted are at most 65536"),
        (lambda c: setattr(c.model, "num_layers", 3), "model.num_layers=3 is no multiple of the 2 letters"),
        (lambda c: setattr(c.model.layers["N"].mixer, "window", 64), "mixer.window=64 is longer than data.sequence_length=32"),
        (lambda c: setattr(c.model.layers["L"].mixer.op, "chunk_size", 64), "mixer.op.chunk_size=64 is longer"),
        (lambda c: setattr(c.data, "sequence_length", 0), "data.sequence_length=0"),
    ],
)  # fmt: skip
def test_errors_name_the_field(tmp_path, change, message):
    config = tiny.config(tmp_path)
    change(config)
    with pytest.raises(ValueError) as error:
        config.validate(8)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=configs/lm.py:glo-340m"], "gla"),
        (["--config=configs/lm.py:gla-341m"], "340m"),
        (["--config=configs/lm.py:gla-350m"], "did you mean '340m'?"),
        (["--config=configs/lm.py:gated_delta_net-340m"], "did you mean 'gated_deltanet'?"),
        (["--config=configs/lm.py:gla-tiny,patern=L"], "did you mean 'pattern'?"),
        (["--config=configs/mom.py:350m"], "did you mean '340m'?"),
        (["--config=configs/lm.py:gla-tiny", "--config.optimizer.peek_lr=1"], "did you mean 'peak_lr'?"),
        (["--config=configs/lm.py:gla-tiny", "--config.optimizer.lr=1"], "did you mean 'peak_lr'?"),
        (["--config=configs/lm.py:gla-tiny", "--config.model.layers.L.mixer.num_head=1"], "num_heads"),
        (["--config=configs/lm.py:gla-tiny", "--config.batch_size=many"], "batch_size"),
        (["--config=configs/lm.py:gla-tiny", "--config.num_steps=3"], "'num_steps', which it computes. The number"),
        (["--config=configs/lm.py:gla-tiny", "--config.validate=3"], "no field 'validate'"),
    ],
)  # fmt: skip
def test_errors_of_the_command_name_what_exists(arguments, message):
    with pytest.raises(AssertionError) as refused:
        doc_commands.parse(["python", "train.py", "--workdir=unused", *arguments])
    assert message in str(refused.value).partition(f"{' '.join(arguments)}: ")[2]


def test_schedule_counts_tokens(tmp_path):
    config = tiny.config(tmp_path, total_tokens=100 * 256)
    config.optimizer.warmup_tokens = 10 * 256
    rates = np.array([learning_rate(config, s) for s in range(100)])
    np.testing.assert_allclose(rates[:10], 1e-2 * np.arange(1, 11) / 10, rtol=1e-6)
    cosine = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(0, 90) / 90))
    np.testing.assert_allclose(rates[10:], 1e-2 * cosine, rtol=1e-5)
    smaller = tiny.config(tmp_path, total_tokens=100 * 256, batch_size=4)
    smaller.optimizer.warmup_tokens = 10 * 256
    np.testing.assert_allclose(learning_rate(smaller, 100), rates[50], rtol=1e-5)


@pytest.mark.slow
def test_accumulation_equals_one_batch(tmp_path):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, size=(8, 33))
    batch = dict(
        tokens=tokens[:, :-1].astype(np.int32),
        labels=tokens[:, 1:].astype(np.int32),
        loss_mask=(rng.random((8, 32)) < np.linspace(0.1, 1, 8)[:, None]).astype(np.float32),
    )
    results = []
    for pieces in (1, 4):
        config = tiny.config(tmp_path, accumulation_steps=pieces)
        mesh = make_mesh(config.mesh)
        with jax.set_mesh(mesh):
            program = make_program(config, mesh)
            state, metrics = program.train_step(
                program.init(), jax.device_put(batch, batch_sharding(mesh))
            )
        results.append((metrics["train/loss"], metrics["train/grad_norm"], state.params))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_trains_on_a_cpu(tmp_path):
    """A model in bfloat16 trains on a CPU. The step is compiled with the options of users, since XLA's CPU
    backend rejects some bfloat16 products with float32 results, which the model must avoid.
    """
    config = tiny.config(tmp_path)
    config.model.dtype = "bfloat16"
    tokens = np.full((8, 32), 7, np.int32)
    batch = dict(tokens=tokens, labels=tokens, loss_mask=np.ones((8, 32), np.float32))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        placed = jax.device_put(batch, batch_sharding(mesh))
        state = program.init()
        step = program.train_step.lower(state, placed).compile(compiler_options=AS_USERS)
        _, metrics = step(state, placed)
        assert np.isfinite(metrics["train/loss"])
