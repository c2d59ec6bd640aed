"""RWKV-7 of flash-linear-attention (`model_type` rwkv7). The checkpoints of RWKV's authors are read by
`lsm_jax.convert.rwkv_file`."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.feedforward import RWKV7ChannelMixConfig
from lsm_jax.mixers import RWKV7Config
from lsm_jax.models import ModelConfig

LOW_RANK = dict(decay="w", rate="a", first="v", gate="g")
"""The letters of RWKV-7's low-rank functions, by their names here."""
MIXED = "rwkvag"
"""The order in which the shares of the token before are stored here."""
BLOCK: Names = {
    **{
        f"{ours}_norm.{part}": f"{theirs}_norm.{stored}"
        for ours, theirs in (("mixer", "attn"), ("feedforward", "ffn"))
        for part, stored in (("scale", "weight"), ("bias", "bias"))
    }
}
_TABLE: Names = {
    **fla.PROJECTIONS,
    "mixer.r_proj.kernel": "attn.r_proj.weight",
    **{
        f"mixer.{ours}.{part}": f"attn.{letter}_lora.lora.{stored}"
        for ours, letter in LOW_RANK.items()
        for part, stored in (("down.kernel", "0.weight"), ("up.kernel", "2.weight"), ("up.bias", "2.bias"))
    },
    "mixer.removal": "attn.k_k",
    "mixer.rate_of_key": "attn.k_a",
    "mixer.bonus": "attn.r_k",
    "mixer.norm.scale": "attn.g_norm.weight",
    "mixer.norm.bias": "attn.g_norm.bias",
}  # fmt: skip
_FEEDFORWARD: Names = {
    "feedforward.mix": "ffn.x_k",
    "feedforward.up_proj.kernel": "ffn.key.weight",
    "feedforward.down_proj.kernel": "ffn.value.weight",
}
_LAYER = fla.names(_TABLE, {**BLOCK, **_FEEDFORWARD})
UNUSED_IN_FIRST = ("mixer.first.down.kernel", "mixer.first.up.kernel", "mixer.first.up.bias")


def top(table: Names) -> Names:
    """Return the names of parameters outside the layers: those of FLA, and the norm of the embedding."""
    norm = "model.layers.0.pre_norm."
    return {
        **table,
        "embedding_norm.scale": f"{norm}weight",
        "embedding_norm.bias": f"{norm}bias",
    }


def inner_width(values: dict[str, Any], default: float) -> int:
    """Return the width of RWKV's channel mix as FLA computes it."""
    if values["intermediate_size"] is not None:
        return values["intermediate_size"]
    ratio = default if values["hidden_ratio"] is None else values["hidden_ratio"]
    return -(-int(values["hidden_size"] * ratio) // 32) * 32


def norms(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model's config that RWKV's norms have."""
    return dict(norm="layer", norm_bias=values["norm_bias"], embedding_norm=values["norm_first"])


def _config(values: dict[str, Any]) -> ModelConfig:
    width, heads, head_dim = values["hidden_size"], values["num_heads"], values["head_dim"]
    if head_dim is None:
        if heads is None:
            raise ValueError("head_dim=None and num_heads=None; accepted is a number for one")
        head_dim = width // heads
    if heads not in (None, width // head_dim):
        raise ValueError(f"num_heads={heads}: accepted is hidden_size / head_dim = {width / head_dim:g}")  # fmt: skip
    wide = values["value_dim"]
    if any(x not in (None, width) for x in (wide if isinstance(wide, list) else [wide])):
        raise ValueError(f"value_dim={wide}; accepted is hidden_size={width} in all layers")
    mixer = RWKV7Config(
        head_dim=head_dim,
        decay_rank=values["decay_low_rank_dim"],
        rate_rank=values["a_low_rank_dim"],
        value_rank=values["v_low_rank_dim"],
        gate_rank=values["gate_low_rank_dim"],
        norm_eps=head_dim * float(values["norm_eps"]),
    )
    inner = RWKV7ChannelMixConfig(intermediate_size=inner_width(values, 4))
    config = fla.decoder(values, mixer, inner, **norms(values))
    if config.letters()[0] != "L":
        raise ValueError("attn.layers has layer 0, whose values the other layers use; accepted are others")  # fmt: skip
    return config


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, RWKV7Config)
    ranks = mixer.ranks(config.hidden_size)
    return fields | dict(
        head_dim=mixer.head_dim,
        num_heads=None,
        decay_low_rank_dim=ranks["w"],
        a_low_rank_dim=ranks["a"],
        v_low_rank_dim=ranks["v"],
        gate_low_rank_dim=ranks["g"],
        norm_first=config.embedding_norm,
        norm_bias=config.norm_bias,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    table = _LAYER(values, config, layer)
    if layer < 0:
        return top(table)
    shares = Entry(tuple(f"attn.x_{x}" for x in MIXED), shape=(1, 1, config.hidden_size))
    table = {**table, **prefixed(f"model.layers.{layer}.", {"mixer.mix": shares})}
    return table | dict.fromkeys(UNUSED_IN_FIRST) if layer == 0 else table


FAMILY = fla.family(
    "rwkv7",
    "RWKV7ForCausalLM",
    kinds=dict(
        **dict.fromkeys(
            ("head_dim", "decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"), "size"
        ),
        norm_first="flag", norm_bias="flag",
    ),
    defaults=dict(
        num_heads=None, head_dim=64, decay_low_rank_dim=64, gate_low_rank_dim=128, a_low_rank_dim=64, v_low_rank_dim=16,
        norm_eps=1e-5, norm_first=True, norm_bias=True, value_dim=None,
    ),
    only=dict(hidden_act=("sqrelu",)),
    null_is_value=frozenset(
        ["head_dim", "decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "hidden_ratio"]
    ),
    sizes=("head_dim", "decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
