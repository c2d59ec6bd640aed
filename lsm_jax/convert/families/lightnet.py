"""LightNet of flash-linear-attention (`model_type` lightnet). Its code computes the norm over the memory's output with an
epsilon of 1e-6, and rotates softmax layers with a base of 10,000, in every model."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import LightNetConfig
from lsm_jax.models import ModelConfig

_NORM_EPS = 1e-6
_TABLE = {
    **fla.PROJECTIONS,
    "mixer.gate_down.kernel": "attn.g_proj.0.weight",
    "mixer.gate_up.kernel": "attn.g_proj.1.weight",
    "mixer.norm.scale": "attn.g_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = LightNetConfig(
        head_dim=fla.head_dim(values),
        gate_rank=values["gate_low_rank_dim"],
        norm_eps=_NORM_EPS,
    )
    fla.check_base(values, "lightnet")
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, LightNetConfig)
    return fields | dict(
        num_heads=None, expand_ratio=mixer.head_dim, gate_low_rank_dim=mixer.gate_rank
    )


FAMILY = fla.family(
    "lightnet",
    "LightNetForCausalLM",
    kinds=dict(expand_ratio="size", gate_low_rank_dim="size"),
    defaults=dict(num_heads=None, expand_ratio=128, gate_low_rank_dim=128),
    only=dict(use_short_conv=(False,)),
    null_is_value=frozenset(["expand_ratio"]),
    unused=frozenset(["conv_size"]),
    sizes=("expand_ratio", "gate_low_rank_dim"),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)
