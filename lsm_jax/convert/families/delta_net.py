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
        conv_size=values["conv_size"] if values["use_short_conv"] else 1,
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
        use_short_conv=mixer.conv_size > 1,
        conv_size=mixer.conv_size if mixer.conv_size > 1 else 4,
        allow_neg_eigval=mixer.allow_negative_eigenvalues,
        use_gate=mixer.output_gate,
    )


FAMILY = fla.family(
    "delta_net",
    "DeltaNetForCausalLM",
    kinds=dict(
        expand_k="positive", expand_v="positive", conv_size="size", allow_neg_eigval="flag", use_gate="flag",
        use_short_conv="flag",
    ),
    defaults=dict(
        num_heads=16, expand_k=1.0, expand_v=1.0, conv_size=4, allow_neg_eigval=False, use_gate=False, use_short_conv=True,
    ),
    only=dict(use_beta=(True,), use_output_norm=(True,), qk_norm=("l2",), qk_activation=("silu",)),
    sizes=("conv_size", ("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
