"""Tests run on the CPU and spend their time in the compiler: leave out the optimisations that small arrays don't need."""

import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)

_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_programs():
    """Give memory maps back: Linux grants a process 65,530, every compiled program takes some, and XLA aborts at the last."""
    yield
    if next(_tests) % 50 == 0:
        jax.clear_caches()
