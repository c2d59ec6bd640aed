"""Tests of RWKV7, KDA and GSA: each is compared with its published recurrence in numpy, and with a simpler
method that it equals in a special case.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.feedforward import RWKV7ChannelMix, RWKV7ChannelMixConfig
from lsm_jax.mixers import METHODS
from tests.mixers.conftest import Small, stir
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import convolved, dense, silu


def f64(param):
    return np.asarray(param[...], np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def low_rank(layer, x, activation=lambda x: x):
    y = dense(layer.up, activation(dense(layer.down, x)))
    return y if layer.up.bias is None else y + f64(layer.up.bias)


def rwkv7(small: Small, x, v_first=None):
    """Compute RWKV7's layer for one row x [T, D] by the paper's equations. Return the output y [T, D], and
    the layer's values before the first layer's values (`v_first`) are mixed into them.
    """
    mixer, dim = small.mixer, small.config.head_dim
    length, heads = len(x), mixer.num_heads
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    mixed = dict(zip("rwkvag", x + (before - x) * f64(mixer.mix)[:, None], strict=True))

    def split(y):
        return y.reshape(length, heads, dim)

    r, k, own = (dense(getattr(mixer, f"{n}_proj"), mixed[n]) for n in "rkv")
    w = np.exp(-np.exp(-0.5) * sigmoid(low_rank(mixer.decay, mixed["w"], np.tanh)))
    a = sigmoid(low_rank(mixer.rate, mixed["a"]))
    share = sigmoid(low_rank(mixer.first, mixed["v"]))
    v = own if v_first is None else own + (v_first - own) * share
    kappa = unit(split(k * f64(mixer.removal)))
    added = split(k * (1 + (a - 1) * f64(mixer.rate_of_key)))
    r, v, w, a = split(r), split(v), split(w), split(a)
    memory, o = np.zeros((heads, dim, dim)), np.zeros((length, heads, dim))
    for t in range(length):
        for h in range(heads):
            transition = np.diag(w[t, h]) - np.outer(kappa[t, h] * a[t, h], kappa[t, h])
            memory[h] = transition @ memory[h] + np.outer(added[t, h], v[t, h])
            o[t, h] = r[t, h] @ memory[h]
    centred = o - o.mean(-1, keepdims=True)
    o = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + dim * 1e-5)
    o = o * f64(mixer.norm.scale) + f64(mixer.norm.bias)
    o = o + (r * added * f64(mixer.bonus)).sum(-1, keepdims=True) * v
    gate = low_rank(mixer.gate, mixed["g"], sigmoid)
    return dense(mixer.o_proj, o.reshape(length, -1) * gate), own


@pytest.mark.slow
def test_rwkv7_is_the_published_recurrence():
    """RWKV7's mixer equals the paper's equations, as the first layer of a model, as a later layer, and
    outside a model.
    """
    small = Small(METHODS["rwkv7"], stirred=True)
    x = np.asarray(small.x[0], np.float64)
    alone, own = rwkv7(small, x)
    first = jax.random.normal(jax.random.key(3), small.x.shape)

    @jax.jit
    def call(layer):
        shared = {"v_first": first, "v_first_layer": jnp.array(2)}
        y, _, context = small.mixer.run(small.x, layer=layer, shared=shared)
        return y[0], context.shared["v_first"]

    y, shared = call(2)
    close(y, alone)
    close(shared[0], own)
    close(small.mixer(small.x)[0][0], alone)
    y, shared = call(5)
    close(y, rwkv7(small, x, np.asarray(first[0], np.float64))[0])
    assert (shared == first).all()


def test_rwkv7_starts_as_published():
    config = mixers.RWKV7Config()
    assert config.ranks(768) == dict(w=64, a=64, v=32, g=128)
    build = lambda layer: mixers.build(config, 256, rngs=nnx.Rngs(0), layer=layer, num_layers=5)  # noqa: E731
    first, last = jax.jit(build, static_argnums=0)(0), jax.jit(build)(4)
    channel = np.arange(256)
    zigzag = ((channel % 64) - 31.5) / 31.5
    zigzag = zigzag * np.abs(zigzag)
    for mixer, power in ((first, 1), (last, 2)):
        expected = -6 + 6 * (channel / 255) ** power + 0.5 + 2.5 * zigzag
        np.testing.assert_allclose(mixer.decay.up.bias[...], expected, atol=1e-5)
        assert not mixer.o_proj.kernel[...].any() and not mixer.decay.down.kernel[...].any()
        kernel = mixer.k_proj.kernel[...]
        np.testing.assert_allclose(kernel.T @ kernel, 0.01 * np.eye(256), atol=1e-5)
    np.testing.assert_allclose(first.mix[...][2], 1 - (channel / 256) ** 0.7, atol=1e-5)
    np.testing.assert_allclose(last.mix[...][2], 1 - (channel / 256) ** (0.7 / 5), atol=1e-5)
    np.testing.assert_allclose(first.norm.scale[...], 0.2**0.7, rtol=1e-5)
    np.testing.assert_allclose(last.norm.scale[...], 1, rtol=1e-5)
    np.testing.assert_allclose(first.rate.up.bias[...], -0.19 + 0.3 * zigzag + 0.4 * (channel / 255 - 0.5), atol=1e-5)  # fmt: skip


@jax.default_matmul_precision("highest")
def test_rwkv7_channel_mix_is_the_published_layer():
    layer = RWKV7ChannelMix(RWKV7ChannelMixConfig(), 32, rngs=nnx.Rngs(0), layer=1, num_layers=2)
    np.testing.assert_allclose(layer.mix[...], 1 - (np.arange(32) / 32) ** (1 / 16), atol=1e-5)
    assert not layer.down_proj.kernel[...].any()
    stir(layer)
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    rows = np.asarray(x, np.float64)
    before = np.concatenate([np.zeros_like(rows[:, :1]), rows[:, :-1]], axis=1)
    mixed = rows + (before - rows) * f64(layer.mix)
    expected = dense(layer.down_proj, np.maximum(dense(layer.up_proj, mixed), 0) ** 2)
    y, _, aux = layer(x)
    close(y, expected)
    y, state, _ = layer(x[:, :2], state=layer.init_state(2, 5, jnp.float32))
    close(y, expected[:, :2])
    close(layer(x[:, 2:], state=state)[0], expected[:, 2:])
    assert aux == {}


@pytest.mark.slow
@pytest.mark.parametrize("value_heads", [None, 4])
def test_kda_is_the_published_recurrence(value_heads):
    small = Small(METHODS["kda"], num_heads=2, num_value_heads=value_heads, head_dim=8, expand_v=2)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    heads, share = mixer.config.value_heads(), mixer.config.value_heads() // 2

    def projected(name, count):
        y = convolved(getattr(mixer, f"{name}_conv"), dense(getattr(mixer, f"{name}_proj"), x))
        return y.reshape(10, count, -1)

    q, k, v = unit(projected("q", 2)), unit(projected("k", 2)), projected("v", heads)
    beta = sigmoid(dense(mixer.beta_proj, x))
    step = dense(mixer.decay_up, dense(mixer.decay_down, x)) + f64(mixer.dt_bias)
    step = np.log1p(np.exp(step)).reshape(10, heads, 8)
    alpha = np.exp(-np.exp(f64(mixer.a_log))[:, None] * step)
    memory, o = np.zeros((heads, 8, 16)), np.zeros((10, heads, 16))
    for t in range(10):
        for h in range(heads):
            key = k[t, h // share]
            erase = np.eye(8) - beta[t, h] * np.outer(key, key)
            memory[h] = erase @ np.diag(alpha[t, h]) @ memory[h]
            memory[h] += beta[t, h] * np.outer(key, v[t, h])
            o[t, h] = q[t, h // share] @ memory[h] * 8**-0.5
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5)
    gate = dense(mixer.gate_up, dense(mixer.gate_down, x)) + f64(mixer.gate_up.bias)
    close(small()[0][0], dense(mixer.o_proj, o.reshape(10, -1) * sigmoid(gate)))


@pytest.mark.slow
def test_gsa_is_the_published_recurrence():
    small = Small(METHODS["gsa"], num_slots=5)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    q, k, v = (silu(dense(getattr(mixer, f"{n}_proj"), x)).reshape(10, 4, 8) for n in "qkv")
    alpha = sigmoid(dense(mixer.decay_proj, x).reshape(10, 4, 5)) ** (1 / 8)
    keys, values, o = np.zeros((4, 5, 8)), np.zeros((4, 5, 8)), np.zeros((10, 4, 8))
    for t in range(10):
        for h in range(4):
            keep, write = alpha[t, h][:, None], (1 - alpha[t, h])[:, None]
            keys[h] = keep * keys[h] + write * k[t, h]
            values[h] = keep * values[h] + write * v[t, h]
            weight = np.exp(keys[h] @ q[t, h])
            o[t, h] = weight @ values[h] / weight.sum()
    o = silu(o.reshape(10, -1))
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5)
    close(small()[0][0], dense(mixer.o_proj, o))


def random_qkv():
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (2, 20, 2, 8)) for key in keys[:3])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    beta = 2 * jax.random.uniform(keys[3], (2, 20, 2))
    return q, k, v, beta, -jax.random.uniform(keys[4], (2, 20, 2))


def test_dplr_memory_reduces_to_the_delta_rule():
    """The DPLR memory with w = 1, a = -κ and b = k̃ = β κ is the delta rule with keys κ. With a decay, `a`
    reads the memory before the decay.
    """
    q, k, v, beta, log_decay = random_qkv()
    written = beta[..., None] * k
    expected = ops.delta_memory(q, k, v, beta, form="recurrent")
    close(ops.dplr_memory(q, written, v, -k, written, chunk_size=8), expected)
    # The delta rule reads the erased value after the decay and this op before it, so that its `a` is
    # multiplied by the decay.
    decay = jnp.exp(log_decay)[..., None]
    expected = ops.delta_memory(q, k, v, beta, log_decay, form="recurrent")
    close(ops.dplr_memory(q, written, v, -k * decay, written, log_decay, chunk_size=8), expected)


def test_equal_channel_decays_of_kda_are_a_heads_decay():
    q, k, v, beta, log_decay = random_qkv()
    channels = jnp.broadcast_to(log_decay[..., None], k.shape)
    expected = ops.delta_memory(q, k, v, beta, log_decay, chunk_size=8)
    close(ops.delta_memory(q, k, v, beta, channels, chunk_size=8), expected)


def test_unwritten_slots_score_zero():
    """A slot of GSA's memory that is never written has score 0 in the softmax over slots."""
    q, k, v, *_ = random_qkv()
    s = jnp.stack([jnp.ones((2, 20, 2)), jnp.zeros((2, 20, 2))], axis=-1)
    output, state = ops.slot_memory(q, k, v, s, chunk_size=8)
    score = jnp.einsum("bthk,bthk->bth", q, jnp.cumsum(k, axis=1)) * 8**-0.5
    close(output, jax.nn.sigmoid(score)[..., None] * jnp.cumsum(v, axis=1))
    assert not state.keys[..., 1].any() and not state.values[..., 1, :].any()


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("rwkv7", dict(head_dim=5), "head_dim=5 does not divide hidden_size=32"),
        ("rwkv7", dict(head_dim=1), "head_dim=1: it must be at least 2"),
        ("rwkv7", dict(gate_rank=0), "gate_rank=0"),
        ("kda", dict(num_value_heads=6), "num_heads=4 does not divide num_value_heads=6"),
        ("gsa", dict(num_slots=0), "num_slots=0"),
        ("gsa", dict(num_heads=3), "num_heads=3 does not divide expand_k . hidden_size=32"),
    ],
)
def test_fields_that_do_not_fit_are_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        Small(METHODS[name], **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": jnp.zeros((2, 20, 3, 8))}, "a has 3 heads; they must divide v's 2"),
        ({"b": jnp.zeros((2, 20, 2, 7))}, "b has shape (2, 20, 2, 7); accepted is"),
        ({"log_decay": jnp.zeros(3)}, "log_decay has shape (3,); accepted are [G]"),
    ],
)
def test_dplr_memory_names_the_argument(change, message):
    q, k, v, *_ = random_qkv()
    with pytest.raises(ValueError) as error:
        ops.dplr_memory(**dict(q=q, k=k, v=v, a=k, b=k) | change)
    assert message in str(error.value)


def test_slot_memory_names_the_argument():
    q, k, v, *_ = random_qkv()
    s = jnp.ones((2, 20, 2, 3))
    with pytest.raises(ValueError, match="log_decay has shape"):
        ops.slot_memory(q, k, v, s, jnp.zeros((2, 20, 2)))
    state = ops.slot_state(2, 2, 4, 8, 8)
    with pytest.raises(ValueError, match=r"initial_state.keys has shape \(2, 2, 8, 4\)"):
        ops.slot_memory(q, k, v, s, initial_state=state)
