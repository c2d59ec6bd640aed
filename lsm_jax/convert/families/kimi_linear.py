"""Kimi-Linear of transformers (`model_type` kimi_linear): Kimi Delta Attention, in some layers multi-head latent attention without
rotation, and mixtures of experts behind a router of sigmoids after the first layers. `bailing_hybrid` has the same layers with
other gates.

transformers 5.23.0 writes the feedforward of the first layers by the name of the others (`block_sparse_moe`); released files have
`mlp`. Both are read.

The functions and tables without a leading underscore are those that both families have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lsm_jax.convert.families.family import Family, the_experts, the_mixer
from lsm_jax.convert.families.qwen3_next import FULL, LINEAR, dense_size
from lsm_jax.convert.fields import check_fields, listed, shown
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.feedforward import MoEConfig, SwiGLUConfig
from lsm_jax.mixers import KDAConfig, MLAConfig
from lsm_jax.models import LayerConfig, ModelConfig

DENSE, SPARSE = "dense", "sparse"
_LETTERS = {(LINEAR, SPARSE): "L", (FULL, SPARSE): "N", (LINEAR, DENSE): "D", (FULL, DENSE): "E"}
KINDS = {
    **dict.fromkeys(
        """
        num_attention_heads num_key_value_heads intermediate_size moe_intermediate_size kv_lora_rank q_lora_rank qk_nope_head_dim
        qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts num_expert_group topk_group
        linear_head_dim linear_num_heads linear_conv_kernel_dim
        """.split(),
        "size",
    ),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor"), "positive"),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), "texts"),
    "moe_renormalize": "flag",
    "first_k_dense_replace": "count",
}
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_shared_experts=1,
    moe_renormalize=True, layer_types=None, mlp_layer_types=None, linear_head_dim=128, linear_conv_kernel_dim=4,
    tie_word_embeddings=False,
)  # fmt: skip
RENAMED = dict(
    norm_topk_prob="moe_renormalize", n_group="num_expert_group", num_local_experts="num_experts",
    num_experts_per_tok="num_experts_per_token", n_shared_experts="num_shared_experts",
    num_mtp_layers="num_nextn_predict_layers",
)  # fmt: skip
SIZES = (
    "kv_lora_rank", "q_lora_rank", "num_experts", "moe_intermediate_size", "intermediate_size", "linear_conv_kernel_dim",
    ("num_attention_heads", "v_head_dim"), ("linear_num_heads", "linear_head_dim"),
)  # fmt: skip
BLOCK: Names = {
    "mixer_norm.scale": "input_layernorm.weight",
    "feedforward_norm.scale": "post_attention_layernorm.weight",
}
PARTS = ("gate_proj", "up_proj", "down_proj")
_KDA: Names = {
    **{f"mixer.{x}_proj.kernel": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"mixer.{x}_conv.weight": f"self_attn.{x}_conv1d.weight" for x in "qkv"},
    "mixer.beta_proj.kernel": "self_attn.b_proj.weight",
    "mixer.decay_down.kernel": "self_attn.f_a_proj.weight",
    "mixer.decay_up.kernel": "self_attn.f_b_proj.weight",
    "mixer.gate_down.kernel": "self_attn.g_a_proj.weight",
    "mixer.gate_up.kernel": "self_attn.g_b_proj.weight",
    "mixer.dt_bias": "self_attn.dt_bias",
    "mixer.norm.scale": "self_attn.o_norm.weight",
}
_LINEAR_FIELDS = dict(
    head_dim="linear_head_dim",
    num_heads="linear_num_heads",
    short_conv_kernel_size="linear_conv_kernel_dim",
)
"""Names of the fields of `linear_attn_config`, and the names here."""


def decoder(values: dict[str, Any], linear: KDAConfig, full: MLAConfig) -> ModelConfig:
    """Return the config of a model from the values of config.json and the configs of both mixers.

    Raises:
        ValueError: the types of the layers are not accepted, or keys and queries have different numbers of heads.
    """
    heads, keys = values["num_attention_heads"], values["num_key_value_heads"]
    if keys not in (None, heads):
        raise ValueError(f"num_key_value_heads={keys}; accepted is num_attention_heads={heads}")
    mixers = {LINEAR: linear, FULL: full}
    count, first = values["num_hidden_layers"], values["first_k_dense_replace"]
    sparse = values["mlp_layer_types"] or [DENSE if i < first else SPARSE for i in range(count)]
    for name, types, accepted in (
        ("layer_types", values["layer_types"], (LINEAR, FULL)),
        ("mlp_layer_types", sparse, (DENSE, SPARSE)),
    ):
        if types is None or len(types) != count or set(types) - set(accepted):
            raise ValueError(
                f"{name}={shown(types)}; accepted is a list of {count}, each one of {listed(accepted)}"
            )
    inner = {
        DENSE: SwiGLUConfig(intermediate_size=values["intermediate_size"]),
        SPARSE: MoEConfig(
            num_experts=values["num_experts"],
            top_k=values["num_experts_per_token"],
            expert_size=values["moe_intermediate_size"],
            shared_size=values["moe_intermediate_size"] * values["num_shared_experts"],
            shared_gate=False,
            router="sigmoid",
            renormalize=values["moe_renormalize"],
            router_bias=True,
            num_groups=values["num_expert_group"],
            top_groups=values["topk_group"],
            weight_scale=float(values["routed_scaling_factor"]),
        ),
    }
    kinds = list(zip(values["layer_types"], sparse, strict=True))
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=count,
        pattern="".join(_LETTERS[kind] for kind in kinds),
        layers={
            _LETTERS[mixer, kind]: LayerConfig(mixer=mixers[mixer], feedforward=inner[kind])
            for mixer, kind in kinds
        },
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["rms_norm_eps"]),
    )


def latent_attention(values: dict[str, Any], **fields: Any) -> MLAConfig:
    """Return the config of multi-head latent attention; `fields` are those that differ from family to family."""
    return MLAConfig(
        num_heads=values["num_attention_heads"],
        key_dim=values["qk_nope_head_dim"],
        rope_dim=values["qk_rope_head_dim"],
        value_dim=values["v_head_dim"],
        latent_dim=values["kv_lora_rank"],
        norm_eps=1e-6,  # in both libraries' code, whatever rms_norm_eps is
        **fields,
    )


def latent_names(values: dict[str, Any], prefix: str, out: str) -> Names:
    """Return the names of the tensors of multi-head latent attention, given what they begin with and the name of the last."""
    heads = Entry(f"{prefix}kv_b_proj.weight", groups=values["num_attention_heads"])
    down = f"{prefix}kv_a_proj_with_mqa.weight"
    return {
        "mixer.q_proj.kernel": f"{prefix}q_proj.weight",
        "mixer.q_down.kernel": f"{prefix}q_a_proj.weight",
        "mixer.q_norm.scale": f"{prefix}q_a_layernorm.weight",
        "mixer.q_up.kernel": f"{prefix}q_b_proj.weight",
        "mixer.latent_proj.kernel": down,
        "mixer.rope_proj.kernel": down,
        "mixer.latent_norm.scale": f"{prefix}kv_a_layernorm.weight",
        "mixer.k_up.kernel": heads,
        "mixer.v_up.kernel": heads,
        "mixer.o_proj.kernel": f"{prefix}{out}.weight",
    }


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return the values of the fields that describe a model and that both families have, except the types of layers.

    Raises:
        ValueError: the model has other layers.
    """
    linear, full = the_mixer(config, KDAConfig), the_mixer(config, MLAConfig)
    experts = the_experts(config)
    inner = [config.layers[letter].feedforward for letter in config.letters()]
    return dict(
        num_attention_heads=full.num_heads,
        num_key_value_heads=full.num_heads,
        kv_lora_rank=full.latent_dim,
        qk_nope_head_dim=full.key_dim,
        qk_rope_head_dim=full.rope_dim,
        v_head_dim=full.value_dim,
        moe_intermediate_size=experts.expert_size,
        num_experts=experts.num_experts,
        num_experts_per_token=experts.top_k,
        num_shared_experts=max(1, experts.shared_size // experts.expert_size),
        num_expert_group=experts.num_groups,
        topk_group=experts.top_groups,
        moe_renormalize=experts.renormalize,
        routed_scaling_factor=experts.weight_scale,
        rms_norm_eps=config.norm_eps,
        first_k_dense_replace=inner.index(experts),
        **dict(intermediate_size=experts.expert_size) | dense_size(config),
        linear_head_dim=linear.head_dim,
        linear_num_heads=linear.num_heads,
        linear_conv_kernel_dim=linear.conv_size,
        layer_types=[
            LINEAR if isinstance(config.layers[x].mixer, KDAConfig) else FULL
            for x in config.letters()
        ],
    )


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json with the fields that transformers writes instead of `linear_attn_config`, in which
    layers are counted from 1.
    """
    given = dict(given)
    linear = given.pop("linear_attn_config", None)
    if linear is None:
        return given
    lists = ("full_attn_layers", "kda_layers")
    if not isinstance(linear, dict) or set(linear) != {*lists, *_LINEAR_FIELDS}:
        raise ValueError(
            f"linear_attn_config={shown(linear)}; accepted is an object with the fields {listed((*lists, *_LINEAR_FIELDS))}"
        )
    check_fields(linear, "linear_attn_config", dict.fromkeys(_LINEAR_FIELDS, "size"))
    count = given.get("num_hidden_layers")
    full, kda = (linear[name] for name in lists)
    if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in (full, kda)) or (
        sorted(full + kda) != list(range(1, len(full + kda) + 1)) or len(full + kda) != count
    ):
        raise ValueError(
            f"linear_attn_config: full_attn_layers={shown(full)}, kda_layers={shown(kda)}; accepted are two lists that have the "
            f"numbers of all {count} layers, from 1, once"
        )
    read = {ours: linear[name] for name, ours in _LINEAR_FIELDS.items()}
    read["layer_types"] = [FULL if i + 1 in full else LINEAR for i in range(len(full + kda))]
    for name, value in read.items():
        if given.setdefault(name, value) != value:
            raise ValueError(
                f"{name}={shown(given[name])} differs from linear_attn_config, which has {shown(value)}"
            )
    return given


def _config(values: dict[str, Any]) -> ModelConfig:
    linear = KDAConfig(
        num_heads=values["linear_num_heads"],
        head_dim=values["linear_head_dim"],
        conv_size=values["linear_conv_kernel_dim"],
        output_gate_bias=False,
        norm_eps=float(values["rms_norm_eps"]),
    )
    full = latent_attention(values, query_rank=values["q_lora_rank"], rope_base=None)
    return decoder(values, linear, full)


def _stored(names: Collection[str]) -> dict[str, Any]:
    """Return the name of the feedforward of the first layers: a function `Family.stored`."""
    written = any(name.endswith(".block_sparse_moe.gate_proj.weight") for name in names)
    return dict(dense_name="block_sparse_moe" if written else "mlp")


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        top = {"embedding": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
        return {**top, "lm_head.kernel": "lm_head.weight"}
    kinds = config.layers[config.letters()[layer]]
    mixer: Mapping[str, Any]
    if isinstance(kinds.mixer, KDAConfig):
        rates = Entry("self_attn.A_log", shape=(1, 1, kinds.mixer.num_heads, 1))
        mixer = {**_KDA, "mixer.a_log": rates}
    else:
        mixer = latent_names(values, "self_attn.", "o_proj")
    inner: dict[str, Any]
    if isinstance(kinds.feedforward, MoEConfig):
        moe = "block_sparse_moe"
        inner = {
            "feedforward.router.kernel": f"{moe}.gate.weight",
            "feedforward.router_bias": f"{moe}.gate.e_score_correction_bias",
        }
        for part, stored in zip(PARTS, ("w1", "w3", "w2"), strict=True):
            experts = range(values["num_experts"])
            each = tuple(f"{moe}.experts.{i}.{stored}.weight" for i in experts)
            inner[f"feedforward.{part}"] = Entry(each)
            inner[f"feedforward.shared.{part}.kernel"] = f"{moe}.shared_experts.{part}.weight"
    else:
        inner = {f"feedforward.{p}.kernel": f"{values['dense_name']}.{p}.weight" for p in PARTS}
    return prefixed(f"model.layers.{layer}.", {**BLOCK, **mixer, **inner})


def _describe(config: ModelConfig) -> dict[str, Any]:
    fields = describe(config)
    types = fields.pop("layer_types")
    linear = {name: fields.pop(ours) for name, ours in _LINEAR_FIELDS.items()}
    for name, kind in (("full_attn_layers", FULL), ("kda_layers", LINEAR)):
        linear[name] = [i + 1 for i, found in enumerate(types) if found == kind]
    rank = the_mixer(config, MLAConfig).query_rank
    return fields | dict(linear_attn_config=linear, q_lora_rank=rank)


FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    library="transformers",
    kinds=KINDS,
    defaults=DEFAULTS | dict(
        intermediate_size=9216, moe_intermediate_size=1024, q_lora_rank=None, num_experts=256, num_experts_per_token=8,
        num_expert_group=1, topk_group=1, routed_scaling_factor=2.446, rms_norm_eps=1e-5, first_k_dense_replace=1,
        linear_num_heads=32,
    ),
    only=dict(
        hidden_act=("silu", "swish"), moe_router_activation_func=("sigmoid",), moe_layer_freq=(1,), mla_use_nope=(True,),
        use_grouped_topk=(True,), topk_method=("noaux_tc",), num_nextn_predict_layers=(0,), attention_bias=(False,),
        rope_scaling=(None,),
    ),
    unused=frozenset(
        """
        attention_dropout head_dim model_max_length output_router_logits pretraining_tp qk_head_dim rope_parameters rope_theta
        """.split()
    ),
    renamed=RENAMED,
    required=("num_attention_heads", "layer_types"),
    sizes=SIZES,
    read=_read,
    stored=_stored,
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
