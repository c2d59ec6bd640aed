"""RetNet of flash-linear-attention (`model_type` retnet)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.families.gla import FEATURE_MAPS
from lsm_jax.mixers import RetNetConfig
from lsm_jax.models import ModelConfig


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = RetNetConfig(
        num_heads=values["num_heads"],
        expand_k=float(values["expand_k"]),
        expand_v=float(values["expand_v"]),
        feature_map=FEATURE_MAPS[values["feature_map"]],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, RetNetConfig)
    names = {ours: name for name, ours in FEATURE_MAPS.items()}
    return fields | dict(
        num_heads=mixer.num_heads,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        feature_map=names.get(mixer.feature_map),
    )


FAMILY = fla.family(
    "retnet",
    "RetNetForCausalLM",
    kinds=dict(expand_k="positive", expand_v="positive"),
    defaults=dict(num_heads=8, expand_k=1.0, expand_v=2.0, hidden_ratio=2),
    only=dict(
        feature_map=(None, "swish", "silu"), num_kv_heads=(None,), use_short_conv=(False,), use_output_gate=(True,),
    ),
    unused=frozenset(["conv_size"]),
    sizes=(("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=fla.gated_norm(fla.PROJECTIONS),
    describe=_describe,
)  # fmt: skip
