"""Qwen3-Next of transformers (`model_type` qwen3_next): Gated DeltaNet, in every fourth layer gated softmax attention, and mixtures
of experts. `qwen3_5` has the same layers in other tensors.

The functions and tables without a leading underscore are those that both have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lsm_jax.convert.families.family import Family, the_experts, the_mixer
from lsm_jax.convert.fields import listed, shown
from lsm_jax.convert.layout import Entry, Names, experts, prefixed
from lsm_jax.convert.published import read_rope
from lsm_jax.feedforward import MoEConfig, SwiGLUConfig
from lsm_jax.mixers import GatedAttentionConfig, GatedDeltaNetConfig
from lsm_jax.models import LayerConfig, ModelConfig

LINEAR, FULL = "linear_attention", "full_attention"
_LETTERS = {(LINEAR, True): "L", (FULL, True): "N", (LINEAR, False): "D", (FULL, False): "E"}
KINDS = {
    **dict.fromkeys(
        """
        num_attention_heads num_key_value_heads head_dim intermediate_size linear_conv_kernel_dim linear_key_head_dim
        linear_value_head_dim linear_num_key_heads linear_num_value_heads full_attention_interval
        """.split(),
        "size",
    ),
    **dict.fromkeys(("rms_norm_eps", "partial_rotary_factor", "rope_theta"), "positive"),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), "object"),
    "layer_types": "texts",
}
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=None, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, rms_norm_eps=1e-6, partial_rotary_factor=None, rope_theta=None,
    rope_parameters=None, rope_scaling=None, layer_types=None, full_attention_interval=4, tie_word_embeddings=False,
)  # fmt: skip
EXPERT_KINDS = {
    **dict.fromkeys(
        "moe_intermediate_size shared_expert_intermediate_size num_experts num_experts_per_tok".split(),
        "size",
    ),
    "router_aux_loss_coef": "number",
}
ONLY: dict[str, tuple[Any, ...]] = dict(
    hidden_act=("silu", "swish"), attention_bias=(False,), attn_output_gate=(True,), output_gate_type=("swish", "silu"),
)  # fmt: skip
UNUSED = frozenset(
    """
    attention_dropout mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings output_router_logits use_sliding_window
    """.split()
)
"""Fields about training, prediction of several tokens, and the dtype of states, which are float32 here."""
SIZES = (
    "linear_conv_kernel_dim", ("num_attention_heads", "head_dim"), ("linear_num_key_heads", "linear_key_head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
)  # fmt: skip
EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts")
BLOCK: Names = {
    "mixer_norm.scale": "input_layernorm.weight",
    "feedforward_norm.scale": "post_attention_layernorm.weight",
}
DENSE: Names = {f"feedforward.{x}_proj.kernel": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}  # fmt: skip
_SHARED: Names = {
    "feedforward.router.kernel": "mlp.gate.weight",
    "feedforward.shared_gate.kernel": "mlp.shared_expert_gate.weight",
    **{
        f"feedforward.shared.{x}_proj.kernel": f"mlp.shared_expert.{x}_proj.weight"
        for x in ("gate", "up", "down")
    },
}
LINEAR_NAMES: Names = {
    **{f"mixer.{x}_conv.weight": "linear_attn.conv1d.weight" for x in "qkv"},
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.a_log": "linear_attn.A_log",
    "mixer.norm.scale": "linear_attn.norm.weight",
    "mixer.o_proj.kernel": "linear_attn.out_proj.weight",
}
"""The names of those tensors of Gated DeltaNet that both have."""


def decoder(values: dict[str, Any], sparse: list[bool]) -> ModelConfig:
    """Return the config of a model.

    Args:
        values: the values of config.json.
        sparse: whether the feedforward of each layer is a mixture of experts.
    """
    eps = float(values["rms_norm_eps"])
    key_dim, head_dim = values["linear_key_head_dim"], values["head_dim"]
    linear = GatedDeltaNetConfig(
        num_heads=values["linear_num_key_heads"],
        num_value_heads=values["linear_num_value_heads"],
        head_dim=key_dim,
        expand_v=values["linear_value_head_dim"] / key_dim,
        conv_size=values["linear_conv_kernel_dim"],
        norm_eps=eps,
    )
    base, scaling, factor = _rotation(values)
    rotated = int(head_dim * factor)
    full = GatedAttentionConfig(
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=head_dim,
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=None if rotated == head_dim else rotated,
        norm_eps=eps,
    )
    mixers = {LINEAR: linear, FULL: full}
    kinds = list(zip(_layer_types(values), sparse, strict=True))
    both = len(set(sparse)) == 2
    letters = {(kind, inner): _LETTERS[kind, inner or not both] for kind, inner in kinds}
    layers = {
        letter: LayerConfig(mixer=mixers[kind], feedforward=_feedforward(values, inner))
        for (kind, inner), letter in letters.items()
    }
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=len(kinds),
        pattern="".join(letters[kind] for kind in kinds),
        layers=layers,
        tie_embeddings=values["tie_word_embeddings"],
        norm="zero_centred_rms",
        norm_eps=eps,
    )


def _rotation(values: dict[str, Any]) -> tuple[float, Any, float]:
    """Return the base and the scaling of the rotation, and the part of a head's channels that is rotated.

    `mrope_section` assigns frequencies to the positions of a picture's tokens; of a text's tokens all positions are equal.
    """
    given = dict(values)
    parts = [values["partial_rotary_factor"]]
    for name in ("rope_parameters", "rope_scaling"):
        fields = dict(values[name] or {})
        parts.append(fields.pop("partial_rotary_factor", None))
        for unused in ("mrope_section", "mrope_interleaved"):
            fields.pop(unused, None)
        given[name] = fields
    stated = [part for part in parts if part is not None] or [0.25]
    numbers = all(type(x) in (int, float) and 0 < x <= 1 for x in stated)
    if not numbers or len(set(stated)) > 1:
        raise ValueError(
            f"partial_rotary_factor={listed(map(shown, stated))}; accepted is one number above 0, at most 1"
        )
    base, scaling = read_rope(given, "the rotation")
    return base, scaling, stated[0]


def _layer_types(values: dict[str, Any]) -> list[str]:
    """Return the kind of each layer's mixer, which is one of `LINEAR` and `FULL`."""
    count, types = values["num_hidden_layers"], values["layer_types"]
    if types is None:
        step = values["full_attention_interval"]
        return [LINEAR if (i + 1) % step else FULL for i in range(count)]
    if len(types) != count or set(types) - {LINEAR, FULL}:
        raise ValueError(
            f"layer_types={shown(types)}; accepted is a list of {count}, each one of {LINEAR}, {FULL}"
        )
    return types


