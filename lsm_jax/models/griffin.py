"""Griffin, Hawk and RecurrentGemma: models with RG-LRU, in the proportions with which they were published."""

from __future__ import annotations

import dataclasses

import ml_dtypes

from lsm_jax import mixers
from lsm_jax.feedforward import GeGLUConfig
from lsm_jax.models.config import LayerConfig, ModelConfig
from lsm_jax.names import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes of one published model: width, depth, channels of the recurrence, heads, the window of its attention; and whether
    embedding and logits are scaled as in RecurrentGemma."""

    hidden_size: int
    num_layers: int
    channels: int
    num_heads: int
    window: int | None = 2048
    gemma: bool = True


_MODELS = {
    "recurrentgemma-2b": _Sizes(hidden_size=2560, num_layers=26, channels=2560, num_heads=10),
    "recurrentgemma-9b": _Sizes(hidden_size=4096, num_layers=38, channels=4096, num_heads=16),
    "griffin-7b": _Sizes(
        hidden_size=4096, num_layers=32, channels=5632, num_heads=32, window=1024, gemma=False
    ),
    "hawk-7b": _Sizes(
        hidden_size=4096, num_layers=32, channels=5632, num_heads=32, window=None, gemma=False
    ),
}
GRIFFIN_MODELS = tuple(_MODELS)
"""The models that `griffin` knows; Hawk has no attention."""


def gemma_scale(hidden_size: int) -> float:
    """Return the factor of RecurrentGemma's embedding: the square root of the width, rounded to bfloat16."""
    return float(ml_dtypes.bfloat16(hidden_size**0.5))


def griffin(name: str = "recurrentgemma-2b", *, vocab_size: int = 256_000) -> ModelConfig:
    """Return the config of a model of Griffin's paper (arXiv 2402.19427) or of RecurrentGemma (arXiv 2404.07839).

    Two layers of RG-LRU (letter L of the pattern) are followed by one of attention in a window (letter N), with one head of keys
    and values, and half of each head's channels rotated; each has a GeGLU of three times the width. The sizes are those of
    google-deepmind/recurrentgemma 2a3dde4 (common.py), whose attention sees one token more than its `window_size`.

    Args:
        name: a name in `GRIFFIN_MODELS`.
        vocab_size: number of tokens in the vocabulary.

    Raises:
        ValueError: the name does not exist.
    """
    if name not in _MODELS:
        raise ValueError(
            f"model={name!r} does not exist; accepted are {', '.join(_MODELS)}{did_you_mean(name, _MODELS)}"
        )
    sizes = _MODELS[name]
    feedforward = GeGLUConfig()
    recurrence = mixers.RGLRUConfig(
        num_heads=sizes.num_heads, expand=sizes.channels / sizes.hidden_size
    )
    layers = {"L": LayerConfig(mixer=recurrence, feedforward=feedforward)}
    pattern = "L"
    if sizes.window is not None:
        attention = mixers.SoftmaxConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=1,
            window=sizes.window,
            output_bias=True,
            rotary_dim=sizes.hidden_size // sizes.num_heads // 2,
        )
        layers["N"] = LayerConfig(mixer=attention, feedforward=feedforward)
        pattern = ("LLN" * sizes.num_layers)[: sizes.num_layers]
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        pattern=pattern,
        layers=layers,
        norm="zero_centred_rms",
        embedding_scale=gemma_scale(sizes.hidden_size) if sizes.gemma else 1.0,
        logits_cap=30.0 if sizes.gemma else None,
    )
    config.validate()
    return config
