"""Tests of tests/slow.txt: each line names a test function that exists, once, in order."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def functions(path: str) -> set[str]:
    """Return the names of the functions of a module of tests."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_line_names_a_test():
    lines = [line for line in (ROOT / "tests/slow.txt").read_text().splitlines() if line[0] != "#"]
    assert lines == sorted(set(lines))
    for line in lines:
        path, name = line.partition("[")[0].split("::")
        assert name in functions(path), line
