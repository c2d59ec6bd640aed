"""HGRN2, ReBased, gated fast weights, RWKV6, mLSTM and feature maps are compared with their published
recurrences in numpy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, models
from lsm_jax.feedforward import RWKV6ChannelMix, RWKV6ChannelMixConfig
from lsm_jax.mixers import METHODS
from lsm_jax.mixers.feature_maps import FeatureMap, num_features
from lsm_jax.mixers.hgrn2 import log_bounds
from tests.mixers.conftest import Small, stir
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import dense, rms, silu
from tests.models.conftest import Small as SmallModel
from tests.models.conftest import small_config


def wide(x):
    return np.asarray(x[...], np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def shifted(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


# ---------------------------------------------------------------------------------------------------------------- HGRN2


def bounds(logits):
    """Return HGRN2's lower bounds of the gates by layer, as published: the cumulative sum over layers of a
    softmax over layers of `logits`, minus its first row.
    """
    sums = np.cumsum(softmax(logits, 0), axis=0)
    return sums - sums[0]


def test_hgrn2_is_the_published_recurrence():
    small = Small(METHODS["hgrn2"], stirred=True)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    q, f, i = (dense(p, x).reshape(10, 4, 8) for p in (mixer.q_proj, mixer.f_proj, mixer.i_proj))
    row = wide(mixer.lower_bound)
    low = bounds(np.stack([row, row]))[1].reshape(
        4, 8
    )  # the second of two layers with equal logits: one half
    np.testing.assert_allclose(low, 0.5)
    memory, o = np.zeros((4, 8, 8)), np.zeros((10, 4, 8))
    for t in range(10):
        forget = low + (1 - low) * sigmoid(f[t])
        memory = forget[..., None] * memory + (1 - forget)[..., None] * i[t][:, None]
        o[t] = np.einsum("hk,hkv->hv", silu(q[t]), memory) * 8**-0.5
    normed = rms(o.reshape(10, -1)) * wide(mixer.norm.scale)
    close(small()[0][0], dense(mixer.o_proj, normed))


def test_hgrn2_with_a_constant_bound_is_the_same_recurrence():
    """HGRN2 has the same outputs with learned lower bounds of its gate and with the constant
    `lower_bound=0.5`. With their initial values, the learned bounds of a model of two layers are 0 in the
    first layer and 1/2 in the second; a constant is 0 in the first layer, too.
    """
    learned = Small(METHODS["hgrn2"])
    constant = Small(METHODS["hgrn2"], lower_bound=0.5)
    assert constant.mixer.lower_bound is None
    close(constant()[0], learned()[0])
    for bound, same in ((0.5, 0), (0.0, 1)):
        mixer = Small(METHODS["hgrn2"], lower_bound=bound).mixer
        y, z = (m(learned.x, layer=same)[0] for m in (mixer, learned.mixer))
        np.testing.assert_allclose(y, z, atol=1e-6)
    with pytest.raises(
        ValueError, match="HGRN2Config.lower_bound=1.5: accepted are None and numbers from 0"
    ):
        mixers.HGRN2Config(lower_bound=1.5).validate(256)


@pytest.mark.slow
def test_hgrn2s_bounds_are_learned_across_the_models_layers():
    """HGRN2's layers receive their rows of the learned bounds in the model's order, for every pattern of
    layers; with logits of 0 the bounds increase linearly.
    """
    logits = np.random.default_rng(0).normal(size=(5, 7))
    table = np.exp(np.asarray(log_bounds(jnp.asarray(logits)), np.float64))
    np.testing.assert_allclose(table[:, 0], bounds(logits), atol=1e-6)
    np.testing.assert_allclose(table[:, 1], 1 - bounds(logits), atol=1e-6)

    small = SmallModel(small_config("hgrn2", "LNLL"))
    place = [0, 2, 3]
    rows = np.random.default_rng(1).normal(size=(3, 2, 32))
    for p, row in zip(place, rows, strict=True):
        small.model.periods.blocks[p].mixer.lower_bound[...] = jnp.asarray(row, jnp.float32)
    stacks = [(jnp.array([p, p + 4]), small.model.periods.blocks[p].mixer) for p in (3, 0, 2)]
    (shared,) = mixers.HGRN2.init_shared(small.tokens, stacks).values()
    expected = bounds(rows.transpose(1, 0, 2).reshape(6, 32))
    assert shared.shape == (8, 2, 32)
    used = np.exp(np.asarray(shared, np.float64))[[0, 2, 3, 4, 6, 7], 0]
    np.testing.assert_allclose(used, expected, atol=1e-6)


@pytest.mark.slow
def test_hgrn2_without_bound_is_a_plain_sigmoid():
    """HGRN2's log decay log f, outside a model and in the first layer, equals the logsigmoid to the bit,
    and its gradient is finite even if a gate saturates.
    """
    small = Small(METHODS["hgrn2"])
    mixer, x = small.mixer, 300.0 * small.x

    def log_f(mixer, layer, shared):
        written, _ = mixer.write(x, mixers.Context(layer, shared))
        return written["log_decay"].reshape(x.shape)

    shared = mixers.HGRN2.init_shared(x, [(jnp.arange(1), jax.tree.map(lambda p: p[None], mixer))])
    expected = jax.nn.log_sigmoid(mixer.f_proj(x))
    assert (log_f(mixer, None, {}) == expected).all()
    assert (log_f(mixer, 0, shared) == expected).all()
    gradients = jax.grad(lambda m: log_f(m, 0, shared).sum())(mixer)
    assert jax.tree.all(jax.tree.map(lambda g: jnp.isfinite(g).all(), gradients))
    far = jnp.array([[-60.0], [60.0], [0.0]])  # bounds so near 1 that 1 - γ rounds to 0
    table, pull = jax.vjp(log_bounds, far)
    assert jnp.isfinite(table[1:]).all() and jnp.isfinite(pull(jnp.ones_like(table))[0]).all()


# -------------------------------------------------------------------------------------------------------------- ReBased


def test_rebased_is_a_normalised_quadratic_kernel():
    """ReBased's layer is attention with the weights (q' k')² / F, divided by their sum; q' and k' are
    queries and keys after the feature map, F their number of channels.
    """
    small = Small(METHODS["rebased"], stirred=True)
    mixer, x, size = small.mixer, np.asarray(small.x[0], np.float64), small.config.feature_dim

    def side(projection, features):
        normed = layer_norm(dense(projection, x).reshape(10, -1, size), 1e-5)
        return normed * wide(features.gamma) + wide(features.beta)

    q, k = side(mixer.q_proj, mixer.q_features), side(mixer.k_proj, mixer.k_features)
    v = dense(mixer.v_proj, x).reshape(10, q.shape[1], -1)
    weights = np.einsum("thk,shk->hts", q, k) ** 2 / size * np.tri(10)
    o = np.einsum("hts,shv->thv", weights, v) / (weights.sum(-1).T[..., None] + 1e-5)
    close(small()[0][0], dense(mixer.o_proj, o.reshape(10, -1)), 1e-4)


# ------------------------------------------------------------------------------------------------------------------ GFW


def test_gfw_is_the_published_recurrence():
    small = Small(METHODS["gfw"], expand_k=0.5, stirred=True)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)

    def heads(projection):
        bias = 0 if projection.bias is None else wide(projection.bias)
        return (dense(projection, x) + bias).reshape(10, 4, -1)

    q, k, v, g = (heads(p) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj))
    beta, alpha = sigmoid(heads(mixer.key_decay_proj)), sigmoid(heads(mixer.value_decay_proj))
    memory, o = np.zeros((4, 4, 8)), np.zeros((10, 4, 8))
    for t in range(10):
        gate = beta[t][:, :, None] * alpha[t][:, None]
        memory = gate * memory + k[t][:, :, None] * v[t][:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], memory) * 4**-0.5
    gated = rms(o) * wide(mixer.norm.scale) * silu(g)
    close(small()[0][0], dense(mixer.o_proj, gated.reshape(10, -1)))


# ---------------------------------------------------------------------------------------------------------------- mLSTM


def test_mlstm_is_the_published_recurrence():
    """mLSTM's output is that of the recurrence without stabilisers, `q C / max(|q n|, 1)` with the memory C
    and the normaliser n.
    """
    small = Small(METHODS["mlstm"], stirred=True, normalizer_eps=1e-12)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    mixer.i_proj.bias[...] = jnp.array([-2.0, 0.0, 1.0, 3.0])
    q, k, v, g = (
        dense(p, x).reshape(10, 4, -1)
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj)
    )

    def gate(projection):
        return 15 * np.tanh((dense(projection, x) + wide(projection.bias)) / 15)

    i, f = np.exp(gate(mixer.i_proj)), sigmoid(gate(mixer.f_proj))
    c, n, o = np.zeros((4, 4, 8)), np.zeros((4, 4)), np.zeros((10, 4, 8))
    for t in range(10):
        c = f[t][:, None, None] * c + i[t][:, None, None] * k[t][:, :, None] * v[t][:, None]
        n = f[t][:, None] * n + i[t][:, None] * k[t]
        query = q[t] * 4**-0.5
        below = np.maximum(np.abs((query * n).sum(-1)), 1)
        o[t] = np.einsum("hk,hkv->hv", query, c) / below[:, None]
    normed = layer_norm(o, 1e-6) * wide(mixer.norm.scale)
    close(small()[0][0], dense(mixer.o_proj, (normed * sigmoid(g)).reshape(10, -1)))


def test_mlstms_gates_start_as_published():
    mixer = Small(METHODS["mlstm"]).mixer
    np.testing.assert_allclose(mixer.i_proj.bias[...], -10)
    np.testing.assert_allclose(mixer.f_proj.bias[...], [3, 4, 5, 6])
    assert not mixer.i_proj.kernel[...].any() and not mixer.f_proj.kernel[...].any()


# ---------------------------------------------------------------------------------------------------------------- RWKV6


def test_rwkv6_is_the_published_recurrence():
    small = Small(METHODS["rwkv6"], stirred=True)
    mixer, x, rank = small.mixer, np.asarray(small.x[0], np.float64), small.config.mix_rank
    delta = shifted(x) - x
    low = np.tanh((x + delta * wide(mixer.mix_all)) @ wide(mixer.mix_down)).reshape(10, 5, rank)
    moved = {
        letter: x + delta * (wide(mixer.mix)[i] + low[:, i] @ wide(mixer.mix_up)[i])
        for i, letter in enumerate("wkvrg")
    }
    r, k, v, g = (dense(getattr(mixer, f"{n}_proj"), moved[n]) for n in "rkvg")
    d = wide(mixer.decay_bias) + np.tanh(moved["w"] @ wide(mixer.decay_down)) @ wide(mixer.decay_up)
    r, k, v, w = (a.reshape(10, 4, 8) for a in (r, k, v, np.exp(-np.exp(d))))
    memory, o, u = np.zeros((4, 8, 8)), np.zeros((10, 4, 8)), wide(mixer.bonus)
    for t in range(10):
        write = k[t][:, :, None] * v[t][:, None]
        o[t] = np.einsum("hk,hkv->hv", r[t], memory + u[..., None] * write)
        memory = w[t][..., None] * memory + write
    normed = layer_norm(o, 64e-5) * wide(mixer.norm.scale) + wide(mixer.norm.bias)
    close(small()[0][0], dense(mixer.o_proj, normed.reshape(10, -1) * silu(g)))


def test_rwkv6_starts_as_published():
    """RWKV6's initial token-shift weights, decays and bonuses by channel are the published ones, in the
    second of three layers.
    """
    build = mixers.build
    mixer = build(mixers.RWKV6Config(), 128, rngs=nnx.Rngs(0), layer=1, num_layers=3)
    n, deep, ahead = np.arange(128), 1 / 2, 1 - 1 / 3
    share = 1 - (n / 128) ** ahead
    np.testing.assert_allclose(mixer.mix_all[...], share, atol=1e-6)
    for row, expected in enumerate(
        [share, share, share - 0.3 * deep] + 2 * [1 - (n / 128) ** (ahead / 2)]
    ):
        np.testing.assert_allclose(mixer.mix[...][row], expected, atol=1e-6)
    decay = -6 + 5 * (n / 127) ** (0.7 + 1.3 * deep)
    np.testing.assert_allclose(mixer.decay_bias[...], decay, atol=1e-5)
    bonus = deep * (1 - n / 127) + 0.1 * ((n + 1) % 3 - 1)
    np.testing.assert_allclose(mixer.bonus[...].ravel(), bonus, atol=1e-6)
    np.testing.assert_allclose(mixer.norm.scale[...], (2 / 3) ** 0.7, atol=1e-6)
    kernel = np.asarray(mixer.k_proj.kernel[...])
    np.testing.assert_allclose(kernel @ kernel.T, 0.01 * np.eye(128), atol=1e-6)
    assert not mixer.o_proj.kernel[...].any() and not mixer.mix_down[...].any()


def test_rwkv6_channel_mix_is_the_published_one_and_remembers_a_token():
    config = RWKV6ChannelMixConfig()
    layer = RWKV6ChannelMix(config, 32, rngs=nnx.Rngs(0), layer=1, num_layers=2)
    stir(layer)
    x = jax.random.normal(jax.random.key(0), (1, 6, 32))
    y, _, aux = layer(x)
    tokens = np.asarray(x[0], np.float64)
    delta = shifted(tokens) - tokens
    keys = dense(layer.k_proj, tokens + delta * wide(layer.mix_k))
    gate = sigmoid(dense(layer.r_proj, tokens + delta * wide(layer.mix_r)))
    close(y[0], gate * dense(layer.v_proj, np.maximum(keys, 0) ** 2))
    state, outputs = layer.init_state(1, 6, jnp.float32), []
    for t in range(6):
        output, state, _ = layer(x[:, t : t + 1], state=state)
        outputs.append(output)
    close(jnp.concatenate(outputs, axis=1), y)
    assert aux == {} and config.width(32) == 96 and config.width(768) == 2688


def test_rwkv6s_block_has_its_own_channel_mix():
    config = models.lm("rwkv6", "125m")
    assert isinstance(config.layers["L"].feedforward, RWKV6ChannelMixConfig)


# --------------------------------------------------------------------------------------------------------- feature maps


def features(name, size=4, heads=3, init_std=0.5):
    module = FeatureMap(name, heads, size, rngs=nnx.Rngs(0), init_std=init_std)
    stir(module)
    x = jax.random.normal(jax.random.key(3), (2, 5, heads, size))
    return module, np.asarray(x, np.float64), np.asarray(module(x), np.float64)


def by_head(layer, x):
    y = np.einsum("bthk,hkf->bthf", x, wide(layer.kernel))
    return y if layer.bias is None else y + wide(layer.bias)


def test_learned_feature_maps_are_the_published_ones():
    module, x, y = features("t2r")
    np.testing.assert_allclose(y, np.maximum(by_head(module.first, x), 0), atol=1e-5)
    module, x, y = features("elementwise_product")
    np.testing.assert_allclose(y, by_head(module.first, x) * by_head(module.second, x), atol=1e-5)
    module, x, y = features("hedgehog")
    inner = 2 * by_head(module.first, x)
    np.testing.assert_allclose(y, softmax(np.concatenate([inner, -inner], -1), -1), atol=1e-5)
    fresh = FeatureMap("hedgehog", 3, 4, rngs=nnx.Rngs(0), init_std=0.5)
    np.testing.assert_allclose(fresh.first.kernel[...], np.broadcast_to(np.eye(4), (3, 4, 4)))


def test_dpfp_multiplies_every_channel_with_its_next_four():
    _, x, y = features("dpfp")
    both = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], -1)
    assert y.shape[-1] == num_features("dpfp", 4) == 32
    for shift in (1, 2, 3, 4):
        for channel in range(8):
            expected = both[..., channel] * both[..., (channel - shift) % 8]
            np.testing.assert_allclose(y[..., 8 * (shift - 1) + channel], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(feature_map="t2r", sum_normalize_q=True, sum_normalize_k=True),
        dict(feature_map="hedgehog", normalize=True, output_gate=True),
        dict(feature_map="elementwise_product"),
        dict(feature_map="dpfp", sum_normalize_k=True),
    ],
    ids=lambda fields: fields["feature_map"],
)
def test_feature_maps_decode_stay_causal_and_learn(fields):
    small = Small(METHODS["linear_attention"], **fields)
    whole, _ = small()
    state, outputs = small.state(), []
    for t in range(10):
        y, state = small(small.x[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    changed, _ = small(small.x.at[:, 6].multiply(-20.0))
    assert (changed[:, :6] == whole[:, :6]).all()
    (gradients, _), _ = small.gradient(small.mixer, small.x)
    for path, leaf in nnx.to_flat_state(nnx.state(gradients)):
        assert jnp.isfinite(leaf[...]).all() and jnp.any(leaf[...] != 0), path
    matrices = {p[-1] for p, _ in nnx.to_flat_state(nnx.state(small.mixer.q_features, nnx.Param))}
    assert matrices <= {"kernel", "bias"}


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("hgrn2", dict(head_dim=5), "head_dim=5 does not divide hidden_size=32"),
        ("rebased", dict(feature_dim=0), "feature_dim=0"),
        ("gfw", dict(num_heads=3), "num_heads=3 does not divide expand_k . hidden_size=32"),
        ("mlstm", dict(gate_soft_cap=0), "gate_soft_cap=0"),
        ("mlstm", dict(qk_dim_factor=0.3), "qk_dim_factor=0.3 times hidden_size=32 is 9.6"),
        ("rwkv6", dict(mix_rank=0), "mix_rank=0"),
        (
            "linear_attention",
            dict(feature_map="silu", sum_normalize_q=True),
            "sum_normalize_q=True needs feature_map in .*hedgehog",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        Small(METHODS[name], **fields)
