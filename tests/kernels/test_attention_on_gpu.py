"""Tests of attention's kernel that run on an NVIDIA Hopper GPU: `make test-gpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
from lsm_jax.ops.core.segments import read_tokens
from pallas_kernels.forgetting_attention import cases as attention_cases
from pallas_kernels.forgetting_attention import forgetting_attention
from tests.kernels import test_attention_state_gpu as attention_state
from tests.kernels.marks import on_hopper
from tests.kernels.test_linear_attention_gpu import error

pytestmark = on_hopper


@pytest.mark.parametrize("case", attention_cases.HOPPER, ids=lambda case: case.id)
def test_attention_equals_xla(case):
    """On the card, the value and every gradient of attention's kernel are those of XLA's attention in float32
    at full precision; a second run gives the same bits.
    """
    (heads, key_heads), dim, length, documents, gates, window = case
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    inputs = [normal(2, length, n, dim) for n in (heads, key_heads, key_heads)]
    if gates is not None:
        gate = jax.nn.log_sigmoid(jnp.asarray(rng.normal(size=(2, length, heads)), jnp.float32) + 3)
        inputs.append(jnp.where(gate < -0.2, -30.0, gate) if gates == "strong" else gate)
    ids = None
    if documents is not None:
        ids = jnp.asarray(np.cumsum(rng.random((2, length)) < documents, axis=1) + 1)
    mask = jnp.asarray(rng.random((2, length)) < 0.9) if documents else None

    @functools.partial(jax.jit, static_argnums=0)
    def both(implementation, d_output, *inputs):
        def run(q, k, v, log_forget=None):
            return ops.attention(
                q, k, v, log_forget=log_forget, window=window, segment_ids=ids, update_mask=mask,
                implementation=implementation,
            )[0]  # fmt: skip

        output, pull = jax.vjp(run, *inputs)
        return output, *pull(d_output)

    d_output = normal(2, length, heads, dim)
    fused = both("mosaic_gpu", d_output, *inputs)
    for a, b in zip(fused, both("mosaic_gpu", d_output, *inputs), strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.default_matmul_precision("highest"):
        widened = [x.astype(jnp.float32) for x in (d_output, *inputs)]
        expected = both("xla", *widened)
    output, gradient = attention_cases.OUTPUT_TOLERANCE, attention_cases.GRADIENT_TOLERANCE
    for index, (got, want) in enumerate(zip(fused, expected, strict=True)):
        assert error(got, want) < (gradient if index else output)


@pytest.mark.parametrize("where", [0, 1, 3])
@pytest.mark.parametrize("case", attention_cases.HOPPER_PARTS, ids=lambda case: case.id)
def test_attention_of_two_parts_equals_xla(case, where):
    """On the card, attention's kernel has the value and every gradient of XLA's for the queries of one of
    four devices that share a row: parts `where` and 7 - `where` of eight. A second run gives the same bits.
    """
    (heads, key_heads), dim, length, documents, gates, window = case
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    inputs = [normal(2, length, n, dim) for n in (heads, key_heads, key_heads)]
    if gates is not None:
        gate = rng.normal(size=(2, length, heads)) + 3
        inputs.append(jax.nn.log_sigmoid(jnp.asarray(gate, jnp.float32)))
    ids = None
    if documents is not None:
        ids = jnp.asarray(np.cumsum(rng.random((2, length)) < documents, axis=1) + 1)
    mask = jnp.asarray(rng.random((2, length)) < 0.9) if documents else None
    part = length // 8
    places = jnp.asarray([where, 7 - where], jnp.int32) * part

    def cut(x):
        return jnp.concatenate([x[:, p * part : (p + 1) * part] for p in (where, 7 - where)], 1)

    def fused(q, k, v, log_forget=None):
        tokens = read_tokens(ids, mask, jnp.zeros(2, jnp.int32), None)
        sums = None
        if log_forget is not None:
            zero = jnp.zeros((2, log_forget.shape[2]), jnp.float32)
            sums = sum_gates(log_forget, tokens._replace(run=None), GateSum(zero, zero))
        return forgetting_attention(
            cut(q), k, v, sums, run=tokens.run, written=tokens.written, places=places,
            scale=dim**-0.5, window=window,
        )  # fmt: skip

    def plain(q, k, v, log_forget=None):
        return cut(ops.attention(
            q, k, v, log_forget=log_forget, window=window, segment_ids=ids, update_mask=mask,
            implementation="xla",
        )[0])  # fmt: skip

    @functools.partial(jax.jit, static_argnums=0)
    def both(run, d_output, *inputs):
        output, pull = jax.vjp(run, *inputs)
        return output, *pull(d_output)

    d_output = normal(2, 2 * part, heads, dim)
    got = both(fused, d_output, *inputs)
    for a, b in zip(got, both(fused, d_output, *inputs), strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.default_matmul_precision("highest"):
        expected = both(plain, *(x.astype(jnp.float32) for x in (d_output, *inputs)))
    output, gradient = attention_cases.OUTPUT_TOLERANCE, attention_cases.GRADIENT_TOLERANCE
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert error(a, b) < (gradient if index else output)


@pytest.mark.parametrize("name", attention_state.SPLITS)
def test_attention_from_a_state_equals_xla(name):
    attention_state.check_pieces(name)


def test_gradients_of_attention_from_a_state_equal_xla():
    attention_state.check_gradients()
