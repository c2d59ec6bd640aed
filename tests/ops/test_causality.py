"""What a later token holds, however large, and whose document it is, changes no bit of an earlier output."""

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
def test_with_one_state_a_segment(case, form):
    """Later ids move the chunks of all segments, and with them what stands beside an earlier token."""
    # XLA rounds complex products by lane.
    by_lane = "complex" in case.arrays and form == "associative"
    inputs = make_inputs(case, dtype=jnp.float32)
    narrow = {"float64": jnp.float32, "complex128": jnp.complex64}
    state = make_state(case, num_segments=4)
    state = jax.tree.map(lambda x: x.astype(narrow.get(x.dtype.name, x.dtype)), state)
    run = jax.jit(
        lambda ids: call(case, inputs, form=form, initial_state=state, segment_ids=ids, chunk_size=2)[0],
        compiler_options={} if by_lane else AS_USERS,
    )  # fmt: skip
    ids = np.random.default_rng(3).integers(1, 5, size=(2, LENGTH))
    base = np.asarray(run(jnp.asarray(ids)))
    for t in (20, 36):
        for later in (0, 1, 3):
            moved = ids.copy()
            moved[:, t:] = later
            np.testing.assert_array_equal(run(jnp.asarray(moved))[:, :t], base[:, :t])


# An MLP's own update is not finite at such a key: gelu's derivative is NaN there.
WITH_KEYS = [
    c
    for c in CASES
    if c.op.endswith("memory") and c.op != "selective_memory" and "mlp" not in c.arrays
]


@parametrize_forms(WITH_KEYS, skip=("recurrent", None))
def test_scores_that_overflow(case, form):
    """A later key, finite, whose products with earlier queries are not."""
    inputs = make_inputs(case, length=8, dtype=jnp.float32)
    inputs["q"] = inputs["q"] * 1e10
    run = jax.jit(lambda x: call(case, x, form=form)[0], compiler_options=AS_USERS)
    base = np.asarray(run(inputs))
    moved = np.asarray(run(inputs | {"k": inputs["k"].at[:, 7].set(1e30)}))
    assert np.isfinite(base).all()
    np.testing.assert_array_equal(moved[:, :7], base[:, :7])
