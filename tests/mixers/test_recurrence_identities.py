"""Tests that newer recurrences equal simpler ones, or do something simple, in special cases: identities that the tests beside
their goldens lack.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.mixers import kda
from lsm_jax.mixers.abc_attention import bounded_memory
from lsm_jax.mixers.elementwise import elementwise_memory
from lsm_jax.mixers.gated_deltanet2 import erase_and_write
from lsm_jax.mixers.mamba3 import trapezoid_memory
from lsm_jax.mixers.precond_gated_deltanet import preconditioned_memory
from tests.mixers import goldens
from tests.mixers.test_mamba3 import inputs_of
from tests.mixers.test_mixers import close
from tests.mixers.test_new_delta_rules import delta_state, random_inputs


def started():
    """Return a memory [B, H, K, V] that is not empty."""
    return jax.random.normal(jax.random.key(7), (2, 2, 8, 6))


def test_a_bound_far_below_is_a_decay_without_a_bound():
    """With f shifted by -log |L|, the log decay is -e^f in the limit."""
    f = jnp.linspace(-5, 3, 9)[:, None, None]
    log_decay = kda.bounded_log_decay(f, jnp.full((1, 1), -np.log(1e6)), jnp.zeros(1), -1e6)
    np.testing.assert_allclose(log_decay, -jnp.exp(f), rtol=1e-4)


@pytest.mark.slow
def test_bounded_kda_is_deltanet_or_gated_deltanet():
    """Without decay it is DeltaNet, with equal decays of a head's channels Gated DeltaNet."""
    q, k, v, beta, _ = random_inputs()

    def run(f):
        log_decay = kda.bounded_log_decay(f, jnp.zeros((2, 8)), jnp.zeros(2), -5.0)
        return ops.delta_memory(q, k, v, beta, log_decay), log_decay[..., 0]

    close(run(jnp.full(k.shape, -1e3))[0], ops.delta_memory(q, k, v, beta), 1e-6)
    f = jnp.broadcast_to(jax.random.normal(jax.random.key(8), (*k.shape[:3], 1)), k.shape)
    result, log_decay = run(f)
    close(result, ops.delta_memory(q, k, v, beta, log_decay), 1e-6)


def test_keys_of_zero_leave_a_decay_of_channels():
    q, k, v, beta, log_decay = random_inputs()
    channels = log_decay[..., None] * jnp.linspace(0.1, 2, 8)
    start = delta_state(started())
    _, state = ops.delta_memory(q, 0 * k, v, beta, channels, initial_state=start)
    close(state.memory, jnp.exp(jnp.sum(channels, axis=1))[..., None] * started(), 1e-6)


@pytest.mark.slow
def test_gated_deltanet2_with_scalar_gates_is_gated_deltanet_and_without_writing_forgets():
    q, k, v, beta, log_decay = random_inputs()
    channels = jnp.broadcast_to(log_decay[..., None], k.shape)

    def run(erase, write, **state):
        gates = erase * jnp.ones_like(k), write * jnp.ones_like(v)
        return ops.dplr_memory(q, **erase_and_write(k, v, *gates, channels), **state)

    equal = beta[..., None]
    close(run(equal, equal), ops.delta_memory(q, k, v, beta, log_decay), 1e-6)
    start = delta_state(started())
    expected = ops.delta_memory(q, k, 0 * v, beta, log_decay, initial_state=start)
    close(run(equal, 0.0, initial_state=start), expected, 1e-6)


@pytest.mark.slow
def test_comba_that_erases_with_its_key_has_the_eigenvalue_of_decay_less_strength():
    """With an undecayed erase and one key for all tokens, k M is multiplied by α - β and the rest of M by α."""
    q, k, v, beta, log_decay = random_inputs()
    one = jnp.broadcast_to(k[:, :1], k.shape)
    _, state = ops.delta_memory(
        q, one, 0 * v, beta, log_decay, erase="undecayed", initial_state=delta_state(started())
    )
    decay = jnp.exp(log_decay)
    along, rest = jnp.prod(decay - beta, axis=1), jnp.prod(decay, axis=1)
    key = one[:, 0]
    held = jnp.einsum("bhk,bhkv->bhv", key, started())[:, :, None] * key[..., None]
    expected = along[..., None, None] * held + rest[..., None, None] * (started() - held)
    close(state.memory, expected, 1e-6)


