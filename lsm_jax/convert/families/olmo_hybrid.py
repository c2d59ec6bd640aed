"""OLMo-Hybrid of transformers (`model_type` olmo_hybrid): Gated DeltaNet, and in every fourth layer softmax attention whose norms
follow the mixer and the feedforward.

transformers 5.23.0 writes the first norm of layers with attention under another name than released files have; both are read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.families.qwen3_next import DENSE, FULL, LINEAR, dense_size
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.convert.published import read_rope
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import GatedDeltaNetConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

_TOP: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_LINEAR: Names = {
    "mixer_norm.scale": "attention_layer_norm.weight",
    "feedforward_norm.scale": "feedforward_layer_norm.weight",
    **{f"mixer.{x}_proj.kernel": f"linear_attn.{x}_proj.weight" for x in "qkvgo"},
    **{f"mixer.{x}_conv.weight": f"linear_attn.{x}_conv1d.weight" for x in "qkv"},
    "mixer.beta_proj.kernel": "linear_attn.b_proj.weight",
    "mixer.decay_proj.kernel": "linear_attn.a_proj.weight",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.a_log": "linear_attn.A_log",
    "mixer.norm.scale": "linear_attn.o_norm.weight",
}
_FULL: Names = {
    "feedforward_norm.scale": "post_feedforward_layernorm.weight",
    **{f"mixer.{x}_proj.kernel": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"mixer.{x}_norm.scale": f"self_attn.{x}_norm.weight" for x in "qk"},
}


def _types(values: dict[str, Any]) -> list[str]:
    """Return the kind of each layer's mixer."""
    count, types = values["num_hidden_layers"], values["layer_types"]
    if types is None:
        types = [FULL if i % 4 == 3 else LINEAR for i in range(count)]
        types = types if FULL in types else [*types[:-1], FULL]
    if len(types) != count or set(types) != {LINEAR, FULL}:
        raise ValueError(
            f"layer_types={shown(types)}; accepted is a list of {count}, of which some are {LINEAR} and the others {FULL}"
        )
    return types


def _config(values: dict[str, Any]) -> ModelConfig:
    width, heads, eps = values["hidden_size"], values["num_attention_heads"], float(values["rms_norm_eps"])  # fmt: skip
    key_heads = values["linear_num_key_heads"] or heads
    key_dim = values["linear_key_head_dim"] or int(0.75 * width / key_heads)
    value_dim = values["linear_value_head_dim"] or 2 * key_dim
    linear = GatedDeltaNetConfig(
        num_heads=key_heads,
        num_value_heads=values["linear_num_value_heads"] or heads,
        head_dim=key_dim,
        expand_v=value_dim / key_dim,
        conv_size=values["linear_conv_kernel_dim"],
        allow_negative_eigenvalues=values["linear_allow_neg_eigval"],
        norm_eps=1e-5,
    )
    base, scaling = _rotation(values)
    full = SoftmaxConfig(
        num_heads=heads,
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        qk_norm=True,
        qk_norm_joint=True,
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=eps,
    )
    inner = SwiGLUConfig(intermediate_size=values["intermediate_size"])
    layers = {
        "L": LayerConfig(mixer=linear, feedforward=inner),
        "N": LayerConfig(mixer=full, feedforward=inner, post_norm=True),
    }
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=width,
        num_layers=values["num_hidden_layers"],
        pattern="".join("L" if kind == LINEAR else "N" for kind in _types(values)),
        layers=layers,
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=eps,
    )


def _rotation(values: dict[str, Any]) -> tuple[float | None, Any]:
    """Return the base of the rotation and its scaling; (None, None) if `rope_theta` is null, as in the released model."""
    fields = values["rope_parameters"] or {}
    if fields.get("rope_theta", values["rope_theta"]) is None:
        if set(fields) - {"rope_theta", "rope_type"} or fields.get("rope_type", "default") != "default":  # fmt: skip
            raise ValueError(f"rope_parameters={shown(fields)}; accepted without rope_theta are no others")  # fmt: skip
        return None, None
    return read_rope({**values, "rope_scaling": None}, "the rotation")


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    first = {"mixer_norm.scale": f"{values['attention_norm']}.weight"}
    linear = config.layers[config.letters()[layer]].post_norm is False
    table = _LINEAR if linear else {**_FULL, **first}
    return prefixed(f"model.layers.{layer}.", {**DENSE, **table})


def _stored(names: Collection[str]) -> dict[str, Any]:
    parts: dict[str, set[str]] = {}
    for name in names:
        if name.startswith("model.layers."):
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            parts.setdefault(layer, set()).add(rest)
    written = any(
        {"self_attn.q_proj.weight", "feedforward_layer_norm.weight"} <= found
        for found in parts.values()
    )
    return dict(attention_norm="feedforward_layer_norm" if written else "post_attention_layernorm")


def _describe(config: ModelConfig) -> dict[str, Any]:
    linear, full = the_mixer(config, GatedDeltaNetConfig), the_mixer(config, SoftmaxConfig)
    if full.rope_scaling is not None:
        raise ValueError(
            f"model.layers has rope_scaling={full.rope_scaling}; accepted is no scaling"
        )
    return dict(
        num_attention_heads=full.num_heads,
        num_key_value_heads=full.kv_heads(),
        head_dim=full.dim(config.hidden_size),
        linear_num_key_heads=linear.num_heads,
        linear_num_value_heads=linear.value_heads(),
        linear_key_head_dim=linear.head_dim,
        linear_value_head_dim=linear.value_dim(),
        linear_conv_kernel_dim=linear.conv_size,
        linear_allow_neg_eigval=linear.allow_negative_eigenvalues,
        rms_norm_eps=config.norm_eps,
        rope_parameters=dict(rope_type="default", rope_theta=full.rope_base),
        layer_types=[
            LINEAR if isinstance(config.layers[x].mixer, GatedDeltaNetConfig) else FULL
            for x in config.letters()
        ],
        **dense_size(config),
    )


FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    library="transformers",
    kinds={
        **dict.fromkeys(
            """
            num_attention_heads num_key_value_heads head_dim intermediate_size linear_num_key_heads linear_num_value_heads
            linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
            """.split(),
            "size",
        ),
        **dict.fromkeys(("rms_norm_eps", "rope_theta"), "positive"),
        "linear_allow_neg_eigval": "flag",
        "rope_parameters": "object",
        "layer_types": "texts",
    },
    defaults=dict(
        num_key_value_heads=None, head_dim=None, linear_num_key_heads=None, linear_num_value_heads=None, linear_key_head_dim=None,
        linear_value_head_dim=None, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, rms_norm_eps=1e-6, rope_theta=1e4,
        rope_parameters=None, layer_types=None, tie_word_embeddings=False,
    ),
    only=dict(hidden_act=("silu", "swish"), attention_bias=(False,), linear_use_gate=(True,)),
    unused=frozenset(
        """
        attention_dropout linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
        """.split()
    ),
    null_is_value=frozenset(["rope_theta"]),
    required=("num_attention_heads", "intermediate_size"),
    sizes=(
        "intermediate_size", "linear_conv_kernel_dim", ("num_attention_heads", "head_dim"),
        ("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim"),
    ),
    stored=_stored,
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
