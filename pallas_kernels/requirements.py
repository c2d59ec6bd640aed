"""The requirements of a kernel as data: one text for errors, for `ops.choices()` and for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Requirement(NamedTuple):
    """One requirement of a kernel.

    Attributes:
        text: the requirement, as the object of "requires": "q, k and v in bfloat16".
        met: whether a call meets it.
        given: what the call has instead, such as "float32"; None if the text is enough.
    """

    text: str
    met: Callable[[Any], bool]
    given: Callable[[Any], str] | None = None


def first_unmet(requirements: Iterable[Requirement], call: Any) -> str | None:
    """The first requirement that the call does not meet, with what the call has; None if it meets all."""
    for requirement in requirements:
        if not requirement.met(call):
            given = "" if requirement.given is None else f", not {requirement.given(call)}"
            return f"{requirement.text}{given}"
    return None
