"""Kinds and places of the norms in a decoder: zero-centred scales, and norms after mixers and feedforwards."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax.models import Decoder, lm

TOKENS = jnp.arange(10)[None] % 7


def model(**fields):
    config = dataclasses.replace(lm("softmax", "nano", vocab_size=16), num_layers=2, dtype="float32", remat="none")  # fmt: skip
    post_norm = fields.pop("post_norm", False)
    config.layers = {
        k: dataclasses.replace(v, post_norm=post_norm) for k, v in config.layers.items()
    }
    return Decoder(dataclasses.replace(config, **fields), rngs=nnx.Rngs(0))


def test_zero_centred_scales_start_as_scales_of_one():
    plain, centred = model(), model(norm="zero_centred_rms")
    np.testing.assert_array_equal(plain(TOKENS)[0], centred(TOKENS)[0])
    centred.norm.scale[...] = jnp.full_like(centred.norm.scale[...], 1.0)
    np.testing.assert_allclose(centred(TOKENS)[0], 2 * plain(TOKENS)[0], rtol=1e-5)


def test_norms_after_mixers_and_feedforwards():
    decoder = model(post_norm=True)
    x = decoder.embedding[...][TOKENS]
    graph, state = nnx.split(decoder.periods)
    for layer in range(2):
        row = nnx.merge(graph, _row(state, layer)).blocks[0]
        x = x + row.mixer_norm(row.mixer(x)[0])
        x = x + row.feedforward_norm(row.feedforward(x)[0])
    np.testing.assert_allclose(decoder(TOKENS)[0], decoder.logits(decoder.norm(x)), rtol=0, atol=1e-5)  # fmt: skip
    assert np.abs(np.asarray(decoder(TOKENS)[0] - model()(TOKENS)[0])).max() > 1e-3


def _row(state, layer):
    return jax.tree.map(lambda value: value[layer], state)
