"""Tests of the constants of a decoder: scales of embedding, branches and logits equal scaled parameters; the logits' cap."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, models
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.models import Decoder, LayerConfig, ModelConfig

TOKENS = jax.random.randint(jax.random.key(3), (2, 9), 0, 31)


def config(**fields):
    mixer = mixers.SoftmaxConfig(num_heads=2)
    layers = {"L": LayerConfig(mixer=mixer, feedforward=SwiGLUConfig(intermediate_size=24))}
    given = dict(vocab_size=31, hidden_size=16, num_layers=2, tie_embeddings=False, init_std=0.4, dtype="float32")  # fmt: skip
    return ModelConfig(layers=layers, **given | fields)


def made(**fields):
    return Decoder(config(**fields), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_scales_equal_scaled_parameters(norm):
    """The embedding times 3, the last projection of each branch times 0.5 and the head times 0.25 give the same logits as the
    three scales, without a state and with one.
    """
    scales = dict(embedding_scale=3.0, residual_scale=0.5, logits_scale=0.25)
    scaled, folded = made(norm=norm, **scales), made(norm=norm)
    block = folded.periods.blocks[0]
    kernels = (block.mixer.o_proj.kernel, block.feedforward.down_proj.kernel)
    for kernel in kernels:
        kernel[...] = 0.5 * kernel[...]
    folded.embedding[...] = 3.0 * folded.embedding[...]
    folded.lm_head.kernel[...] = 0.25 * folded.lm_head.kernel[...]
    run = jax.jit(lambda model, tokens: model(tokens)[0])
    expected = run(folded, TOKENS)
    assert np.abs(expected - run(made(norm=norm), TOKENS)).max() > 0.1
    np.testing.assert_allclose(run(scaled, TOKENS), expected, atol=1e-5)
    with_state = jax.jit(lambda model, tokens: model(tokens, state=model.init_state(2, 9))[0])
    np.testing.assert_allclose(with_state(scaled, TOKENS), expected, atol=1e-5)


def test_the_cap_bounds_the_logits_that_the_loss_is_computed_from():
    capped, free = made(logits_cap=1.5, logits_scale=2.0), made(logits_scale=2.0)
    logits, wide = capped(TOKENS)[0], free(TOKENS)[0]
    assert np.abs(wide).max() > 3 > 1.5 > np.abs(logits).max()
    np.testing.assert_allclose(logits, 1.5 * np.tanh(wide / 1.5), atol=1e-5)
    labels = jnp.roll(TOKENS, -1, axis=1)
    hidden = capped.hidden(TOKENS)[0]
    nll = models.next_token_loss(hidden, capped.head(), labels, cap=capped.logits_cap)
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(nll, -own, atol=1e-5)


@pytest.mark.parametrize("name", ["embedding_scale", "residual_scale", "logits_scale", "logits_cap"])  # fmt: skip
def test_scales_are_above_zero(name):
    with pytest.raises(ValueError, match=f"model.{name}=0.0"):
        dataclasses.replace(config(), **{name: 0.0}).validate()
