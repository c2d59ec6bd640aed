"""Granite-4.0-H of transformers (`model_type` granitemoehybrid): Mamba-2 and softmax attention, each followed by a feedforward or
by a mixture of experts with a shared one; also Granite-4.0 of softmax attention alone."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import mamba_hybrid as hybrid
from lsm_jax.convert.families.family import Family
from lsm_jax.convert.layout import Names, experts, prefixed
from lsm_jax.feedforward import MoEConfig, SwiGLUConfig
from lsm_jax.mixers import Mamba2Config, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

_TOP: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_NORMS: Names = {
    "mixer_norm.scale": "input_layernorm.weight",
    "feedforward_norm.scale": "post_attention_layernorm.weight",
}
_SHARED: Names = {
    "gate_proj.kernel": "shared_mlp.input_linear.weight",
    "up_proj.kernel": "shared_mlp.input_linear.weight",
    "down_proj.kernel": "shared_mlp.output_linear.weight",
}
_EXPERTS: Names = {
    "feedforward.router.kernel": "block_sparse_moe.router.layer.weight",
    "feedforward.gate_proj": experts("block_sparse_moe.input_linear.weight", 0, 2),
    "feedforward.up_proj": experts("block_sparse_moe.input_linear.weight", 1, 2),
    "feedforward.down_proj": experts("block_sparse_moe.output_linear.weight"),
}


def _feedforward(values: dict[str, Any]) -> MoEConfig | SwiGLUConfig:
    shared, count = values["shared_intermediate_size"], values["num_local_experts"]
    if not count:
        return SwiGLUConfig(intermediate_size=shared)
    return MoEConfig(
        num_experts=count,
        top_k=values["num_experts_per_tok"],
        expert_size=values["intermediate_size"],
        shared_size=shared,
        shared_gate=False,
        router="topk_softmax",
        balance_scale=float(values["router_aux_loss_coef"]),
    )


def _config(values: dict[str, Any]) -> ModelConfig:
    inner = _feedforward(values)
    rotated = values["position_embedding_type"] == "rope"
    attention = hybrid.softmax(values, rotated=rotated, scale=float(values["attention_multiplier"]))
    types = hybrid.layer_types(values["layer_types"], values["num_hidden_layers"])
    layers = {hybrid.FULL: LayerConfig(mixer=attention, feedforward=inner)}
    if hybrid.LINEAR in types:  # without a layer of Mamba-2, its fields have no meaning
        layers[hybrid.LINEAR] = LayerConfig(mixer=hybrid.mamba(values), feedforward=inner)
    return hybrid.decoder(
        values,
        types,
        layers,
        embedding_scale=float(values["embedding_multiplier"]),
        residual_scale=float(values["residual_multiplier"]),
        logits_scale=1 / float(values["logits_scaling"]),
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    fields = hybrid.describe_layers(config)
    softmax = hybrid.mixers_of(config).get(SoftmaxConfig)
    if softmax is not None:
        scale = softmax.dim(config.hidden_size) ** -0.5 if softmax.scale is None else softmax.scale
        fields |= dict(
            position_embedding_type=None if softmax.rope_base is None else "rope",
            attention_multiplier=scale,
        )
    elif Mamba2Config in hybrid.mixers_of(config):
        fields |= dict(num_attention_heads=1, num_key_value_heads=1)
    inner = config.layers[config.letters()[0]].feedforward
    if isinstance(inner, MoEConfig):
        fields |= dict(
            num_local_experts=inner.num_experts,
            num_experts_per_tok=inner.top_k,
            intermediate_size=inner.expert_size,
            shared_intermediate_size=inner.shared_size,
            router_aux_loss_coef=inner.balance_scale,
        )
    elif isinstance(inner, SwiGLUConfig):
        width = inner.width(config.hidden_size)
        fields |= dict(num_local_experts=0, shared_intermediate_size=width, intermediate_size=width)
    else:
        raise ValueError("model.layers has no feedforward; accepted are SwiGLU and MoE")
    scale = config.logits_scale
    return fields | dict(
        embedding_multiplier=config.embedding_scale,
        residual_multiplier=config.residual_scale,
        logits_scaling=hybrid.solve(lambda x: 1 / x, scale, 1 / scale),
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    sparse = bool(values["num_local_experts"])
    prefix = "feedforward.shared." if sparse else "feedforward."
    shared = {f"{prefix}{key}": name for key, name in _SHARED.items()}
    table = {
        **_NORMS,
        **hybrid.mixer_names(config, layer),
        **shared,
        **(_EXPERTS if sparse else {}),
    }
    return prefixed(f"model.layers.{layer}.", table)


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    library="transformers",
    kinds=hybrid.KINDS | dict(
        num_local_experts="count", num_experts_per_tok="count", shared_intermediate_size="size", router_aux_loss_coef="number",
        embedding_multiplier="positive", residual_multiplier="positive", attention_multiplier="positive", logits_scaling="positive",
    ),
    defaults=hybrid.DEFAULTS | dict(
        rms_norm_eps=1e-6, intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024,
        embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0, layer_types=None,
        router_aux_loss_coef=0.001,
    ),
    only=hybrid.ONLY | dict(
        position_embedding_type=(None, "nope", "rope"), normalization_function=("rmsnorm",),
    ),
    unused=hybrid.UNUSED | {"init_method"},
    renamed=dict(layers_block_type="layer_types"),
    required=("num_attention_heads",),
    sizes=("shared_intermediate_size", ("mamba_expand", "hidden_size"), *(x for x in hybrid.SIZES[1:] if "mamba" not in x)),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
