"""Make the config of a linearised model (Liger, LoLCATs) from that of a softmax model, and the config of the
softmax model from that of a linearised one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from lsm_jax.mixers import LigerConfig, LolcatsConfig, LoRAConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

LINEARIZED = (LigerConfig, LolcatsConfig)
"""The configs of mixers that replace softmax attention and have its parameters."""


def liger_model(
    base: ModelConfig, *, hybrid: int = 0, lora: LoRAConfig | None = None, **fields: Any
) -> ModelConfig:
    """Return the config of a model with Liger attention instead of softmax attention, and with the same
    parameters.

    Args:
        base: the config of a model whose layers have softmax attention.
        hybrid: n, where the layers n, 2n, 3n, ... remain softmax attention (the paper has one in 8 layers, but does not say
            which one); 0 replaces all layers.
        lora: the config of adapters in all layers, also those with softmax attention; None adds none.
        fields: values of fields of `LigerConfig`, by name.

    Raises:
        ValueError: a layer's mixer is not softmax attention, `hybrid` is out of range, or a field is not accepted.
    """
    if hybrid < 0 or hybrid == 1 or hybrid > base.num_layers:
        raise ValueError(
            f"hybrid={hybrid}: accepted are 0 and integers from 2 to the model's {base.num_layers} layers"
        )
    config = _converted(base, LigerConfig, lora, fields)
    if hybrid:
        softmax = {letter: "N" if letter == "L" else letter.lower() for letter in base.layers}
        config.layers |= {softmax[letter]: layer for letter, layer in base.layers.items()}
        config.pattern = "".join(
            softmax[letter] if i % hybrid == hybrid - 1 else letter
            for i, letter in enumerate(base.letters())
        )
        config.layers = {k: v for k, v in config.layers.items() if k in config.pattern}
        config.pattern = config.period()
    config.validate()
    return config


def lolcats_model(
    base: ModelConfig, *, transfer: bool = False, lora: LoRAConfig | None = None, **fields: Any
) -> ModelConfig:
    """Return the config of a model with LoLCATs attention (arXiv 2410.10254) instead of softmax attention.

    Args:
        base: the config of a model whose layers have softmax attention.
        transfer: whether to return the model of the first stage, which learns the outputs of softmax attention: 1000 times the
            squared distance between them and those of LoLCATs attention, averaged over layers, is added to the model's loss. The
            layers' outputs are those of softmax attention, so that the loss of the next tokens has no gradient for feature maps
            and window factors.
        lora: the config of adapters in all layers, for the second stage; None adds none.
        fields: values of fields of `LolcatsConfig`, by name.

    Raises:
        ValueError: a layer's mixer is not softmax attention, or a field is not accepted.
    """
    fields = dict(transfer_weight=1000.0 / base.num_layers if transfer else 0.0) | fields
    config = _converted(base, LolcatsConfig, lora, fields)
    config.validate()
    return config


def _converted(
    base: ModelConfig, kind: type, lora: LoRAConfig | None, fields: dict[str, Any]
) -> ModelConfig:
    """Return a copy of the model config `base` in which the config of each softmax mixer is replaced by one of the
    class `kind` (`LigerConfig` or `LolcatsConfig`).

    Its fields are those of the softmax mixer's config, except a window of 64 tokens, and except the values in `fields`.
    `lora` is the config of the adapters in all layers.

    Raises:
        ValueError: a layer's mixer is not softmax attention.
    """
    config = copy.deepcopy(base)
    config.lora = lora
    for letter, layer in base.layers.items():
        if type(layer.mixer) is not SoftmaxConfig:
            raise ValueError(
                f"model.layers[{letter!r}].mixer is a {type(layer.mixer).__name__}; accepted is a SoftmaxConfig"
            )
        softmax = {f.name: getattr(layer.mixer, f.name) for f in dataclasses.fields(SoftmaxConfig)}
        mixer = kind(**softmax | dict(window=64) | fields)
        config.layers[letter] = dataclasses.replace(layer, mixer=mixer)
    return config


def window_model(
    base: ModelConfig, *, window: int = 64, lora: LoRAConfig | None = None
) -> ModelConfig:
    """Return the config of a model with softmax attention in a sliding window only, a baseline for Liger.

    Args:
        base: the config of a model whose layers have softmax attention.
        window: number of tokens that a query attends to, itself included.
        lora: the config of adapters in all layers; None adds none.
    """
    config = copy.deepcopy(base)
    config.lora = lora
    for letter, layer in base.layers.items():
        config.layers[letter] = dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, window=window)
        )
    config.validate()
    return config


def base_model(config: ModelConfig) -> ModelConfig:
    """Return the config of the softmax model from which the linearised model of `config` was made; the order of
    its layers is the same, and it has no adapters. Mixers that are no linearised attention do not change."""
    base = copy.deepcopy(config)
    base.lora = None
    for letter, layer in config.layers.items():
        if isinstance(layer.mixer, LINEARIZED):
            fields = {
                f.name: getattr(layer.mixer, f.name) for f in dataclasses.fields(SoftmaxConfig)
            }
            fields |= dict(window=None, implementation=None)
            base.layers[letter] = LayerConfig(
                mixer=SoftmaxConfig(**fields), feedforward=layer.feedforward
            )
    return base
