"""HGRN2 of flash-linear-attention (`model_type` hgrn2). Its code computes the norm over the memory's output with an epsilon of
1e-5 in every model."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla, hgrn
from lsm_jax.mixers import HGRN2Config
from lsm_jax.models import ModelConfig

NORM_EPS = 1e-5


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = HGRN2Config(
        head_dim=fla.head_dim(values), lower_bound=hgrn.lower_bound(values), norm_eps=NORM_EPS
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, HGRN2Config)
    return fields | dict(
        num_heads=None, expand_ratio=mixer.head_dim, use_lower_bound=mixer.lower_bound is None
    )


FAMILY = fla.family(
    "hgrn2",
    "HGRN2ForCausalLM",
    kinds=dict(expand_ratio="size", use_lower_bound="flag"),
    defaults=dict(num_heads=None, expand_ratio=128, use_lower_bound=True),
    only=dict(use_short_conv=(False,)),
    null_is_value=frozenset(["expand_ratio"]),
    unused=frozenset(["conv_size"]),
    sizes=("expand_ratio",),
    config=_config,
    names=hgrn.names,
    describe=_describe,
)
