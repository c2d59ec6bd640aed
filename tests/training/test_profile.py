"""Tests of the table of a profiled training step: categories, parts, sums and the picture."""

from __future__ import annotations

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from lsm_jax import ops
from lsm_jax.evaluation.plots import plot_step_times
from lsm_jax.training import train
from lsm_jax.training.device_times import (
    CATEGORIES,
    PARTS,
    category,
    device_times,
    instructions_of,
    op,
    part,
)
from lsm_jax.training.profiler import profiler, step_table, sums_of
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
    ("source", "kernel", "expected"),
    [
        # The op's scope, also where the kernel is another op's.
        ("jvp()/mixer/jit(run_inline)/dplr_memory/cond/branch_0_fun/delta_rule_scan/mpmd_map", "mpmd_map_3", "dplr_memory"),
        ("transpose(jvp())/checkpoint/mixer/jit(attend)/attention/cond/branch_0_fun/fmha", "cudnn_1", "attention"),
        ("jit(f)/transpose(jvp(mixer/linear_memory))/cond/branch_0_fun/triton_call", "lsm_scan", "linear_memory"),
        ("feedforward/grouped_swiglu/jit(_kernel_gradients)/jit(kernel_product)/grouped_product/mpmd_map", "a", "grouped_swiglu"),
        # Kernels that are called without an op.
        ("jvp()/mixer/cond/branch_0_fun/gated_rms_norm_forward/mpmd_map", "mpmd_map_7", "gated_rms_norm"),
        ("jvp()/mixer/cond/branch_0_fun/own_kernel_backward/mpmd_map", "mpmd_map_7", "own_kernel"),
        ("jvp()/mixer/cond/branch_0_fun/triton_call", "lsm_convolution_backward", "convolution"),
        ("jvp()/mixer/custom_call", "own_kernel_forward_2", "own_kernel"),
        ("", "own_kernel.12", "own_kernel"),
    ],
)  # fmt: skip
def test_ops_of_fused_kernels(source, kernel, expected):
    assert op(source, kernel) == expected


SCOPES = {
    "mpmd_map.11": "jit(f)/jvp()/mixer/jit(run_inline)/linear_memory/cond/branch_0_fun/linear_attention_scalar_scan/mpmd_map",
    "mpmd_map.12": "jit(f)/transpose(jvp())/mixer/jit(run_inline)/linear_memory/cond/branch_0_fun/linear_attention_scalar_scan/mpmd_map",
    "mpmd_map.13": "jit(f)/jvp()/mixer/short_convolution/cond/branch_0_fun/short_convolution_forward/mpmd_map",
    "mpmd_map.14": "jit(f)/jvp()/feedforward/residual_norm/cond/branch_0_fun/residual_norm_forward/mpmd_map",
}


def test_fused_kernels_are_summed_by_op(tmp_path):
    kernels = [
        f'  %{name} = bf16[8,8]{{1,0}} custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={{op_name="{source}"}}'
        for name, source in SCOPES.items()
    ]
    text = PROGRAM.replace("  %all-reduce-start", "\n".join([*kernels, "  %all-reduce-start"]))
    spent = {"mpmd_map.11": 3000, "mpmd_map.12": 5000, "mpmd_map.13": 1000, "mpmd_map.14": 500, "fusion.7": 2000, "copy.2": 100}  # fmt: skip
    events = [
        dict(ph="X", pid=1, ts=1e6 * run, dur=time, name=name.replace(".", "_"), args=dict(hlo_op=name))
        for run in range(2) for name, time in spent.items()
    ]  # fmt: skip
    content = json.dumps(dict(traceEvents=events)).encode()
    (tmp_path / "host.trace.json.gz").write_bytes(gzip.compress(content))
    sums = sums_of(device_times(tmp_path, text, calls=2))
    fused = [entry for entry in sums if entry["category"] == "fused kernels"]
    found = [(e["op"], e["part"], e["milliseconds"], e["launches"]) for e in fused]
    assert found == [
        ("linear_memory", "mixer", 8.0, 2.0),
        ("short_convolution", "mixer", 1.0, 1.0),
        ("residual_norm", "feedforward", 0.5, 1.0),
    ]
    assert {e["op"] for e in sums if e["category"] != "fused kernels"} == {""}
    times = dict(milliseconds=12.0, idle=0.4, categories=sums)
    lines = step_table(times).splitlines()
    rows = [line.split() for line in lines]
    assert ["fused", "kernels", "9.50", "79.2%", "4"] in rows
    assert ["linear_memory,", "mixer", "8.00", "66.7%", "2"] in rows
    assert ["short_convolution,", "mixer", "1.00", "8.3%", "1"] in rows
    assert ["matrix", "products", "2.00", "16.7%", "1"] in rows
    assert plot_step_times(times, tmp_path / "times.png").stat().st_size > 5000
    for entry in sums:  # as stored by earlier releases
        del entry["op"]
    assert plot_step_times(times, tmp_path / "older.png").stat().st_size > 5000


def test_kernels_of_ops_have_the_op_as_scope():
    """The source of an operation of an op's forward and backward pass contains the op's name."""

    def loss(x, kernel):
        return ops.short_convolution(x, kernel)[0].sum()

    arrays = jnp.ones((1, 8, 4)), jnp.ones((4, 4))
    text = jax.jit(jax.grad(loss)).lower(*arrays).compile().as_text()
    sources = {found.source for found in instructions_of(text).values() if found.source}
    assert any("short_convolution" in source and "transpose" in source for source in sources)


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
