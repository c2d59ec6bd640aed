"""Tests of the ops behind Liger's gated memories (arXiv 2503.01496, Table 5), compared with stored results
that were computed in float64 without this library.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops

LENGTH, DIM = 5, 4


def sequence(a: float, b: float) -> np.ndarray:
    return np.sin(a * np.arange(1, LENGTH * DIM + 1) + b).reshape(1, LENGTH, 1, DIM)


Q, K, V = sequence(0.7, 0.1), sequence(1.3, 0.2), sequence(0.9, 0.3)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def rows(output, **expected):
    for name, row in expected.items():
        np.testing.assert_allclose(output[0, int(name[3:]) - 1, 0], row, rtol=0, atol=1e-6)


def gla():
    q, k = jax.nn.softmax(Q), jax.nn.softmax(K)
    return ops.linear_memory(q, k, V, jax.nn.log_sigmoid(K) / 16, scale=1.0)


def window_of_two():
    return ops.attention(jnp.asarray(Q), jnp.asarray(K), jnp.asarray(V), window=2)[0]


def test_gla_branch():
    output, state = gla()
    rows(
        output,
        row1=[0.245446, 0.22732, 0.037163, -0.181118],
        row5=[0.031143, -0.072562, -0.121353, -0.078307],
    )
    expected = [0.238862, 0.161258, -0.038383, -0.208976]
    np.testing.assert_allclose(state.memory[0, 0, 0], expected, rtol=0, atol=1e-6)


def test_hgrn2_branch():
    gate = jax.nn.log_sigmoid(K)
    output, _ = ops.linear_memory(jax.nn.softmax(Q), -jnp.expm1(gate), V, gate, scale=1.0)
    rows(
        output,
        row1=[0.462824, 0.428645, 0.070076, -0.341525],
        row5=[0.014479, -0.27783, -0.359882, -0.169583],
    )


@pytest.mark.parametrize("form", ["recurrent", "chunk", "associative"])
def test_gsa_branch(form):
    """GSA's memory equals stored float64 results with two slots, each gated by the mean of two channels of
    k; q and k are not normalised.
    """
    gate = jax.nn.log_sigmoid(K.reshape(1, LENGTH, 1, 2, 2).mean(-1)) / 16
    output, _ = ops.slot_memory(Q, K, V, -jnp.expm1(gate), gate, scale=1.0, form=form)
    rows(
        output,
        row1=[0.044821, 0.041511, 0.006786, -0.033074],
        row5=[0.012421, -0.002717, -0.015799, -0.016925],
    )


def test_sliding_window_and_its_mean_with_gla():
    window = window_of_two()
    rows(window, row2=[0.239645, 0.355497, 0.202316, -0.103974])
    rows(
        0.5 * window + 0.5 * gla()[0],
        row2=[0.125052, 0.226477, 0.156508, -0.031903],
    )
