"""Test that all cells of the example notebook run without an error."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]


def test_the_ablation_notebook(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in (
        "XLA_FLAGS",
        "JAX_DISABLE_MOST_OPTIMIZATIONS",
    ):  # set for tests only; users do not have them
        monkeypatch.delenv(name)
    notebook = nbformat.read(ROOT / "notebooks" / "ablation.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"], outputs
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "gated_deltanet" in text and "tokens/s" in text
