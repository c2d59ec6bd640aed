"""ABC, attention with bounded-memory control, of flash-linear-attention (`model_type` abc)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import ABCConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    "mixer.s_proj.kernel": "attn.s_proj.weight",
    "mixer.norm.scale": "attn.g_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    heads, expand_k, slots = values["num_heads"], float(values["expand_k"]), values["num_slots"]
    least, largest = values["clamp_min"], values["clamp_max"]
    if least != -largest:
        raise ValueError(
            f"clamp_min={least}, clamp_max={largest}; accepted is a clamp_min of -clamp_max"
        )
    mixer = ABCConfig(
        num_heads=heads,
        num_slots=round(values["hidden_size"] * expand_k) // heads if slots is None else slots,
        expand_k=expand_k,
        expand_v=float(values["expand_v"]),
        largest_score=float(largest),
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, ABCConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        num_slots=mixer.num_slots,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        clamp_min=-mixer.largest_score,
        clamp_max=mixer.largest_score,
    )


# No matrix of FLA's layer has the rank `gate_low_rank_dim`.
FAMILY = fla.family(
    "abc",
    "ABCForCausalLM",
    kinds=dict(
        expand_k="positive", expand_v="positive", num_slots="size", clamp_min="number", clamp_max="positive",
    ),
    defaults=dict(
        num_heads=4, num_slots=64, expand_k=0.5, expand_v=1, clamp_min=-32, clamp_max=32,
    ),
    only=dict(use_short_conv=(False,), use_rope=(True,)),
    null_is_value=frozenset(["num_slots"]),
    renamed=dict(exapnd_k="expand_k", exapnd_v="expand_v"),
    unused=frozenset(["conv_size", "gate_low_rank_dim"]),
    sizes=("num_slots", ("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
