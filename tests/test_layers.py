"""Tests of the rules of imports: packages import only the packages below them, and no private names of
other modules.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The packages of the library that each package may import besides itself. A name with a dot is a single module.
ALLOWED = {
    "names": set(),
    "linearize": {"convert", "training", "models", "mixers", "data", "files", "hub", "programs"},
    "convert": {
        "training",
        "models",
        "mixers",
        "feedforward",
        "parallel",
        "data",
        "files",
        "hub",
        "programs",
    },
    "training": {
        "models",
        "mixers",
        "feedforward",
        "ops",
        "parallel",
        "data",
        "interrupts",
        "files",
        "hub",
        "programs",
        "names",
    },
    "files": set(),
    "hub": set(),
    "programs": set(),
    "interrupts": set(),
    "commands": {"files", "names"},
    "cli": {"mixers", "ops", "models", "training", "evaluation", "interrupts", "programs", "names"},
    "__main__": {"cli"},
    "plan": {"convert", "training", "parallel", "files"},
    "evaluation": {
        "models",
        "mixers",
        "feedforward",
        "ops",
        "parallel",
        "data",
        "training.runs",
        "training.run_files",
        "training.metrics",
        "files",
        "names",
    },
    "models": {"mixers", "feedforward", "ops", "parallel", "names"},
    # A mixer may use parts of another mixer; feedforwards use only the layers and checks in the mixers' package.
    "feedforward": {"mixers.layers", "mixers.checks", "ops", "parallel"},
    "mixers": {"ops", "parallel", "names"},
    "ops": {"parallel", "pallas_kernels"},
    "parallel": set(),
    "data": {"files", "hub", "programs"},
    "pallas_kernels": set(),
}


# The same for the folders of ops and pallas_kernels. All folders may import the modules that are in no folder
# (`lsm_jax.ops`, `pallas_kernels.compat`).
ALLOWED_INSIDE = {
    "lsm_jax.ops": {
        "core": set(),
        "backends": {"core"},
        "linear": {"core", "backends"},
        "delta": {"core", "backends"},
        "log_linear": {"core", "backends", "delta"},
        "mesa": {"core", "backends", "linear"},
        "momentum": {"core", "backends"},
        "blocks": {"core", "backends", "attention"},
        "path": {"core", "backends", "attention"},
        "slstm": {"core", "backends"},
        "selective": {"core", "backends"},
        "slots": {"core", "backends", "linear"},
        "attention": {"core", "backends"},
        "online": {"core", "backends"},
        "convolution": {"core", "backends"},
        "experts": {"core", "backends"},
        "normalization": {"core", "backends"},
        "rwkv7": {"core", "backends", "convolution"},
    },
    "pallas_kernels": {
        "tiles": set(),
        "hopper": {"tiles"},
        "tpu": {"tiles"},
        "triton": set(),
        "linear_attention": {"hopper", "tpu", "tiles", "triton"},
        "delta_rule": {"hopper", "tpu", "tiles", "triton", "linear_attention"},
        "dplr": {"hopper", "tpu", "tiles", "triton", "linear_attention", "delta_rule"},
        "forgetting_attention": {"hopper", "tpu", "tiles", "triton"},
        "selective_scan": {"hopper", "tpu", "tiles", "triton"},
        "short_convolution": {"hopper", "tpu", "tiles", "triton"},
        "decode_step": {"hopper", "tpu", "tiles", "triton"},
        "gated_norm": {"hopper"},
        "rwkv7": {"hopper"},
        "residual_norm": {"hopper"},
        "row_product": {"hopper"},
        "grouped_product": {"hopper", "tpu", "tiles"},
    },
}


def _files() -> list[Path]:
    return sorted([*ROOT.glob("lsm_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a source file."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path: Path) -> set[tuple[int, str]]:
    """Return (line, full module name) of every import in a source file, also inside functions; `from a
    import b` is a.b if that is a module.
    """
    imports = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            imports |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import; write the full name"
            for alias in node.names:
                if alias.name == "__version__":
                    continue
                full_name = f"{node.module}.{alias.name}"
                imports.add((node.lineno, full_name if _is_module(full_name) else node.module))
    return imports


def _package(module: str) -> str | None:
    """Return the package of this project that a module is in, such as "ops"; None for any other module."""
    head, _, rest = module.partition(".")
    if head == "pallas_kernels":
        return head
    return rest.partition(".")[0] if head == "lsm_jax" else None


def _allowed(package: str, module: str) -> bool:
    """Return whether the rules of imports let modules of the package `package` import `module`."""
    target = _package(module)
    if target is None or target == package:
        return True
    inside = module.partition(".")[2]
    return any(
        target == name or inside == name or inside.startswith(name + ".")
        for name in ALLOWED[package]
        if "." in name or target == name
    )


def test_imports_run_downwards():
    for path in _files():
        package = _package(_module(path))
        if not package:
            continue  # lsm_jax/__init__.py, which loads every package on demand
        assert package in ALLOWED, f"{path}: {package} is new; add to ALLOWED what it may import"
        wrong = [
            f"{path.relative_to(ROOT)}:{line} imports {m}"
            for line, m in imported(path)
            if not _allowed(package, m)
        ]
        assert not wrong, f"{package} may import {sorted(ALLOWED[package])}: {wrong}"


def _folder(parent: str, module: str) -> str | None:
    """Return the folder of the package `parent` that contains a module; None if none does."""
    if not module.startswith(parent + "."):
        return None
    folder, _, _ = module.removeprefix(parent + ".").partition(".")
    return folder if folder and (ROOT.joinpath(*parent.split("."), folder)).is_dir() else None


@pytest.mark.parametrize("parent", ALLOWED_INSIDE)
def test_imports_run_downwards_inside_ops_and_kernels(parent):
    allowed = ALLOWED_INSIDE[parent]
    for path in _files():
        folder = _folder(parent, _module(path) + ".")
        if folder is None:
            continue
        assert folder in allowed, (
            f"{path}: {folder} is new; add to ALLOWED_INSIDE what it may import"
        )
        targets = {(line, m, _folder(parent, m + ".")) for line, m in imported(path)}
        wrong = [
            f"{path.relative_to(ROOT)}:{line} imports {m}"
            for line, m, target in targets
            if target not in (None, folder, *allowed[folder])
        ]
        assert not wrong, f"{folder} may import {sorted(allowed[folder])}: {wrong}"


def private_names(path: Path) -> list[str]:
    """List the places in a source file that use other modules' private names: `from a import _b`, and
    `a._b` of an imported module a.
    """
    modules = {"jax"}
    uses = []
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name):
                    uses.append(f"{path}:{node.lineno}: {alias.name} of {node.module}")
                if _is_module(f"{node.module}.{alias.name}"):
                    modules.add(alias.asname or alias.name)
    for node in _nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules and _is_private(node.attr):
                uses.append(f"{path}:{node.lineno}: {node.value.id}.{node.attr}")
    return uses


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_of_another_module():
    for path in _files():
        if path != ROOT / "pallas_kernels" / "compat.py":  # which uses jax's private names
            assert not private_names(path)


def test_only_one_module_imports_jax_experimental():
    for path in _files():
        if path == ROOT / "pallas_kernels" / "compat.py":
            continue
        names = {f"{a}.{b}" if b else a for a, b in _attributes(path)}
        names |= {m for _, m in imported(path)}
        wrong = sorted(n for n in names if f"{n}.".startswith("jax.experimental."))
        assert not wrong, f"{path}: only pallas_kernels/compat.py may use {wrong}"


def _attributes(path: Path) -> set[tuple[str, str]]:
    """Return (a, b) of every `a.b` and every `from a import b` in the code of a source file, even if b is
    no module of this project.
    """
    pairs = set()
    for node in _nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pairs.add((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom) and node.module:
            pairs |= {(node.module, alias.name) for alias in node.names}
    return pairs


def test_the_checks_find_wrong_imports(tmp_path):
    assert not _allowed("models", "lsm_jax.training")
    assert not _allowed("data", "lsm_jax.ops.core.segments")
    assert not _allowed("pallas_kernels", "lsm_jax.ops")
    assert not _allowed("evaluation", "lsm_jax.training.loop")
    assert not _allowed("evaluation", "lsm_jax.training")
    assert not _allowed("feedforward", "lsm_jax.mixers.gla")
    assert _allowed("evaluation", "lsm_jax.training.runs")
    assert _allowed("ops", "pallas_kernels.compat")
    assert _allowed("models", "jax.numpy")
    code = tmp_path / "code.py"
    code.write_text(
        "def f():\n    from lsm_jax import training\n    import jax.experimental.pallas\n"
    )
    assert imported(code) == {(2, "lsm_jax.training"), (3, "jax.experimental.pallas")} or imported(code) == {
        (2, "lsm_jax"), (3, "jax.experimental.pallas")
    }  # fmt: skip
    other = tmp_path / "other.py"
    other.write_text("from jax import experimental\n")
    assert ("jax", "experimental") in _attributes(other)


def test_importing_the_library_imports_no_dependency():
    code = "import sys, lsm_jax; print(sorted(m for m in ('jax', 'numpy', 'flax', 'grain') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_error_of_an_unknown_name_lists_the_known_ones():
    import lsm_jax

    with pytest.raises(AttributeError, match="mixers, models, ops"):
        _ = lsm_jax.mixer
    assert lsm_jax.__version__
    assert "load_run" in dir(lsm_jax)
