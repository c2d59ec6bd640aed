"""Mixture-of-Memories of flash-linear-attention (`model_type` mom): memories of Gated DeltaNet.

Its decoding from a state differs from its forward pass (version 0.6.0); here both are the forward pass.
"""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.mixers import GatedDeltaNetConfig, MoMConfig
from lsm_jax.models import ModelConfig

_LETTERS = dict(k_proj="k", v_proj="v", beta_proj="b", decay_proj="a")
_INNER = {
    **{
        key.replace("mixer.", "mixer.inner."): name
        for key, name in {**fla.PROJECTIONS, **fla.CONVOLUTIONS}.items()
    },
    "mixer.inner.dt_bias": "attn.dt_bias",
    "mixer.inner.a_log": "attn.A_log",
    "mixer.inner.norm.scale": "attn.o_norm.weight",
    "mixer.router.kernel": "attn.gate.weight",
}
_LAYER = fla.names(_INNER)


def _config(values: dict[str, Any]) -> ModelConfig:
    inner = GatedDeltaNetConfig(
        num_heads=values["num_heads"],
        head_dim=values["head_dim"],
        expand_v=float(values["expand_v"]),
        conv_size=values["conv_size"],
        norm_eps=float(values["norm_eps"]),
    )
    mixer = MoMConfig(
        mixer=inner,
        num_memories=values["num_memories"],
        top_k=values["topk"],
        shared_memory=values["shared_mem"],
        single_projections=values["single_kv_proj"],
        balance_scale=float(values["aux_loss_scale"]),
    )
    fla.check_base(values, "mom")
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, MoMConfig)
    inner = mixer.mixer
    if not isinstance(inner, GatedDeltaNetConfig):
        raise ValueError(
            f"the memories are of {type(inner).__name__}; accepted is GatedDeltaNetConfig"
        )
    return fields | dict(
        num_heads=inner.num_heads,
        head_dim=inner.head_dim,
        expand_v=inner.expand_v,
        conv_size=inner.conv_size,
        num_memories=mixer.num_memories,
        topk=mixer.top_k,
        shared_mem=mixer.shared_memory,
        single_kv_proj=mixer.single_projections,
        aux_loss_scale=mixer.balance_scale,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    table = _LAYER(values, config, layer)
    if layer < 0:
        return table
    parts: dict[str, str | Entry] = {}
    for part, letter in _LETTERS.items():
        shared = f"attn.shared_{letter}.weight"
        each = [f"attn.{letter}_proj.{i}.weight" for i in range(values["num_memories"])]
        stacked = tuple(each + [shared] * values["shared_mem"])
        single = values["single_kv_proj"]
        parts[f"mixer.inner.{part}.kernel"] = shared if single else Entry(stacked)
    return {**table, **prefixed(f"model.layers.{layer}.", parts)}


FAMILY = fla.family(
    "mom",
    "MomForCausalLM",
    kinds=dict(
        head_dim="size", expand_v="positive", conv_size="size", num_memories="size", topk="size", shared_mem="flag",
        single_kv_proj="flag", aux_loss_scale="number",
    ),
    defaults=dict(
        num_heads=4, head_dim=256, expand_v=1.0, conv_size=4, num_memories=4, topk=2, shared_mem=True, single_kv_proj=False,
        aux_loss_scale=0.01,
    ),
    only=dict(use_output_gate=(True,), use_short_conv=(True,), mom_backend=("gated_deltanet",)),
    unused=frozenset(["capacity", "use_layer_wise_balance"]),
    sizes=("conv_size", "num_memories", ("num_heads", "head_dim")),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
