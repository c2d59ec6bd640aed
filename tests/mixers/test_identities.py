"""Tests that a method whose gate is constant equals another, simpler method with the same parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.mixers import METHODS
from lsm_jax.mixers.lightning import alibi_slopes
from tests.mixers.conftest import Small
from tests.mixers.test_mixers import close


def copy_parameters(target: Small, source: Small, *names: str) -> None:
    """Copy the parameters of the modules with these names from the small mixer `source` to the small mixer
    `target`.
    """
    for name in names:
        for own, other in zip(
            jax.tree.leaves(getattr(target.mixer, name)),
            jax.tree.leaves(getattr(source.mixer, name)),
            strict=True,
        ):
            assert own.shape == other.shape, name
        setattr(target.mixer, name, getattr(source.mixer, name))


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj", "norm")


@pytest.fixture
def basic():
    """Return a small mixer of basic linear attention with silu as feature map, an output gate and two
    heads.
    """
    fields = dict(num_heads=2, feature_map="silu", output_gate=True)
    return Small(METHODS["linear_attention"], **fields)


def test_lightning_without_decay_is_basic_linear_attention(basic):
    lightning = Small(METHODS["lightning"], num_heads=2, decay="none")
    copy_parameters(lightning, basic, *QKVO, "g_proj")
    close(lightning()[0], basic()[0])


def test_lightnings_first_head_never_forgets():
    log_decay = Small(METHODS["lightning"], num_heads=4).mixer.log_decay
    np.testing.assert_allclose(log_decay(0), [0, -2, -4, -6])
    np.testing.assert_allclose(log_decay(1), [0, -1, -2, -3])  # the second of two layers
    np.testing.assert_allclose(alibi_slopes(4), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    np.testing.assert_allclose(alibi_slopes(6)[4:], [2.0**-1, 2.0**-3])


def test_gla_with_gate_one_is_basic_linear_attention():
    basic = Small(
        METHODS["linear_attention"], num_heads=2, feature_map="identity", output_gate=True
    )
    gla = Small(METHODS["gla"], num_heads=2, expand_k=1.0, gate_temperature=1e12)
    copy_parameters(gla, basic, *QKVO, "g_proj")
    close(gla()[0], basic()[0])


def test_gated_retention_with_a_constant_gate_is_retention():
    gated = Small(METHODS["gated_retention"], num_heads=1, gate_temperature=1.0)
    retnet = Small(METHODS["retnet"], num_heads=1, expand_v=1.0)
    copy_parameters(gated, retnet, *QKVO, "g_proj")
    # sigmoid(log 31) = 31 / 32 is the decay of retention's first head; the gate reads only a constant
    # channel.
    gated.mixer.decay_proj.kernel[...] = jnp.zeros((32, 1)).at[0].set(jnp.log(31.0))
    x = gated.x.at[:, :, 0].set(1.0)
    close(gated(x)[0], retnet(x)[0])


def test_gated_deltanet_with_decay_one_is_deltanet():
    fields = dict(num_heads=2, conv_size=4)
    delta = Small(METHODS["deltanet"], output_gate=True, **fields)
    gated = Small(METHODS["gated_deltanet"], head_dim=16, expand_v=1.0, **fields)
    names = ("beta_proj", "q_conv", "k_conv", "v_conv")
    copy_parameters(gated, delta, *QKVO, "g_proj", *names)
    gated.mixer.a_log[...] = jnp.full(2, -40.0)  # α = exp(-e^-40 step): 1 in float32
    close(gated()[0], delta()[0])


def test_mamba2_is_a_scalar_decay_memory_with_the_step_folded_in():
    """A linear memory with keys B, values Δ x, log decays Δ A and queries C computes Mamba2's recurrence of
    Δ, A, B, C and x.
    """
    rng = np.random.default_rng(0)
    steps, heads, state, head = 12, 3, 5, 4
    delta, a = rng.uniform(0.01, 1, (steps, heads)), rng.uniform(1, 16, heads)
    b, c = rng.normal(size=(2, steps, state))
    x = rng.normal(size=(steps, heads, head))
    memory, expected = np.zeros((heads, state, head)), []
    for t in range(steps):
        memory *= np.exp(-delta[t] * a)[:, None, None]
        memory += delta[t, :, None, None] * b[t][None, :, None] * x[t][:, None, :]
        expected.append(np.einsum("k,hkv->hv", c[t], memory))
    with jax.enable_x64(True):
        output, _ = ops.linear_memory(
            c[None, :, None],
            b[None, :, None],
            (delta[..., None] * x)[None],
            -(delta * a)[None],
            scale=1.0,
        )
        np.testing.assert_allclose(output[0], np.array(expected), rtol=0, atol=1e-12)
