"""Tests of the delta rules after Gated DeltaNet: each is compared with the authors' code, values, states and all
gradients, and with a simpler method that it equals in a special case.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers import kda
from lsm_jax.mixers.comba import erase_ratio
from lsm_jax.mixers.gated_deltanet2 import erase_and_write
from lsm_jax.mixers.gated_deltaproduct import product_memory
from lsm_jax.mixers.precond_gated_deltanet import PrecondState, preconditioned_memory
from lsm_jax.ops.convolution.backends import l2_normalize
from tests.mixers import goldens
from tests.mixers.test_mixers import close


def delta_state(memory):
    return ops.DeltaState(memory, jnp.zeros(memory.shape[0], jnp.int32))


def random_inputs(heads=2, key_dim=8, value_dim=6):
    """Return queries, unit keys, values, write strengths in (0, 1) and log decays [B, T, H], B 2 and T 13."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (2, 13, heads, key_dim)) for key in keys[:2])
    v = jax.random.normal(keys[2], (2, 13, heads, value_dim))
    beta, decay = (jax.random.uniform(key, (2, 13, heads)) for key in keys[3:])
    return q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, beta, -decay


# --------------------------------------------------------------------------------------------------------------- KDA


def test_kda_with_bounded_decays_is_the_published_recurrence():
    def run(g):
        log_decay = kda.bounded_log_decay(g["g_raw"], g["dt_bias"].reshape(4, 8), g["A_log"], -5.0)
        o, state = ops.delta_memory(
            g["q"], g["k"], g["v"], g["beta"], log_decay,
            initial_state=delta_state(g["initial_state"]), chunk_size=4,
        )  # fmt: skip
        return dict(o=o, final_state=state.memory, g=log_decay)

    goldens.check("kda_bounded", run)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("layer_kimi_kda", dict(output_gate_bias=False)),
        ("layer_glm5_next_kda", dict(output_gate_bias=False, lower_bound=-5.0)),
        ("layer_ling3_kda", dict(full_rank_gates=True, lower_bound=-5.0)),
    ],
)
def test_released_layers_of_kda(name, fields):
    golden = goldens.load(name)
    config = mixers.KDAConfig(num_heads=2, head_dim=8, norm_eps=NORM_EPS[name], **fields)
    gates = dict(decay_proj="forget_gate.f_proj", gate_proj="g_proj")
    if "g_proj.weight" not in golden:
        gates = dict(
            decay_down="forget_gate.f_a_proj", decay_up="forget_gate.f_b_proj",
            gate_down="g_a_proj", gate_up="g_b_proj",
        )  # fmt: skip
    same = {f"{n}_proj": f"{n}_proj" for n in "qkvo"}

    def run(g):
        kernels = same | gates | dict(beta_proj="b_proj")
        parameters = {f"{ours}/kernel": g[f"{n}.weight"].T for ours, n in kernels.items()}
        convolutions = jnp.split(g["conv1d.weight"][:, 0].T, 3, axis=1)
        parameters |= {f"{n}_conv/weight": w for n, w in zip("qkv", convolutions, strict=True)}
        parameters["dt_bias"] = g["forget_gate.dt_bias"]
        parameters["a_log"] = g["forget_gate.A_log"].ravel()
        parameters["norm/scale"] = g["o_norm.weight"]
        return dict(y=goldens.run_layer(config, 16, parameters, g["x"]))

    goldens.check(name, run, dtypes=["float32"])


NORM_EPS = dict(layer_kimi_kda=1e-5, layer_glm5_next_kda=1e-5, layer_ling3_kda=1e-6)


def test_bounded_decays_end_at_one_and_at_the_bound():
    f = jnp.array([-1e3, 0.0, 1e3])[:, None, None]
    log_decay = kda.bounded_log_decay(f, jnp.zeros((1, 1)), jnp.zeros(1), -5.0)
    np.testing.assert_allclose(log_decay.ravel(), [0, -2.5, -5], atol=1e-6)
    with pytest.raises(ValueError, match="lower_bound=0.5: accepted are None and negative"):
        mixers.KDAConfig(num_heads=2, head_dim=8, lower_bound=0.5).validate(16)


