"""Tests of tests/slow.txt: each line names a test function that exists, once, in order."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_each_line_names_a_test():
    lines = [line for line in (ROOT / "tests/slow.txt").read_text().splitlines() if line[0] != "#"]
    assert lines == sorted(set(lines))
    for line in lines:
        path, name = line.partition("[")[0].split("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, line
