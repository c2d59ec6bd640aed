"""Gated DeltaProduct of flash-linear-attention (`model_type` gated_deltaproduct)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import GatedDeltaProductConfig
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
    mixer = GatedDeltaProductConfig(
        num_heads=values["num_heads"],
        head_dim=values["head_dim"],
        expand_v=float(values["expand_v"]),
        conv_size=fla.conv_size(values),
        num_steps=values["num_householder"],
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        decay=values["use_forget_gate"],
        output_gate=values["use_output_gate"],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, GatedDeltaProductConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        num_householder=mixer.num_steps,
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        use_forget_gate=mixer.decay,
        use_output_gate=mixer.output_gate,
    )


FAMILY = fla.delta_family(
    "gated_deltaproduct",
    "GatedDeltaProductForCausalLM",
    kinds=dict(
        expand_v="positive", head_dim="size", num_householder="size", allow_neg_eigval="flag",
        use_forget_gate="flag", use_output_gate="flag",
    ),
    defaults=dict(
        num_heads=6, head_dim=256, expand_v=2.0, num_householder=1, allow_neg_eigval=False, use_forget_gate=False,
        use_output_gate=True,
    ),
    only={},
    sizes=("num_householder", ("num_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
