"""Merge low-rank adapters (LoRA) into the projections to which they belong."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lsm_jax.mixers import LoRAConfig


def merge_adapters(params: dict[str, Any], lora: LoRAConfig | None) -> dict[str, Any]:
    """Return a model's parameters without adapters: each adapted kernel W becomes `W + (alpha / rank) A B`
    in float32, where A and B are the adapter's matrices.

    Args:
        params: the parameters of a model, with layers stacked or not.
        lora: the adapters' config, which has `rank` and `alpha`; None if there are none.
    """
    merged = {}
    for key, value in params.items():
        if isinstance(value, dict) and "lora" in value and lora is not None:
            a, b = value["lora"]["a"], value["lora"]["b"]
            product = jnp.matmul(a, b, precision="highest")
            kernel = value["kernel"].astype(jnp.float32) + lora.alpha / lora.rank * product
            value = {name: leaf for name, leaf in value.items() if name != "lora"} | dict(kernel=kernel)  # fmt: skip
        elif isinstance(value, dict):
            value = merge_adapters(value, lora)
        merged[key] = value
    return merged
