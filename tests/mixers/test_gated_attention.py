"""Gated softmax attention against its definition in numpy, in float64, one document and one token at a time."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import METHODS, GatedAttentionConfig
from lsm_jax.mixers.layers import RMSNorm, rotate
from tests.mixers import goldens
from tests.mixers.conftest import WIDTH, Small

EPSILON = 1.0  # a small one would hide a wrong factor


def rotated(x, position, channels, base):
    """Rotate the first channels of x [K] by the angles of a position, the first half of them paired with their second half."""
    y, half = x.copy(), channels // 2
    for i in range(half):
        angle = position * base ** (-i / half)
        a, b = x[i], x[half + i]
        y[i], y[half + i] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)  # fmt: skip
    return y


def definition(mixer, config, x):
    """Return the layer's output [T, D] for one document x [T, D]."""

    def weight(dense):
        return np.asarray(dense.kernel[...], np.float64)

    heads, groups, dim = config.num_heads, config.kv_heads(), config.dim(WIDTH)
    q, k, v, g = (x @ weight(getattr(mixer, f"{n}_proj")) for n in "qkvg")
    q, k, v = (z.reshape(len(x), -1, dim) for z in (q, k, v))
    gate = 1 / (1 + np.exp(-g.reshape(len(x), heads, -1)))
    if config.qk_norm:
        scales = [np.asarray(n.scale[...], np.float64) for n in (mixer.q_norm, mixer.k_norm)]
        q, k = (
            z / np.sqrt(np.mean(z**2, -1, keepdims=True) + EPSILON) * (config.zero_centred_norm + s)
            for z, s in zip((q, k), scales, strict=True)
        )
    out = np.zeros((len(x), heads, dim))
    for t in range(len(x)):
        for h in range(heads):
            group = h * groups // heads
            query = rotated(q[t, h], t, config.rotary_dim, config.rope_base)
            keys = [rotated(k[s, group], s, config.rotary_dim, config.rope_base) for s in range(t + 1)]  # fmt: skip
            scores = np.array([query @ key for key in keys]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[: t + 1, group] * gate[t, h]
    return out.reshape(len(x), -1) @ weight(mixer.o_proj)


@pytest.mark.parametrize(
    "fields",
    [
        dict(num_heads=4, num_kv_heads=2, rotary_dim=4),
        dict(num_heads=2, head_dim=6, rotary_dim=2, output_gate="head", zero_centred_norm=False),
    ],
    ids=["channel", "head"],
)
def test_is_its_definition(fields):
    small = Small(METHODS["gated_attention"], stirred=True, norm_eps=EPSILON, **fields)
    expected = definition(small.mixer, small.config, np.asarray(small.x[0], np.float64))
    np.testing.assert_allclose(small()[0][0], expected, rtol=0, atol=2e-5)


def test_zero_centred_norms_start_as_norms():
    x = jnp.arange(12.0).reshape(2, 6)
    norms = RMSNorm(6, eps=1e-5), RMSNorm(6, eps=1e-5, zero_centred=True)
    assert not np.any(norms[1].scale[...])
    np.testing.assert_array_equal(norms[0](x), norms[1](x))
    norms[0].scale[...], norms[1].scale[...] = jnp.full(6, 1.5), jnp.full(6, 0.5)
    np.testing.assert_array_equal(norms[0](x), norms[1](x))


def test_channels_that_are_not_rotated_stay():
    x, positions = jnp.ones((1, 3, 2, 8)), jnp.arange(3)[None]
    y = rotate(x, positions, base=1e4, channels=4)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(y[..., :4], rotate(x[..., :4], positions, base=1e4))
    assert not np.any(np.asarray(y[:, 1:, :, :4]) == 1)


def test_the_published_proportions():
    config = GatedAttentionConfig.for_width(4096)
    assert (config.num_heads, config.dim(4096), config.rotary_dim) == (32, 128, 32)
    mixer = nnx.eval_shape(lambda: mixers.build(config, 4096, rngs=nnx.Rngs(0)))
    assert mixer.g_proj.kernel.get_value().shape == (4096, 4096)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(output_gate="layer"), "GatedAttentionConfig.output_gate='layer': accepted are 'channel', 'head'"),
        (dict(rotary_dim=3), "GatedAttentionConfig.rotary_dim=3: accepted are even numbers from 2 to the 8"),
        (dict(rotary_dim=2, rope_base=None), "rotary_dim=2: without a rope_base no channel is rotated"),
        (dict(qk_norm_joint=True), "GatedAttentionConfig.qk_norm_joint=True: accepted in a SoftmaxConfig"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GatedAttentionConfig.for_width(WIDTH), **fields).validate(WIDTH)


def test_the_layer_is_that_of_qwen3_next():
    """Their first projection has the queries and the gates of each head, one after the other."""
    config = GatedAttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=2, norm_eps=1e-6, rope_base=10000.0
    )

    def run(g):
        both = g["q_proj.weight"].reshape(4, 2, 8, 16)
        parts = dict(q=both[:, 0].reshape(32, 16), g=both[:, 1].reshape(32, 16))
        parts |= {n: g[f"{n}_proj.weight"] for n in "kvo"}
        parameters = {f"{n}_proj/kernel": w.T for n, w in parts.items()}
        parameters |= {f"{n}_norm/scale": g[f"{n}_norm.weight"] for n in "qk"}
        return dict(y=goldens.run_layer(config, 16, parameters, g["x"]))

    goldens.check("layer_gated_attention", run, dtypes=["float32"])
