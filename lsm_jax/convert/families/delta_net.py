"""DeltaNet of flash-linear-attention (`model_type` delta_net)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import DeltaNetConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    **fla.CONVOLUTIONS,
    "mixer.beta_proj.kernel": "attn.b_proj.weight",
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = DeltaNetConfig(
        num_heads=values["num_heads"],
        expand_k=float(values["expand_k"]),
        expand_v=float(values["expand_v"]),
        conv_size=fla.conv_size(values),
        allow_negative_eigenvalues=values["allow_neg_eigval"],
        output_gate=values["use_gate"],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, DeltaNetConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        **fla.convolutions(mixer),
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        use_gate=mixer.output_gate,
    )


FAMILY = fla.delta_family(
    "delta_net",
    "DeltaNetForCausalLM",
    kinds=dict(
        expand_k="positive", expand_v="positive", allow_neg_eigval="flag", use_gate="flag",
    ),
    defaults=dict(
        num_heads=16, expand_k=1.0, expand_v=1.0, allow_neg_eigval=False, use_gate=False,
    ),
    only=dict(use_beta=(True,), use_output_norm=(True,), qk_norm=("l2",), qk_activation=("silu",), norm_first=(False,)),
    sizes=(("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
