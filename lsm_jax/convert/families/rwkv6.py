"""RWKV-6 of flash-linear-attention (`model_type` rwkv6)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla, rwkv7
from lsm_jax.convert.layout import Entry, Names
from lsm_jax.convert.load import Place, StoredRows
from lsm_jax.feedforward import RWKV6ChannelMixConfig
from lsm_jax.mixers import RWKV6Config
from lsm_jax.models import ModelConfig

_ORDER = tuple("rwkvg".index(x) for x in "wkvrg")
"""The place in FLA's tensors of each of the five interpolations, in the order of our parameters."""
_Placed = tuple[tuple[int, ...], Place]


def _transposed(name: str, shape: tuple[int, ...]) -> _Placed:
    """Return the shape and the place of a matrix that FLA stores transposed."""
    return shape[::-1], (((), StoredRows(name, True)),)


def _rows(name: str, shape: tuple[int, ...]) -> _Placed:
    """Return the shape and the place of the five vectors [5, D], which FLA stores in another order."""
    return shape, tuple(((i,), StoredRows(name, False, j, j + 1)) for i, j in enumerate(_ORDER))


def _down(name: str, shape: tuple[int, ...]) -> _Placed:
    """Return the shape and the place of five matrices side by side [D, 5 R], which FLA stores as [5 R, D] in another order."""
    rank = shape[1] // 5
    pieces = (
        ((slice(None), slice(i * rank, (i + 1) * rank)), j * rank) for i, j in enumerate(_ORDER)
    )
    return shape[::-1], tuple((at, StoredRows(name, True, j, j + rank)) for at, j in pieces)


def _up(name: str, shape: tuple[int, ...]) -> _Placed:
    """Return the shape and the place of five matrices [5, R, D], which FLA stores as [D, 5 R] in another order."""
    _, rank, width = shape
    pieces = ((i, (j * rank, (j + 1) * rank)) for i, j in enumerate(_ORDER))
    rows = tuple(((i,), StoredRows(name, True, columns=columns)) for i, columns in pieces)
    return (width, 5 * rank), rows


_TABLE: Names = {
    **{f"mixer.{x}_proj.kernel": f"attn.{x}_proj.linear.weight" for x in "rkvg"},
    "mixer.o_proj.kernel": "attn.o_proj.weight",
    "mixer.mix_all": "attn.x_proj.0.mu",
    "mixer.decay_bias": "attn.w_proj.linear.lora.2.bias",
    "mixer.bonus": "attn.bonus",
    "mixer.norm.scale": "attn.g_norm.weight",
    "mixer.norm.bias": "attn.g_norm.bias",
}
_MATRICES: Names = {
    "mixer.mix": Entry("attn.x_bias", place=_rows),
    "mixer.mix_down": Entry("attn.x_proj.0.linear.weight", place=_down),
    "mixer.mix_up": Entry("attn.x_proj.2.weight", place=_up),
    "mixer.decay_down": Entry("attn.w_proj.linear.lora.0.weight", place=_transposed),
    "mixer.decay_up": Entry("attn.w_proj.linear.lora.2.weight", place=_transposed),
}
_FEEDFORWARD: Names = {
    "feedforward.mix_k": "ffn.key.mu",
    "feedforward.mix_r": "ffn.receptance.mu",
    "feedforward.k_proj.kernel": "ffn.key.linear.weight",
    "feedforward.r_proj.kernel": "ffn.receptance.linear.weight",
    "feedforward.v_proj.kernel": "ffn.value.weight",
}
_LAYER = fla.names({**_TABLE, **_MATRICES}, {**rwkv7.BLOCK, **_FEEDFORWARD})


def _config(values: dict[str, Any]) -> ModelConfig:
    width, heads = values["hidden_size"], values["num_heads"]
    if values["expand_k"] != 1 or values["expand_v"] != 1:
        raise ValueError(
            f"expand_k={values['expand_k']}, expand_v={values['expand_v']}; accepted is 1 for both"
        )
    if width % heads:
        raise ValueError(f"num_heads={heads}: accepted are divisors of hidden_size={width}")
    mixer = RWKV6Config(
        head_dim=width // heads,
        mix_rank=values["proj_low_rank_dim"],
        decay_rank=values["gate_low_rank_dim"],
        norm_eps=float(values["norm_eps"]),
    )
    inner = RWKV6ChannelMixConfig(intermediate_size=rwkv7.inner_width(values, 3.5))
    return fla.decoder(values, mixer, inner, **rwkv7.norms(values))


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, RWKV6Config)
    return fields | dict(
        expand_k=1.0,
        expand_v=1.0,
        num_heads=config.hidden_size // mixer.head_dim,
        proj_low_rank_dim=mixer.mix_rank,
        gate_low_rank_dim=mixer.decay_rank,
        norm_first=config.embedding_norm,
        norm_bias=config.norm_bias,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    table = _LAYER(values, config, layer)
    return rwkv7.top(table) if layer < 0 else table


FAMILY = fla.family(
    "rwkv6",
    "RWKV6ForCausalLM",
    kinds=dict(
        expand_k="positive", expand_v="positive", proj_low_rank_dim="size", gate_low_rank_dim="size", norm_first="flag",
        norm_bias="flag",
    ),
    defaults=dict(
        num_heads=4, expand_k=0.5, expand_v=1.0, proj_low_rank_dim=32, gate_low_rank_dim=64, norm_eps=1e-5, norm_first=True,
        norm_bias=True, hidden_ratio=3.5,
    ),
    only=dict(hidden_act=("sqrelu",)),
    null_is_value=frozenset(["hidden_ratio"]),
    sizes=("proj_low_rank_dim", "gate_low_rank_dim"),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