def _feedforward(values: dict[str, Any], sparse: bool) -> Any:
    if not sparse:
        return SwiGLUConfig(intermediate_size=values["intermediate_size"])
    return MoEConfig(
        num_experts=values["num_experts"],
        top_k=values["num_experts_per_tok"],
        expert_size=values["moe_intermediate_size"],
        shared_size=values["shared_expert_intermediate_size"],
        renormalize=values.get("norm_topk_prob", True),
        balance_scale=float(values["router_aux_loss_coef"]),
    )


def names(
    linear: Callable[[dict[str, Any]], Names], prefix: str = "model."
) -> Callable[[dict[str, Any], ModelConfig, int], Names]:
    """Return the function `Family.names`.

    Args:
        linear: returns, from the values of the fields, the names of the tensors of Gated DeltaNet that are not in `LINEAR_NAMES`.
        prefix: what the names of the language model's tensors begin with.
    """

    def of_layer(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
        if layer < 0:
            top = {"embedding": f"{prefix}embed_tokens.weight", "norm.scale": f"{prefix}norm.weight"}  # fmt: skip
            return {**top, "lm_head.kernel": "lm_head.weight"}
        kinds = config.layers[config.letters()[layer]]
        full = isinstance(kinds.mixer, GatedAttentionConfig)
        mixer = _attention(values) if full else {**LINEAR_NAMES, **linear(values)}
        sparse = isinstance(kinds.feedforward, MoEConfig)
        inner = _experts(values) if sparse else DENSE
        return prefixed(f"{prefix}layers.{layer}.", {**BLOCK, **mixer, **inner})

    return of_layer


def _attention(values: dict[str, Any]) -> Names:
    queries = Entry("self_attn.q_proj.weight", groups=values["num_attention_heads"])
    return {
        "mixer.q_proj.kernel": queries,
        "mixer.g_proj.kernel": queries,
        **{f"mixer.{x}_proj.kernel": f"self_attn.{x}_proj.weight" for x in "kvo"},
        **{f"mixer.{x}_norm.scale": f"self_attn.{x}_norm.weight" for x in "qk"},
    }


def _experts(values: dict[str, Any]) -> Names:
    each = {
        f"feedforward.{x}_proj": Entry(
            tuple(f"mlp.experts.{i}.{x}_proj.weight" for i in range(values["num_experts"]))
        )
        for x in ("gate", "up", "down")
    }
    together = {
        "feedforward.gate_proj": experts("mlp.experts.gate_up_proj", 0, 2),
        "feedforward.up_proj": experts("mlp.experts.gate_up_proj", 1, 2),
        "feedforward.down_proj": experts("mlp.experts.down_proj"),
    }
    return {**_SHARED, **(together if values["experts_together"] else each)}


def stored(names: Collection[str]) -> dict[str, Any]:
    """Return whether a checkpoint has one tensor with all experts of a layer: a function `Family.stored`."""
    return dict(experts_together=any(name.endswith(".experts.gate_up_proj") for name in names))


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return the values of the fields that describe a model, except those of its feedforwards."""
    linear = the_mixer(config, GatedDeltaNetConfig)
    full = the_mixer(config, GatedAttentionConfig)
    if full.rope_base is None or full.rope_scaling is not None:
        raise ValueError(
            f"model.layers has rope_base={full.rope_base}, rope_scaling={full.rope_scaling}; accepted are a base and no scaling"
        )
    dim = full.dim(config.hidden_size)
    part = (full.rotary_dim or dim) / dim
    return dict(
        num_attention_heads=full.num_heads,
        num_key_value_heads=full.kv_heads(),
        head_dim=dim,
        linear_num_key_heads=linear.num_heads,
        linear_num_value_heads=linear.value_heads(),
        linear_key_head_dim=linear.head_dim,
        linear_value_head_dim=linear.value_dim(),
        linear_conv_kernel_dim=linear.conv_size,
        rms_norm_eps=config.norm_eps,
        rope_parameters=dict(
            rope_type="default", rope_theta=full.rope_base, partial_rotary_factor=part
        ),
        layer_types=[
            LINEAR if isinstance(config.layers[x].mixer, GatedDeltaNetConfig) else FULL
            for x in config.letters()
        ],
    )


def describe_experts(config: ModelConfig) -> dict[str, Any]:
    """Return the values of the fields that describe the mixtures of experts of a model.

    Raises:
        ValueError: the model has none, or several that differ.
    """
    first = the_experts(config)
    return dict(
        num_experts=first.num_experts,
        num_experts_per_tok=first.top_k,
        moe_intermediate_size=first.expert_size,
        shared_expert_intermediate_size=first.shared_size,
        router_aux_loss_coef=first.balance_scale,
    )


def dense_size(config: ModelConfig) -> dict[str, Any]:
    """Return the field `intermediate_size` of a model that has feedforwards other than mixtures of experts, else no field."""
    inner = [config.layers[letter].feedforward for letter in config.letters()]
    widths = {x.width(config.hidden_size) for x in inner if isinstance(x, SwiGLUConfig)}
    if len(widths) > 1:
        raise ValueError(
            f"model.layers has feedforwards of widths {listed(widths)}; accepted are equal ones"
        )
    return dict(intermediate_size=widths.pop()) if widths else {}


def _config(values: dict[str, Any]) -> ModelConfig:
    dense, step = values["mlp_only_layers"] or [], values["decoder_sparse_step"]
    count = values["num_hidden_layers"]
    if not isinstance(dense, list) or any(type(x) is not int for x in dense):
        raise ValueError(
            f"mlp_only_layers={shown(dense)}; accepted is a list of the numbers of layers"
        )
    return decoder(values, [i not in dense and (i + 1) % step == 0 for i in range(count)])


def _describe(config: ModelConfig) -> dict[str, Any]:
    inner = [config.layers[letter].feedforward for letter in config.letters()]
    experts = describe_experts(config)
    (renormalize,) = {x.renormalize for x in inner if isinstance(x, MoEConfig)}
    return {
        **describe(config),
        **experts,
        **dense_size(config),
        "norm_topk_prob": renormalize,
        "mlp_only_layers": [i for i, x in enumerate(inner) if isinstance(x, SwiGLUConfig)],
    }


def _linear(values: dict[str, Any]) -> Names:
    groups = values["linear_num_key_heads"]
    projected = Entry("linear_attn.in_proj_qkvz.weight", groups=groups)
    gates = Entry("linear_attn.in_proj_ba.weight", groups=groups)
    return {
        **{f"mixer.{x}_proj.kernel": projected for x in "qkvg"},
        **{f"mixer.{x}_proj.kernel": gates for x in ("beta", "decay")},
    }


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    library="transformers",
    kinds=KINDS | EXPERT_KINDS | dict(decoder_sparse_step="size", norm_topk_prob="flag"),
    defaults=DEFAULTS | dict(
        intermediate_size=5632, decoder_sparse_step=1, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts_per_tok=10, num_experts=512, norm_topk_prob=True, router_aux_loss_coef=0.001, mlp_only_layers=None,
    ),
    only=ONLY,
    unused=UNUSED,
    required=("num_attention_heads",),
    sizes=(*SIZES, *EXPERT_SIZES),
    ignored=("mtp.",),
    stored=stored,
    config=_config,
    names=names(_linear),
    describe=_describe,
)  # fmt: skip
