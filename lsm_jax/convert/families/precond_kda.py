"""Preconditioned KDA of flash-linear-attention (`model_type` precond_kda)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import PrecondKDAConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    **fla.CONVOLUTIONS,
    "mixer.beta_proj.kernel": "attn.b_proj.weight",
    "mixer.decay_down.kernel": "attn.f_proj.0.weight",
    "mixer.decay_up.kernel": "attn.f_proj.1.weight",
    "mixer.gate_down.kernel": "attn.g_proj.0.weight",
    "mixer.gate_up.kernel": "attn.g_proj.1.weight",
    "mixer.gate_up.bias": "attn.g_proj.1.bias",
    "mixer.dt_bias": "attn.dt_bias",
    "mixer.a_log": "attn.A_log",
    "mixer.energy_beta_proj.kernel": "attn.b_atk_proj.weight",
    "mixer.energy_decay_proj.kernel": "attn.a_proj.weight",
    "mixer.energy_dt_bias": "attn.dt_bias_atk",
    "mixer.energy_a_log": "attn.A_log_atk",
    "mixer.threshold": "attn.log_atk_scale",
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = PrecondKDAConfig(
        num_heads=values["num_heads"],
        head_dim=values["head_dim"],
        conv_size=fla.conv_size(values),
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        squash=float(values["squash_x"]),
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, PrecondKDAConfig)
    # With more heads of values than of keys, FLA has the strengths of key heads alone.
    if mixer.value_heads() != mixer.num_heads:
        raise ValueError(
            f"num_value_heads={mixer.value_heads()}; accepted for an export is num_heads={mixer.num_heads}"
        )
    return fields | dict(
        num_heads=mixer.num_heads,
        num_v_heads=None,
        head_dim=mixer.head_dim,
        **fla.convolutions(mixer),
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        squash_x=mixer.squash,
    )


FAMILY = fla.delta_family(
    "precond_kda",
    "PrecondKDAForCausalLM",
    kinds=dict(
        head_dim="size", allow_neg_eigval="flag",
        squash_x="positive",
    ),
    defaults=dict(
        num_heads=16, head_dim=128, allow_neg_eigval=False, squash_x=1.5,
    ),
    only=dict(expand_v=(1.0,), num_v_heads=(None,), safe_gate=(False,), lower_bound=(None,), squash_eps=(1e-6,)),
    unused=frozenset({"a_log_init_lower", "log_atk_scale_init"}),
    sizes=(("num_heads", "head_dim"),),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
