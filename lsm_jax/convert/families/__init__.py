"""The families of released models with linear layers, one module each: what their config.json means, and what their tensors
contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lsm_jax.convert.families import (
    abc_attention,
    bailing_hybrid,
    bamba,
    comba,
    delta_net,
    falcon_h1,
    gated_deltanet,
    gated_deltaproduct,
    gla,
    granite,
    gsa,
    hgrn,
    hgrn2,
    kda,
    kimi_linear,
    lfm2,
    lightnet,
    linear_attn,
    log_linear_mamba2,
    mamba,
    mamba2,
    mamba3,
    mesa_net,
    mla,
    moba,
    mom,
    nemotron_h,
    nsa,
    olmo_hybrid,
    path_attn,
    precond_gated_deltanet,
    precond_kda,
    qwen3_5,
    qwen3_next,
    recurrent_gemma,
    retnet,
    rwkv6,
    rwkv7,
    rwkv7_pth,
    xlstm,
)
from lsm_jax.convert.families.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        gla, retnet, delta_net, gated_deltanet, kda, hgrn2, gsa, linear_attn, mom, rwkv6, rwkv7, rwkv7_pth, mamba, mamba2,
        gated_deltaproduct, comba, precond_gated_deltanet, precond_kda, mesa_net, path_attn, moba, hgrn,
        lightnet, abc_attention, mamba3, nsa, mla, log_linear_mamba2,
        granite, bamba, nemotron_h, falcon_h1, lfm2, xlstm, qwen3_next, olmo_hybrid, kimi_linear,
        bailing_hybrid, recurrent_gemma,
    )
} | {family.model_type: family for family in qwen3_5.FAMILIES}  # fmt: skip
"""The families by `model_type`."""
MODEL_TYPES = tuple(sorted(set(FAMILIES) - {rwkv7_pth.FAMILY.model_type}))
"""The values of `model_type` in a config.json, which a .pth file of RWKV has not."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a model, given the contents of its config.json; None if it is none of `FAMILIES`."""
    kind = config.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "family_of"]
