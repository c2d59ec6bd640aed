"""Comba of flash-linear-attention (`model_type` comba)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import CombaConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    **fla.CONVOLUTIONS,
    "mixer.beta_proj.kernel": "attn.b_proj.weight",
    "mixer.decay_proj.kernel": "attn.a_proj.weight",
    "mixer.erase_scale": "attn.decay",
    "mixer.correction": "attn.D",
    "mixer.dt_bias": "attn.dt_bias",
    "mixer.a_log": "attn.A_log",
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = CombaConfig(
        num_heads=values["num_heads"],
        num_value_heads=values["num_v_heads"],
        head_dim=values["head_dim"],
        expand_v=float(values["expand_v"]),
        conv_size=fla.conv_size(values),
        correction=float(values["correction_factor"]),
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, CombaConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        num_v_heads=mixer.num_value_heads,
        head_dim=mixer.head_dim,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        correction_factor=mixer.correction,
    )


# FLA's blocks do not pass `use_inner_decay` and `use_output_correction` on to the layer, which always has both.
FAMILY = fla.delta_family(
    "comba",
    "CombaForCausalLM",
    kinds=dict(
        expand_v="positive", head_dim="size", num_v_heads="size", correction_factor="positive",
    ),
    defaults=dict(
        num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, correction_factor=1.0,
    ),
    only=dict(use_output_gate=(True,)),
    unused=frozenset({"use_inner_decay", "use_output_correction"}),
    sizes=("num_v_heads", ("num_heads", "head_dim"), ("num_v_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
