"""The requirements of a kernel as data, so that error messages, `ops.choices()` and the documentation have one text for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Requirement(NamedTuple):
    """One condition that a call must meet for a kernel to support it.

    Attributes:
        text: the condition, as the object of "requires": "q, k and v in bfloat16".
        met: a function that returns whether a call meets it.
        given: a function that returns what a call has instead, such as "float32"; None if the text is enough.
    """

    text: str
    met: Callable[[Any], bool]
    given: Callable[[Any], str] | None = None


def first_unmet(requirements: Iterable[Requirement], call: Any) -> str | None:
    """Return the first of a kernel's requirements that the call does not meet, as text, with what the call has instead; None if it meets
    all.
    """
    for requirement in requirements:
        if not requirement.met(call):
            given = "" if requirement.given is None else f", not {requirement.given(call)}"
            return f"{requirement.text}{given}"
    return None
