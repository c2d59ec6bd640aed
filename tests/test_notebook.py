"""Tests of the notebooks: the public names that they use exist, their stored outputs are complete and small, and their cells run,
those of two with few steps by default, and those of all also as a reader runs them if slow tests are selected."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib import pyplot as plt
from traitlets.config import Config

import lsm_jax
from lsm_jax import mixers
from scripts import run_notebooks

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in run_notebooks.FOLDER.glob("*.ipynb"))
MOST_BYTES = 1_500_000  # of all notebooks, with their pictures
# The values of the cell with the tag "parameters" with which a notebook runs in a few seconds.
SMALL: dict[str, dict[str, Any]] = {
    "ablation": dict(methods=("linear_attention",), steps=2, eval_batches=1),
    "devices": dict(axes=("sequence",), steps=1, methods=("softmax",), lengths=(1024,)),
    "forget_gates": dict(steps=2, eval_batches=1, longest=320, compared=("FoX",)),
    "liger": dict(weights="small", small_steps=3, length=96, tuning_steps=1),
    "memories": dict(steps=5, inner=mixers.LinearAttentionConfig(num_heads=2), eval_batches=1),
    "one_recurrence": dict(lengths=(64,)),
    "own_method": dict(
        steps=2, compared=("moving_average",), tests="moving_average and one_static_shape"
    ),
}


def code(name: str) -> list[str]:
    """Return the code cells of a notebook, without the lines of commands to IPython."""
    cells = [cell.source for cell in run_notebooks.read(name).cells if cell.cell_type == "code"]
    return [re.sub(r"^%.*$", "", source, flags=re.MULTILINE) for source in cells]


def resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return the object that a dotted name of a cell means, None if it does not begin with an import. AttributeError if a
    module or class does not have the name."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, known)
        if isinstance(base, ModuleType | type):
            assert re.match("__|[^_]", node.attr), f"{node.attr} of {base} is private"
            return getattr(base, node.attr)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_the_names_and_arguments_that_a_notebook_uses_exist(name):
    known: dict[str, Any] = {}
    for source in code(name):
        tree = ast.parse(source)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        local = [node for node in imports if "moving_average" in ast.unparse(node)]
        for node in imports:
            if node not in local:
                exec(ast.unparse(node), known)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                resolve(node, known)
            if not isinstance(node, ast.Call):
                continue
            function = resolve(node.func, known)
            if function is None or not (getattr(function, "__module__", "") or "").startswith(
                "lsm_jax"
            ):
                continue
            accepted = inspect.signature(function).parameters
            if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
                continue
            wrong = {k.arg for k in node.keywords if k.arg} - set(accepted)
            assert not wrong, f"{ast.unparse(node.func)} has no argument {wrong}"
    used = [
        x for x in known.values() if isinstance(x, ModuleType) and x.__name__.startswith("lsm_jax.")
    ]
    public = {f"lsm_jax.{package}" for package in lsm_jax.__all__} | {"lsm_jax.convert.smollm2"}
    assert {x.__name__ for x in used} <= public
    assert used


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_outputs_are_complete(name):
    notebook = run_notebooks.read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {o.output_type for o in outputs} <= {"display_data", "execute_result", "stream"}
    assert all(o.name == "stdout" for o in outputs if o.output_type == "stream")
    pictures = sum("image/png" in o.get("data", {}) for o in outputs)
    assert pictures == sum("plt.figure(" in c.source or "plt.subplots(" in c.source for c in cells)
    assert pictures and "$" in "".join(
        c.source for c in notebook.cells if c.cell_type == "markdown"
    )
    (parameters,) = (c for c in cells if "parameters" in c.metadata.get("tags", ()))
    assert set(SMALL[name]) == set(re.findall(r"^(\w+) = ", parameters.source, re.MULTILINE))


def test_the_numbers_of_ligers_text_are_printed():
    cells = run_notebooks.read("liger").cells
    printed = "".join(o.get("text", "") for c in cells for o in c.get("outputs", ()))
    tuned, window, transformer = re.findall(r"\d\.\d{3}", cells[-1].source)
    assert f"tuned {tuned}, window alone {window}" in printed
    assert re.search(f"transformer +{transformer}", printed) and tuned < window


def test_the_notebooks_are_small():
    assert set(SMALL) == set(NAMES)
    assert sum(path.stat().st_size for path in run_notebooks.FOLDER.glob("*.ipynb")) < MOST_BYTES


def run_small(name: str) -> str:
    """Run the cells of a notebook in this process, with its parameters in `SMALL`; return what they print."""
    shell = InteractiveShell(config=Config(HistoryManager=dict(enabled=False)))
    printed = io.StringIO()
    try:
        for cell in run_notebooks.read(name).cells:
            if cell.cell_type == "code":
                with contextlib.redirect_stdout(printed):
                    shell.run_cell(cell.source).raise_error()
            if "parameters" in cell.metadata.get("tags", ()):
                shell.user_ns.update(SMALL[name])
    finally:
        plt.close("all")
    return printed.getvalue()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "devices"])
def test_a_small_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("sys.path", [*sys.path])
    plt.switch_backend("Agg")
    methods = dict(mixers.METHODS)
    try:
        printed = run_small(name)
    finally:
        sys.modules.pop("moving_average", None)
        mixers.METHODS.clear()
        mixers.METHODS.update(methods)
    assert name != "own_method" or "1 passed" in printed


def test_a_small_run_on_eight_devices():
    notebook = run_notebooks.read("devices")
    (at,) = (i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", ()))
    values = "\n".join(f"{key} = {value!r}" for key, value in SMALL["devices"].items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(values))
    run_notebooks.execute(notebook)
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    (off,) = re.findall(r"sequence  losses \d.*, largest difference from one device (.*)", printed)
    assert float(off) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_as_a_reader_has_it(name):
    run_notebooks.execute(run_notebooks.read(name))
