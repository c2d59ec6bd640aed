"""Linear attention of flash-linear-attention (`model_type` linear_attn). The heads of a layer share learned feature maps."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.layout import Entry
from lsm_jax.mixers import LinearAttentionConfig
from lsm_jax.models import ModelConfig

_MAPS = ("elementwise_product", "hedgehog", "t2r", "dpfp", "elu", "relu", "identity")


def _maps(first: str, second: str = "") -> dict[str, Entry]:
    """Return the names of the matrices and biases of both feature maps."""
    parts = [("first", first)] + ([("second", second)] if second else [])
    return {
        f"mixer.{x}_features.{ours}.{kind}": Entry((f"attn.feature_map_{x}.{theirs}.{stored}",))
        for x in "qk"
        for ours, theirs in parts
        for kind, stored in (("kernel", "weight"), ("bias", "bias"))
    }


_TABLE = {**fla.PROJECTIONS, "mixer.norm.scale": "attn.norm.weight"}
_ONE, _TWO = (fla.names({**_TABLE, **maps}) for maps in (_maps("layer"), _maps("layer1", "layer2")))  # fmt: skip


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = LinearAttentionConfig(
        num_heads=values["num_heads"],
        expand_k=float(values["expand_k"]),
        expand_v=float(values["expand_v"]),
        feature_map=values["feature_map"],
        shared_feature_map=True,
        sum_normalize_q=values["norm_q"],
        sum_normalize_k=values["norm_k"],
        normalize=values["norm_feature_map"],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, LinearAttentionConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        feature_map=mixer.feature_map,
        norm_q=mixer.sum_normalize_q,
        norm_k=mixer.sum_normalize_k,
        norm_feature_map=mixer.normalize,
    )


FAMILY = fla.family(
    "linear_attn",
    "LinearAttentionForCausalLM",
    kinds=dict(
        expand_k="positive", expand_v="positive", norm_q="flag", norm_k="flag", norm_feature_map="flag",
    ),
    defaults=dict(num_heads=4, expand_k=1.0, expand_v=1.0, norm_q=False, norm_k=False, norm_feature_map=False),
    only=dict(feature_map=_MAPS, tie_feature_map_qk=(False,), num_kv_heads=(None,)),
    sizes=(("expand_k", "hidden_size"), ("expand_v", "hidden_size")),
    config=_config,
    names=lambda values, config, layer: (
        _TWO if values["feature_map"] == "elementwise_product" else _ONE
    )(values, config, layer),
    describe=_describe,
)  # fmt: skip
