"""Tests of the table of a profiled training step: categories, parts, sums and the picture."""

from __future__ import annotations

import json

import pytest

from lsm_jax.evaluation.plots import plot_step_times
from lsm_jax.training import train
from lsm_jax.training.device_times import CATEGORIES, PARTS, category, instructions_of, part
from lsm_jax.training.profiler import profiler
from tests.training import tiny

PROGRAM = """
%fused_add (p.1: bf16[8,8], p.2: s32[]) -> bf16[8,8] {
  %p.1 = bf16[8,8]{1,0} parameter(0)
  ROOT %add.1 = bf16[8,8]{1,0} add(%p.1, %p.1)
}
%fused_update (p.3: f32[4,8], p.4: s32[]) -> f32[4,8] {
  %p.3 = f32[4,8]{1,0} parameter(0)
  %p.4 = s32[] parameter(1)
  %next = s32[] add(%p.4, %p.4)
  ROOT %dynamic-update-slice.1 = f32[4,8]{1,0} dynamic-update-slice(%p.3, %p.3, %next, %next)
}
%fused_dot (p.5: f32[8,8]) -> f32[8,8] {
  %p.5 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p.5, %p.5), metadata={op_name="jit(f)/mixer/dot_general"}
}
%sliced (p.6: f32[2,8,8]) -> f32[8,8] {
  %p.6 = f32[2,8,8]{2,1,0} parameter(0)
  ROOT %custom-call.1 = f32[8,8]{1,0} custom-call(%p.6), custom_call_target="__cublas$lt$matmul"
}
ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %loop_add_fusion = bf16[8,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_add, metadata={op_name="jit(f)/loss/add"}
  %update.1 = f32[4,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_update
  %fusion.7 = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%fused_dot
  %fusion.8 = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%sliced
  %mpmd_map.1 = (bf16[8,8]{1,0}, f32[8]{0}) custom-call(%a), custom_call_target="mosaic_gpu_v2"
  %all-reduce-start = f32[8,8]{1,0} all-reduce-start(%a), to_apply=%fused_add
  ROOT %copy.2 = f32[8,8]{1,0} copy(%a)
}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loop_add_fusion", "elementwise and reductions"),
        ("update.1", "copies and fills"),
        ("fusion.7", "matrix products"),
        ("fusion.8", "matrix products"),
        ("mpmd_map.1", "fused kernels"),
        ("all-reduce-start", "collectives"),
        ("copy.2", "copies and fills"),
    ],
)
def test_categories(name, expected):
    assert category(instructions_of(PROGRAM)[name], "kernel") == expected


def test_parts():
    sources = (
        "jit(f)/while/body/mixer/dot",
        "jit(f)/transpose(jvp(feedforward))/mul",
        "jit(f)/add",
    )
    assert [part(source) for source in sources] == ["mixer", "feedforward", "other"]


@pytest.mark.parametrize(
    ("start", "steps", "warned"), [(0, 2, False), (0, 3, True), (2, 2, True), (0, 0, False)]
)
def test_a_profile_that_the_run_is_too_short_for_is_announced(start, steps, warned, tmp_path):
    config = tiny.config(tmp_path, total_tokens=4 * 256, profile_start=1, profile_steps=steps)
    assert config.num_steps == 4
    said = []
    with profiler(tmp_path, config, start, lambda: "", said.append) as before_step:
        before_step(start, None)
    assert [text.startswith("profile: there will be no table") for text in said] == [True] * warned
    assert not (tmp_path / "profile").exists()


@pytest.mark.slow
def test_a_run_prints_where_the_time_of_its_steps_goes(tmp_path, capsys):
    text = tiny.write_text(tmp_path / "text")
    train(
        tiny.config(text, total_tokens=4 * 256, profile_start=1, profile_steps=2), tmp_path / "run"
    )
    output = capsys.readouterr().err
    assert "profile: a step takes" in output and "matrix products" in output
    times = json.loads((tmp_path / "run" / "profile" / "step_times.json").read_text())
    entries = times["categories"]
    assert {entry["category"] for entry in entries} <= set(CATEGORIES)
    assert {"mixer", "feedforward", "loss", "optimizer"} <= {entry["part"] for entry in entries}
    assert {entry["part"] for entry in entries} <= {*PARTS, "other"}
    summed = sum(row["milliseconds"] for row in times["instructions"])
    assert sum(entry["milliseconds"] for entry in entries) == pytest.approx(summed, rel=1e-2)
    assert 0 < times["idle"] < times["milliseconds"]
    assert plot_step_times(times, tmp_path / "times.png").stat().st_size > 5000
