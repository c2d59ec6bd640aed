"""RWKV-7 from its authors' files (`lsm_jax.convert.rwkv_file`), by their names."""

from __future__ import annotations

import dataclasses
from typing import Any

from lsm_jax.convert.families import rwkv7
from lsm_jax.convert.families.family import Family
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.convert.load import StoredRows
from lsm_jax.models import ModelConfig

GROUP_NORM_EPS = 64e-5
"""The epsilon of the norm of heads in the authors' code, whatever the heads' size."""
_TOP: Names = {
    "embedding": "emb.weight",
    "embedding_norm.scale": "blocks.0.ln0.weight",
    "embedding_norm.bias": "blocks.0.ln0.bias",
    "norm.scale": "ln_out.weight",
    "norm.bias": "ln_out.bias",
    "lm_head.kernel": "head.weight",
}
_MATRICES = dict(r="receptance", k="key", v="value", o="output")
_LAYER: Names = {
    **{
        f"{ours}_norm.{part}": f"{theirs}.{stored}"
        for ours, theirs in (("mixer", "ln1"), ("feedforward", "ln2"))
        for part, stored in (("scale", "weight"), ("bias", "bias"))
    },
    **{f"mixer.{x}_proj.kernel": f"att.{name}.weight" for x, name in _MATRICES.items()},
    "mixer.bonus": "att.r_k",
    "mixer.norm.scale": "att.ln_x.weight",
    "mixer.norm.bias": "att.ln_x.bias",
    "feedforward.up_proj.kernel": "ffn.key.weight",
    "feedforward.down_proj.kernel": "ffn.value.weight",
}


def _vector(name: str, width: int) -> Entry:
    """Return the entry of a vector that is stored as [1, 1, width]."""
    return Entry(name, shape=(1, 1, width))


def _matrix(name: str) -> Entry:
    """Return the entry of a matrix that is stored as [in, out]."""
    return Entry(name, place=lambda tensor, shape: (shape, (((), StoredRows(tensor)),)))


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    width, absent = config.hidden_size, layer == 0 and not values["first_layer_values"]
    table: dict[str, str | Entry | None] = dict(_LAYER)
    for ours, letter in rwkv7.LOW_RANK.items():
        table[f"mixer.{ours}.down.kernel"] = _matrix(f"att.{letter}1")
        table[f"mixer.{ours}.up.kernel"] = _matrix(f"att.{letter}2")
        table[f"mixer.{ours}.up.bias"] = _vector(f"att.{letter}0", width)
    shares = tuple(f"att.x_{x}" for x in rwkv7.MIXED)
    table["mixer.mix"] = Entry(shares, shape=(1, 1, width))
    for key, name in (("mixer.removal", "att.k_k"), ("mixer.rate_of_key", "att.k_a"), ("feedforward.mix", "ffn.x_k")):  # fmt: skip
        table[key] = _vector(name, width)
    named = prefixed(f"blocks.{layer}.", table)
    return {**named, **dict.fromkeys(rwkv7.UNUSED_IN_FIRST)} if absent else named


def _config(values: dict[str, Any]) -> ModelConfig:
    config = rwkv7.FAMILY.config(values)
    layer = config.layers["L"]
    mixer = dataclasses.replace(layer.mixer, norm_eps=GROUP_NORM_EPS)
    config.layers["L"] = dataclasses.replace(layer, mixer=mixer)
    return config


def _describe(config: ModelConfig) -> dict[str, Any]:
    raise ValueError("the authors' format is not written; accepted is rwkv7, that of flash-linear-attention")  # fmt: skip


FAMILY = Family(
    model_type="rwkv7-pth",
    architecture="RWKV7ForCausalLM",
    library="RWKV-LM",
    kinds={**rwkv7.FAMILY.kinds, "first_layer_values": "flag"},
    defaults={**rwkv7.FAMILY.defaults, "tie_word_embeddings": False, "first_layer_values": True},
    null_is_value=rwkv7.FAMILY.null_is_value,
    sizes=rwkv7.FAMILY.sizes,
    prefix="blocks.",
    config=_config,
    names=_names,
    describe=_describe,
)
