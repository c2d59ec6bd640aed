"""Tests that the built wheel contains both packages, lsm_jax and pallas_kernels, and that they can be
imported from another folder.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_wheel_imports_from_another_folder(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        assert "lsm_jax/evaluation/suites/recall.yaml" in archive.namelist()
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
