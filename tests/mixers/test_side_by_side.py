"""Tests of two mixers side by side, of the gated short convolution, and of Mamba-2's norms and scales, by their definitions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.models import Decoder, LayerConfig, ModelConfig

WIDTH, LENGTH = 16, 13
X = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
MAMBA = mixers.Mamba2Config(head_dim=8, state_size=4, inner_size=24)
SOFTMAX = mixers.SoftmaxConfig(num_heads=2)
PARALLEL = mixers.ParallelConfig(
    first=MAMBA, second=SOFTMAX, input_scales=(0.5, 2.0), output_scales=(3.0, 0.25)
)


def made(config):
    return mixers.build(config, WIDTH, rngs=nnx.Rngs(0), init_std=0.4)


def in_pieces(layer, x):
    """Return the output of a layer that reads x in a piece of five tokens, and then token by token."""
    state, parts = layer.init_state(2, LENGTH, jnp.float32), []
    for start, stop in ((0, 5), *((i, i + 1) for i in range(5, LENGTH))):
        y, state, _ = layer(x[:, start:stop], state=state)
        parts.append(y)
    return jnp.concatenate(parts, axis=1)


@pytest.mark.parametrize("segments", [None, [1] * 6 + [2] * 7])
def test_both_mixers_are_added(segments):
    layer = made(PARALLEL)
    ids = None if segments is None else jnp.array([segments, segments])
    y = layer(X, segment_ids=ids)[0]
    first, second = layer.first(0.5 * X, segment_ids=ids)[0], layer.second(2.0 * X, segment_ids=ids)[0]  # fmt: skip
    assert min(np.abs(first).max(), np.abs(second).max()) > 0.1
    np.testing.assert_allclose(y, 3.0 * first + 0.25 * second, atol=1e-5)


@pytest.mark.parametrize("config", [PARALLEL, mixers.ShortConvConfig()], ids=["parallel", "conv"])
def test_a_row_in_pieces_equals_the_whole(config):
    layer = made(config)
    np.testing.assert_allclose(in_pieces(layer, X), layer(X)[0], atol=1e-5)


def test_two_of_a_kind_have_states_of_their_own():
    config = mixers.ParallelConfig(first=MAMBA, second=dataclasses.replace(MAMBA, conv_size=3))
    layer = made(config)
    assert len(layer.init_state(2, LENGTH, jnp.float32).tails) == 6
    np.testing.assert_allclose(in_pieces(layer, X), layer(X)[0], atol=1e-5)


def test_a_short_convolution_is_its_definition():
    layer = made(mixers.ShortConvConfig(conv_size=3))
    b, c, x = (np.asarray(X @ getattr(layer, f"{n}_proj").kernel[...]) for n in "bcx")
    written, weight = b * x, np.asarray(layer.conv.weight[...])
    padded = np.pad(written, ((0, 0), (2, 0), (0, 0)))
    convolved = sum(padded[:, i : i + LENGTH] * weight[i] for i in range(3))
    expected = (c * convolved) @ np.asarray(layer.o_proj.kernel[...])
    np.testing.assert_allclose(layer(X)[0], expected, atol=1e-5)
    # A document does not see the one before it.
    ids = jnp.array([[1] * 6 + [2] * 7] * 2)
    np.testing.assert_allclose(layer(X, segment_ids=ids)[0][:, 6:], layer(X[:, 6:])[0], atol=1e-5)


def test_norms_of_mamba2_and_scales_of_its_projections():
    """Without a norm the output is the gated one; a norm before the gate, and scales, are those of the definition."""

    def inner(layer):  # the output before the projection
        seen = []
        project = layer.o_proj
        layer.o_proj = lambda y: seen.append(y) or project(y)
        layer(X)
        return seen[0], jax.nn.silu(layer.config.projection_scales[0] * layer.z_proj(X))

    plain, gate = inner(made(dataclasses.replace(MAMBA, norm="none", num_groups=3)))
    after, _ = inner(made(dataclasses.replace(MAMBA, norm="after_gate", num_groups=3)))
    before, _ = inner(made(dataclasses.replace(MAMBA, norm="before_gate", num_groups=3)))

    def normed(y):
        groups = y.reshape(*y.shape[:2], 3, -1)
        square = np.mean(np.square(groups), axis=-1, keepdims=True)
        return (groups / np.sqrt(square + MAMBA.norm_eps)).reshape(y.shape)

    np.testing.assert_allclose(after, normed(plain), atol=1e-4)
    np.testing.assert_allclose(before, normed(plain / gate) * gate, atol=1e-4)
    scales = (0.5, 2.0, 3.0, 0.25, 1.5)
    scaled, folded = made(dataclasses.replace(MAMBA, projection_scales=scales)), made(MAMBA)
    for name, scale in zip(("z", "x", "b", "c", "dt"), scales, strict=True):
        kernel = getattr(folded, f"{name}_proj").kernel
        kernel[...] = scale * kernel[...]
    np.testing.assert_allclose(scaled(X)[0], folded(X)[0], atol=1e-5)


@pytest.mark.slow
def test_output_scale_and_adapters_reach_both_mixers():
    config = ModelConfig(
        vocab_size=11, hidden_size=WIDTH, num_layers=1, layers={"L": LayerConfig(mixer=PARALLEL, feedforward=None)}
    )  # fmt: skip

    def mixer(**fields):
        return Decoder(dataclasses.replace(config, **fields), rngs=nnx.Rngs(0)).periods.blocks[0].mixer  # fmt: skip

    plain, smaller = mixer(), mixer(scaled_output_init=True)
    for name in ("first", "second"):
        kernels = [getattr(m, name).o_proj.kernel[...] for m in (plain, smaller)]
        np.testing.assert_allclose(kernels[1], kernels[0] / 2**0.5, rtol=1e-5)
    adapted = mixer(lora=mixers.LoRAConfig(rank=2, targets=("x_proj", "q_proj", "o_proj")))
    for part, name in (("first", "x_proj"), ("second", "q_proj"), ("first", "o_proj"), ("second", "o_proj")):  # fmt: skip
        assert getattr(getattr(adapted, part), name).lora is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (mixers.ParallelConfig(first=mixers.RWKV7Config()), "first=RWKV7Config.* cannot stand beside another mixer; .*mamba2"),
        (mixers.ParallelConfig(first=MAMBA, second=mixers.MoMConfig()), "second=MoMConfig.* cannot stand beside"),
        (dataclasses.replace(PARALLEL, input_scales=(1.0,)), "input_scales=.1.0,.: accepted are two numbers above 0"),
        (dataclasses.replace(PARALLEL, output_scales=(1.0, 0.0)), "output_scales=.1.0, 0.0.: accepted are two"),
        (mixers.ShortConvConfig(conv_size=0), "conv_size=0: it must be at least 1"),
        (dataclasses.replace(MAMBA, norm="late"), "norm='late': accepted are 'after_gate', 'before_gate', 'none'"),
        (dataclasses.replace(MAMBA, inner_size=20), "head_dim=8 does not divide inner_size=20"),
        (dataclasses.replace(MAMBA, projection_scales=(1.0,)), "projection_scales=.1.0,.: it must be five numbers"),
        (dataclasses.replace(SOFTMAX, rotary_dim=3), "rotary_dim=3: accepted are even numbers from 2 to the 8"),
        (dataclasses.replace(SOFTMAX, rotary_dim=4, rope_base=None), "rotary_dim=4: without a rope_base"),
        (dataclasses.replace(SOFTMAX, scale=0.0), "scale=0.0: it must be greater than 0"),
        (mixers.LigerConfig(num_heads=2, scale=0.5), "scale=0.5: accepted are None"),
        (mixers.LolcatsConfig(num_heads=2, scale=0.5), "scale=0.5: accepted are None"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        config.validate(WIDTH)
