"""Runs of release 0.1 load and resume: renamed fields of configs are migrated, and the losses are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lsm_jax import mixers
from lsm_jax.mixers import OpConfig
from lsm_jax.training import load_run, train
from lsm_jax.training.config_json import from_dict, suggest
from tests.training import tiny

RELEASE = Path(__file__).parent / "goldens" / "release_0_1"


@pytest.fixture
def release(tmp_path):
    """Fixture: a copy of the training run stored by release 0.1, 8 steps with a checkpoint at 4
    (`tests.training.tiny` at that release), and its text.
    """
    shutil.copytree(RELEASE / "run", tmp_path / "run")
    shutil.copytree(RELEASE / "text", tmp_path / "text")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"TEXT"', json.dumps(str(tmp_path / "text"))))
    return tmp_path


def _losses(workdir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


@pytest.mark.slow
def test_a_run_resumes_to_the_same_losses(release):
    expected = _losses(RELEASE / "run")
    (release / "run" / "metrics.jsonl").write_text(
        "".join((RELEASE / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)[:4])
    )
    config = tiny.config(release / "text", total_tokens=8 * 256, checkpoint_every=4)
    train(config, release / "run")
    losses = _losses(release / "run")
    assert sorted(losses) == list(range(1, 9))
    np.testing.assert_allclose(
        [losses[step] for step in range(5, 9)], [expected[step] for step in range(5, 9)], rtol=1e-6
    )


def test_a_run_loads(release):
    run = load_run(release / "run")
    mixer = run.config.model.layers["L"].mixer
    assert mixer.op == OpConfig(form="chunk", chunk_size=16)
    assert run.model(np.zeros((1, 8), np.int32))[0].shape == (1, 8, 257)


def _old(name: str, **fields) -> dict:
    config = mixers.METHODS[name].config
    return {"type": f"{config.__module__}:{config.__qualname__}"} | fields


def test_fields_of_the_op_move_into_op():
    old = _old("gla", form="recurrent", implementation="xla", chunk_size=32, num_heads=2)
    op = OpConfig(form="recurrent", implementation="xla", chunk_size=32)
    assert from_dict(old) == mixers.GLAConfig(num_heads=2, op=op)
    assert from_dict(_old("mlstm", form="chunk")).op == OpConfig(chunk_size=128)
    inner = {"type": "lsm_jax.mixers.mom:MoMConfig", "mixer": old}
    assert from_dict(inner).mixer.op == op


def test_attention_has_an_implementation_outside_op():
    """A config of release 0.1 is migrated, in which `implementation` selected the backend of the recurrence
    and `window_implementation` that of the attention in a window.
    """
    old = _old("liger", form="chunk", implementation="xla", window_implementation="cudnn")
    config = from_dict(old)
    assert (config.op.implementation, config.implementation) == ("xla", "cudnn")
    assert from_dict(_old("softmax", implementation="xla")).implementation == "xla"


def test_a_tuple_of_implementations_comes_back_from_json():
    op = {"type": "lsm_jax.mixers.op_config:OpConfig", "implementation": ["mosaic_gpu", "xla"]}
    assert from_dict(_old("gla", op=op)).op.names() == ("mosaic_gpu", "xla")


@pytest.mark.parametrize("field", ["form", "implementation", "chunk_size"])
def test_the_error_for_an_old_name_has_the_new_one(field, tmp_path):
    config = tiny.config(tmp_path)
    message = suggest(config, f"model.layers.L.mixer.{field}")
    assert f"has no field {field!r}; since release 0.2 it is 'op.{field}'" in message
