"""Preconditioned Gated DeltaNet of flash-linear-attention (`model_type` precond_gated_deltanet)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import PrecondGatedDeltaNetConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    **fla.CONVOLUTIONS,
    "mixer.beta_proj.kernel": "attn.b_proj.weight",
    "mixer.decay_proj.kernel": "attn.a_proj.weight",
    "mixer.dt_bias": "attn.dt_bias",
    "mixer.a_log": "attn.A_log",
    "mixer.energy_beta_proj.kernel": "attn.b_atk_proj.weight",
    "mixer.energy_decay_proj.kernel": "attn.a_atk_proj.weight",
    "mixer.energy_dt_bias": "attn.dt_bias_atk",
    "mixer.energy_a_log": "attn.A_log_atk",
    "mixer.threshold": "attn.log_atk_scale",
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = PrecondGatedDeltaNetConfig(
        num_heads=values["num_heads"],
        num_value_heads=values["num_v_heads"],
        head_dim=values["head_dim"],
        expand_v=float(values["expand_v"]),
        conv_size=fla.conv_size(values),
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        squash=float(values["squash_x"]),
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, PrecondGatedDeltaNetConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        num_v_heads=mixer.num_value_heads,
        head_dim=mixer.head_dim,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        squash_x=mixer.squash,
    )


FAMILY = fla.delta_family(
    "precond_gated_deltanet",
    "PrecondGatedDeltaNetForCausalLM",
    kinds=dict(
        expand_v="positive", head_dim="size", num_v_heads="size", allow_neg_eigval="flag",
        squash_x="positive",
    ),
    defaults=dict(
        num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, allow_neg_eigval=False, squash_x=1.5,
    ),
    only=dict(use_gate=(True,), squash_eps=(1e-6,)),
    unused=frozenset({"a_log_init_lower", "log_atk_scale_init"}),
    sizes=("num_v_heads", ("num_heads", "head_dim"), ("num_v_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
