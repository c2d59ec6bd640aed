"""The kernels on the card itself: `make test-gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from tests.kernels.test_linear_attention_gpu import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA Hopper GPU"),
]

# heads of q, k and v; K, V; T; documents; decay
CONFIGURATIONS = [
    ((4, 4, 4), 128, 128, 512, False, "token"),
    ((4, 2, 2), 64, 128, 500, True, "token"),
    ((2, 1, 2), 128, 64, 1100, True, None),
    ((2, 2, 4), 64, 64, 2048, True, "token"),
    ((2, 2, 2), 128, 128, 4096, False, "strong"),
    ((2, 2, 2), 128, 128, 1024, False, "constant"),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_linear_memory_equals_the_recurrence(configuration):
    """Value, final state and every gradient, in float32 at full precision; and twice the same bits."""
    (heads, key_heads, memories), key_dim, value_dim, length, documents, decay = configuration
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    inputs = [
        normal(2, length, heads, key_dim),
        normal(2, length, key_heads, key_dim),
        normal(2, length, memories, value_dim),
    ]
    if decay == "constant":
        inputs.append(jnp.log1p(-(2.0 ** (-5 - jnp.arange(memories)))))
    elif decay is not None:
        gate = jax.nn.log_sigmoid(normal(2, length, memories, dtype=jnp.float32) + 3)
        inputs.append(jnp.where(gate < -0.2, -30.0, gate) if decay == "strong" else gate)
    memory = normal(2, memories, key_dim, value_dim, dtype=jnp.float32)
    ids = jnp.asarray(np.cumsum(rng.random((2, length)) < 0.01, axis=1) + 1) if documents else None
    mask = jnp.asarray(rng.random((2, length)) < 0.9) if documents else None

    def run(implementation, form, memory, *inputs):
        state = ops.linear_state(2, memories, key_dim, value_dim)._replace(
            memory=memory, segment_id=jnp.ones(2, jnp.int32)
        )
        output, state = ops.linear_memory(
            *inputs, initial_state=state, segment_ids=ids, update_mask=mask, form=form,
            implementation=implementation,
        )  # fmt: skip
        return output, state.memory

    def both(implementation, form, cotangents, *inputs):
        outputs, pull = jax.vjp(lambda *x: run(implementation, form, *x), *inputs)
        return outputs, pull(cotangents)

    cotangents = normal(2, length, max(heads, memories), value_dim), normal(*memory.shape, dtype=jnp.float32)  # fmt: skip
    fused = jax.jit(lambda *x: both("mosaic_gpu", "chunk", *x))
    values, gradients = fused(cotangents, memory, *inputs)
    for a, b in zip(
        jax.tree.leaves((values, gradients)), jax.tree.leaves(fused(cotangents, memory, *inputs)), strict=True
    ):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), (cotangents, memory, *inputs))
    with jax.default_matmul_precision("highest"):
        expected, wanted = jax.jit(lambda *x: both("xla", "chunk", *x))(*widened)
    for got, want in zip(values, expected, strict=True):
        assert error(got, want) < 5e-3
    for got, want in zip(gradients, wanted, strict=True):
        assert error(got, want) < 1e-2


def test_none_picks_the_kernel_and_changes_nothing_else():
    inputs = [jnp.ones((1, 128, 2, 64), jnp.bfloat16)] * 3
    text = jax.jit(lambda *x: ops.linear_memory(*x)[0]).lower(*inputs).as_text()
    assert "mosaic_gpu" in text
    text = jax.jit(lambda *x: ops.linear_memory(*x, implementation="xla")[0]).lower(*inputs)
    assert "mosaic_gpu" not in text.as_text()