@pytest.mark.slow
def test_a_constant_in_all_angles_changes_nothing():
    """Only differences of angles enter: turning the first token further turns all."""
    golden = goldens.load("mamba3_siso")
    given = {n: jnp.asarray(a, jnp.float32) for n, a in golden.items() if a.dtype.kind == "f"}
    siso = inputs_of(given)
    further = siso | dict(angle=siso["angle"].at[:, 0].add(0.7))
    outputs = (trapezoid_memory(**x, halves=False, chunk_size=4)[0] for x in (siso, further))
    close(*outputs, 1e-5)


@pytest.mark.slow
def test_as_many_steps_as_channels_solve_mesanets_equations():
    """One step suffices where all eigenvalues are equal: S is a multiple of 1, to which keys of 0 add nothing."""
    q, k, v, beta, log_decay = random_inputs()
    regularizer = jnp.ones((2, 8))
    with jax.enable_x64(True):
        given = [jnp.asarray(x, jnp.float64) for x in (q, k, v, beta, regularizer, log_decay)]
        exact, more = (ops.mesa_memory(*given, steps=n, chunk_size=4)[0] for n in (8, 20))
    close(exact, more, 1e-9)
    one, many = (
        ops.mesa_memory(q, 0 * k, v, beta, 3 * regularizer, log_decay, steps=n, initial_state=ops.MesaState(
            jnp.broadcast_to(jnp.eye(8), (2, 2, 8, 8)), jnp.broadcast_to(jnp.eye(8, 6), (2, 2, 8, 6)), jnp.zeros(2, jnp.int32),
        ))[0]
        for n in (1, 8)
    )  # fmt: skip
    close(one, many, 1e-6)


@pytest.mark.slow
def test_abc_is_gated_slot_attention_that_forgets_what_it_writes():
    """A slot's decay is 1 less the share of its newest token."""
    q, k, v, _, _ = random_inputs()
    scores = jax.random.normal(jax.random.key(8), (2, 13, 2, 5))
    share = jnp.exp(scores - jax.lax.associative_scan(jnp.logaddexp, scores, axis=1))
    decay = jnp.log1p(-share.at[:, 0].set(0.0))
    o, state = ops.slot_memory(q, k, v, share, decay)
    expected, other = bounded_memory(q, k, v, scores)
    close((o, state.keys, state.values), (expected, other.keys, other.values), 1e-5)


@pytest.mark.slow
def test_hgrn_is_hgrn2_with_heads_of_one_channel():
    """HGRN2's keys are 1 - f."""
    i = jax.random.normal(jax.random.key(0), (2, 13, 5))
    log_f = -jax.random.uniform(jax.random.key(1), i.shape)
    key = (-jnp.expm1(log_f))[..., None]
    o, _ = ops.linear_memory(
        jnp.ones_like(key), key, i[..., None], log_f[..., None], scale=1.0, chunk_size=4
    )
    close(elementwise_memory(-jnp.expm1(log_f) * i, log_f, chunk_size=4)[0], o[..., 0], 1e-6)


def test_preconditioned_rules_without_energy_scale_all_writes_alike():
    """Where nothing adds to the energy, all channels have the factor s^(-r / (1 + |r|)) with r = log 1e-6 - c."""
    q, k, v, beta, log_decay = random_inputs()
    threshold = jnp.array([-0.2, 1.0])
    o, state = preconditioned_memory(
        q, k, v, beta, log_decay, log_decay, 0 * beta, threshold, squash=1.5
    )
    r = np.log(1e-6) - threshold
    factor = 1.5 ** (-r / (1 + jnp.abs(r)))
    expected, parent = ops.delta_memory(q, k, v, factor * beta, log_decay)
    close((o, state.memory), (expected, parent.memory), 1e-5)
