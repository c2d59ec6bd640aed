"""Format instructions and answers with the prompt templates of instruction tuning."""

from __future__ import annotations

from typing import Any

_FIRST = "Below is an instruction that describes a task"
_LAST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"


def short_text(value: Any, length: int) -> str:
    """Return a value of a file, or an error, for a message of one line: at most about `length` characters."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except (ValueError, RecursionError):  # an integer of over 4,300 digits
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def text_field(fields: Any, name: str, where: str) -> str:
    """Return the text that a document, a JSON object, has in its field `name`.

    Args:
        fields: the parsed line of a file.
        name: name of the field.
        where: the place of the object (file and line), for error messages.

    Raises:
        ValueError: `fields` is no object, or its field is missing or no string.
    """
    if not isinstance(fields, dict):
        raise ValueError(
            f"{where}, is a {type(fields).__name__}; accepted is an object with {name!r}"
        )
    if name not in fields:
        names = short_text(sorted(fields), 200)
        raise ValueError(f"{where}, has no field {name!r}; its fields are {names}")
    if not isinstance(fields[name], str):
        raise ValueError(
            f"{where}, has {name!r}={short_text(fields[name], 80)}; accepted is a string"
        )
    return fields[name]


def alpaca(fields: Any, where: str) -> tuple[str, str]:
    """Return (answer, prompt) by Stanford Alpaca's templates: one for instructions with an input, one for those without.

    Args:
        fields: the parsed line of a file: instruction, output, and input, which may be empty or absent.
        where: the place of the object (file and line), for error messages.

    Raises:
        ValueError: a field of the instruction is missing or no string.
    """
    instruction = text_field(fields, "instruction", where)
    given = text_field(fields, "input", where) if "input" in fields else ""
    answer = text_field(fields, "output", where)
    context = ", paired with an input that provides further context" if given else ""
    input_section = f"\n\n### Input:\n{given}" if given else ""
    return (
        answer,
        f"{_FIRST}{context}. {_LAST}{instruction}{input_section}\n\n### Response:\n",
    )
