"""Ling-3.0 of transformers (`model_type` bailing_hybrid): Kimi Delta Attention with bounded decays, in every sixth layer multi-head
latent attention with a rotation and a gate of each head, and mixtures of experts in groups after the first layers.

Layers that predict several tokens are not read, and an export copies them.

Released files and transformers 5.23.0 differ: the former name the class BailingMoeV3ForCausalLM, have many more fields, and store
the output projection of Kimi Delta Attention as `o_proj`, where transformers writes `dense`, as in multi-head latent attention.
Both are read. Ling-3.0-tiny has queries of a low rank (`q_lora_rank`), which transformers lacks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lsm_jax.convert.families import kimi_linear as kimi
from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.convert.published import read_rope
from lsm_jax.feedforward import MoEConfig
from lsm_jax.mixers import KDAConfig, MLAConfig
from lsm_jax.models import ModelConfig

_TOP: Names = {
    "embedding": "model.word_embeddings.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_KDA: Names = {
    **{f"mixer.{x}_proj.kernel": f"attention.{x}_proj.weight" for x in "qkv"},
    **{f"mixer.{x}_conv.weight": f"attention.{x}_conv1d.weight" for x in "qkv"},
    "mixer.beta_proj.kernel": "attention.b_proj.weight",
    "mixer.decay_proj.kernel": "attention.f_proj.weight",
    "mixer.gate_proj.kernel": "attention.g_proj.weight",
    "mixer.dt_bias": "attention.dt_bias",
    "mixer.a_log": "attention.A_log",
    "mixer.norm.scale": "attention.o_norm.weight",
}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json with Kimi-Linear's names of the sizes of its linear layers.

    transformers 5.23.0 writes these names beside the released ones, and then `head_dim` is that of the rotated channels.
    """
    given = dict(given)
    for name, ours in (
        ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ):
        value = given.pop(name, None)
        if value is not None:
            given.setdefault(ours, value)
    return given


def _config(values: dict[str, Any]) -> ModelConfig:
    values, count = dict(values), values["num_hidden_layers"]
    if values["layer_types"] is None:
        size = values["layer_group_size"]
        values["layer_types"] = [kimi.LINEAR if (i + 1) % size else kimi.FULL for i in range(count)]
    heads = values["num_attention_heads"]
    for name, usual in (
        ("linear_num_heads", "num_attention_heads"),
        ("num_kv_heads_for_linear_attn", "num_attention_heads"),
        ("moe_shared_expert_intermediate_size", "moe_intermediate_size"),
        ("rotary_dim", "qk_rope_head_dim"),
    ):
        if values[name] not in (None, values[usual]):
            raise ValueError(f"{name}={values[name]}; accepted is {usual}={values[usual]}")
    linear = KDAConfig(
        num_heads=heads,
        head_dim=values["linear_head_dim"],
        conv_size=values["linear_conv_kernel_dim"],
        lower_bound=float(values["kda_lower_bound"]) if values["kda_safe_gate"] else None,
        full_rank_gates=True,
        norm_eps=float(values["rms_norm_eps"]),
    )
    base, scaling = read_rope({**values, "rope_scaling": None}, "the rotation")
    if scaling is not None:
        raise ValueError(f"rope_parameters: {scaling}; accepted is no scaling")
    full = kimi.latent_attention(
        values, query_rank=values["q_lora_rank"], output_gate=True, rope_base=base
    )
    return kimi.decoder(values, linear, full)


