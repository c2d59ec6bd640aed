"""Tests of sLSTM: it is compared with the authors' code, values, states and all gradients, and with a running mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import mixers, ops
from tests.mixers import goldens
from tests.mixers.test_mixers import close


def random_inputs():
    """Return the inputs of the gates o, i, f and z, [B, T, H, K], B 2 and T 13, and recurrent matrices."""
    keys = jax.random.split(jax.random.key(0), 5)
    gates = [2 * jax.random.normal(key, (2, 13, 2, 4)) for key in keys[:4]]
    return *gates, 0.5 * jax.random.normal(keys[4], (2, 4, 4, 4))


@pytest.mark.parametrize("name", ["slstm", "slstm_resumed"])
def test_slstm_is_the_published_recurrence(name):
    """The golden's gates are in the order i, f, z, o."""

    def run(g):
        x = (g["x"] + g["b"]).reshape(2, 19, 4, 2, 4)
        i, f, z, o = (x[:, :, gate] for gate in range(4))
        state = ops.slstm_state(2, 2, 4, dtype=x.dtype)
        if name == "slstm_resumed":
            arrays = (g[n].reshape(2, 2, 4) for n in "ycnm")
            state = ops.SLSTMState(*arrays, state.segment_id)
        h, state = ops.slstm_memory(o, i, f, z, g["R"], initial_state=state)
        final = zip(("final_y", "final_c", "final_n", "final_m"), state[:4], strict=True)
        return dict(h=h.reshape(2, 19, 8)) | {n: a.reshape(2, 8) for n, a in final}

    goldens.check(name, run)


def test_without_recurrence_it_is_a_weighed_running_mean():
    o, i, f, z, recurrent = random_inputs()
    y, _ = ops.slstm_memory(o, i, f, z, 0 * recurrent)
    t = jnp.arange(13)
    total = jnp.cumsum(jax.nn.log_sigmoid(f), axis=1)
    log_weight = i[:, None] + total[:, :, None] - total[:, None]  # [B, t, s, H, K]
    log_weight = jnp.where((t[:, None] >= t)[None, :, :, None, None], log_weight, -jnp.inf)
    mean = jnp.sum(jax.nn.softmax(log_weight, axis=2) * jnp.tanh(z)[:, None], axis=2)
    close(y, jax.nn.sigmoid(o) * mean)


def test_a_constant_in_all_input_gates_changes_only_the_stabilizer():
    o, i, f, z, recurrent = random_inputs()
    y, state = ops.slstm_memory(o, i, f, z, recurrent)
    again, moved = ops.slstm_memory(o, i + 50, f, z, recurrent)
    close((again, moved[:3]), (y, state[:3]))
    close(moved.stabilizer, state.stabilizer + 50)


def test_large_gates_are_finite():
    o, i, f, z, recurrent = random_inputs()

    def total(i, f):
        return jnp.sum(ops.slstm_memory(o, 1e3 * i, 1e3 * f, z, recurrent)[0])

    assert np.isfinite(total(i, f))
    for slope in jax.grad(total, (0, 1))(i, f):
        assert np.isfinite(slope).all()


def test_forget_gates_start_as_published():
    """From 5 down to -7 over the channels of a head, in the last layer with the power 1.6."""
    bias = [
        mixers.build(mixers.SLSTMConfig(num_heads=2), 16, layer=layer, num_layers=3).f_bias[...][0]
        for layer in (0, 2)
    ]
    place = np.arange(8) / 7
    np.testing.assert_allclose(bias[0], 5 - 12 * place**0.3, atol=1e-5)
    np.testing.assert_allclose(bias[1], 5 - 12 * place**1.6, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(i=jnp.ones((2, 13, 2, 3))), "i has shape (2, 13, 2, 3); accepted is [B, T, G, K]"),
        (dict(z=jnp.ones((2, 13, 8))), "z has shape (2, 13, 8); accepted is [B, T, G, K]"),
        (dict(f=jnp.ones((2, 13, 2, 4), int)), "f has dtype int32; accepted are floating ones"),
        (dict(recurrent=jnp.ones((2, 4, 4))), "recurrent has shape (2, 4, 4); accepted is [G, K, 4, K]"),
        (dict(initial_state=ops.slstm_state(2, 2, 5)), "initial_state.output has shape (2, 2, 5)"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    given = dict(zip(("o", "i", "f", "z", "recurrent"), random_inputs(), strict=True))
    with pytest.raises(ValueError) as error:
        ops.slstm_memory(**given | change)
    assert message in str(error.value)
