"""Native sparse attention of flash-linear-attention (`model_type` nsa)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import NSAConfig
from lsm_jax.models import ModelConfig

_TABLE = {**fla.PROJECTIONS, "mixer.gate_proj.kernel": "attn.g_proj.weight"}


def _config(values: dict[str, Any]) -> ModelConfig:
    theta = values["rope_theta"]
    mixer = NSAConfig(
        num_heads=values["num_heads"],
        num_kv_heads=values["num_kv_heads"],
        head_dim=values["head_dim"],
        qkv_bias=values["qkv_bias"],
        rope_base=10000.0 if theta is None else float(theta),
        block_size=values["block_size"],
        num_blocks=values["block_counts"],
        window=values["window_size"],
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, NSAConfig, softmax=False)
    queries = mixer.num_heads // mixer.kv_heads()
    if queries < 16 or queries & (queries - 1):
        raise ValueError(
            f"NSAConfig.num_heads={mixer.num_heads}; accepted for an export are num_kv_heads={mixer.kv_heads()} times a power of 2 "
            "from 16, which FLA's kernels require"
        )
    return fields | dict(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.kv_heads(),
        head_dim=mixer.head_dim,
        qkv_bias=mixer.qkv_bias,
        rope_theta=mixer.rope_base,
        block_size=mixer.block_size,
        block_counts=mixer.num_blocks,
        window_size=mixer.window,
    )


FAMILY = fla.family(
    "nsa",
    "NSAForCausalLM",
    kinds=dict(
        num_kv_heads="size", head_dim="size", block_size="size", block_counts="size", window_size="size", rope_theta="positive",
        qkv_bias="flag",
    ),
    defaults=dict(
        num_heads=64, num_kv_heads=4, head_dim=32, block_size=64, block_counts=16, window_size=512, rope_theta=10000.0,
        qkv_bias=False,
    ),
    only={},
    sizes=("num_kv_heads", ("num_heads", "head_dim")),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
