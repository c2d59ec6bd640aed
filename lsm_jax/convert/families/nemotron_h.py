"""Nemotron-H and Nemotron-3-Nano of transformers (`model_type` nemotron_h), whose layers have one branch each: Mamba-2, softmax
attention without rotation, a feedforward with a squared ReLU, or a mixture of experts.

A layer with a mixer and the layer after it with a feedforward are one layer here, with both; every released model has such pairs.

transformers 5.23.0 raises steps of Mamba-2 below `time_step_min` to it in its prefill, and not in its decoding; here none is raised.
"""

from __future__ import annotations

import math
from typing import Any

from lsm_jax.convert.families import mamba2
from lsm_jax.convert.families import mamba_hybrid as hybrid
from lsm_jax.convert.families.family import Family
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.feedforward import MoEConfig, ReLU2Config
from lsm_jax.mixers import Mamba2Config, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

_TYPES = {
    **hybrid.LAYER_TYPES,
    "M": hybrid.LINEAR,
    "*": hybrid.FULL,
    "-": "mlp",
    "E": "moe",
    "mlp": "mlp",
    "moe": "moe",
}
_LETTERS: dict[tuple[str, str | None], str] = {
    (hybrid.LINEAR, None): "L",
    (hybrid.LINEAR, "mlp"): "M",
    (hybrid.LINEAR, "moe"): "E",
    (hybrid.FULL, None): "N",
    (hybrid.FULL, "mlp"): "A",
    (hybrid.FULL, "moe"): "F",
}
"""The letters of the pattern by the types of a layer's mixer and feedforward."""
_TOP: Names = {
    "embedding": "backbone.embeddings.weight",
    "norm.scale": "backbone.norm_f.weight",
    "lm_head.kernel": "lm_head.weight",
}
_MIXERS: dict[str, Names] = {
    hybrid.LINEAR: {key: f"mixer.{name}" for key, name in mamba2.MIXER.items()},
    hybrid.FULL: {f"mixer.{x}_proj.kernel": f"mixer.{x}_proj.weight" for x in "qkvo"},
}
_PARTS = ("up_proj", "down_proj")


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json with `layers_block_type` instead of the letters of `hybrid_override_pattern`."""
    given = dict(given)
    pattern = given.pop("hybrid_override_pattern", None)
    types = given.get("layers_block_type")
    if pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
            raise ValueError(f"hybrid_override_pattern={shown(pattern)}; accepted are letters M, *, - and E")  # fmt: skip
        named = [_TYPES[letter] for letter in pattern]
        listed = [_TYPES.get(str(x)) for x in types] if isinstance(types, list) else None
        if types is not None and listed != named:
            raise ValueError(f"hybrid_override_pattern={pattern!r} differs from layers_block_type={shown(types)}")  # fmt: skip
        given["layers_block_type"] = types = named
    if isinstance(types, list):
        given.setdefault("num_hidden_layers", len(types))
    return given


def _layers(values: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    """Return of every layer here the types of mixer and feedforward (None for none), and the number of the mixer's layer in the
    checkpoint; the feedforward is the layer after it.
    """
    given, count = values["layers_block_type"], values["num_hidden_layers"]
    if not isinstance(given, list) or len(given) != count or not all(
        isinstance(kind, str) and kind in _TYPES for kind in given
    ):  # fmt: skip
        raise ValueError(
            f"layers_block_type={shown(given)}; accepted is a list of num_hidden_layers={count}, each one of {', '.join(_TYPES)}"
        )
    layers: list[tuple[str, str | None, int]] = []
    for number, kind in enumerate(_TYPES[kind] for kind in given):
        if kind in (hybrid.LINEAR, hybrid.FULL):
            layers.append((kind, None, number))
        elif not layers or layers[-1][1] is not None:
            raise ValueError(
                f"layers_block_type: layer {number} is a feedforward, and no mixer is before it; accepted are feedforwards after "
                "a layer of Mamba-2 or attention"
            )
        else:
            layers[-1] = (layers[-1][0], kind, layers[-1][2])
    return layers


def _feedforward(values: dict[str, Any], kind: str | None) -> Any:
    if kind is None:
        return None
    if kind == "mlp":
        return ReLU2Config(intermediate_size=values["intermediate_size"])
    return MoEConfig(
        num_experts=values["n_routed_experts"],
        top_k=values["num_experts_per_tok"],
        expert_size=values["moe_intermediate_size"],
        shared_size=values["moe_shared_expert_intermediate_size"],
        shared_gate=False,
        activation="relu2",
        router="sigmoid",
        renormalize=values["norm_topk_prob"],
        router_bias=True,
        num_groups=values["n_group"],
        top_groups=values["topk_group"],
        weight_scale=float(values["routed_scaling_factor"]),
    )


def _config(values: dict[str, Any]) -> ModelConfig:
    mamba = Mamba2Config(
        expand=values["expand"],
        inner_size=values["mamba_num_heads"] * values["mamba_head_dim"],
        head_dim=values["mamba_head_dim"],
        state_size=values["ssm_state_size"],
        num_groups=values["n_groups"],
        conv_size=values["conv_kernel"],
        norm_eps=float(values["layer_norm_epsilon"]),
    )
    softmax = SoftmaxConfig(
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        rope_base=None,
    )
    layers, pattern = {}, ""
    for kind, inner, _ in _layers(values):
        letter = _LETTERS[kind, inner]
        pattern += letter
        mixer = mamba if kind == hybrid.LINEAR else softmax
        layers[letter] = LayerConfig(mixer=mixer, feedforward=_feedforward(values, inner))
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=len(pattern),
        pattern=pattern,
        layers=layers,
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["layer_norm_epsilon"]),
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixers, types = hybrid.mixers_of(config), []
    names = {Mamba2Config: hybrid.LINEAR, SoftmaxConfig: hybrid.FULL}
    fields: dict[str, Any] = {}
    for letter in config.letters():
        layer = config.layers[letter]
        if type(layer.mixer) not in names:
            raise ValueError(f"model.layers has mixers of {type(layer.mixer).__name__}; accepted are Mamba2Config and SoftmaxConfig")  # fmt: skip
        types.append(names[type(layer.mixer)])
        inner = layer.feedforward
        if isinstance(inner, ReLU2Config):
            types.append("mlp")
            fields |= dict(intermediate_size=inner.width(config.hidden_size))
        elif isinstance(inner, MoEConfig):
            types.append("moe")
            fields |= _describe_experts(inner)
        elif inner is not None:
            raise ValueError(f"model.layers has {type(inner).__name__}; accepted are ReLU2Config and MoEConfig")  # fmt: skip
    mamba, softmax = mixers.get(Mamba2Config), mixers.get(SoftmaxConfig)
    if mamba is not None:
        fields |= dict(
            expand=mamba.expand,
            mamba_num_heads=mamba.num_heads(config.hidden_size),
            mamba_head_dim=mamba.head_dim,
            ssm_state_size=mamba.state_size,
            n_groups=mamba.num_groups,
            conv_kernel=mamba.conv_size,
        )
    if softmax is not None:
        fields |= dict(
            num_attention_heads=softmax.num_heads,
            num_key_value_heads=softmax.kv_heads(),
            head_dim=softmax.dim(config.hidden_size),
        )
    described = dict(layers_block_type=types, num_hidden_layers=len(types))
    return fields | described | dict(layer_norm_epsilon=config.norm_eps)


def _describe_experts(inner: MoEConfig) -> dict[str, Any]:
    return dict(
        n_routed_experts=inner.num_experts,
        num_experts_per_tok=inner.top_k,
        moe_intermediate_size=inner.expert_size,
        moe_shared_expert_intermediate_size=max(1, inner.shared_size),
        norm_topk_prob=inner.renormalize,
        n_group=inner.num_groups,
        topk_group=inner.top_groups,
        routed_scaling_factor=inner.weight_scale,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    kind, inner, number = _layers(values)[layer]
    table = prefixed(f"backbone.layers.{number}.", {"mixer_norm.scale": "norm.weight", **_MIXERS[kind]})  # fmt: skip
    second: dict[str, str | Entry] = {"feedforward_norm.scale": "norm.weight"}
    if inner == "mlp":
        second |= {f"feedforward.{part}.kernel": f"mixer.{part}.weight" for part in _PARTS}
    elif inner == "moe":
        second |= {
            "feedforward.router.kernel": "mixer.gate.weight",
            "feedforward.router_bias": "mixer.gate.e_score_correction_bias",
        }
        for part in _PARTS:
            experts = range(values["n_routed_experts"])
            stored = tuple(f"mixer.experts.{i}.{part}.weight" for i in experts)
            second[f"feedforward.{part}"] = Entry(stored)
            shared = f"mixer.shared_experts.{part}.weight"
            second[f"feedforward.shared.{part}.kernel"] = shared
    return {**table, **prefixed(f"backbone.layers.{number + 1}.", second)}


FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    library="transformers",
    kinds={
        **dict.fromkeys(
            (
                "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "ssm_state_size", "mamba_num_heads",
                "mamba_head_dim", "n_groups", "conv_kernel", "expand", "n_routed_experts", "moe_intermediate_size",
                "moe_shared_expert_intermediate_size", "num_experts_per_tok", "n_group", "topk_group",
            ),
            "size",
        ),
        **dict.fromkeys(("layer_norm_epsilon", "routed_scaling_factor"), "positive"),
        "norm_topk_prob": "flag",
    },
    defaults=dict(
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=21504, ssm_state_size=128, n_groups=8,
        mamba_num_heads=128, mamba_head_dim=64, conv_kernel=4, expand=2, n_routed_experts=8, moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688, num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.0, layer_norm_epsilon=1e-5, tie_word_embeddings=False, layers_block_type=None,
    ),
    only=dict(
        attention_bias=(False,), attention_dropout=(0.0,), sliding_window=(None,), mlp_hidden_act=("relu2",), mlp_bias=(False,),
        mamba_hidden_act=("silu",), use_conv_bias=(True,), use_bias=(False,), mamba_proj_bias=(False,), n_shared_experts=(1,),
        moe_latent_size=(None,), num_nextn_predict_layers=(0,), hidden_dropout=(0.0,), time_step_limit=([0.0, math.inf],),
    ),
    unused=frozenset(
        """
        chunk_size mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type mtp_hybrid_override_pattern
        num_logits_to_keep output_router_logits partial_rotary_factor rescale_prenorm_residual residual_in_fp32 rope_theta
        time_step_floor time_step_max time_step_min time_step_rank use_mamba_kernels
        """.split()
    ),
    read=_read,
    renamed=dict(
        attention_head_dim="head_dim", rms_norm_eps="layer_norm_epsilon", norm_eps="layer_norm_epsilon",
        layer_types="layers_block_type", num_local_experts="n_routed_experts",
    ),
    required=("layers_block_type",),
    sizes=("ssm_state_size", "n_groups", "conv_kernel", "n_routed_experts", ("mamba_num_heads", "mamba_head_dim")),
    prefix="backbone.layers.",
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
