"""Imports run downwards only, as the library's rooms are built."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each room may import of the library, besides itself. A name with a dot stands for that module alone.
ALLOWED = {
    "linearize": {"convert", "training", "models", "mixers"},
    "convert": {"training", "models", "mixers", "feedforward", "data"},
    "training": {"models", "mixers", "feedforward", "ops", "parallel", "data", "interrupts"},
    "interrupts": set(),
    "commands": set(),
    "plan": {"training", "parallel"},
    "evaluation": {"models", "mixers", "feedforward", "ops", "parallel", "data", "training.runs"},
    "models": {"mixers", "feedforward", "ops", "parallel"},
    # A mixer may be built of another's parts, and a feedforward shares the layers and checks kept beside the mixers.
    "feedforward": {"mixers.layers", "mixers.checks", "ops", "parallel"},
    "mixers": {"ops", "parallel"},
    "ops": {"parallel", "pallas_kernels"},
    "parallel": set(),
    "data": set(),
    "pallas_kernels": set(),
}


# The same inside ops and pallas_kernels: what each folder may import of its neighbours. Their own modules outside a folder
# (`lsm_jax.ops` itself, `pallas_kernels.compat`) are open to all of their folders.
ROOMS_INSIDE = {
    "lsm_jax.ops": {
        "core": set(),
        "backends": {"core"},
        "linear": {"core", "backends"},
        "delta": {"core", "backends"},
        "selective": {"core", "backends"},
        "slots": {"core", "backends", "linear"},
        "attention": {"core", "backends"},
        "online": {"core", "backends"},
        "convolution": {"core", "backends"},
        "experts": {"core", "backends"},
    },
    "pallas_kernels": {
        "tiles": set(),
        "hopper": {"tiles"},
        "tpu": {"tiles"},
        "linear_attention": {"hopper", "tpu", "tiles"},
        "delta_rule": {"hopper", "tpu", "tiles"},
        "dplr": {"hopper", "tpu", "tiles"},
        "forgetting_attention": {"hopper", "tpu", "tiles"},
        "selective_scan": {"hopper", "tpu", "tiles"},
        "short_convolution": {"hopper", "tpu", "tiles"},
        "decode_step": {"hopper", "tpu", "tiles"},
        "grouped_product": {"hopper", "tpu", "tiles"},
    },
}


def _files() -> list[Path]:
    return sorted([*ROOT.glob("lsm_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imported(path: Path) -> set[tuple[int, str]]:
    """(line, full module name) of every import, those inside functions too; `from a import b` names a.b if that is one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import; write the whole name"
            for alias in node.names:
                if alias.name == "__version__":
                    continue
                whole = f"{node.module}.{alias.name}"
                found.add((node.lineno, whole if _is_module(whole) else node.module))
    return found


def _room(module: str) -> str | None:
    """The room of a module of this project, or None for any other module."""
    head, _, rest = module.partition(".")
    if head == "pallas_kernels":
        return head
    return rest.partition(".")[0] if head == "lsm_jax" else None


def _allowed(room: str, module: str) -> bool:
    target = _room(module)
    if target is None or target == room:
        return True
    inside = module.partition(".")[2]
    return any(
        target == name or inside == name or inside.startswith(name + ".")
        for name in ALLOWED[room]
        if "." in name or target == name
    )


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    room = _room(_module(path))
    if not room:
        return  # lsm_jax/__init__.py, which loads every room on demand
    assert room in ALLOWED, f"{path}: {room} is a new room; say in ALLOWED what it may import"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {m}"
        for line, m in imported(path)
        if not _allowed(room, m)
    ]
    assert not wrong, f"{room} may import {sorted(ALLOWED[room])}: {wrong}"


def _room_inside(house: str, module: str) -> str | None:
    """The folder of `house` that a module stands in; None for other modules and for those in no folder."""
    if not module.startswith(house + "."):
        return None
    folder, _, _ = module.removeprefix(house + ".").partition(".")
    return folder if folder and (ROOT.joinpath(*house.split("."), folder)).is_dir() else None


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards_inside_ops_and_kernels(path):
    for house, rooms in ROOMS_INSIDE.items():
        room = _room_inside(house, _module(path) + ".")
        if room is None:
            continue
        assert room in rooms, (
            f"{path}: {room} is a new room; say in ROOMS_INSIDE what it may import"
        )
        targets = {(line, m, _room_inside(house, m + ".")) for line, m in imported(path)}
        wrong = [
            f"{path.relative_to(ROOT)}:{line} imports {m}"
            for line, m, target in targets
            if target not in (None, room, *rooms[room])
        ]
        assert not wrong, f"{room} may import {sorted(rooms[room])}: {wrong}"


def private_names(path: Path) -> list[str]:
    """Uses of another module's private names: `from a import _b`, and `a._b` of an imported module a."""
    tree = ast.parse(path.read_text())
    modules = {"jax"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name):
                    found.append(f"{path}:{node.lineno}: {alias.name} of {node.module}")
                if _is_module(f"{node.module}.{alias.name}"):
                    modules.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules and _is_private(node.attr):
                found.append(f"{path}:{node.lineno}: {node.value.id}.{node.attr}")
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_another_module(path):
    if path == ROOT / "pallas_kernels" / "compat.py":
        return  # which reaches into jax for all others
    assert not private_names(path)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_jax_experimental_has_one_importer(path):
    if path == ROOT / "pallas_kernels" / "compat.py":
        return
    names = {f"{a}.{b}" if b else a for a, b in _attributes(path)} | {m for _, m in imported(path)}
    wrong = sorted(n for n in names if n == "jax.experimental" or n.startswith("jax.experimental."))
    assert not wrong, f"{path}: only pallas_kernels/compat.py may use {wrong}"


def _attributes(path: Path) -> set[tuple[str, str]]:
    """(a, b) of every `a.b` in the code, and of `from a import b`, whose b may be no file of this project."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def test_the_rules_bite(tmp_path):
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
    code.write_text("from jax import experimental\n")
    assert ("jax", "experimental") in _attributes(code)


def test_importing_the_library_loads_nothing():
    code = "import sys, lsm_jax; print(sorted(m for m in ('jax', 'numpy', 'flax', 'grain') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_lists_what_there_is():
    import lsm_jax

    with pytest.raises(AttributeError, match="mixers, models, ops"):
        _ = lsm_jax.mixer
    assert lsm_jax.__version__
    assert "load_run" in dir(lsm_jax)
