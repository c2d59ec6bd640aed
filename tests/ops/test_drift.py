"""A hundred thousand tokens in float32 stay as exact as the first ten thousand."""

from __future__ import annotations

import pytest

from benchmarks.drift import drift, make_cases


@pytest.mark.slow
def test_drift_stays_bounded():
    for name, (op, inputs) in make_cases(100_000).items():
        first, last = drift(op, inputs)
        assert first < 1e-5 and last < 1e-5, name
