"""Check task files of lm-evaluation-harness before the harness reads them: YAML, includes, and whether they run
code.

The harness imports and calls the functions that `!function` names, makes tasks of the classes that `class` names, and
renders Jinja templates with an environment that is no sandbox (`lm_eval.utils.env` of lm_eval 0.4), from which a template
can reach any Python function. It loads metrics that it does not know with the package `evaluate`, which runs their code.
A folder of task files that does any of this is a program.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from lsm_jax.files import MEGABYTE, read_bytes

_MAX_DEPTH = 64
_MAX_NODES = 1 << 17  # of a file after aliases are replaced by their values
_IGNORED_FOLDERS = ("__pycache__", ".ipynb_checkpoints")  # as in the harness
_TEXT_FIELDS = (
    "dataset_path", "output_type", "training_split", "validation_split", "test_split", "fewshot_split",
)  # fmt: skip
_JINJA = re.compile(r"\{\{|\{%|\{#")
_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in "binary bool float int map merge null omap pairs seq set str timestamp value".split()
)
_ADVICE = "read it, and pass --lm_eval.trust if you trust it"


def check_task_files(folder: str | Path, *, trust: bool) -> None:
    """Check all task files (.yaml) in a folder, and the files that they include.

    Args:
        folder: the folder, `lm_eval.include_path`.
        trust: whether the files may run code, include files outside the folder and be links.

    Raises:
        ValueError: a file is no YAML, is nested too deeply, or, without `trust`, would run code or leads out of the folder.
            The message names the file and the line.
    """
    root = Path(folder).expanduser().resolve()
    files = sorted(root.glob("**/*.yaml"), key=lambda path: path.as_posix())
    waiting = [path for path in files if not any(p in _IGNORED_FOLDERS for p in path.parts)]
    checked: set[Path] = set()
    while waiting:
        path = waiting.pop(0)
        if not trust and path.is_symlink():
            _check_inside(path.resolve(), root, f"{path} is a link")
        if path.resolve() in checked:
            continue
        checked.add(path.resolve())
        node = _parse(path)
        _check_texts(path, node)
        if not trust:
            _check_harmless(path, node)
        _check_keys(path, node)
        for name, line in _includes(node):
            included = path.resolve().parent / name
            if not included.is_file():
                raise ValueError(f"{path}, line {line}: include: {name!r} does not exist")
            if not trust:
                _check_inside(included.resolve(), root, f"{path}, line {line}: include: {name!r}")
            if not _is_stock(included.resolve()):
                waiting.append(included)


def _check_texts(path: Path, root: Any) -> None:
    """Raise ValueError if a field of a task file that must be a text has another type."""
    for key, value in _fields(root):
        kind = value.tag.rpartition(":")[2]
        if key in _TEXT_FIELDS and value.tag.startswith("tag:") and kind not in ("str", "null"):
            given = value.value if isinstance(value.value, str) else f"a {kind}"
            raise ValueError(
                f"{path}, line {value.start_mark.line + 1}: {key}={given}; accepted is a text"
            )


def _check_inside(target: Path, root: Path, what: str) -> None:
    """Raise ValueError unless a file is in the folder of task files or in the installed harness."""
    if not target.is_relative_to(root) and not _is_stock(target):
        raise ValueError(f"{what}, which leads to {target}, outside {root}; {_ADVICE}")


def _is_stock(path: Path) -> bool:
    """Return whether a file is one of the installed harness's tasks."""
    spec = importlib.util.find_spec("lm_eval")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(path.is_relative_to(Path(f).resolve() / "tasks") for f in folders or ())


