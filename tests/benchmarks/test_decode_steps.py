"""Tests of the programs with which one token is timed."""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks.cases import decode_step
from lsm_jax import ops


def test_unrolled_steps_are_those_of_the_loop(monkeypatch):
    """Each token's output is returned, and a batch of two calls continues from the memory of the first."""
    monkeypatch.setattr(decode_step, "STEPS", 3)
    arrays = decode_step.make_inputs("token beta", 2, 1, 16)
    options = dict(implementation="xla", form="recurrent")
    steps = functools.partial(decode_step.steps, ops.delta_memory, False, options)
    empty = functools.partial(jnp.zeros, (2, 1, 16, 16))
    memory, last = steps()(empty(), arrays)
    unrolled = steps(unrolled=3)
    got, outputs = unrolled(empty(), arrays)
    assert outputs.shape == (3, 2, 1, 1, 16)
    np.testing.assert_allclose(got, memory, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[-1], last, rtol=2e-2, atol=1e-2)
    seen = []

    def watched(memory, arrays):
        seen.append(float(jnp.abs(memory).sum()))
        return unrolled(memory, arrays)

    assert decode_step.microseconds(watched, empty(), arrays, 3, calls=2) > 0
    assert len(seen) == 16 and seen[0] == 0 and 0 < seen[1] != seen[2]
