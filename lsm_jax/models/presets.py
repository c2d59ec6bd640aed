"""Language models by method and size, in the proportions each method was published with."""

from __future__ import annotations

import dataclasses

from lsm_jax import mixers
from lsm_jax.feedforward import FEEDFORWARDS
from lsm_jax.models.config import LayerConfig, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Width and depth of a size's name; `multiple_of` rounds the feedforward's width."""

    hidden_size: int
    num_layers: int
    multiple_of: int = 256


SIZES: dict[str, Size] = {
    "tiny": Size(hidden_size=64, num_layers=4, multiple_of=32),
    "10m": Size(hidden_size=256, num_layers=12, multiple_of=64),
    "125m": Size(hidden_size=768, num_layers=12),
    "340m": Size(hidden_size=1024, num_layers=24),
    "760m": Size(hidden_size=1536, num_layers=24),
    "1.3b": Size(hidden_size=2048, num_layers=24),
}


def _layer(method: mixers.Method, size: Size) -> LayerConfig:
    inner = None
    if method.feedforward is not None:
        config, _ = FEEDFORWARDS[method.feedforward]
        inner = config.for_width(size.hidden_size, size.multiple_of)
    return LayerConfig(mixer=method.config.for_width(size.hidden_size), feedforward=inner)


def lm(
    method: str, size: str = "340m", pattern: str = "L", *, vocab_size: int = 32000
) -> ModelConfig:
    """A language model: letter L is the method, N softmax attention.

    A size fixes width and depth, and is named after a softmax transformer's parameters at them (from 125m on with an
    embedding of 32000 tokens). Other methods come near it: `count_parameters` tells. Methods without a feedforward (Mamba2)
    have twice as many layers.

    Args:
        method: a name in `lsm_jax.mixers.METHODS`.
        size: a name in `SIZES`.
        pattern: of L and N.
        vocab_size: tokens.

    Raises:
        ValueError: a name that does not exist, or a pattern that does not fit.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} does not exist; accepted are {', '.join(SIZES)}")
    chosen, found = mixers.get_method(method), SIZES[size]
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=found.hidden_size,
        num_layers=found.num_layers * (2 if chosen.feedforward is None else 1),
        pattern=pattern,
        layers={"L": _layer(chosen, found), "N": _layer(mixers.METHODS["softmax"], found)},
    )
    config.validate()
    return config
