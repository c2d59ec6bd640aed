"""Tests of slot memory on the Hopper kernels of linear attention, with one call of them for each of its two
memories, in Mosaic GPU's interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from pallas_kernels import compat, linear_attention
from pallas_kernels.linear_attention.cases import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from tests.kernels.test_linear_attention_gpu import error


@pytest.fixture
def interpreted(monkeypatch):
    kernel = functools.partial(
        linear_attention.linear_attention, interpret=compat.gpu_interpreter()
    )
    monkeypatch.setattr(linear_attention, "linear_attention", kernel)


def make(length, heads, memories, key_dim, slots, value_dim):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(1, length, *shape)), jnp.bfloat16)  # noqa: E731
    gate = jax.nn.log_sigmoid(normal(memories, slots).astype(jnp.float32)) / 8
    return [
        normal(heads, key_dim), normal(min(heads, memories), key_dim), normal(memories, value_dim), -jnp.expm1(gate), gate
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "segments", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["row", "segments"]
)
def test_equals_the_recurrence_in_value_and_every_gradient(interpreted, segments):
    length = 130
    inputs = make(length, 1, 2, 64, 64, 64)
    ids = jnp.asarray(np.repeat([1, 2, 1], [40, 50, 40])[None])
    state = ops.slot_state(1, 2, 64, 64, 64, num_segments=2) if segments else None

    def run(implementation, form, *x):
        output, final = ops.slot_memory(
            *x, scale=2.0, initial_state=state, segment_ids=ids, form=form,
            implementation=implementation,
        )  # fmt: skip
        return output, final.keys, final.values

    got, pull = jax.vjp(functools.partial(run, "mosaic_gpu", "chunk"), *inputs)
    wide = [x.astype(jnp.float32) for x in inputs]
    expected, expected_pull = jax.vjp(functools.partial(run, "xla", "recurrent"), *wide)
    for a, b in zip(got, expected, strict=True):
        assert error(a, b) < OUTPUT_TOLERANCE
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in got)
    grads = pull(cotangents)
    for a, b in zip(grads, expected_pull(jax.tree.map(jnp.float32, cotangents)), strict=True):
        assert error(a, b) < GRADIENT_TOLERANCE
    assert not compat.races_found()


def test_unsupported_sizes_are_refused_with_the_requirement(interpreted):
    odd = make(64, 1, 1, 64, 24, 64)
    with pytest.raises(
        NotImplementedError, match=r"V of 64 or a multiple of 128, not 24 in the memory of keys"
    ):
        ops.slot_memory(*odd, implementation="mosaic_gpu")
    wide = make(64, 2, 1, 64, 64, 96)
    with pytest.raises(
        NotImplementedError, match="V of 64 or a multiple of 128, not 96 in the memory of values"
    ):
        ops.slot_memory(*wide, implementation="mosaic_gpu")
    ops.slot_memory(*odd)
    assert "xla, chunk form (mosaic_gpu requires V of 64 or a multiple of 128, not 24 in" in ops.choices()["slot_memory"]  # fmt: skip
