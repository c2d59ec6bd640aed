"""Tests of mixers' options that only single methods have, of their initialisation, and of their errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.feedforward import SwiGLU, SwiGLUConfig
from lsm_jax.mixers import METHODS
from tests.mixers import test_mixers
from tests.mixers.conftest import Small
from tests.mixers.test_mixers import close

VARIANTS = [
    ("linear_attention", dict(feature_map="relu", normalize=True, output_gate=True)),
    ("linear_attention", dict(feature_map="identity", expand_k=0.5, expand_v=2.0)),
    ("gla", dict(conv_size=4)),
    ("gla", dict(conv_size=2, feature_map="silu", qkv_bias=True)),
    ("retnet", dict(num_heads=2, expand_v=1.0)),
    ("mamba2", dict(num_groups=2)),
    ("deltanet", dict(allow_negative_eigenvalues=True, output_gate=True)),
    ("deltanet", dict(num_heads=2, num_value_heads=4)),
    ("gated_deltanet", dict(num_heads=2, num_value_heads=4, expand_v=1.5)),
    ("gated_deltanet", dict(allow_negative_eigenvalues=True)),
    ("lightning", dict(decay="alibi")),
    ("gated_retention", dict(expand_v=2.0, gate_temperature=1.0)),
    ("softmax", dict(num_heads=4, num_kv_heads=2, qk_norm=True)),
    ("softmax", dict(num_heads=4, num_kv_heads=1, head_dim=6, window=3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), VARIANTS, ids=lambda v: str(v)[:40])
def test_variants_decode_and_stay_causal(name, fields):
    small = Small(METHODS[name], **fields)
    whole, _ = small()
    state, outputs = small.state(), []
    for t in range(10):
        y, state = small(small.x[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    changed, _ = small(small.x.at[:, 6].multiply(-20.0))
    assert (changed[:, :6] == whole[:, :6]).all()


def numpy_of(mixer) -> dict:
    return {
        name: np.asarray(getattr(mixer, name)[...], np.float64) for name in ("dt_bias", "a_log")
    }


def dense(layer, x):
    return x @ np.asarray(layer.kernel[...], np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


def convolved(layer, x):
    weight = np.asarray(layer.weight[...], np.float64)
    padded = np.concatenate([np.zeros((len(weight) - 1, x.shape[1])), x])
    y = sum(weight[i] * padded[i : i + len(x)] for i in range(len(weight)))
    return silu(y if layer.bias is None else y + np.asarray(layer.bias[...], np.float64))


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def test_mamba2_is_the_published_recurrence():
    small = Small(METHODS["mamba2"], num_groups=2)
    mixer, config = small.mixer, small.config
    x, p = np.asarray(small.x[0], np.float64), numpy_of(mixer)
    heads, size = mixer.num_heads, config.head_dim
    inner = convolved(mixer.x_conv, dense(mixer.x_proj, x)).reshape(10, heads, size)
    b = convolved(mixer.b_conv, dense(mixer.b_proj, x)).reshape(10, 2, -1)
    c = convolved(mixer.c_conv, dense(mixer.c_proj, x)).reshape(10, 2, -1)
    dt = np.log1p(np.exp(dense(mixer.dt_proj, x) + p["dt_bias"]))
    memory, y = np.zeros((heads, config.state_size, size)), np.zeros((10, heads, size))
    for t in range(10):
        for h in range(heads):
            group = h // (heads // 2)
            write = dt[t, h] * np.outer(b[t, group], inner[t, h])
            memory[h] = np.exp(-np.exp(p["a_log"][h]) * dt[t, h]) * memory[h] + write
            y[t, h] = c[t, group] @ memory[h] + inner[t, h]
    y = y.reshape(10, -1) * silu(dense(mixer.z_proj, x))
    close(small()[0][0], dense(mixer.o_proj, rms(y.reshape(10, 2, -1)).reshape(10, -1)))


@functools.cache
def gla_with_convolutions() -> Small:
    return Small(METHODS["gla"], stirred=True, conv_size=4)


@pytest.mark.parametrize("how", ["padding", "mask"])
def test_gla_with_convolutions_leaves_tokens_out(how):
    test_mixers.test_tokens_left_out_change_nothing(gla_with_convolutions(), how)


@pytest.mark.parametrize(
    "check",
    [
        test_mixers.test_prefill_then_decoding_equals_one_call,
        test_mixers.test_packed_documents_equal_documents_alone,
        test_mixers.test_causal_to_the_bit,
        test_mixers.test_state_has_one_static_shape,
        test_mixers.test_every_parameter_is_used_and_described,
    ],
)
def test_gla_with_convolutions_has_the_properties_of_all_mixers(check):
    check(gla_with_convolutions())


def test_forms_of_gla_with_convolutions_agree_in_every_gradient():
    def make(method, **fields):
        return Small(method, stirred=True, conv_size=4, **fields)

    test_mixers.test_forms_agree_in_every_gradient(METHODS["gla"], make, gla_with_convolutions())


def test_gla_with_convolutions_is_the_recurrence():
    """`M_t = diag(α_t) M_{t-1} + k_tᵀ v_t` of q, k and v after a causal convolution and SiLU; the decay and the output gate are of
    the tokens themselves. Without convolutions there is no SiLU either."""
    for width in (1, 4):
        small = Small(METHODS["gla"], stirred=True, conv_size=width)
        mixer, config = small.mixer, small.config
        x = np.asarray(small.x[0], np.float64)
        short = convolved if width > 1 else lambda layer, y: y
        q, k, v = (
            short(conv, dense(proj, x)).reshape(len(x), config.num_heads, -1)
            for conv, proj in (
                (mixer.q_conv, mixer.q_proj), (mixer.k_conv, mixer.k_proj), (mixer.v_conv, mixer.v_proj),
            )
        )  # fmt: skip
        gate = dense(mixer.decay_up, dense(mixer.decay_down, x)) + np.asarray(
            mixer.decay_up.bias[...], np.float64
        )
        decay = (1 / (1 + np.exp(-gate))).reshape(k.shape) ** (1 / config.gate_temperature)
        memory, outputs = np.zeros((config.num_heads, k.shape[-1], v.shape[-1])), []
        for t in range(len(x)):
            memory = decay[t][..., None] * memory + k[t][..., None] * v[t][:, None]
            outputs.append(np.einsum("hk,hkv->hv", q[t], memory) * k.shape[-1] ** -0.5)
        scale = np.asarray(mixer.norm.scale[...], np.float64)
        o = (
            rms(np.stack(outputs))
            * scale
            * silu(dense(mixer.g_proj, x)).reshape(len(x), config.num_heads, -1)
        )
        close(small()[0][0], dense(mixer.o_proj, o.reshape(len(x), -1)))


def test_gated_deltanet_is_the_published_recurrence():
    small = Small(METHODS["gated_deltanet"], num_heads=2, num_value_heads=4, head_dim=8)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    p = numpy_of(mixer)

    def heads(name, count):
        projected = dense(getattr(mixer, f"{name}_proj"), x)
        return convolved(getattr(mixer, f"{name}_conv"), projected).reshape(10, count, -1)

    q, k, v = heads("q", 2), heads("k", 2), heads("v", 4)
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    beta = 1 / (1 + np.exp(-dense(mixer.beta_proj, x)))
    step = np.log1p(np.exp(dense(mixer.decay_proj, x) + p["dt_bias"]))
    alpha = np.exp(-np.exp(p["a_log"]) * step)
    memory, o = np.zeros((4, 8, 16)), np.zeros((10, 4, 16))
    for t in range(10):
        for h in range(4):
            key, query = k[t, h // 2], q[t, h // 2]
            m = alpha[t, h] * memory[h]
            memory[h] = m + beta[t, h] * np.outer(key, v[t, h] - key @ m)
            o[t, h] = query @ memory[h] * 8**-0.5
    gated = rms(o) * silu(dense(mixer.g_proj, x).reshape(10, 4, 16))
    close(small()[0][0], dense(mixer.o_proj, gated.reshape(10, -1)))


def test_softmax_is_rotary_grouped_query_attention():
    small = Small(METHODS["softmax"], num_heads=4, num_kv_heads=2)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    turn = np.arange(10)[:, None] * 10000.0 ** (-np.arange(4) / 4)

    def rotated(layer, count):
        pairs = dense(layer, x).reshape(10, count, 2, 4)
        z = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * turn)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    q, k = rotated(mixer.q_proj, 4), rotated(mixer.k_proj, 2)
    v, o = dense(mixer.v_proj, x).reshape(10, 2, 8), np.zeros((10, 4, 8))
    for t in range(10):
        for h in range(4):
            weight = np.exp(k[: t + 1, h // 2] @ q[t, h] * 8**-0.5)
            o[t, h] = weight @ v[: t + 1, h // 2] / weight.sum()
    close(small()[0][0], dense(mixer.o_proj, o.reshape(10, -1)))


def test_positions_are_counted_from_ids_and_mask():
    ids = jnp.array([[4, 4, 0, 4, 2, 2, 2]])
    mask = jnp.array([[1, 1, 1, 1, 1, 0, 1]])
    clock = mixers.Clock(jnp.array([3]), jnp.array([4]))
    positions, after = mixers.advance(clock, ids.shape, ids, mask)
    assert positions[0, [0, 1, 3, 4, 6]].tolist() == [3, 4, 5, 0, 1]
    assert after.position.tolist() == [2] and after.segment_id.tolist() == [2]
    _, after = mixers.advance(clock, ids.shape, ids, None, positions=ids + 10)
    assert after.position.tolist() == [13]


def test_given_positions_are_used():
    small = Small(METHODS["retnet"])
    counted = jnp.tile(jnp.arange(10), (2, 1))
    close(small(positions=counted)[0], small()[0])
    assert (small(positions=2 * counted)[0] != small()[0]).any()


def test_initial_gates():
    """Gates start as published: GLA's decay α near 0.958; the steps Δ of Mamba2 and Gated DeltaNet in
    [1e-3, 1e-1], and their rates in the published ranges.
    """

    def initial_decay():
        mixer = mixers.GLA(mixers.GLAConfig(), 256, rngs=nnx.Rngs(0))
        written, _ = mixer.write(jnp.zeros((1, 1, 256)), mixers.Context())
        return jnp.exp(written["log_decay"])

    np.testing.assert_allclose(jax.jit(initial_decay)(), 0.5 ** (1 / 16), rtol=1e-5)
    for module, config, low in (
        (mixers.Mamba2, mixers.Mamba2Config(head_dim=4), 1.0),
        (mixers.GatedDeltaNet, mixers.GatedDeltaNetConfig(head_dim=4, num_heads=128), 1e-6),
    ):

        def initial(module=module, config=config):
            mixer = module(config, 256, rngs=nnx.Rngs(0))
            return jnp.exp(mixer.a_log[...]), jax.nn.softplus(mixer.dt_bias[...])

        rate, step = jax.jit(initial)()
        assert (rate > 0.99 * low).all() and (rate < 16).all() and rate.max() > 12
        assert (step > 0.99e-3).all() and (step < 0.101).all() and step.max() > 0.05


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("gla", dict(num_heads=3), "num_heads=3 does not divide expand_k . hidden_size=16"),
        ("gla", dict(expand_v=0.3), "expand_v=0.3 times hidden_size=32 is 9.6"),
        ("gla", dict(gate_rank=0), "gate_rank=0"),
        ("linear_attention", dict(feature_map="tanh"), "feature_map='tanh'.*'elu'"),
        ("linear_attention", dict(feature_map="silu", normalize=True), "normalize=True needs"),
        ("retnet", dict(num_heads=32), "num_heads=32 gives key heads of 1"),
        ("mamba2", dict(head_dim=7), "head_dim=7 does not divide expand . hidden_size=64"),
        ("mamba2", dict(num_groups=3), "num_groups=3 does not divide"),
        ("lightning", dict(decay="linear"), "decay='linear'.*'depth', 'alibi', 'none'"),
        ("lightning", dict(num_heads=5), "num_heads=5 does not divide hidden_size=32"),
        ("gated_retention", dict(gate_temperature=0), "gate_temperature=0"),
        ("retnet", dict(feature_map="relu"), "feature_map='relu': accepted are 'identity', 'silu'"),
        ("gla", dict(feature_map="elu"), "feature_map='elu': accepted are 'identity', 'silu'"),
        ("deltanet", dict(num_value_heads=6), "num_heads=4 does not divide num_value_heads=6"),
        ("deltanet", dict(conv_size=0), "conv_size=0: it must be at least 1"),
        (
            "gated_deltanet",
            dict(num_value_heads=4),
            "num_heads=3 does not divide num_value_heads=4",
        ),
        ("softmax", dict(num_heads=5), "num_heads=5 does not divide hidden_size=32"),
        (
            "softmax",
            dict(num_heads=4, num_kv_heads=3),
            "num_kv_heads=3 does not divide num_heads=4",
        ),
        ("softmax", dict(head_dim=3), "heads of 3 channels"),
        ("softmax", dict(window=0), "window=0"),
    ],
)
def test_fields_that_do_not_fit_are_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        Small(METHODS[name], **fields)


@jax.default_matmul_precision("highest")
def test_swiglu_has_a_mixers_call():
    layer = SwiGLU(SwiGLUConfig(multiple_of=8), 32, rngs=nnx.Rngs(0), init_std=0.2)
    x = jax.random.normal(jax.random.key(0), (2, 3, 32))
    y, state, aux = layer(x, layer=0, shared={}, segment_ids=None, positions=None, state=None)
    gate, up = dense(layer.gate_proj, x), dense(layer.up_proj, x)
    close(y, dense(layer.down_proj, silu(gate) * up))
    assert state is None and aux == {} and layer.gate_proj.kernel[...].shape == (32, 88)
