"""Tests of momentum DeltaNet: it is compared with the authors' code, values, states and all gradients, and with Gated
DeltaNet.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import mixers, ops
from tests.mixers import goldens
from tests.mixers.goldens import SLOW
from tests.mixers.test_mixers import close
from tests.mixers.test_new_delta_rules import random_inputs


@pytest.mark.parametrize("form", ["chunk", *SLOW])
def test_momentum_deltanet_is_the_published_recurrence(form):
    def run(g):
        zeros = jnp.zeros(g["q"].shape[0], jnp.int32)
        arrays = (g[n] for n in ("q", "k", "v", "p", "beta", "eta", "log_alpha", "log_mu"))
        o, state = ops.momentum_memory(
            *arrays, form=form, chunk_size=4,
            initial_state=ops.MomentumState(g["initial_state"], g["initial_momentum"], zeros),
        )  # fmt: skip
        return dict(o=o, final_state=state.memory, final_momentum=state.momentum)

    goldens.check("momentum_deltanet", run)


def test_without_momentum_it_is_gated_deltanet():
    q, k, v, beta, log_decay = random_inputs()
    p, none = jnp.exp(log_decay)[..., None] * k, jnp.full_like(log_decay, -1e3)
    eta = 1 + jax.random.uniform(jax.random.key(7), beta.shape)
    o, state = ops.momentum_memory(q, k, v, p, beta, eta, log_decay, none, chunk_size=4)
    expected, parent = ops.delta_memory(q, k, v, beta * eta, log_decay)
    close((o, state.memory), (expected, parent.memory), 1e-6)


def test_without_errors_the_momentum_goes_on():
    """With η = 0 nothing is written: N decays by μ, and M moves by β N at each token."""
    q, k, v, beta, log_decay = random_inputs()
    start = jax.random.normal(jax.random.key(7), (2, 2, 8, 6))
    state = ops.MomentumState(0 * start, start, jnp.zeros(2, jnp.int32))
    half, no_decay = jnp.full_like(beta, np.log(0.5)), jnp.zeros_like(beta)
    _, after = ops.momentum_memory(
        q, k, v, k, 0 * beta + 1, 0 * beta, no_decay, half, initial_state=state, chunk_size=4
    )
    close(after.momentum, start * 0.5**13, 1e-6)
    close(after.memory, -start * (1 - 0.5**13), 1e-6)


def test_small_step_sizes_are_exact():
    """The published chunk form adds 1e-6 to β; here chunks equal tokens for β near 0, too."""
    q, k, v, beta, log_decay = random_inputs()
    arguments = (q, k, v, k, 1e-9 * beta, beta, log_decay, log_decay)
    one, many = (
        ops.momentum_memory(*arguments, form=form, chunk_size=4)[0] for form in ("recurrent", "chunk")
    )  # fmt: skip
    close(1e9 * many, 1e9 * one)
    assert jnp.abs(1e9 * one).max() > 0.1


def test_the_angle_bounds_step_and_decay():
    mixer = mixers.build(mixers.MomentumDeltaNetConfig(num_heads=2, head_dim=8), 16, init_std=1.0)
    written, _ = mixer.write(
        10 * jax.random.normal(jax.random.key(0), (2, 50, 16)), mixers.Context()
    )
    assert (written["beta"] + jnp.exp(written["log_decay"]) < 1 + 1e-6).all()
    assert (written["log_momentum"] >= -2).all() and (written["log_momentum"] == -2).any()
    assert (written["eta"] >= 0).all() and (written["eta"] <= 2).all()
    with pytest.raises(ValueError, match="least_log_momentum=0.0: accepted are negative numbers"):
        mixers.MomentumDeltaNetConfig(num_heads=2, head_dim=8, least_log_momentum=0.0).validate(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(p=jnp.ones((2, 13, 2, 7))), "p has shape (2, 13, 2, 7); accepted is [B, T, Hk, K]"),
        (dict(eta=jnp.ones((2, 13))), "eta has shape (2, 13); accepted is [B, T, G]"),
        (dict(log_momentum=jnp.ones((2, 13, 2))), "log_momentum has values up to 1"),
        (dict(form="parallel"), "form='parallel'; accepted are 'recurrent', 'chunk', 'associative'"),
        (dict(initial_state=ops.delta_state(2, 2, 8, 6)), "is a DeltaState; accepted are MomentumState"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    q, k, v, beta, log_decay = random_inputs()
    given = dict(p=k, beta=beta, eta=beta, log_decay=log_decay, log_momentum=log_decay)
    with pytest.raises(ValueError) as error:
        ops.momentum_memory(q, k, v, **given | change)
    assert message in str(error.value)
