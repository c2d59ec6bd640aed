"""The wording of RULER's prompts, read from the files of the installed lm-evaluation-harness.

The wording is the benchmark's, not this library's. It is read without running the harness's modules, which require packages
and download essays when they are imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any


@functools.cache
def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], "tasks", "ruler", f"{module}.py")
    return ast.parse(path.read_text(encoding="utf-8"))


def read_constant(module: str, name: str) -> Any:
    """Return the literal that a module of the harness's RULER tasks assigns to `name`, at module level or in a function.

    Raises:
        ValueError: the installed harness does not assign a literal to that name.
    """
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                continue
    raise ValueError(
        f"the installed lm-evaluation-harness has no {name} in tasks/ruler/{module}.py"
    )


def read_answer_prefix(plural: bool) -> str:
    """Return the beginning of the answer to RULER's question about a needle, a template with the fields
    {type_needle_v} and {query}, from the installed harness.

    Raises:
        ValueError: the installed harness has no such text.
    """
    for node in ast.walk(_tree("prepare_niah")):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "gen_prefix":
                assert isinstance(value, ast.IfExp)
                return _template(value.orelse if plural else value.body)
    raise ValueError("the installed lm-evaluation-harness has no gen_prefix in prepare_niah.py")


def _template(text: ast.expr) -> str:
    """Convert an f-string of the harness's code, given as its syntax tree, to a template for `str.format`.
    Each {expression} becomes a field that is named after the first variable in the expression."""
    assert isinstance(text, ast.JoinedStr)
    parts: list[str] = []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            names = [node.id for node in ast.walk(part) if isinstance(node, ast.Name)]
            parts.append("{" + names[0] + "}")
    return "".join(parts)
