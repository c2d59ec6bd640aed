"""Tests of the list of benchmarks, of the command that runs one, and of the rows of results that it writes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import options, registry, run
from benchmarks import text as texts
from benchmarks.__main__ import main, make_parser
from benchmarks.cases import (
    delta_chunks,
    delta_forward,
    gated_norm,
    kernels,
    mom_sequence,
    residual_norm,
    writes,
)
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import read_rows
from pallas_kernels.compat import gpu_interpreter
from pallas_kernels.delta_rule.hopper import scan as delta_scan
from pallas_kernels.gated_norm.cases import Case
from pallas_kernels.hopper import unit_inverse
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_scan
from tests.faults import campaign

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(registry.benchmarks())


def test_every_module_is_in_the_list(capsys):
    main([])
    text = capsys.readouterr().out
    modules = {path.stem for path in (ROOT / "benchmarks" / "cases").glob("*.py")} - {"__init__"}
    assert set(NAMES) == modules
    assert all(f"\n  {name} " in text for name in modules)
    assert all(benchmark.summary in text for benchmark in registry.benchmarks().values())


def test_listing_does_not_import_jax():
    code = "import sys; from benchmarks.__main__ import main; main([]); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_benchmark(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"python -m benchmarks {name}" in text and "--output" in text and "--resume" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_description_is_that_of_the_module(name):
    benchmark = registry.get(name)
    module = benchmark.load()
    assert module.BENCHMARK == benchmark
    assert all(callable(getattr(module, function)) for function in ("cases", "rows"))


NEEDED = dict(
    liger="--source=x --store=x --tokenizer=x", liger_branches="--source=x --store=x --tokenizer=x"
)


@pytest.mark.parametrize("name", NAMES)
def test_cases_have_the_key_fields(name):
    benchmark = registry.get(name)
    args = make_parser(benchmark).parse_args(NEEDED.get(name, "").split())
    cases = benchmark.load().cases(args)
    assert cases
    for case in cases:
        assert set(case) <= {*benchmark.key, *benchmark.optional_key}
        assert set(case) >= set(benchmark.key)


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_docs_have_the_key_fields(name):
    benchmark = registry.get(name)
    for file in benchmark.files:
        lines = (ROOT / file).read_text().splitlines()
        assert lines
        for line in lines:
            row = json.loads(line)
            assert {*benchmark.key, "date", "commit", "device", "jax"} <= set(row), line[:200]


def test_each_file_of_rows_belongs_to_one_benchmark_or_to_the_campaign_of_faults():
    files = [file for benchmark in registry.benchmarks().values() for file in benchmark.files]
    files.append(str(campaign.ROWS.relative_to(ROOT)))
    assert sorted(files) == sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.jsonl"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kernel", "no benchmark 'kernel'; the nearest are kernels"),
        ("modelstep", "the nearest are model_step"),
        ("xyzzy", "`python -m benchmarks` lists all"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message):
    with pytest.raises(SystemExit, match=message):
        main([name])


def test_a_wrong_option_is_answered_with_one_line(capsys):
    with pytest.raises(SystemExit, match="kernels: this benchmark requires an NVIDIA Hopper GPU"):
        main(["kernels"])
    with pytest.raises(SystemExit, match="scans: --kinds kernel requires an NVIDIA Hopper GPU"):
        main(["scans", "--output=-"])
    with pytest.raises(SystemExit, match="method='glo' does not exist; accepted are"):
        main(["decode", "--methods=glo"])
    for word in (
        "kda+lower=-5",
        "kda+lower_bound=low",
        "kda+lower_bound",
        "kda+num_heads=2+num_heads=4",
    ):
        with pytest.raises(SystemExit, match=r"accepted behind a method are \+<field>=<number>"):
            main(["methods", f"--methods={word}", "--output=-"])
    with pytest.raises(SystemExit):
        main(["scans", "--kinds=cuda"])
    assert (
        "argument --kinds: unknown name 'cuda'; accepted are kernel, xla" in capsys.readouterr().err
    )


def test_types_of_options():
    assert options.words("a,b") == ["a", "b"] and options.integers("") == []
    assert list(range(10))[options.shard("1/4")] == [1, 5, 9]
    for text in ("4/4", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="accepted is I/N"):
            options.shard(text)


@pytest.fixture
def toy(monkeypatch):
    """Fixture: a benchmark of four cases that records in its module which cases are measured."""
    benchmark = Benchmark(name="toy", summary="", key=("name",), optional_key={"size": 1})
    all_cases = [dict(name="a"), dict(name="a", size=2), dict(name="b"), dict(name="c")]

    def measure(case):
        if case["name"] == "c":
            raise RuntimeError("the toy case is too large")
        return case | dict(seconds=1.0)

    module = types.SimpleNamespace(measured=[], cases=lambda args: all_cases)

    def rows(args, cases):
        module.measured = cases
        yield from run.one_by_one(cases, measure)

    module.rows = rows
    monkeypatch.setattr(Benchmark, "load", lambda self: module)
    return benchmark, module


def test_resuming_skips_the_cases_that_have_a_row(toy, tmp_path, capsys):
    benchmark, module = toy
    output = tmp_path / "folder" / "rows.jsonl"
    args = argparse.Namespace(output=output, resume=True)
    with pytest.raises(SystemExit, match="1 of 4 cases failed"):
        run.run(benchmark, args)
    assert [row["name"] for row in read_rows(output)] == ["a", "a", "b"]
    assert {"date", "commit", "device", "jax"} <= set(read_rows(output)[0])
    errors = capsys.readouterr().err
    assert "1 of 4, a, about" in errors and "2 of 4, a size=2, about" in errors
    assert "c: FAILED: RuntimeError: the toy case is too large" in errors
    output.write_text(
        "".join(output.open().readlines()[:2]) + '{"name": "b", "sec'
    )  # a row cut short
    args.shard = slice(0, None, 2)
    run.run(benchmark, args)
    assert module.measured == [dict(name="b")]
    assert [row["name"] for row in read_rows(output)] == ["a", "a", "b"]
    assert "1 of 2 cases have a row" in capsys.readouterr().err


def test_without_resuming_every_case_is_measured_again(toy, tmp_path):
    benchmark, module = toy
    output = tmp_path / "rows.jsonl"
    output.write_text('{"name": "a"}\n')
    args = argparse.Namespace(output=output, resume=False, shard=slice(0, 1))
    run.run(benchmark, args)
    assert module.measured == [dict(name="a")] and len(read_rows(output)) == 2


def test_an_op_is_measured_from_the_command_line(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    command = ["scans", "--ops=gateloop", "--shapes=1x8", "--kinds=xla", f"--output={output}"]
    main(command)
    rows = read_rows(output)
    assert [row["packed"] for row in rows] == [False, True]
    assert all(row["op"] == "gateloop" and len(row["xla"]) == 2 for row in rows)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    main([*command, "--resume"])
    assert len(read_rows(output)) == 2


def test_the_seconds_of_memories_on_a_row_count_after_compiling(monkeypatch, capsys):
    """Compiling lasts 100 s of a clock that this test sets, and so does each timing, of the 150 s that the rows may take."""
    now = [0.0]

    def pass_time(*_, calls=0):
        now[0] += 100
        return 1.0

    def compiled(case, args, inputs):
        pass_time()
        return lambda *_: np.ones(1), None, None, None

    monkeypatch.setattr(mom_sequence.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(mom_sequence, "compiled", compiled)
    monkeypatch.setattr(mom_sequence, "batch_milliseconds", pass_time)
    monkeypatch.setattr(mom_sequence.text, "activations", lambda *_, **__: None)
    parser = argparse.ArgumentParser()
    mom_sequence.add_arguments(parser)
    args = parser.parse_args(["--devices=1", "--documents=0", "--seconds=150"])
    cases = mom_sequence.cases(args)
    assert [row["form"] for row in mom_sequence.rows(args, cases)] == ["packed"]
    said = capsys.readouterr().err
    assert "'masked'}: not timed, the 150 seconds after compiling are over; a larger --seconds" in said  # fmt: skip


def test_gated_norms_are_drawn_and_compared_by_compiled_programs(tmp_path, monkeypatch):
    monkeypatch.setitem(gated_norm.CASES, "small", Case(2, 4, 2, 8))
    monkeypatch.setattr(
        gated_norm, "batch_milliseconds", lambda program, *x: len(jax.tree.leaves(program(*x)))
    )
    output = tmp_path / "rows.jsonl"
    main(["gated_norm", "--cases=small", "--kinds=xla,definition", f"--output={output}"])
    (row,) = read_rows(output)
    assert row["right"] and row["xla"] == row["definition"] == [1, 3, 4]
    assert all(0 < row["errors"][kind] < 5e-3 for kind in ("xla", "definition"))


def test_gradients_of_residual_norms_are_drawn_and_compared(tmp_path, monkeypatch):
    case = residual_norm.Case(2, 4, 8, 3)
    monkeypatch.setitem(residual_norm.CASES, "small", case)
    monkeypatch.setattr(
        residual_norm, "batch_milliseconds", lambda program, *x: len(jax.tree.leaves(program(*x)))
    )
    output = tmp_path / "rows.jsonl"
    main(["residual_norm", "--cases=small", "--kinds=xla", f"--output={output}"])
    (row,) = read_rows(output)
    assert row["right"] and row["xla"] == 2
    assert 0 < row["errors"]["xla"] < 5e-3


def test_sums_with_their_norms_are_drawn_and_compared(tmp_path, monkeypatch):
    monkeypatch.setitem(residual_norm.CASES, "small", residual_norm.ForwardCase(2, 4, 8))
    monkeypatch.setattr(
        residual_norm, "batch_milliseconds", lambda program, *x: len(jax.tree.leaves(program(*x)))
    )
    output = tmp_path / "rows.jsonl"
    main(["residual_norm", "--cases=small", "--kinds=xla", f"--output={output}"])
    (row,) = read_rows(output)
    assert row["right"] and row["xla"] == 3 and row["limit"] == 0
    assert 0 < row["errors"]["xla"] < 5e-3


def test_gradients_of_writes_are_drawn_and_compared():
    arrays = writes.make((2, 70, 2))
    got, wanted = (writes.of_first_row("xla", dtype, arrays) for dtype in (None, np.float32))
    assert set(got) == set(arrays) - {"d_output"} and got["v"].shape == (1, 70, 2, 64)
    assert 0 < max(writes.errors(got, wanted).values()) < 0.1


def test_the_scan_by_roles_is_compared_with_the_other_and_with_float32(monkeypatch):
    traced = set()

    def switches():
        return scalar_scan.ROLES, scalar_decay.SUMS_BY_PRODUCTS, scalar_decay.FEW_LAUNCHES

    def call(*options):
        def scaled(*inputs):
            traced.add((inputs[0].dtype.name, *switches()))
            return library(*options)(*inputs) * (1.1 if scalar_scan.ROLES else 1)

        return scaled

    library = kernels.library_call
    monkeypatch.setattr(kernels, "library_call", call)
    monkeypatch.setattr(kernels, "KINDS", dict.fromkeys(kernels.KINDS, "xla"))
    monkeypatch.setattr(kernels, "batch_milliseconds", lambda program, *x, calls: len(program(*x)))
    monkeypatch.setattr(
        kernels, "by_kernel", lambda *x, calls: [{"milliseconds": 1, "launches": 2}]
    )
    case = dict(op="scalar decay", shape="2x64x2x64")
    programs = kernels.compile_all([tuple(case.values())], ["float32", *kernels.SCANS])
    assert switches() == (None, True, "automatic")
    wanted = {("bfloat16", *x) for x in kernels.SCANS.values()}
    assert traced == wanted | {("float32", *switches())} and len(wanted) == 6
    row = kernels.measure_row(case, ["columns", "roles"], programs, 1.0, None, on_device=True)
    assert row["columns_right"] and not row["roles_right"] and not any(row["roles_same_bits"])
    assert 0 < row["columns_errors"][0] < 5e-3 and row["roles_errors"][0] == pytest.approx(
        0.1, rel=0.05
    )
    assert row["columns"] == [2, 2] and row["roles_device"] == [[1, 2], [1, 2]]
    assert "WRONG" in kernels.line(row)


@pytest.mark.slow
def test_kernels_of_the_delta_rules_chunks_are_compared(monkeypatch):
    monkeypatch.setattr(delta_chunks, "batch_milliseconds", lambda program, x: len(program(x)))
    case = "1x128x1x64x256-documents"
    row = delta_chunks.measure(case, ["kept", "streamed"], 1, interpret=gpu_interpreter())
    assert row["kept"] == row["streamed"] == 4
    assert row["kept_same"] and row["streamed_same"] and row["right"]
    assert set(row["differences"]) == {"q", "k", "beta", "log_decay"}
    shapes = jax.eval_shape(lambda: delta_chunks.make("1x128x1x64x256-plain"))
    assert shapes["log_decay"] is shapes["run"] is None
    x, far, nan = (np.full(4, value, np.float32) for value in (1, 1.01, np.nan))
    assert delta_chunks.differences([far], [x])["q"] == pytest.approx(0.01, rel=1e-3)
    assert np.isnan(delta_chunks.differences([nan], [x])["q"])


@pytest.mark.slow
def test_versions_of_the_delta_rules_forward_pass_are_compared(monkeypatch):
    for module, name in ((unit_inverse, "METHOD"), (delta_scan, "FORWARD")):
        monkeypatch.setattr(module, name, None)  # the default, which is restored at the end
    monkeypatch.setattr(
        delta_forward, "batch_milliseconds", lambda program, *x: len(jax.tree.leaves(program(*x)))
    )
    monkeypatch.setattr(delta_forward, "_SMALL", (1, 70, 1))
    names, kinds = ("1x128x1x64-documents", "1x64x1x64-plain"), ("whole_tiles", "scored")
    keys = [(name, kind) for name in names for kind in kinds]
    programs, first = delta_forward.compile_all(keys, "xla", gpu_interpreter()), {}
    for name, kind in keys:
        delta_forward.choose(kind)
        row = delta_forward.measure(name, kind, programs, 1, first)
        # The inverses, scores and decays; the output and the last memory; the output, and gradients.
        assert [row[part] for part in ("solve", "scan", "forward")] == [3 - (kind == "scored"), 2, 1]  # fmt: skip
        both = {"both": 5 + ("documents" in name)} if kind == "whole_tiles" else {}
        assert {part: row[part] for part in row if part == "both"} == both
        assert row["same"] and row["difference"] == 0
        assert 0 < row["errors"][0] < 0.02 and isinstance(row["right"], bool)


@pytest.mark.slow
def test_a_layer_of_memories_is_measured_on_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    output = tmp_path / "rows.jsonl"
    small = "--devices 1 --documents 0,32 --length 128 --width 32 --dtype float32 --calls 1 --max_bytes 200000"
    main(["mom_sequence", *small.split(), f"--output={output}"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    forms = [(row["document"], row["form"]) for row in rows]
    assert forms == [(0, "packed"), (0, "masked"), (32, "packed"), (32, "masked")]
    assert all(row["error"] < 1e-4 and row["training_ms"] > 0 for row in rows)
    with pytest.raises(SystemExit, match=r"--devices 3: this machine has 1; .*device_count=3"):
        main(["mom_sequence", "--devices=3", "--length=128", "--output=-"])
    with pytest.raises(SystemExit, match="--devices 0: accepted are numbers that divide"):
        main(["mom_sequence", "--devices=1,0", "--length=128", "--output=-"])


@pytest.mark.slow
def test_a_run_of_experts_ends_when_its_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    output = tmp_path / "rows.jsonl"
    small = "--balances 0 --steps 9 --layers 1 --batch_size 2 --length 64 --vocab_size 300 --unsaved --seconds 0"
    main(["expert_overflow", *small.split(), f"--output={output}"])
    (row,) = map(json.loads, output.read_text().splitlines())
    assert (row["ended_at_step"], row["steps"], row["heldout_loss"]) == (1, 9, None)
    assert not row["checkpoints"] and row["overflow_count"] == 0 and set(row["loss"]) == {"1"}
    assert "step 1 of 9" in capsys.readouterr().err
    main(["expert_overflow", *small.replace("9", "2").replace("seconds 0", "seconds 1e6").split(), f"--output={output}"])  # fmt: skip
    row = json.loads(output.read_text().splitlines()[-1])
    assert row["ended_at_step"] == row["steps"] == 2 and row["heldout_loss"] > 0


def test_a_description_must_be_literal_and_named_as_its_file(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text('BENCHMARK = Benchmark(name="other", summary="", key=())\n')
    with pytest.raises(ValueError, match="name='other'; it must be the file's"):
        registry.read_description(path)
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="it assigns no BENCHMARK"):
        registry.read_description(path)
    with pytest.raises(UsageError, match="no benchmark"):
        registry.get("toy")
