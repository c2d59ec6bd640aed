"""Tests of the scan over chunks that divides a row into several parts and computes them in parallel, which
ops use for many chunks of few memories: its results equal those of the recurrent form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.ops.core import chunk_scans

LENGTH, SIZE = 556, 8  # 70 chunks, the last one incomplete: parts of 18, 18, 18 and 16 chunks
ARRAYS = {
    "no decay": (),
    "scalar": ("log_decay",),
    "key": ("key_log_decay",),
    "both": ("key_log_decay", "value_log_decay"),
    "gate": ("log_decay", "log_input_gate"),
}


def test_how_many_parts():
    count = chunk_scans._parts
    assert [count(70, 100), count(31, 100), count(256, 2**19), count(256, 2**21)] == [4, 1, 4, 1]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Fixture: ops run their branch for NVIDIA GPUs on the present platform."""

    def on_cuda(*arguments, cuda, default):
        del default
        return cuda(*arguments)

    monkeypatch.setattr(chunk_scans, "by_platform", on_cuda)


@pytest.mark.parametrize("name", ARRAYS)
def test_equals_the_recurrence(as_on_a_gpu, name):
    rng = np.random.default_rng(0)
    shapes = dict(log_decay=(2,), key_log_decay=(2, 4), value_log_decay=(2, 3), log_input_gate=(2,))
    with jax.enable_x64(True):
        floats = dict(q=rng.normal(size=(2, LENGTH, 2, 4)), k=rng.normal(size=(2, LENGTH, 2, 4)))
        floats |= dict(v=rng.normal(size=(2, LENGTH, 2, 3)))
        for array in ARRAYS[name]:
            x = rng.normal(size=(2, LENGTH, *shapes[array]))
            floats[array.removeprefix("key_")] = x if array == "log_input_gate" else -0.03 * x**2
        gated = "log_input_gate" in floats
        state = ops.linear_state(2, 2, 4, 3, normalize=gated, stabilize=gated, dtype=jnp.float64)
        state = jax.tree.map(
            lambda x: x + rng.normal(size=x.shape), state._replace(segment_id=None)
        )
        options = dict(chunk_size=SIZE, normalize=1e-6 if gated else None)

        def run(form, floats, state):
            with_id = state._replace(segment_id=jnp.ones(2, jnp.int32))
            output, final = ops.linear_memory(**floats, initial_state=with_id, form=form, **options)
            return output, final._replace(segment_id=None)

        def results_and_gradients(form, cotangents):
            outputs, pull = jax.vjp(lambda *x: run(form, *x), floats, state)
            return outputs, pull(cotangents or jax.tree.map(jnp.cos, outputs))

        outputs, grads = results_and_gradients("recurrent", None)
        cotangents = jax.tree.map(jnp.cos, outputs)
        result = results_and_gradients("chunk", cotangents)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves((outputs, grads)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


def test_large_gates_keep_their_digits(as_on_a_gpu):
    """With large input gates, the stabiliser at the start of a part of a row equals, to the bit, the one by
    which the memory before the part was divided.
    """
    rng = np.random.default_rng(0)
    q, k, v = (np.abs(rng.normal(size=(1, LENGTH, 1, 4))).astype(np.float32) for _ in "qkv")
    decay = -np.float32(1e-3) * rng.random((1, LENGTH, 1)).astype(np.float32)
    gate = (1e4 + rng.normal(size=(1, LENGTH, 1))).astype(np.float32)

    def run(form):
        options = dict(normalize=1e-6, chunk_size=SIZE, form=form)
        return ops.linear_memory(q, k, v, decay, log_input_gate=gate, **options)[0]

    result = np.asarray(run("chunk"))
    with jax.enable_x64(True):
        q, k, v, decay, gate = (x.astype(np.float64) for x in (q, k, v, decay, gate))
        expected = np.asarray(run("recurrent"))
    np.testing.assert_allclose(result, expected, rtol=2e-6)
