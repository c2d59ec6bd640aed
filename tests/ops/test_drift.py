"""Tests that the errors of ops in float32 do not grow over a hundred thousand tokens."""

from __future__ import annotations

import pytest

from benchmarks.cases.drift import drift, make_cases
from tests.conftest import AS_USERS


def _bound(name: str) -> float:
    """Return the largest relative error in float32 that the drift test accepts for a class of transition,
    given by its name: larger for constant decays, which accumulate one rounding error per token or chunk.
    """
    if "constant" in name:
        return 2e-4 if "token by token" in name else 2e-5
    return 1e-5


@pytest.mark.slow
def test_drift_stays_bounded():
    for name, (op, inputs) in make_cases(100_000).items():
        first, last = drift(op, inputs, AS_USERS)
        assert first < _bound(name) and last < _bound(name), name
