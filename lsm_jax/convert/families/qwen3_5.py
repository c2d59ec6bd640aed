"""Qwen3.5 and its mixture of experts of transformers: language models alone (`model_type` qwen3_5_text, qwen3_5_moe_text), and
beside a vision tower (qwen3_5, qwen3_5_moe), whose tensors are not read, and copied by an export.
"""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import qwen3_next
from lsm_jax.convert.families.family import Family
from lsm_jax.convert.fields import check_fields, shown
from lsm_jax.convert.layout import Names
from lsm_jax.models import ModelConfig

_LINEAR: Names = {
    **{f"mixer.{x}_proj.kernel": "linear_attn.in_proj_qkv.weight" for x in "qkv"},
    "mixer.g_proj.kernel": "linear_attn.in_proj_z.weight",
    "mixer.beta_proj.kernel": "linear_attn.in_proj_b.weight",
    "mixer.decay_proj.kernel": "linear_attn.in_proj_a.weight",
}
_OUTER = frozenset(
    """
    image_token_id language_model_only video_token_id vision_config vision_end_token_id vision_start_token_id
    """.split()
)
"""Fields beside `text_config` that a text's tokens do not depend on."""


def _config(values: dict[str, Any]) -> ModelConfig:
    return qwen3_next.decoder(values, [False] * values["num_hidden_layers"])


def _config_of_experts(values: dict[str, Any]) -> ModelConfig:
    return qwen3_next.decoder(values, [True] * values["num_hidden_layers"])


def _describe(config: ModelConfig) -> dict[str, Any]:
    return {**qwen3_next.describe(config), **qwen3_next.dense_size(config)}


def _describe_experts(config: ModelConfig) -> dict[str, Any]:
    return {**qwen3_next.describe(config), **qwen3_next.describe_experts(config)}


def _text_fields(model_type: str) -> Any:
    """Return the function `Family.read` of a model whose config.json has its fields in `text_config`."""

    def read(given: dict[str, Any]) -> dict[str, Any]:
        check_fields(given, "text_config", dict(text_config="object"))
        inner = given.get("text_config")
        if inner is None:
            raise ValueError("missing fields: text_config")
        if inner.get("model_type", f"{model_type}_text") != f"{model_type}_text":
            raise ValueError(
                f"text_config.model_type={shown(inner['model_type'])}; accepted is {model_type}_text"
            )
        outer = {n: v for n, v in given.items() if n not in _OUTER and n != "text_config"}
        shared = {"tie_word_embeddings", "dtype", "torch_dtype", "model_type"}
        if doubled := sorted(n for n in set(outer) & set(inner) - shared if outer[n] != inner[n]):
            raise ValueError(
                f"{doubled[0]}={shown(outer[doubled[0]])}, but text_config.{doubled[0]}={shown(inner[doubled[0]])}; accepted are "
                "equal values"
            )
        return {**inner, **outer}

    return read


def _family(model_type: str, architecture: str, *, text: bool, experts: bool) -> Family:
    """Return the description of a family: of a language model alone (`text`), or beside a vision tower."""
    kinds, defaults = dict(qwen3_next.KINDS), dict(qwen3_next.DEFAULTS)
    only, required, sizes = dict(qwen3_next.ONLY), ["num_attention_heads"], qwen3_next.SIZES
    if experts:
        kinds |= qwen3_next.EXPERT_KINDS
        defaults |= dict(
            moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=8, num_experts=256,
            router_aux_loss_coef=0.001,
        )  # fmt: skip
        only |= dict(norm_topk_prob=(True,), mlp_only_layers=([], None), decoder_sparse_step=(1,))
        sizes = (*sizes, *qwen3_next.EXPERT_SIZES)
    else:
        required.append("intermediate_size")
        only |= dict(mlp_only_layers=([], None))
        sizes = (*sizes, "intermediate_size")
    prefix = "model." if text else "model.language_model."
    return Family(
        model_type=model_type,
        architecture=architecture,
        library="transformers",
        kinds=kinds,
        defaults=defaults,
        only=only,
        unused=qwen3_next.UNUSED,
        required=tuple(required),
        sizes=sizes,
        read=dict if text else _text_fields(model_type),
        prefix=f"{prefix}layers.",
        ignored=("mtp.",) if text else ("mtp.", "model.visual."),
        stored=qwen3_next.stored,
        config=_config_of_experts if experts else _config,
        names=qwen3_next.names(lambda values: _LINEAR, prefix),
        describe=_describe_experts if experts else _describe,
    )


TEXT = _family("qwen3_5_text", "Qwen3_5ForCausalLM", text=True, experts=False)
EXPERTS = _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", text=True, experts=True)
FAMILIES = (
    TEXT,
    EXPERTS,
    _family("qwen3_5", "Qwen3_5ForConditionalGeneration", text=False, experts=False),
    _family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", text=False, experts=True),
)
