"""Gated slot attention of flash-linear-attention (`model_type` gsa). Its code computes the norm over the memory's output with an
epsilon of 1e-5 in every model."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.families.hgrn2 import NORM_EPS
from lsm_jax.mixers import GSAConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    "mixer.decay_proj.kernel": "attn.f_proj.weight",
    "mixer.norm.scale": "attn.g_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    heads, expand_k, slots = values["num_heads"], float(values["expand_k"]), values["num_slots"]
    if slots is None:
        slots = round(values["hidden_size"] * expand_k) // heads
    mixer = GSAConfig(
        num_heads=heads,
        num_slots=slots,
        expand_k=expand_k,
        expand_v=float(values["expand_v"]),
        gate_temperature=float(values["gate_logit_normalizer"]),
        norm_eps=NORM_EPS,
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, GSAConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        num_slots=mixer.num_slots,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        gate_logit_normalizer=mixer.gate_temperature,
    )


FAMILY = fla.family(
    "gsa",
    "GSAForCausalLM",
    kinds=dict(
        expand_k="positive", expand_v="positive", num_slots="size", gate_logit_normalizer="positive",
    ),
    defaults=dict(num_heads=4, num_slots=64, expand_k=1, expand_v=1, gate_logit_normalizer=8),
    only=dict(
        feature_map=("swish",), num_kv_heads=(None,), use_short_conv=(False,), use_output_gate=(False,), use_norm=(True,),
        clamp_min=(None,), clamp_max=(None,),
    ),
    null_is_value=frozenset(["num_slots"]),
    renamed=dict(exapnd_k="expand_k", exapnd_v="expand_v"),
    unused=frozenset(["conv_size"]),
    sizes=("num_slots", ("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
