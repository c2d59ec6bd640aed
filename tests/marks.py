"""Which parameters of a test `make test` leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow_after(count: int, values: Sequence[Any]) -> list[Any]:
    """Return the values of a test's parameters, of which those after the first `count` are marked slow. A tuple is one value for
    each of several parameters.
    """
    rest = [value if isinstance(value, tuple) else (value,) for value in values[count:]]
    return [*values[:count], *(pytest.param(*value, marks=pytest.mark.slow) for value in rest)]
