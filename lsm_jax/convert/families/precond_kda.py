"""Preconditioned KDA of flash-linear-attention (`model_type` precond_kda)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.families.kda import gate_rank, lower_bound
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
    heads, head_dim, expand = values["num_heads"], values["head_dim"], float(values["expand_v"])
    # With more heads of values than of keys, FLA has the strengths of key heads alone.
    if values["num_v_heads"] not in (None, heads):
        raise ValueError(
            f"num_v_heads={values['num_v_heads']}; accepted are null and num_heads={heads}"
        )
    mixer = PrecondKDAConfig(
        num_heads=heads,
        head_dim=head_dim,
        gate_rank=gate_rank(head_dim, expand),
        expand_v=expand,
        conv_size=fla.conv_size(values),
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        lower_bound=lower_bound(values),
        squash=float(values["squash_x"]),
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, PrecondKDAConfig)
    if mixer.value_heads() != mixer.num_heads:
        raise ValueError(
            f"num_value_heads={mixer.value_heads()}; accepted for an export is num_heads={mixer.num_heads}"
        )
    return fields | dict(
        num_heads=mixer.num_heads,
        num_v_heads=None,
        head_dim=mixer.head_dim,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        safe_gate=mixer.lower_bound is not None,
        lower_bound=mixer.lower_bound,
        squash_x=mixer.squash,
    )


FAMILY = fla.delta_family(
    "precond_kda",
    "PrecondKDAForCausalLM",
    kinds=dict(
        expand_v="positive", head_dim="size", num_v_heads="size", allow_neg_eigval="flag",
        safe_gate="flag", lower_bound="number", squash_x="positive",
    ),
    defaults=dict(
        num_heads=16, num_v_heads=None, head_dim=128, expand_v=1.0, allow_neg_eigval=False, safe_gate=False,
        lower_bound=None, squash_x=1.5,
    ),
    only=dict(squash_eps=(1e-6,)),
    unused=frozenset({"a_log_init_lower", "log_atk_scale_init"}),
    sizes=("num_v_heads", ("num_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
