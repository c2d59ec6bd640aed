"""Tests of the growth of expert buffers: if the tokens sent to experts do not fit into the static buffers,
the buffers become larger and the training step is repeated, so that no step is lost.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from lsm_jax.feedforward import MoEConfig
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training.batches import RecentBatches, train_batches
from lsm_jax.training.expert_buffers import ExpertBuffers
from tests.parallel.meshes import run_of
from tests.parallel.test_parallel import run_with_devices
from tests.training import tiny

PROGRAM = ("-m", "tests.parallel.growth")


@pytest.mark.slow
def test_runs_on_four_devices_grow_and_lose_no_step(tmp_path):
    done = run_with_devices(4, *PROGRAM, str(tmp_path), "run", "evaluation", "steps", "text")
    for name in ("run", "evaluation", "steps", "text"):
        assert f"{name} ok" in done


@pytest.mark.slow
def test_interrupted_growths_and_the_tiny_config(tmp_path):
    names = ("run", "evaluation", "interrupted", "published")
    done = run_with_devices(4, *PROGRAM, str(tmp_path), *names)
    assert "interrupted ok" in done and "published ok" in done


def moe_run(devices: int = 4):
    config = run_of("linear_attention+moe/softmax+moe/gla", mesh=MeshConfig(data=1, expert=devices))
    for letter, buffer in (("A", 1.25), ("B", 3.0)):
        config.model.layers[letter].feedforward = MoEConfig(num_experts=8, expert_buffer=buffer)
    return config


def sizes(buffers: ExpertBuffers) -> list[float]:
    layers = buffers.config.model.layers
    return [layers[letter].feedforward.expert_buffer for letter in "AB"]


def test_buffers_double_up_to_the_number_of_devices_and_are_recorded(tmp_path):
    config = moe_run()
    buffers = ExpertBuffers(config, tmp_path)
    assert buffers.may_overflow and buffers.overflow_count == 0
    assert buffers.grow(7, 11) == "expert_buffer of A 1.25 -> 2.5, of B 3 -> 4"
    assert (
        sizes(buffers) == [2.5, 4.0] and config.model.layers["A"].feedforward.expert_buffer == 1.25
    )
    # A resumed run begins with what was reached, or with what its config has if that is more.
    config.model.layers["A"].feedforward.expert_buffer = 2.6
    again = ExpertBuffers(config, tmp_path)
    assert sizes(again) == [2.6, 4.0] and again.overflow_count == 11
    again.grow(9, 2, "evaluation")
    assert sizes(again) == [4.0, 4.0] and again.overflow_count == 13 and not again.may_overflow
    with pytest.raises(RuntimeError, match="step 10: 1 choices .* report"):
        again.grow(10, 1)
    record = json.loads((tmp_path / "expert_buffers.json").read_text())["growths"]
    assert [g["step"] for g in record] == [7, 9] and record[1]["expert_buffer"] == dict(
        A=4.0, B=4.0
    )
    (tmp_path / "expert_buffers.json").write_text('{"growths": [{"step": 1}]}')
    with pytest.raises(ValueError, match="expert_buffers.json .* remove it"):
        ExpertBuffers(config, tmp_path)


def test_buffers_that_no_token_is_sent_in_are_not_in_use(tmp_path):
    assert not ExpertBuffers(moe_run(1), tmp_path).in_use
    config = moe_run()
    for letter in "AB":
        inner = config.model.layers[letter].feedforward
        config.model.layers[letter].feedforward = dataclasses.replace(inner, execution="dense")
    assert not ExpertBuffers(config, tmp_path).in_use
    assert not ExpertBuffers(run_of("gla", mesh=MeshConfig(data=1, expert=4)), tmp_path).in_use


@pytest.mark.parametrize("kind", ["text", "prefetched text", "store"])
def test_batches_are_read_again(tmp_path, kind):
    config = tiny.config(tiny.write_text(tmp_path / "text"))
    if kind != "text":
        config.data.num_threads = config.data.prefetch = 2
    if kind == "store":
        config.data.path, config.data.cache_dir = "", str(tmp_path / "cache")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    iterator, expected = train_batches(config, mesh), train_batches(config, mesh)
    batches = RecentBatches(iterator, 2)
    batches.peek()
    read = [next(expected)["tokens"] for _ in range(6)]
    saved = None
    # Read 0; again 0 and 1; again 0, 1, 2; again 1 to 4; again 4 and 5.
    for first, count, back in ((0, 1, 1), (0, 2, 2), (0, 3, 2), (1, 4, 1), (4, 2, 0)):
        for number in range(first, first + count):
            np.testing.assert_array_equal(next(batches)["tokens"], read[number])
        if back:
            batches.go_back(back)
            saved = iterator.get_state()
    resumed = train_batches(config, mesh)
    resumed.set_state(saved)  # the position before batch 4
    np.testing.assert_array_equal(next(resumed)["tokens"], read[4])
    for each in (iterator, expected, resumed):
        each.close()
