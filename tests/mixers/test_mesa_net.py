"""Tests of MesaNet's memory: it is compared with the authors' code and with direct solvers, values, states and all
gradients.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import mixers, ops
from tests.mixers import goldens
from tests.mixers.goldens import SLOW
from tests.mixers.test_mixers import close
from tests.mixers.test_new_delta_rules import random_inputs


def run(g, **options):
    """Run the op on a golden's arrays, [B, T, ...] or of one token [B, ...]."""
    one = g["q"].ndim == 3
    row = {n: g[n][:, None] if one else g[n] for n in ("q", "k", "v", "beta", "g")}
    log_decay = row.pop("g")
    zeros = jnp.zeros(row["q"].shape[0], jnp.int32)
    o, state = ops.mesa_memory(
        **row, regularizer=g["lamb"], log_decay=log_decay, chunk_size=4,
        initial_state=ops.MesaState(g["initial_kk"], g["initial_kv"], zeros), **options,
    )  # fmt: skip
    return dict(o=o[:, 0] if one else o, final_kk=state.keys, final_kv=state.values)


@pytest.mark.parametrize("form", ["chunk", *SLOW])
def test_converged_steps_are_the_solution_with_its_gradients(form):
    goldens.check("mesa_net", functools.partial(run, form=form))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mesa_net_cg5", dict(steps=5)),
        ("mesa_net_cg30", dict(steps=30)),
        ("mesa_net_step_cg5", dict(steps=5, start="diagonal")),
    ],
)
def test_a_fixed_number_of_steps_is_the_published_one(name, options):
    """The goldens' denominators have 1e-5 added, and their gradients are those of the steps."""
    published = dict(options, epsilon=1e-5, gradient="unrolled")
    goldens.check(name, functools.partial(run, **published), symmetric=("initial_kk",))
    with pytest.raises(AssertionError, match=name):
        exact = functools.partial(run, **published | dict(epsilon=0.0))
        goldens.check(name, exact, symmetric=("initial_kk",))


def test_implicit_gradients_are_those_of_converged_steps():
    q, k, v, beta, log_decay = random_inputs(value_dim=6)
    regularizer = jnp.linspace(0.5, 2, 16).reshape(2, 8)

    def loss(arguments, **options):
        o, state = ops.mesa_memory(*arguments, chunk_size=4, **options)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state.keys))

    arguments = (q, k, v, beta, regularizer, log_decay)
    with jax.enable_x64(True):
        arguments = tuple(jnp.asarray(x, jnp.float64) for x in arguments)
        expected = jax.grad(functools.partial(loss, steps=20, gradient="unrolled"))(arguments)
        for start in ("zero", "diagonal"):
            run = functools.partial(loss, start=start, steps=20, gradient="implicit")
            close(jax.jit(jax.grad(run))(arguments), expected, 1e-9)


def test_a_large_regularizer_is_linear_attention():
    q, k, v, beta, log_decay = random_inputs()
    large = jnp.full((2, 8), 1e6)
    o, _ = ops.mesa_memory(q, k, v, beta, large, log_decay)
    expected, _ = ops.linear_memory(q, beta[..., None] * k, v, log_decay, scale=1.0)
    close(1e6 * o, expected, 1e-5)


def test_a_small_regularizer_recalls_values_exactly():
    """While there are at most as many tokens as key channels, each token's own key returns its value."""
    _, k, v, _, _ = random_inputs()
    k, v = k[:, :6], v[:, :6]
    with jax.enable_x64(True):
        k, v = (jnp.asarray(x, jnp.float64) for x in (k, v))
        o, _ = ops.mesa_memory(k, k, v, jnp.ones(k.shape[:3]), jnp.full((2, 8), 1e-9), steps=60)
    np.testing.assert_allclose(o, v, atol=1e-5)


def test_outputs_scale_with_queries():
    q, k, v, beta, log_decay = random_inputs()
    run = functools.partial(
        ops.mesa_memory, k=k, v=v, beta=beta, regularizer=jnp.ones((2, 8)), log_decay=log_decay
    )
    close(run(3 * q)[0], 3 * run(q)[0], 1e-6)


def test_the_regularizer_starts_at_one():
    mixer = mixers.build(mixers.MesaNetConfig(num_heads=2, head_dim=8), 16)
    written, _ = mixer.write(jnp.ones((1, 1, 16)), mixers.Context())
    np.testing.assert_allclose(written["regularizer"], jnp.ones((2, 8)), rtol=1e-6)
    with pytest.raises(ValueError, match="least_regularizer=1.5: accepted are numbers below 1"):
        mixers.MesaNetConfig(num_heads=2, head_dim=8, least_regularizer=1.5).validate(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(regularizer=jnp.ones((2, 7))), "regularizer has shape (2, 7); accepted is [G, K] = [2, 8]"),
        (dict(steps=0), "steps=0; accepted are integers from 1"),
        (dict(start="warm"), "start='warm'; accepted are 'zero', 'diagonal'"),
        (dict(gradient="none"), "gradient='none'; accepted are 'implicit', 'unrolled'"),
        (dict(epsilon=-1.0), "epsilon=-1.0; accepted are finite Python numbers from 0"),
        (dict(beta=jnp.ones((2, 13))), "beta has shape (2, 13); accepted is [B, T, G]"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    q, k, v, beta, _ = random_inputs()
    with pytest.raises(ValueError) as error:
        ops.mesa_memory(q, k, v, **dict(beta=beta, regularizer=jnp.ones((2, 8))) | change)
    assert message in str(error.value)
