"""Griffin, Hawk and RecurrentGemma have the published sizes and the parts of their authors' code. The values of a small
RecurrentGemma are compared with transformers' in tests/convert/test_released.py.
"""

from __future__ import annotations

import dataclasses

import pytest

from lsm_jax.convert.families import FAMILIES
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import MoBAConfig, SoftmaxConfig
from lsm_jax.models import GRIFFIN_MODELS, count_parameters, griffin

FAMILY = FAMILIES["recurrent_gemma"]


def by_hand(width, layers, channels, heads, attentions, vocabulary=256_000):
    """Return the parameters of a model: of each block the two norms and GeGLU; of attention queries, one head of keys and of
    values, and the output with a bias; of a recurrent block three projections with biases, a convolution of width 4 with one,
    two gates of a square matrix and a bias for each head, and the rates."""
    head = width // heads
    geglu = 3 * width * 3 * width + 2 * 3 * width + width
    attention = width * (2 * width + 2 * head) + width
    recurrent = 3 * width * channels + 2 * channels + width + 5 * channels
    recurrent += 2 * (channels * channels // heads + channels) + channels
    blocks = layers * (geglu + 2 * width) + attentions * attention
    return vocabulary * width + width + blocks + (layers - attentions) * recurrent


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("recurrentgemma-2b", (2560, 26, 2560, 10, 8)),
        ("recurrentgemma-9b", (4096, 38, 4096, 16, 12)),
        ("griffin-7b", (4096, 32, 5632, 32, 10)),
        ("hawk-7b", (4096, 32, 5632, 32, 0)),
    ],
)
def test_parameters_are_those_counted_by_hand(name, sizes):
    assert name in GRIFFIN_MODELS
    assert count_parameters(griffin(name))["total"] == by_hand(*sizes)


@pytest.mark.parametrize(("size", "width", "heads"), [("2b", 2560, 10), ("9b", 4096, 16)])
def test_the_presets_have_the_fields_of_the_released_models(size, width, heads):
    config = griffin(f"recurrentgemma-{size}")
    fields = FAMILY.describe_model(config)  # the same model is read from them, or ValueError
    expected = dict(
        hidden_size=width, lru_width=width, intermediate_size=6 * width, num_attention_heads=heads, num_key_value_heads=1,
        attention_window_size=2048, conv1d_width=4, logits_soft_cap=30.0, rms_norm_eps=1e-6, vocab_size=256_000,
        block_types=["recurrent", "recurrent", "attention"], tie_word_embeddings=True,
    )  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert config.embedding_scale == {2560: 50.5, 4096: 64.0}[width]


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="model='griffin-2b' does not exist; accepted are recurrentgemma-2b"):  # fmt: skip
        griffin("griffin-2b")
    with pytest.raises(ValueError, match="GeGLUConfig and logits_cap=None; accepted for an export"):
        FAMILY.describe_model(griffin("griffin-7b"))
    for name, value, words in (
        ("window", None, "SoftmaxConfig.window=None; accepted for an export is a number"),
        ("output_bias", False, "no recurrent_gemma model with layer 2.mixer.output_bias=False"),
        ("rotary_dim", None, "no recurrent_gemma model with layer 2.mixer.rotary_dim=256"),
    ):
        config = griffin()
        setattr(config.layers["N"].mixer, name, value)
        with pytest.raises(ValueError, match=words):
            FAMILY.describe_model(config)
    config = griffin()
    config.layers["L"] = dataclasses.replace(config.layers["L"], feedforward=SwiGLUConfig())
    with pytest.raises(ValueError, match="model has feedforwards of SwiGLUConfig"):
        FAMILY.describe_model(config)


def test_an_output_bias_of_another_mixer_is_refused():
    with pytest.raises(ValueError, match="MoBAConfig.output_bias=True: accepted in a SoftmaxConfig"):  # fmt: skip
        MoBAConfig(num_heads=2, output_bias=True).validate(32)
    SoftmaxConfig(num_heads=2, output_bias=True).validate(32)
