"""Gated DeltaNet of flash-linear-attention (`model_type` gated_deltanet)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import GatedDeltaNetConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    **fla.CONVOLUTIONS,
    "mixer.beta_proj.kernel": "attn.b_proj.weight",
    "mixer.decay_proj.kernel": "attn.a_proj.weight",
    "mixer.dt_bias": "attn.dt_bias",
    "mixer.a_log": "attn.A_log",
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = GatedDeltaNetConfig(
        num_heads=values["num_heads"],
        num_value_heads=values["num_v_heads"],
        head_dim=values["head_dim"],
        expand_v=float(values["expand_v"]),
        conv_size=fla.conv_size(values),
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, GatedDeltaNetConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        num_v_heads=mixer.num_value_heads,
        head_dim=mixer.head_dim,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
    )


FAMILY = fla.delta_family(
    "gated_deltanet",
    "GatedDeltaNetForCausalLM",
    kinds=dict(
        expand_v="positive", head_dim="size", num_v_heads="size", allow_neg_eigval="flag",
    ),
    defaults=dict(
        num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, allow_neg_eigval=False,
    ),
    only=dict(use_gate=(True,), output_gate_activation=("swish", "silu")),
    sizes=("num_v_heads", ("num_heads", "head_dim"), ("num_v_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