def test_bounded_rates_start_at_one():
    config = mixers.KDAConfig(num_heads=2, head_dim=8, lower_bound=-5.0)
    mixer = mixers.build(config, 16, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(mixer.a_log[...], [0, 0])


# ------------------------------------------------------------------------------------------------- Gated DeltaProduct


def stepwise(x, steps):
    """Return x [B, n T, ...] as [B, T, n, ...]."""
    return x.reshape(x.shape[0], -1, steps, *x.shape[2:])


@pytest.mark.parametrize(
    ("name", "steps"),
    [("gated_deltaproduct_2", 2), ("gated_deltaproduct_3", 3), ("deltaproduct_2", 2)],
)
def test_gated_deltaproduct_is_the_published_recurrence(name, steps):
    def run(g):
        o, state = product_memory(
            g["q"], *(stepwise(g[n], steps) for n in ("k", "v", "beta")), g.get("g"),
            initial_state=delta_state(g["initial_state"]), chunk_size=4,
        )  # fmt: skip
        return dict(o=o, final_state=state.memory)

    goldens.check(name, run)


def test_one_step_of_deltaproduct_is_gated_deltanet():
    q, k, v, beta, log_decay = random_inputs()
    one = product_memory(q, k[:, :, None], v[:, :, None], beta[:, :, None], log_decay)
    close(one, ops.delta_memory(q, k, v, beta, log_decay), 1e-6)


def test_two_equal_steps_of_deltaproduct_are_one():
    """Two steps with one key and value are a step of 1 - (1 - β₁)(1 - β₂): with β = 2, none at all."""
    q, k, v, beta, log_decay = random_inputs()
    k2, v2 = (jnp.stack([x, x], axis=2) for x in (k, v))

    def two(first, second):
        strengths = jnp.stack([first, second], axis=2)
        return product_memory(q, k2, v2, strengths, log_decay)

    together = 1 - (1 - beta) * (1 - 2 * beta)
    close(two(beta, 2 * beta), ops.delta_memory(q, k, v, together, log_decay))
    close(two(2 + 0 * beta, 2 + 0 * beta), ops.delta_memory(q, k, v, 0 * beta, log_decay))


def test_reflections_do_not_change_the_norm_of_a_memory():
    q, k, v, beta, _ = random_inputs()
    start = jax.random.normal(jax.random.key(7), (2, 2, 8, 6))
    strengths = jnp.full_like(beta[:, :, None], 2.0)
    _, state = product_memory(
        q, k[:, :, None], 0 * v[:, :, None], strengths, None, initial_state=delta_state(start)
    )
    norms = [jnp.linalg.norm(m, axis=(-2, -1)) for m in (state.memory, start)]
    close(*norms)


# -------------------------------------------------------------------------------------------------- Gated DeltaNet-2


def test_gated_deltanet2_is_the_published_recurrence():
    def run(g):
        written = erase_and_write(*(g[n] for n in ("k", "v", "b", "w", "g")))
        state = delta_state(g["initial_state"])
        o, state = ops.dplr_memory(g["q"], **written, initial_state=state, chunk_size=4)
        return dict(o=o, final_state=state.memory)

    goldens.check("gdn2", run)


def test_gated_deltanet2_with_equal_gates_is_kda_and_without_erasing_gla():
    q, k, v, beta, log_decay = random_inputs()
    channels = log_decay[..., None] * jnp.linspace(0.1, 2, 8)

    def run(erase, write):
        gates = erase * jnp.ones_like(k), write * jnp.ones_like(v)
        return ops.dplr_memory(q, **erase_and_write(k, v, *gates, channels))

    equal = beta[..., None]
    close(run(equal, equal), ops.delta_memory(q, k, v, beta, channels), 1e-6)
    o, state = ops.linear_memory(q, k, equal * v, channels)
    close(run(0.0, equal), (o, ops.DeltaState(state.memory, state.segment_id)), 1e-6)


# ------------------------------------------------------------------------------------------------------------- Comba


def comba_update(k, p, v, beta, log_decay):
    """Return the arguments of `dplr_memory` of Comba's recurrence with any erasing keys p: a = -β p and b = k."""
    strength = beta[..., None]
    return dict(k=k, v=strength * v, a=-strength * p, b=k, log_decay=log_decay)


def test_comba_is_the_published_recurrence():
    def run(g):
        written = comba_update(*(g[n] for n in ("k", "p", "v", "beta", "g")))
        state = delta_state(g["initial_state"])
        o, state = ops.dplr_memory(g["q"], **written, initial_state=state, chunk_size=4)
        return dict(o=o, final_state=state.memory)

    goldens.check("comba", run)
    with pytest.raises(AssertionError, match="comba_naive_recurrent/o"):
        goldens.check("comba_naive_recurrent", run)  # decays before p reads


def test_comba_with_decayed_erasing_keys_is_gated_deltanet():
    q, k, v, beta, log_decay = random_inputs()

    def run(p):
        return ops.dplr_memory(q, **comba_update(k, p, v, beta, log_decay))

    close(run(jnp.exp(log_decay)[..., None] * k), ops.delta_memory(q, k, v, beta, log_decay), 1e-6)
    o, state = ops.linear_memory(q, k, beta[..., None] * v, log_decay)
    close(run(0 * k), (o, ops.DeltaState(state.memory, state.segment_id)), 1e-6)


@pytest.mark.parametrize(
    ("length", "scale", "options"),
    [
        (1.0, (-1.0, 1.0), dict(form="recurrent")),
        pytest.param(1.0, (-1.0, 1.0), dict(chunk_size=4), marks=pytest.mark.slow),
        pytest.param(1e-3, (-1.0, 1.0), dict(chunk_size=4), marks=pytest.mark.slow),
        pytest.param(1.0, (-200.0, -20.0), dict(chunk_size=4), marks=pytest.mark.slow),
    ],
)
def test_combas_layer_is_its_recurrence_with_parallel_keys(length, scale, options):
    """Keys near the epsilon of their normalisation, and those of a very negative scale, have erasing keys that are shorter than
    they.
    """
    q, k, v, beta, log_decay = random_inputs()
    x = dict(k=length * k, scale=jnp.array(scale), v=v, beta=beta, log_decay=log_decay)

    def by_low_rank(k, scale, v, beta, log_decay):
        p = jax.nn.sigmoid(scale)[:, None] * k
        update = comba_update(l2_normalize(k), l2_normalize(p), v, beta, log_decay)
        return ops.dplr_memory(q, **update, form="recurrent")

    def by_layer(k, scale, v, beta, log_decay):
        c = erase_ratio(k, scale)
        update = l2_normalize(k), v / c[..., None], beta * c, log_decay
        return ops.delta_memory(q, *update, erase="undecayed", **options)

    def value_and_gradients(run, x):
        (o, state), pull = jax.vjp(lambda x: run(**x), x)
        return o, state.memory, pull((o, state))

    runs = (jax.jit(functools.partial(value_and_gradients, run)) for run in (by_layer, by_low_rank))
    close(*(run(x) for run in runs), 2e-5)


def test_combas_layer_divides_by_no_zero():
    """However short the erasing key is, c, by which values are divided, and its gradients are finite and c is not 0."""
    k = jnp.array([0.0, 1e-3, 1.0, 1e3])[:, None] * jnp.ones((1, 4, 4, 3))
    scale = jnp.array([-1e4, -100.0, -85.0, 80.0])
    c, pull = jax.vjp(erase_ratio, k, scale)
    assert jnp.all(c > 0)
    assert jnp.all(c <= 1 + 1e-6)
    close((1 / c) * c, jnp.ones_like(c), 1e-6)
    for gradient in jax.tree.leaves(pull(1 / c**2)):
        assert jnp.all(jnp.isfinite(gradient))


def test_the_scale_of_combas_erasing_key_acts_on_queries_alone():
    """The erasing key is of unit length and parallel to the key, so that its learned scale cancels."""
    config = mixers.CombaConfig(num_heads=2, head_dim=8)
    mixer = mixers.build(config, 16, rngs=nnx.Rngs(0), init_std=1.0)
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    written = mixer.write(x, mixers.Context())[0]
    mixer.erase_scale[...] = jnp.array([-1.0, 2.0])
    close(mixer.write(x, mixers.Context())[0], written)


# --------------------------------------------------------------------------------------------- preconditioned rules


@pytest.mark.parametrize("name", ["precond_gated_deltanet", "precond_kda"])
def test_preconditioned_delta_rules_are_the_published_recurrence(name):
    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def run(g):
        q, k = (unit(g[n]) if name == "precond_gated_deltanet" else g[n] for n in "qk")
        zeros = jnp.zeros(q.shape[0], jnp.int32)
        o, state = preconditioned_memory(
            q, k, g["v"], g["beta"], g["g"], g["g_atk"], g["beta_atk"], g["log_atk_scale"],
            squash=1.5, chunk_size=4,
            initial_state=PrecondState(g["initial_state"], g["initial_A"], zeros),
        )  # fmt: skip
        return dict(o=o, final_state=state.memory, final_A=state.energy)

    goldens.check(name, run)


def test_preconditioned_rules_without_a_squash_are_their_parents():
    q, k, v, beta, log_decay = random_inputs()
    v = jnp.concatenate([v, -v], axis=2)
    beta, log_decay = (jnp.repeat(x, 2, axis=2) for x in (beta, log_decay))
    channels = log_decay[..., None] * jnp.linspace(0.1, 2, 8)
    run = jax.jit(functools.partial(preconditioned_memory, squash=1.0))
    for decay, heads in ((log_decay, 2), (channels, 4)):
        energy = log_decay[..., :heads], beta[..., :heads], jnp.zeros(heads)
        o, state = run(q, k, v, beta, decay, *energy)
        expected = jax.jit(ops.delta_memory)(q, k, v, beta, decay)
        close((o, ops.DeltaState(state.memory, state.segment_id)), expected, 1e-5)


@pytest.mark.parametrize("config", [mixers.PrecondGatedDeltaNetConfig, mixers.PrecondKDAConfig])
def test_squashes_that_diverge_are_refused(config):
    with pytest.raises(ValueError, match="squash=2.5: accepted are numbers from 1 to 2"):
        config(num_heads=2, head_dim=8, squash=2.5).validate(16)
