"""Configs of linearised models from a softmax model's config, and back."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from lsm_jax.mixers import LigerConfig, LolcatsConfig, LoRAConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig


def liger_model(
    base: ModelConfig, *, hybrid: int = 0, lora: LoRAConfig | None = None, **fields: Any
) -> ModelConfig:
    """The model with Liger attention in place of softmax attention, on the same parameters.

    Args:
        base: a model of softmax layers.
        hybrid: of each group of so many layers the last stays as it is (the paper's 8; which of a group it does not say); a
            group that the depth cuts off has none. 0 keeps none.
        lora: adapters on every layer, the kept ones included.
        fields: of `LigerConfig`.

    Raises:
        ValueError: layers of another kind, or fields that do not fit.
    """
    if hybrid < 0 or hybrid == 1 or hybrid > base.num_layers:
        raise ValueError(f"hybrid={hybrid}: accepted are 0 and 2 to the model's {base.num_layers} layers")  # fmt: skip
    config = _converted(base, LigerConfig, lora, fields)
    if hybrid:
        kept = {letter: "N" if letter == "L" else letter.lower() for letter in base.layers}
        config.layers |= {kept[letter]: layer for letter, layer in base.layers.items()}
        config.pattern = "".join(
            kept[letter] if place % hybrid == hybrid - 1 else letter
            for place, letter in enumerate(base.letters())
        )
        config.layers = {k: v for k, v in config.layers.items() if k in config.pattern}
        config.pattern = config.period()
    config.validate()
    return config


def lolcats_model(
    base: ModelConfig, *, transfer: bool = False, lora: LoRAConfig | None = None, **fields: Any
) -> ModelConfig:
    """The model with LoLCATs attention (arXiv 2410.10254) in place of softmax attention.

    Args:
        base: a model of softmax layers.
        transfer: the first stage, in which softmax attention's outputs are learned: the loss is 1000 times the mean of the
            layers' squared distances, beside the model's own, which maps and window factors do not change.
        lora: adapters on every layer, for the second stage.
        fields: of `LolcatsConfig`.

    Raises:
        ValueError: layers of another kind, or fields that do not fit.
    """
    fields = dict(transfer_weight=1000.0 / base.num_layers if transfer else 0.0) | fields
    config = _converted(base, LolcatsConfig, lora, fields)
    config.validate()
    return config


def _converted(
    base: ModelConfig, kind: type, lora: LoRAConfig | None, fields: dict[str, Any]
) -> ModelConfig:
    config = copy.deepcopy(base)
    config.lora = lora
    for letter, layer in base.layers.items():
        if type(layer.mixer) is not SoftmaxConfig:
            raise ValueError(
                f"model.layers[{letter!r}] has a {type(layer.mixer).__name__}; accepted are models of softmax attention"
            )
        softmax = {f.name: getattr(layer.mixer, f.name) for f in dataclasses.fields(SoftmaxConfig)}
        mixer = kind(**softmax | dict(window=64) | fields)
        config.layers[letter] = dataclasses.replace(layer, mixer=mixer)
    return config


def window_model(
    base: ModelConfig, *, window: int = 64, lora: LoRAConfig | None = None
) -> ModelConfig:
    """The model whose layers see a window only: what Liger has to beat."""
    config = copy.deepcopy(base)
    config.lora = lora
    for letter, layer in base.layers.items():
        config.layers[letter] = dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, window=window)
        )
    config.validate()
    return config


def base_model(config: ModelConfig) -> ModelConfig:
    """The softmax model whose parameters a linearised model's are made of, in the same order of layers."""
    base = copy.deepcopy(config)
    base.lora = None
    for letter, layer in config.layers.items():
        if not isinstance(layer.mixer, SoftmaxConfig):
            raise ValueError(
                f"model.layers[{letter!r}] has a {type(layer.mixer).__name__}, which is no softmax attention made linear"
            )
        fields = {f.name: getattr(layer.mixer, f.name) for f in dataclasses.fields(SoftmaxConfig)}
        if type(layer.mixer) is not SoftmaxConfig:
            fields |= dict(window=None, implementation=None)
        base.layers[letter] = LayerConfig(
            mixer=SoftmaxConfig(**fields), feedforward=layer.feedforward
        )
    return base
