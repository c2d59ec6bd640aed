"""Tests that the built wheel contains both packages, lsm_jax and pallas_kernels, and that they can be
imported from another folder.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_wheel_imports_from_another_folder(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        files = set(archive.namelist())
    assert "lsm_jax/evaluation/suites/recall.yaml" in files
    shipped = {
        "train.py",
        "eval.py",
        *(f"configs/{path.name}" for path in ROOT.glob("configs/*.py")),
    }
    assert {f"lsm_jax/shipped/{name}" for name in shipped} <= files
    code = "import lsm_jax, pallas_kernels; print(lsm_jax.__file__, pallas_kernels.__file__)"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code + "; lsm_jax.ops.linear_memory; lsm_jax.mixers.METHODS"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    for path in run.stdout.split():
        assert pathlib.Path(path).is_relative_to(tmp_path / "site")


@pytest.mark.slow
def test_the_command_works_in_a_venv_with_the_wheel(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    # The dependencies are those of this environment, whose editable install of lsm_jax comes after the wheel.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", wheel], check=True, capture_output=True)

    def lsm(*arguments):
        run = subprocess.run(
            [tmp_path / "venv/bin/lsm", *arguments],
            cwd=tmp_path,
            env={"JAX_PLATFORMS": "cpu", "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert str(site) in lsm("doctor")
    small = [
        "--config.batch_size=2",
        "--config.data.sequence_length=64",
        "--config.total_tokens=512",
    ]
    small += ["--config.optimizer.warmup_tokens=128", "--config.model.num_layers=1"]
    lsm("train", "--config=lm:gla-tiny", "--workdir=a", *small)
    lsm("train", "--config=configs/lm.py:retnet-tiny", "--workdir=b", *small)
    lsm("eval", "--workdir=a", "--tasks=perplexity", "--max_tokens=128", "--batch_size=2")
    assert "retnet" in lsm("methods")
    lsm("compare", "a", "b")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
