"""MoBA of flash-linear-attention (`model_type` moba)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import MoBAConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    "mixer.gate_down.kernel": "attn.g_proj.0.weight",
    "mixer.gate_up.kernel": "attn.g_proj.1.weight",
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    theta, heads = values["rope_theta"], values["num_heads"]
    # FLA's selection of blocks has a head of keys for each head of queries, and with one block it attends to all tokens.
    if values["num_kv_heads"] not in (None, heads):
        raise ValueError(
            f"num_kv_heads={values['num_kv_heads']}: accepted are null and num_heads={heads}"
        )
    if values["moba_topk"] < 2:
        raise ValueError("moba_topk=1: accepted are numbers from 2")
    mixer = MoBAConfig(
        num_heads=heads,
        num_kv_heads=values["num_kv_heads"],
        qkv_bias=values["qkv_bias"],
        rope_base=10000.0 if theta is None else float(theta),
        block_size=values["moba_chunk_size"],
        num_blocks=values["moba_topk"],
        output_gate=values["use_output_gate"],
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, MoBAConfig, softmax=False)
    if mixer.kv_heads() != mixer.num_heads:
        raise ValueError(
            f"MoBAConfig.num_kv_heads={mixer.num_kv_heads}; accepted for an export are None and num_heads={mixer.num_heads}"
        )
    if mixer.num_blocks < 2:
        raise ValueError(
            f"MoBAConfig.num_blocks={mixer.num_blocks}; accepted for an export are numbers from 2"
        )
    return fields | dict(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        qkv_bias=mixer.qkv_bias,
        rope_theta=mixer.rope_base,
        moba_chunk_size=mixer.block_size,
        moba_topk=mixer.num_blocks,
        use_output_gate=mixer.output_gate,
    )


FAMILY = fla.family(
    "moba",
    "MoBAForCausalLM",
    kinds=dict(
        num_kv_heads="size", moba_chunk_size="size", moba_topk="size", rope_theta="positive", qkv_bias="flag",
        use_output_gate="flag",
    ),
    defaults=dict(
        num_heads=32, num_kv_heads=None, moba_chunk_size=256, moba_topk=4, rope_theta=10000.0, qkv_bias=False,
        use_output_gate=False,
    ),
    only=dict(attn=(None,), qk_norm=(False,), window_size=(None,)),
    unused=frozenset({"use_flash_moba"}),
    sizes=("num_kv_heads",),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
