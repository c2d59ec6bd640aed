"""Forgetting attention: stored results, special kinds of gates, long documents and errors.

`test_ops` tests the properties that all ops have in common, with cases of `attention` with gates.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels.forgetting_attention
from lsm_jax import mixers, ops
from lsm_jax.mixers.lightning import alibi_slopes
from lsm_jax.ops.attention import query_blocks
from lsm_jax.ops.attention.forget_gates import GateSum, gate_bias, sum_gates
from lsm_jax.ops.core.segments import read_tokens
from tests.ops.test_golden import LENGTH, K, Q, V, rows

RNG = np.random.default_rng(0)


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def reference(q, k, v, sums):
    """Compute the output [T, H, V] of forgetting attention in float64, query by query.

    q is [T, H, K], the queries of the last T of S tokens; k, v and the cumulative sums of log forget gates (`sums`) are
    [S, H, *].
    """
    before, o = len(k) - len(q), np.zeros((*q.shape[:2], v.shape[-1]))
    for i in range(len(q)):
        attended = slice(0, before + i + 1)
        scores = np.einsum("hk,shk->hs", q[i], k[attended]) * q.shape[-1] ** -0.5
        scores += (sums[before + i] - sums[attended]).T
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o[i] = np.einsum("hs,shv->hv", weights / weights.sum(-1, keepdims=True), v[attended])
    return o


def test_golden_values_and_gradients():
    """Outputs and gradients of forgetting attention equal stored results of a float64 reference that does
    not use this library; its gradients agree with finite differences.
    """
    n = np.arange(1, LENGTH + 1)
    upstream = np.sin(0.5 * np.arange(1, 4 * LENGTH + 1) + 0.6).reshape(Q.shape)
    gates = log_sigmoid(2 * np.sin(1.1 * n + 0.4))[None, :, None]
    np.testing.assert_allclose(
        gates[0, :, 0], [-0.127527, -0.305018, -1.357232, -2.120175, -1.135346], atol=1e-6
    )
    with jax.enable_x64(True):
        output, back = jax.vjp(
            lambda q, k, v, g: ops.attention(q, k, v, log_forget=g)[0],
            *map(jnp.asarray, (Q, K, V, gates)),
        )
        dq, dk, dv, dg = back(jnp.asarray(upstream))
    rows(
        output,
        row1=[0.932039, 0.863209, 0.14112, -0.687766],
        row2=[0.099345, 0.252619, 0.214716, 0.01432],
        row3=[0.627465, 0.076945, -0.531806, -0.738096],
        row4=[-0.29915, 0.295335, 0.666316, 0.533043],
        row5=[-0.099014, -0.323127, -0.302705, -0.053201],
    )
    np.testing.assert_allclose(
        dg[0, :, 0], [0, 0.256525, 0.155407, -0.235469, -0.61772], rtol=0, atol=1e-6
    )
    rows(dq, row1=[0, 0, 0, 0], row2=[0.087933, -0.097091, -0.139877, 0.022258])
    rows(dk, row1=[-0.068001, -0.152703, -0.165586, -0.100592])
    rows(dv, row1=[0.927286, 0.793707, 0.4658, 0.02385])


def random_array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def test_gates_of_one_equal_attention_without_gates():
    q, k, v = random_array(2, 9, 4, 8), random_array(2, 9, 2, 8), random_array(2, 9, 2, 4)
    expected, _ = ops.attention(q, k, v, window=4)
    for gates in (jnp.zeros(4), jnp.zeros((2, 9, 4), jnp.bfloat16)):
        output, _ = ops.attention(q, k, v, log_forget=gates, window=4)
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)


def test_constant_gates_are_alibi():
    q, k, v = random_array(1, 9, 4, 8), random_array(1, 9, 4, 8), random_array(1, 9, 4, 4)
    slopes = np.array(alibi_slopes(4))
    output, _ = ops.attention(q, k, v, log_forget=jnp.asarray(-slopes, jnp.float32))
    distance = np.arange(9)[:, None] - np.arange(9)
    scores = np.einsum("thk,shk->hts", q[0], k[0]) * 8**-0.5 - slopes[:, None, None] * distance
    weights = np.exp(np.where(distance >= 0, scores, -np.inf))
    expected = np.einsum("hts,shv->thv", weights / weights.sum(-1, keepdims=True), v[0])
    np.testing.assert_allclose(output[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prune", [True, False])
def test_a_config_sets_whether_a_kernel_prunes(prune, monkeypatch):
    values = []

    def kernel(q, *_, prune, **__):
        values.append(prune)
        return q

    monkeypatch.setattr(pallas_kernels.forgetting_attention, "forgetting_attention", kernel)
    config = mixers.FoXConfig(num_heads=1, implementation="mosaic_tpu", prune=prune)
    x = jax.ShapeDtypeStruct((1, 32, 64), jnp.bfloat16)
    jax.eval_shape(mixers.build(config, 64, rngs=nnx.Rngs(0)), x)
    assert values == [prune]


@pytest.mark.parametrize("closed", [-1e5, -1e9, -1e30, -np.inf])
def test_a_closed_gate_equals_a_document_start(closed):
    length, every = 1024, 8
    q, k, v = (jnp.asarray(RNG.normal(size=(1, length, 2, 4)), jnp.float32) for _ in range(3))
    gates = jnp.full((1, length, 2), -0.01).at[:, ::every].set(closed)
    ids = jnp.arange(length)[None] // every + 1

    def loss(q, k, v, gates, ids):
        output, _ = ops.attention(q, k, v, log_forget=gates, segment_ids=ids)
        return jnp.sum(jnp.sin(output)), output

    grads = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    (*results, d_gates), output = grads(q, k, v, gates, None)
    (*expected, expected_d_gates), expected_output = grads(
        q, k, v, gates.at[:, ::every].set(-1.0), ids
    )
    np.testing.assert_allclose(output, expected_output, rtol=0, atol=1e-5)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    inside = np.arange(length) % every != 0
    np.testing.assert_allclose(d_gates[:, inside], expected_d_gates[:, inside], rtol=0, atol=1e-5)
    assert not d_gates[:, ~inside].any()


def test_differences_of_sums_are_exact():
    """Differences of the cumulative sums of log forget gates are exact after 65,536 gates near 0.5 or near
    1, where differences of float32 sums have an error of 0.002.
    """
    length, near = 65_536, 64
    gates = -np.exp(RNG.normal(size=(1, length, 2)) * 0.1) * np.array([0.7, 1.0])
    gates[:, ::2, 1] *= 1e-6
    gates = gates.astype(np.float32)
    tokens = read_tokens(None, None, jnp.zeros(1, jnp.int32), None)
    zero = GateSum(jnp.zeros((1, 2)), jnp.zeros((1, 2)))
    sums = jax.jit(lambda g: sum_gates(g, tokens, zero))(gates)
    last = jax.tree.map(lambda x: x[:, -near:], sums)
    exact = np.cumsum(gates.astype(np.float64), axis=1)[0, -near:].T
    expected = exact[:, :, None] - exact[:, None]
    np.testing.assert_allclose(gate_bias(last, last)[0], expected, rtol=1e-6, atol=1e-7)
    float32_sums = np.cumsum(gates, axis=1, dtype=np.float32)[0, -near:].T
    assert np.abs(float32_sums[:, :, None] - float32_sums[:, None] - expected).max() > 1e-3


def test_attention_after_65536_tokens():
    """Forgetting attention is exact for the last 33 queries of a document of 65,536 tokens. The state
    contains the tokens before them; one call reads 32 tokens, and a second call one token. The outputs are
    compared with a float64 reference.
    """
    length, last, heads = 65_536, 33, 2
    gates = log_sigmoid(0.1 * RNG.normal(size=(1, length, heads))).astype(np.float32)
    k, v, q = (
        random_array(1, length, heads, 8),
        random_array(1, length, heads, 4),
        random_array(1, last, heads, 8),
    )
    state = ops.attention_state(1, length, heads, 8, 4, forget_heads=heads)
    tokens = read_tokens(None, None, state.segment_id, None)
    zero = GateSum(jnp.zeros((1, heads)), jnp.zeros((1, heads)))
    stored = length - last
    sums = sum_gates(jnp.asarray(gates[:, :stored]), tokens, zero)
    state = ops.AttentionState(
        state.keys.at[:, :stored].set(k[:, :stored]),
        state.values.at[:, :stored].set(v[:, :stored]),
        jnp.full(1, stored, jnp.int32),
        state.segment_id,
        jax.tree.map(lambda ring, x: ring.at[:, :stored].set(x), state.log_forget, sums),
    )
    expected = reference(
        *(np.asarray(x[0], np.float64) for x in (q, k, v)),
        np.cumsum(gates[0], axis=0, dtype=np.float64),
    )
    outputs = []
    for a, b in ((0, 32), (32, 33)):
        new = slice(stored + a, stored + b)
        arrays = (q[:, a:b], k[:, new], v[:, new])
        output, state = ops.attention(*arrays, log_forget=gates[:, new], initial_state=state)
        outputs.append(output[0])
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=0, atol=3e-6)


@pytest.mark.slow
def test_gradients_of_blocks_equal_those_of_one_block(monkeypatch):
    """Forgetting attention has the same gradients if a row of 300 queries is computed in one block and if it
    is computed in four parts of 75 queries, in blocks of 32, the last one incomplete.
    """
    arguments = [random_array(1, 300, heads, 4) for heads in (4, 2, 2)]
    arguments.append(-jnp.abs(random_array(1, 300, 4)))
    weight = random_array(1, 300, 4, 4)

    def gradients(rows):
        def loss(q, k, v, g):
            return jnp.sum(weight * ops.attention(q, k, v, log_forget=g)[0])

        repeated = [jnp.repeat(x, rows, axis=0) for x in arguments]
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*repeated)

    one_block = gradients(1)
    lengths = []
    monkeypatch.setattr(query_blocks, "_block_size", lambda *x: lengths.append(x) or 32)
    monkeypatch.setattr(query_blocks, "_LONG_ROW", 256)
    for result, expected in zip(gradients(2), one_block, strict=True):
        tolerance = 1e-5 * float(jnp.abs(expected).max())
        np.testing.assert_allclose(result[:1], expected, rtol=0, atol=tolerance)
    assert lengths[1:] == [(75, 75), (75, 150), (75, 225), (75, 300)]


def test_no_array_of_queries_by_keys_is_stored():
    """The forward and backward pass of forgetting attention on 8,192 tokens uses a fraction of the 256 MiB
    that the scores of one head would have.
    """
    shapes = [jax.ShapeDtypeStruct((1, 8192, 1, d), jnp.float32) for d in (4, 4, 4)]
    gates = jax.ShapeDtypeStruct((1, 8192, 1), jnp.float32)

    def loss(q, k, v, g):
        return jnp.sum(ops.attention(q, k, v, log_forget=g)[0])

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes, gates).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 48 * 2**20


def test_errors():
    q, k, v = random_array(2, 5, 4, 8), random_array(2, 5, 2, 8), random_array(2, 5, 2, 4)
    for gates, words in (
        (
            random_array(2, 5, 2),
            "log_forget has shape (2, 5, 2); accepted are [N] and [B, T, N] = (4,) and",
        ),
        (random_array(5, 4), "log_forget has shape (5, 4); accepted are"),
        (jnp.zeros(4, jnp.int32), "log_forget has dtype int32; accepted are floating dtypes"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"attention: {words}")):
            ops.attention(q, k, v, log_forget=gates)
    with pytest.raises(NotImplementedError, match="implementation='cudnn' requires no log_forget"):
        ops.attention(q, k, v, log_forget=jnp.zeros(4), implementation="cudnn")
    without_gates = ops.attention_state(2, 5, 2, 8, 4)
    words = "accepted with these arguments is a AttentionState of .*initial_state.log_forget.high"
    with pytest.raises(ValueError, match=words):
        ops.attention(q, k, v, log_forget=jnp.zeros(4), initial_state=without_gates)
    with pytest.raises(ValueError, match="initial_state holds .*log_forget.low; accepted"):
        ops.attention(q, k, v, initial_state=ops.attention_state(2, 5, 2, 8, 4, forget_heads=4))
