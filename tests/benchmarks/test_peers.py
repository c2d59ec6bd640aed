"""Tests of what the peers' benchmarks can be asked for, and of flash-linear-attention's processes with stand-ins for its packages."""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path

import pytest

from benchmarks import __main__ as command_line
from benchmarks import options
from benchmarks.cases import model_step, triton_kernels
from benchmarks.peers import fla, fla_models, jla_trainer
from benchmarks.registry import ROOT, UsageError
from configs import lm

_PACKAGES = {
    "flash_linear_attention-0.0.1.dist-info/METADATA": "Name: flash-linear-attention\nVersion: 0.0.1\n",
    "fla/ops/__init__.py": "",
    "fla/ops/common/chunk_o.py": "",
    "fla/modules/causal_conv1d.py": "causal_conv1d = None",
    "fla/modules/norm/l2norm.py": "l2norm = None",
    "torch/__init__.py": "class cuda:\n    empty_cache = staticmethod(lambda: None)",
    "triton/__init__.py": "",
    "triton/testing.py": "do_bench = None",
    "triton/runtime/__init__.py": "",
    "triton/runtime/autotuner.py": "class Autotuner:\n    run = None",
}


@pytest.fixture
def packages(tmp_path) -> Path:
    """Return a folder with packages that have what the peer's processes import, and nothing that computes."""
    folder = tmp_path / "peer"
    for name, text in _PACKAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_models_of_the_peer_are_those_that_its_worker_builds():
    named = {f"{method}-{size}" for size, methods in fla.MODELS.items() for method in methods}
    assert named == set(fla_models.MODELS)
    for variant in named:
        model = lm.get_config(variant).model
        assert model.num_layers == fla_models.MODELS[variant]["num_hidden_layers"]
        assert model.hidden_size == fla_models.WIDTHS[variant.rpartition("-")[2]]


def test_a_size_that_the_peer_lacks_is_named():
    parser = argparse.ArgumentParser()
    model_step.add_arguments(parser)
    arguments = ["--variants", "gla-125m", "--peers", "fla"]
    with pytest.raises(UsageError, match="has models of 340m and 1.3b"):
        model_step.cases(parser.parse_args(arguments))


def test_the_processes_of_the_peer_import_it_from_the_folders_of_their_own(packages, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "ours")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "ours")
    found = fla.environment(str(packages))
    assert found["PYTHONPATH"] == f"{packages}{os.pathsep}{ROOT}"
    assert "TRITON_PTXAS_PATH" not in found
    assert fla.environment("")["PYTHONPATH"] == str(ROOT)
    assert fla.environment(None) == dict(os.environ)
    assert fla.find(str(packages)) == packages / "triton/__init__.py"
    peer = fla.Fla([], workers=1, path=str(packages))
    try:
        assert peer.wait(60)
        assert peer.times("an operation", "1x2x3x4") == {"fla_error": fla.UNKNOWN}
    finally:
        peer.close()


