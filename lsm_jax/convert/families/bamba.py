"""Bamba of transformers (`model_type` bamba): Mamba-2, and softmax attention that rotates half of each head's channels."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import mamba_hybrid as hybrid
from lsm_jax.convert.families.family import Family
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

_ROTATED = 0.5  # the part of a head's channels, a constant in transformers
_TOP: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.final_layernorm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_BLOCK: Names = {
    "mixer_norm.scale": "input_layernorm.weight",
    "feedforward_norm.scale": "pre_ff_layernorm.weight",
    **{f"feedforward.{x}_proj.kernel": f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")},
}  # fmt: skip


def _types(values: dict[str, Any]) -> list[str]:
    given, count = values["attn_layer_indices"] or [], values["num_hidden_layers"]
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < count for i in given):
        raise ValueError(
            f"attn_layer_indices={shown(given)}; accepted is a list of layers from 0 to {count - 1}"
        )
    return [hybrid.FULL if i in given else hybrid.LINEAR for i in range(count)]


def _config(values: dict[str, Any]) -> ModelConfig:
    inner = SwiGLUConfig(intermediate_size=values["intermediate_size"])
    attention = hybrid.softmax(values, factor=_ROTATED)
    rotated = values.get("attn_rotary_emb")
    if rotated not in (None, attention.rotary_dim):
        raise ValueError(f"attn_rotary_emb={rotated}; accepted is half of a head, {attention.rotary_dim}")  # fmt: skip
    layers = {
        hybrid.LINEAR: LayerConfig(mixer=hybrid.mamba(values), feedforward=inner),
        hybrid.FULL: LayerConfig(mixer=attention, feedforward=inner),
    }
    return hybrid.decoder(values, _types(values), layers)


def _describe(config: ModelConfig) -> dict[str, Any]:
    fields = hybrid.describe_layers(config)
    types = fields.pop("layer_types")
    if SoftmaxConfig not in hybrid.mixers_of(config):
        fields |= dict(num_attention_heads=1, num_key_value_heads=1)
    inner = config.layers[config.letters()[0]].feedforward
    if not isinstance(inner, SwiGLUConfig):
        raise ValueError("model.layers has other feedforwards than SwiGLU; accepted is SwiGLU")
    return fields | dict(
        attn_layer_indices=[i for i, kind in enumerate(types) if kind == hybrid.FULL],
        intermediate_size=inner.width(config.hidden_size),
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    return prefixed(f"model.layers.{layer}.", {**_BLOCK, **hybrid.mixer_names(config, layer)})


FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    library="transformers",
    kinds=hybrid.KINDS | dict(partial_rotary_factor="positive", attn_rotary_emb="size"),
    defaults=hybrid.DEFAULTS | dict(
        rms_norm_eps=1e-5, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, attn_layer_indices=None,
    ),
    only=hybrid.ONLY | dict(mlp_bias=(False,)),
    unused=hybrid.UNUSED | {"use_mamba_kernels", "z_loss_coefficient"},
    null_is_value=frozenset(["num_key_value_heads"]),
    sizes=(*hybrid.SIZES, ("mamba_expand", "hidden_size")),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
