"""Instructions with answers, in the prompts that models are tuned with."""

from __future__ import annotations

from typing import Any

_FIRST = "Below is an instruction that describes a task"
_LAST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"


def text_under(fields: Any, name: str, where: str) -> str:
    """The text that a line of JSON has under a name; ValueError, which names the line, if it has none there."""
    if not isinstance(fields, dict) or name not in fields:
        has = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"{where}, has no text under {name!r}; it has {has}")
    if not isinstance(fields[name], str):
        raise ValueError(f"{where}, has {fields[name]!r} under {name!r}; accepted is text")
    return fields[name]


def alpaca(fields: Any, where: str) -> tuple[str, str]:
    """(answer, prompt) in Stanford Alpaca's two templates, with and without an input.

    Args:
        fields: of a line: instruction, output, and input, which may be empty or absent.
        where: the line, for messages.

    Raises:
        ValueError: a field that is missing or no string.
    """
    instruction = text_under(fields, "instruction", where)
    given = text_under(fields, "input", where) if "input" in fields else ""
    answer = text_under(fields, "output", where)
    context = ", paired with an input that provides further context" if given else ""
    about = f"\n\n### Input:\n{given}" if given else ""
    return (
        answer,
        f"{_FIRST}{context}. {_LAST}{instruction}{about}\n\n### Response:\n",
    )
