"""Gated linear attention of flash-linear-attention (`model_type` gla)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import GLAConfig
from lsm_jax.models import ModelConfig

FEATURE_MAPS = {None: "identity", "swish": "silu", "silu": "silu"}
_NAMES = fla.gated_norm(
    {
        **fla.PROJECTIONS,
        "mixer.decay_down.kernel": "attn.gk_proj.0.weight",
        "mixer.decay_up.kernel": "attn.gk_proj.1.weight",
        "mixer.decay_up.bias": "attn.gk_proj.1.bias",
    }
)


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = GLAConfig(
        num_heads=values["num_heads"],
        expand_k=float(values["expand_k"]),
        expand_v=float(values["expand_v"]),
        feature_map=FEATURE_MAPS[values["feature_map"]],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, GLAConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        feature_map={ours: name for name, ours in FEATURE_MAPS.items()}[mixer.feature_map],
    )


FAMILY = fla.family(
    "gla",
    "GLAForCausalLM",
    kinds=dict(expand_k="positive", expand_v="positive"),
    defaults=dict(num_heads=4, expand_k=0.5, expand_v=1.0),
    only=dict(
        feature_map=(None, "swish", "silu"), num_kv_heads=(None,), use_short_conv=(False,), use_output_gate=(True,),
        clamp_min=(None,), use_gk=(True,), use_gv=(False,),
    ),
    unused=frozenset(["conv_size"]),
    sizes=(("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=_NAMES,
    describe=_describe,
)  # fmt: skip
