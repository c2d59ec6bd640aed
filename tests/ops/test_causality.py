"""Tests that every op is causal: no bit of an output depends on the values, however large, or on the segment
ids of later tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import AS_USERS
from tests.ops.cases import CASES, call, make_inputs, make_state, parametrize_forms

LENGTH = 37


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@parametrize_forms(skip=("recurrent", None))
def test_with_one_state_per_segment(case, form):
    """With one state per segment, later segment ids change which chunks the earlier tokens are in, but no
    bit of their outputs.
    """
    # XLA rounds a complex product by its index in the array, so that this form requires other compiler
    # options.
    depends_on_index = "complex" in case.arrays and form == "associative"
    inputs = make_inputs(case, dtype=jnp.float32)
    narrow = {"float64": jnp.float32, "complex128": jnp.complex64}
    state = make_state(case, num_segments=4)
    state = jax.tree.map(lambda x: x.astype(narrow.get(x.dtype.name, x.dtype)), state)
    run = jax.jit(
        lambda ids: call(
            case, inputs, form=form, initial_state=state, segment_ids=ids, chunk_size=2
        )[0],
        compiler_options={} if depends_on_index else AS_USERS,
    )
    ids = np.random.default_rng(3).integers(1, 5, size=(2, LENGTH))
    base = np.asarray(run(jnp.asarray(ids)))
    for t in (20, 36):
        for later in (0, 1, 3):
            changed = ids.copy()
            changed[:, t:] = later
            np.testing.assert_array_equal(run(jnp.asarray(changed))[:, :t], base[:, :t])


# An MLP's update is not finite for such a key, where the derivative of gelu is NaN.
WITH_KEYS = [
    c
    for c in CASES
    if c.op.endswith("memory") and c.op != "selective_memory" and "mlp" not in c.arrays
]


@parametrize_forms(WITH_KEYS, skip=("recurrent", None))
def test_scores_that_overflow(case, form):
    """No output depends on a later key that is finite, but whose products with earlier queries overflow."""
    inputs = make_inputs(case, length=8, dtype=jnp.float32)
    inputs["q"] = inputs["q"] * 1e10
    run = jax.jit(lambda x: call(case, x, form=form)[0], compiler_options=AS_USERS)
    base = np.asarray(run(inputs))
    changed = np.asarray(run(inputs | {"k": inputs["k"].at[:, 7].set(1e30)}))
    assert np.isfinite(base).all()
    np.testing.assert_array_equal(changed[:, :7], base[:, :7])
