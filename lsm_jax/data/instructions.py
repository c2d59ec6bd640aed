"""Instructions with answers, in the prompts that models are tuned with."""

from __future__ import annotations

from typing import Any

_FIRST = "Below is an instruction that describes a task"
_LAST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"


def alpaca(fields: Any, where: str) -> tuple[str, str]:
    """(answer, prompt) in Stanford Alpaca's two templates, with and without an input.

    Args:
        fields: of a line: instruction, output, and input, which may be empty or absent.
        where: the line, for messages.

    Raises:
        ValueError: a field that is missing or no string.
    """
    given = fields if isinstance(fields, dict) else {}
    given = {"input": "", **given}
    for name in ("instruction", "input", "output"):
        if not isinstance(given.get(name), str):
            if name in given:
                raise ValueError(f"{where}, has {given[name]!r} under {name!r}; accepted is text")
            has = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise ValueError(f"{where}, has no text under {name!r}; it has {has}")
    context = ", paired with an input that provides further context" if given["input"] else ""
    about = f"\n\n### Input:\n{given['input']}" if given["input"] else ""
    return (
        given["output"],
        f"{_FIRST}{context}. {_LAST}{given['instruction']}{about}\n\n### Response:\n",
    )
