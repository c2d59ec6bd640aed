"""Choose the accepted name that a wrong one is nearest to, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST_RATIO = 0.5  # of difflib, of names that count as similar


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Return the end of an error message, "; did you mean 'gla'?", with the accepted name that is nearest to `name` in
    spelling, whatever its case, or has it as one of its words; "" if there is none. Of names that are equally near it is the
    one with the same letters, or else the first.
    """
    given, names = name.lower(), list(accepted)
    near = [n for n in names if n.lower() == given] or [n for n in names if given in n.split("_")]
    if near:
        return f"; did you mean {near[0]!r}?"

    def closeness(one: str) -> tuple[float, bool]:
        ratio = difflib.SequenceMatcher(None, one.lower(), given).ratio()
        return ratio, sorted(one.lower()) == sorted(given)

    nearest = max(names, key=closeness, default="")
    if not nearest or closeness(nearest)[0] < _LEAST_RATIO:
        return ""
    return f"; did you mean {nearest!r}?"