def _parse(path: Path) -> Any:
    """Return the root node of a YAML file.

    Raises:
        ValueError: the file is no YAML mapping, too large or nested too deeply; the message has the line.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data = read_bytes(path, max_bytes=4 * MEGABYTE)
    depth = 0
    try:
        for event in yaml.parse(data, Loader=loader):  # not recursive
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(
                    f"{path}, line {event.start_mark.line + 1}: nested more than {_MAX_DEPTH} deep"
                )
        node = yaml.compose(data, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ValueError(f"{where}: not YAML: {problem}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path}: accepted is a YAML mapping, such as 'task: my_task'")
    _check_size(path, node)
    return node


def _check_size(path: Path, root: Any) -> None:
    """Raise ValueError if a file's aliases stand for very many nodes, or for a node that contains itself."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any) -> int:
        if id(node) in open_nodes:
            raise ValueError(f"{path}, line {node.start_mark.line + 1}: an alias contains itself")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            sizes[id(node)] = 1 + sum(size(child) for child in _children(node))
            open_nodes.remove(id(node))
        return sizes[id(node)]

    if size(root) > _MAX_NODES:
        raise ValueError(f"{path}: its aliases stand for more than {_MAX_NODES} values")


def _check_keys(path: Path, root: Any) -> None:
    """Raise ValueError if a mapping has a key twice, of which the harness would use the last."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        waiting += _children(node)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value if node.tag == "tag:yaml.org,2002:map" else ():
            if not isinstance(key.value, str) or key.value == "<<":
                continue
            if (key.tag, key.value) in keys:
                raise ValueError(
                    f"{path}, line {key.start_mark.line + 1}: the key {key.value[:100]!r} occurs twice in one mapping"
                )
            keys.add((key.tag, key.value))


def _children(node: Any) -> list[Any]:
    if isinstance(node.value, str):
        return []
    return [n for item in node.value for n in (item if isinstance(item, tuple) else (item,))]


def _fields(node: Any) -> list[tuple[str, Any]]:
    """Return the (key, value node) pairs of a mapping node."""
    return [(key.value, value) for key, value in node.value if isinstance(key.value, str)]


def _includes(root: Any) -> list[tuple[str, int]]:
    """Return the names in the field `include` of a task file, each with its line."""
    nodes = [value for key, value in _fields(root) if key == "include"]
    nodes = [n for node in nodes for n in (_children(node) or [node])]
    return [(n.value, n.start_mark.line + 1) for n in nodes if isinstance(n.value, str)]


def _check_harmless(path: Path, root: Any) -> None:
    """Raise ValueError if a task file would run code; the message has the line and says what."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        key, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        where = f"{path}, line {node.start_mark.line + 1}"
        if node.tag == "!function":
            raise ValueError(f"{where}: `!function {node.value}` runs Python code; {_ADVICE}")
        if node.tag not in _TAGS:
            raise ValueError(
                f"{where}: the tag {node.tag!r} is not known; accepted are YAML's and `!function`"
            )
        if isinstance(node.value, str):
            reason = _code_in(key, node.value)
            if reason:
                raise ValueError(f"{where}: {key}: {reason}; {_ADVICE}")
            continue
        for child in node.value:
            if isinstance(child, tuple):  # of a mapping
                name, value = child
                waiting += [("", name), (name.value if isinstance(name.value, str) else key, value)]
            else:
                waiting.append((key, child))


def _code_in(key: str, text: str) -> str | None:
    """Return how the harness runs code for a text in the field `key` of a task file; None if it does not."""
    if _JINJA.search(text):
        return "it has a Jinja template, which the harness renders without a sandbox"
    if key == "class":
        return "it names a Python class"
    if key == "use_prompt":
        return "it names a prompt, whose Jinja template the harness renders without a sandbox"
    if key in ("hf_evaluate", "trust_remote_code", "unsafe_code") and text.lower() in (
        "true",
        "yes",
        "on",
    ):
        return "it lets a metric or a data set run its code"
    if key == "dataset_path" and text == "pandas":
        return "it loads pickles, which run code"
    if key == "metric" and text not in _known_metrics():
        return f"the harness has no metric {text!r}, and the package `evaluate` would run its code"
    return None


def _known_metrics() -> set[str]:
    """Return the names of the metrics that the installed harness registers, read from its source."""
    spec = importlib.util.find_spec("lm_eval")
    folders = spec.submodule_search_locations if spec is not None else None
    names: set[str] = set()
    for folder in folders or ():
        source = Path(folder) / "api" / "metrics.py"
        if source.is_file():
            text = source.read_text(encoding="utf-8")
            names |= set(
                re.findall(r"""@register_metric\(\s*metric\s*=\s*["']([^"']+)["']""", text)
            )
    return names
