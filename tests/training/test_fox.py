"""Tests of the training configs of FoX's published runs: their numbers, and a short run with such a config on
a small store in LongCrawl64's format.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from configs import fox
from lsm_jax import models
from lsm_jax.data import make_train_iterator
from lsm_jax.training import from_dict, learning_rate, read_config, read_rows, to_dict, train
from tests.data.stores import write_array

BOS = 50256


@pytest.mark.parametrize(
    ("variant", "tokens", "steps", "rate"),
    [
        ("pro-760m", 48_318_382_080, 92_160, 2e-3),
        ("llama-760m", 48_318_382_080, 92_160, 1e-3),
        ("transformer-pro-760m", 48_318_382_080, 92_160, 1e-3),
        ("transformer-llama-760m,tokens=48b", 48_318_382_080, 92_160, 5e-4),
        ("transformer-llama-760m,tokens=16b", 16_106_127_360, 30_720, 1e-3),
        ("samba-760m", 16_106_127_360, 30_720, 1e-3),
        ("mamba2-760m", 48_318_382_080, 92_160, 2e-3),
        ("deltanet-760m", 48_318_382_080, 92_160, 1e-3),
        ("llama-360m", 7_516_192_768, 14_336, 2e-3),
        ("transformer-pro-125m", 2_684_354_560, 5_120, 2e-3),
        ("mamba2-125m", 2_684_354_560, 5_120, 2e-3),
        ("hgrn2-360m", 7_516_192_768, 14_336, 2e-3),
        ("deltanet-360m", 7_516_192_768, 14_336, 2e-3),
        ("pro-no-output-gate-360m", 7_516_192_768, 14_336, 2e-3),
    ],
)
def test_numbers_of_the_runs(variant, tokens, steps, rate):
    config = fox.get_config(variant)
    config.validate(8)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert (config.total_tokens, config.num_steps) == (tokens, steps)
    assert (config.batch_size, config.data.sequence_length) == (32, 16_384)
    assert config.tokens_per_step == 2**19 and steps * 2**19 == tokens
    opt = config.optimizer
    assert (opt.peak_lr, opt.b1, opt.b2, opt.eps) == (rate, 0.9, 0.95, 1e-8)
    assert (opt.weight_decay, opt.clip_norm, opt.end_lr_ratio) == (0.1, 1.0, 0.0)
    assert not config.data.shuffle and config.data.add_bos and config.data.json_escape
    # The rate depends on the tokens before the step: it rises for 512 steps, then falls by a cosine until
    # the last token.
    for step in (0, 1, 256, 511, 512, steps // 2, steps - 1):
        seen = step * 2**19
        left = (seen - 2**28) / (tokens - 2**28)
        expected = seen / 2**28 if step < 512 else 0.5 * (1 + np.cos(np.pi * left))
        np.testing.assert_allclose(
            learning_rate(config, step), rate * expected, rtol=1e-5, atol=1e-6 * rate
        )


@pytest.mark.parametrize("name", fox.SLIMPAJAMA)
def test_slimpajama(name):
    config = fox.get_config(f"{name}-360m,data=slimpajama")
    config.validate(8)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert (config.total_tokens, config.num_steps, config.tokens_per_step) == (
        15_032_385_536, 28_672, 2**19
    )  # fmt: skip
    assert (config.batch_size, config.data.sequence_length, config.data.bos_id) == (256, 2048, 1)
    assert config.optimizer.weight_decay == 0.01 and config.model.vocab_size == 32_000
    if name.startswith("transformer"):
        assert config.model.layers["L"].mixer.rope_base == 10_000
    for step in (0, 1, 512, 1023, 1024, 10_000, 28_671):
        left = (step - 1024) / (28_672 - 1024)
        cosine = 3e-5 + (3e-4 - 3e-5) * 0.5 * (1 + np.cos(np.pi * left))
        expected = 3e-5 + (3e-4 - 3e-5) * step / 1024 if step < 1024 else cosine
        np.testing.assert_allclose(learning_rate(config, step), expected, rtol=1e-5)


def test_every_model_has_a_run():
    for name in models.FOX_MODELS:
        fox.get_config(f"{name}-760m,tokens=16b").validate(8)
    for name in (*models.FOX_TABLE_3, *models.FOX_FIGURE_7):
        fox.get_config(f"{name}-360m").validate(8)
    for variant, words in (
        ("pro", "accepted is <model>-<size>, such as pro-760m"),
        ("pro-1b", "size='1b'"),
        ("pro-360m,tokens=16b", "tokens='16b'; accepted is 7.5b"),
        ("samba-760m,tokens=48b", "tokens='48b'; accepted is 16b"),
        ("pro-360m,steps=3", "option 'steps'; accepted are tokens, data"),
        ("pro-360m,data=pile", "data='pile'; accepted are longcrawl64, slimpajama"),
        ("hgrn2-360m,data=slimpajama", "data=slimpajama, model 'hgrn2'; accepted are pro, llama"),
        ("pro-760m,data=slimpajama", "data=slimpajama, size '760m'; accepted is 360m"),
        ("pro-360m,data=slimpajama,tokens=7.5b", "tokens='7.5b'; accepted is 15b"),
    ):
        with pytest.raises(ValueError, match=words):
            fox.get_config(variant)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train", pytest.param("train.py", marks=pytest.mark.slow)])
def test_a_small_store_trains(tmp_path, how):
    """A small FoX model trains on a small store, by the function `train` or the command `train.py` (`how`):
    its batches have the tokens in the published order, and its learning rates follow the published
    schedule.
    """
    rng = np.random.default_rng(0)
    rows = rng.integers(0, BOS, (9, 48))
    write_array(tmp_path / "store" / "train.zarr", rows)
    write_array(tmp_path / "store" / "heldout.zarr", rows[:4])
    changes = {
        "data.path": str(tmp_path / "store"),
        "data.sequence_length": 16,
        "batch_size": 4,
        "model.hidden_size": 32,
        "model.num_layers": 1,
        "model.layers.L.mixer.num_heads": 2,
        "model.layers.L.feedforward.multiple_of": 16,
        "total_tokens": 512,
        "optimizer.warmup_tokens": 128,
        "log_every": 1,
    }
    if how == "train.py":
        arguments = [f"--config.{name}={value}" for name, value in changes.items()]
        named = ["--config=configs/fox.py:pro-125m", f"--workdir={tmp_path / 'run'}"]
        command = [sys.executable, "train.py", *named, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        config = fox.get_config("pro-125m")
        for name, value in changes.items():
            *path, last = name.split(".")
            holder = config
            for part in path:
                holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
            assert hasattr(holder, last)
            setattr(holder, last, value)
        train(config, tmp_path / "run")
    metrics = [r for r in read_rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert len(metrics) == 8
    cosine = 0.5 * (1 + np.cos(np.pi * np.arange(6) / 6))
    expected = 2e-3 * np.array([0, 0.5, *cosine])
    np.testing.assert_allclose([r["train/learning_rate"] for r in metrics], expected, atol=1e-8)
    losses = [r["train/loss"] for r in metrics]
    assert abs(losses[0] - np.log(50257)) < 0.1 and np.isfinite(losses).all()

    data = read_config(tmp_path / "run").data
    batches = make_train_iterator(data, global_batch_size=4, seed=0)
    for i in range(8):  # two groups of four documents, three blocks
        column, group = i % 6 // 2, i % 2
        block = rows[4 * group : 4 * group + 4, 16 * column : 16 * column + 16]
        batch = next(batches)
        np.testing.assert_array_equal(batch["labels"], block)
        np.testing.assert_array_equal(batch["tokens"][:, 1:], block[:, :-1])
        assert (batch["tokens"][:, 0] == BOS).all() and (batch["loss_mask"] == 1).all()
