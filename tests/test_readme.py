"""The README's table of methods agrees with the registry."""

from __future__ import annotations

from scripts import methods_table


def test_methods_table_is_fresh():
    text = methods_table.README.read_text()
    assert methods_table.replace_table(text) == text, "run python scripts/methods_table.py --write"