def _stored(names: Collection[str]) -> dict[str, Any]:
    """Return the name of the output projection of Kimi Delta Attention: a function `Family.stored`."""
    released = any(name.endswith(".attention.o_proj.weight") for name in names)
    return dict(kda_output="o_proj" if released else "dense")


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    kinds = config.layers[config.letters()[layer]]
    mixer = {**_KDA, "mixer.o_proj.kernel": f"attention.{values['kda_output']}.weight"}
    if isinstance(kinds.mixer, MLAConfig):
        mixer = dict(kimi.latent_names(values, "attention.", "dense"))
        mixer["mixer.g_proj.kernel"] = "attention.g_proj.weight"
    inner: dict[str, str | Entry] = {
        f"feedforward.{part}.kernel": f"mlp.{part}.weight" for part in kimi.PARTS
    }
    if isinstance(kinds.feedforward, MoEConfig):
        inner = {
            "feedforward.router.kernel": "mlp.gate.weight",
            "feedforward.router_bias": "mlp.gate.expert_bias",
        }
        for part in kimi.PARTS:
            each = tuple(f"mlp.experts.{i}.{part}.weight" for i in range(values["num_experts"]))
            inner[f"feedforward.{part}"] = Entry(each)
            inner[f"feedforward.shared.{part}.kernel"] = f"mlp.shared_experts.{part}.weight"
    return prefixed(f"model.layers.{layer}.", {**kimi.BLOCK, **mixer, **inner})


def _describe(config: ModelConfig) -> dict[str, Any]:
    fields = kimi.describe(config)
    linear, full = the_mixer(config, KDAConfig), the_mixer(config, MLAConfig)
    if full.rope_base is None:
        raise ValueError("model.layers has multi-head latent attention without rotation; accepted is one with it")  # fmt: skip
    fields |= dict(
        head_dim=fields.pop("linear_head_dim"),
        short_conv_kernel_size=fields.pop("linear_conv_kernel_dim"),
        kda_safe_gate=linear.lower_bound is not None,
        kda_lower_bound=-5.0 if linear.lower_bound is None else linear.lower_bound,
        rope_parameters=dict(rope_type="default", rope_theta=full.rope_base),
    )
    return {name: value for name, value in fields.items() if name != "linear_num_heads"}


FAMILY = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    other_architectures=("BailingMoeV3ForCausalLM",),
    library="transformers",
    kinds={
        **kimi.KINDS, "moe_shared_expert_intermediate_size": "size", "rotary_dim": "size",
        "num_kv_heads_for_linear_attn": "size",
        "kda_lower_bound": "number", "kda_safe_gate": "flag", "layer_group_size": "size", "rope_theta": "positive",
        "rope_parameters": "object", "num_nextn_predict_layers": "count",
    },
    defaults=kimi.DEFAULTS | dict(
        intermediate_size=6144, moe_intermediate_size=768, num_experts=512, num_experts_per_token=8, num_expert_group=8,
        topk_group=4, routed_scaling_factor=2.5, rms_norm_eps=1e-6, first_k_dense_replace=2, rope_theta=6e6,
        rope_parameters=None, linear_num_heads=None, kda_safe_gate=True, kda_lower_bound=-5.0, layer_group_size=6,
        q_lora_rank=None, moe_shared_expert_intermediate_size=None, rotary_dim=None, num_kv_heads_for_linear_attn=None,
    ),
    only=dict(
        hidden_act=("silu", "swish"), attention_bias=(False,), use_bias=(False,), use_qkv_bias=(False,), mlp_bias=(False,),
        no_kda_lora=(True,), use_kda_lora=(False,), linear_silu=(True,),
        use_qk_norm=(True,), group_norm_size=(1,), gated_attention_proj_granularity_type=("head_wise",), use_mla_nope=(False,),
        rope_interleave=(True,), rope_scaling=(None,), score_function=("sigmoid",), scoring_func=("sigmoid",),
        topk_method=("noaux_tc",), moe_router_enable_expert_bias=(True,), scale_router_input=(False,), use_nGPT=(False,),
        up_proj_norm=(False,), value_norm=(False,),
    ),
    unused=frozenset(
        """
        attention_dropout embedding_dropout hidden_dropout output_dropout model_max_length mtp_loss_scaling_factor mtp_use_kda
        output_router_logits pretraining_tp qk_head_dim num_nextn_predict_layers partial_rotary_factor router_dtype
        expert_swiglu_limit_list share_expert_swiglu_limit_list
        """.split()
    ),
    renamed=kimi.RENAMED,
    required=("num_attention_heads",),
    sizes=(*(x for x in kimi.SIZES if isinstance(x, str)), ("num_attention_heads", "linear_head_dim")),
    read=_read,
    ignored=("model.layers.{layer}.",),
    stored=_stored,
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
