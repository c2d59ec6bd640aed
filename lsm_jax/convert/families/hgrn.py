"""HGRN of flash-linear-attention (`model_type` hgrn), whose recurrence is real."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.layout import Entry, Names
from lsm_jax.mixers import HGRNConfig
from lsm_jax.models import ModelConfig

_LAYER = fla.names(
    {
        **fla.PROJECTIONS,
        "mixer.f_proj.kernel": "attn.f_proj.weight",
        "mixer.i_proj.kernel": "attn.i_proj.weight",
        "mixer.norm.scale": "attn.g_norm.weight",
    }
)


def lower_bound(values: dict[str, Any]) -> float | None:
    """Return the field `lower_bound` of HGRN's and HGRN2's configs: None for learned bounds, else 0.

    Raises:
        ValueError: the bounds are learned, and there are layers of softmax attention.
    """
    bounded = values["use_lower_bound"]
    if bounded and values["attn"]:
        raise ValueError(
            "attn and use_lower_bound=True: bounds would be shared with layers of softmax; accepted is one of the two"
        )
    return None if bounded else 0.0


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = HGRNConfig(lower_bound=lower_bound(values), norm_eps=float(values["norm_eps"]))
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, HGRNConfig)
    return fields | dict(expand_ratio=1, use_lower_bound=mixer.lower_bound is None)


def names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    """Return the names of HGRN's and HGRN2's parameters in a layer, or outside of the layers if `layer` is negative."""
    bounds = Entry("model.lower_bounds", shape=(1, config.hidden_size))
    table = _LAYER(values, config, layer)
    return table if layer < 0 else {**table, "mixer.lower_bound": bounds}


FAMILY = fla.family(
    "hgrn",
    "HGRNForCausalLM",
    kinds=dict(use_lower_bound="flag"),
    defaults=dict(use_lower_bound=True),
    only=dict(use_short_conv=(False,), expand_ratio=(1,)),
    unused=frozenset(["conv_size"]),
    config=_config,
    names=names,
    describe=_describe,
)
