"""Kimi Delta Attention of flash-linear-attention (`model_type` kda)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import KDAConfig
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
    "mixer.norm.scale": "attn.o_norm.weight",
}


def lower_bound(values: dict[str, Any]) -> float | None:
    """Return the bound of the log decays from the values of config.json. FLA's field `safe_gate` selects a kernel; the bound
    alone decides what is computed.

    Raises:
        ValueError: `safe_gate` is true without a bound, with which FLA does not compute.
    """
    if values["safe_gate"] and values["lower_bound"] is None:
        raise ValueError("safe_gate=True, lower_bound=None; accepted is a lower_bound below 0")
    return values["lower_bound"]


def gate_rank(head_dim: int, expand_v: float) -> int | None:
    """Return `KDAConfig.gate_rank` of FLA's layers, whose gates have the rank of a head's value channels."""
    rank = int(head_dim * expand_v)
    return None if rank == head_dim else rank


def _config(values: dict[str, Any]) -> ModelConfig:
    head_dim, expand = values["head_dim"], float(values["expand_v"])
    mixer = KDAConfig(
        num_heads=values["num_heads"],
        num_value_heads=values["num_v_heads"],
        head_dim=head_dim,
        gate_rank=gate_rank(head_dim, expand),
        expand_v=expand,
        conv_size=fla.conv_size(values),
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        lower_bound=lower_bound(values),
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, KDAConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        num_v_heads=mixer.num_value_heads,
        head_dim=mixer.head_dim,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        safe_gate=mixer.lower_bound is not None,
        lower_bound=mixer.lower_bound,
    )


FAMILY = fla.delta_family(
    "kda",
    "KDAForCausalLM",
    kinds=dict(
        expand_v="positive", head_dim="size", num_v_heads="size", allow_neg_eigval="flag",
        safe_gate="flag", lower_bound="number",
    ),
    defaults=dict(
        num_heads=16, num_v_heads=None, head_dim=128, expand_v=1.0, allow_neg_eigval=False,
        safe_gate=False, lower_bound=None,
    ),
    only={},
    sizes=("num_v_heads", ("num_heads", "head_dim"), ("num_v_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