def test_the_assembler_of_older_code_is_that_of_the_peers_triton(packages, tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
    (folder / "nvidia-smi").chmod(0o755)
    assembler = packages / "triton/backends/nvidia/bin/ptxas"
    assembler.parent.mkdir(parents=True)
    assembler.write_text('#!/bin/sh\necho assembled "$@"\n')
    assembler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/of/our/triton")
    out = folder / "out"
    (packages / "triton/testing.py").write_text(
        "import os, subprocess\ndo_bench = None\n"
        "command = [os.environ['TRITON_PTXAS_PATH'], '--gpu-name=sm_80']\n"
        f"open({str(out)!r}, 'w').write(subprocess.run(command, capture_output=True, text=True).stdout)\n"
    )
    (packages / "triton/runtime/__init__.py").write_text(
        "class driver:\n    class active:\n        class utils:\n            get_device_properties = None\n"
    )
    (packages / "torch/__init__.py").write_text(
        "class cuda:\n    empty_cache = get_device_name = get_device_capability = staticmethod(lambda: None)\n"
    )
    peer = fla.Fla([], workers=0, capability="8.0", path=str(packages))
    try:
        assert peer.times("an operation", "1x2x3x4") == {"fla_error": fla.UNKNOWN}
    finally:
        peer.close()
    assert out.read_text() == "assembled --gpu-name=sm_90a\n"


def test_a_peer_that_cannot_be_imported_ends_the_benchmark_before_it_compiles(
    packages, tmp_path, monkeypatch
):
    def compiled(*case):
        pytest.fail("compiled before the peer was imported")

    monkeypatch.setattr(triton_kernels, "compiled", compiled)
    (packages / "torch/__init__.py").write_text("raise ImportError('no library libtorch')")
    output = tmp_path / "rows.jsonl"
    arguments = ["triton_kernels", "--peers=fla", "--beside", "--ops=no decay", f"--output={output}"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        command_line.main([*arguments, f"--peer_path={packages}"])
    assert "ImportError: no library libtorch. --peer_path: accepted" in str(ended.value)
    assert str(packages) in str(ended.value)
    assert not output.exists() or not output.read_text()
    with pytest.raises(SystemExit, match="--peer_path: accepted with --peers fla"):
        command_line.main(["kernels", "--peers=jla", f"--peer_path={packages}"])


def test_a_folder_of_the_peer_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(SystemExit, match="--peer_path: '.*none' is no folder; accepted are"):
        command_line.main(["kernels", "--peers=fla", f"--peer_path={tmp_path / 'none'}"])


def test_the_peer_may_take_longer_for_a_model(packages, monkeypatch):
    slow = "import time\ntime.sleep(60)"
    (packages / "triton/testing.py").write_text(slow)
    monkeypatch.setattr(fla, "PATIENCE", 0.25)
    monkeypatch.setattr(fla, "MODEL_PATIENCE", 0.5)
    for patience, expected in ((None, (0.25, 0.5)), (0.75, (0.75, 0.75))):
        for op, seconds in zip(("no decay", "model gla-1.3b"), expected, strict=True):
            peer = fla.Fla([], workers=0, path=str(packages), patience=patience)
            try:
                assert peer.times(op, "1x64x1x64") == {"fla_error": f"Empty within {seconds} s"}
            finally:
                peer.close()
    parser = argparse.ArgumentParser()
    model_step.add_arguments(parser)
    args = parser.parse_args(["--peers=fla", "--peer_patience=450", "--workers=3"])
    assert options.of_fla(args) == dict(workers=3, path=None, patience=450)
    with pytest.raises(SystemExit):
        parser.parse_args(["--peers=fla", "--peer_patience=0"])
    with pytest.raises(UsageError, match="--peer_patience: accepted with --peers fla"):
        options.check_peers(parser.parse_args(["--peer_patience=450"]))


class _Peer:
    """Answers as `fla.Fla` with times that get shorter, and writes down when it is asked."""

    def __init__(self, order: list[str]):
        self.order = order

    def times(self, op, shape, again=False):
        self.order.append(f"fla {again}")
        return {"fla": [3.0, 9.0] if again else [4.0, 8.0]}


def test_triton_the_peer_and_xla_are_timed_beside_each_other():
    order: list[str] = []
    ours = iter(([2.0, 5.0], [1.0, 6.0]))

    def triton():
        order.append("triton")
        return next(ours)

    def xla():
        order.append("xla")
        return [10.0, 20.0]

    def fails():
        raise RuntimeError("out of memory")

    case = dict(op="kda", shape="1x64x1x64")
    row = triton_kernels.in_turn(case, dict(triton=triton, xla=xla), _Peer(order))  # pyrefly: ignore
    assert row == {"triton": [1.0, 5.0], "fla": [3.0, 8.0], "xla": [10.0, 20.0]}
    assert order == ["triton", "fla False", "triton", "fla True", "xla"]
    row = triton_kernels.in_turn(case, dict(triton=lambda: [1.0], xla=fails), _Peer([]))  # pyrefly: ignore
    assert row == {"triton": [1.0], "fla": [3.0, 8.0], "xla_error": "RuntimeError: out of memory"}
    assert triton_kernels.in_turn(case, {}, _Peer([])) == {"fla": [4.0, 8.0]}  # pyrefly: ignore


def test_xla_is_compiled_beside_triton_whichever_of_both_fails():
    found = triton_kernels.compiled("8.0", dict(op="no decay", shape="1x64x1x64"))
    assert callable(found["xla"]) and "triton" not in found and found["error"]
    assert all(ms > 0 for ms in found["xla"]())
    found = triton_kernels.compiled("8.0", dict(op="no decay", shape="1x64x1"))
    assert "xla" not in found and found["xla_error"]


def test_no_row_is_written_of_a_process_that_could_not_start(packages):
    (packages / "triton/testing.py").write_text("raise ImportError('no do_bench')")
    peer = fla.Fla([], workers=0, path=str(packages))
    try:
        with pytest.raises(RuntimeError, match="ended with status 1 before it could time anything"):
            peer.times("no decay", "1x64x1x64")
    finally:
        peer.close()


def test_each_policy_of_the_peers_trainer_has_a_row(monkeypatch):
    def train_speed(case, *, remat, fp8, patience):
        assert (case["variant"], fp8, patience) == ("kda-1.3b", False, 5.0)
        return {"dots": dict(tokens_per_second=51_000)}.get(remat, dict(error="no memory"))

    monkeypatch.setattr(jla_trainer, "train_speed", train_speed)
    parser = argparse.ArgumentParser()
    model_step.add_arguments(parser)
    given = (
        "--variants kda-1.3b --lengths 4096 --peers jla --jla_remat none+lean_vjp,dots --patience 5"
    )
    args = parser.parse_args(given.split())
    peers = [case for case in model_step.cases(args) if "peer" in case]
    rows = [case | model_step.jla_row(case, args) for case in peers]
    assert [row["peer_remat"] for row in rows] == ["none+lean_vjp", "dots"]
    assert rows[0]["error"] == "no memory" and rows[1]["tokens_per_second"] == 51_000


def test_the_config_of_the_peers_trainer_has_the_models_fields():
    case = dict(variant="gla-1.3b", vocab_size=32000, rows=8, length=4096)
    text = jla_trainer.config_text(case, remat="none+lean_vjp", fp8=True, folder="runs")
    model = tomllib.loads(text)["model"]
    assert (model["preset"], model["remat"], model["lean_vjp"]) == ("kda-1p3b", "none", True)
    assert model["fp8"] == "delayed" and model["layer_types"] == ["gla"] * 24
    ours = jla_trainer.model_config("gla-1.3b").layers["L"].mixer
    theirs = model["linear_attention"]
    assert (theirs["num_k_heads"], theirs["num_v_heads"]) == (ours.num_heads, ours.num_heads)
    assert (
        theirs["head_v_dim"] * ours.num_heads == 2048 == 2 * theirs["head_k_dim"] * ours.num_heads
    )
    case |= dict(variant="gated_deltanet-1.3b", mixer=jla_trainer.HEADS_OF_128)
    text = jla_trainer.config_text(case, remat="dots", fp8=False, folder="runs")
    assert tomllib.loads(text)["model"] == dict(preset="gdn-hd128-1p3b", vocab_size=32000, remat="dots")  # fmt: skip


def test_models_that_a_peer_lacks_are_refused():
    parser = argparse.ArgumentParser()
    model_step.add_arguments(parser)
    arguments = ["--variants", "kda-1.3b", "--lengths", "4096", "--mixer", "lower_bound=-5.0"]
    for peer, message in (("jla", "has models of softmax-1.3b; gla-1.3b"), ("fla", "have no other fields")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            model_step.cases(parser.parse_args([*arguments, "--peers", peer]))
