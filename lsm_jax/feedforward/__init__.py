"""Feedforwards: the layers between mixers that treat each token alone. Same call as a mixer's; a layer may have none."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lsm_jax.feedforward.moe import MoE, MoEConfig
from lsm_jax.feedforward.rwkv7_channel_mix import RWKV7ChannelMix, RWKV7ChannelMixConfig
from lsm_jax.feedforward.rwkv_channel_mix import RWKV6ChannelMix, RWKV6ChannelMixConfig
from lsm_jax.feedforward.swiglu import SwiGLU, SwiGLUConfig

FEEDFORWARDS: dict[str, tuple[type, Any]] = {
    "swiglu": (SwiGLUConfig, SwiGLU),
    "moe": (MoEConfig, MoE),
    "rwkv6_channel_mix": (RWKV6ChannelMixConfig, RWKV6ChannelMix),
    "rwkv7_channel_mix": (RWKV7ChannelMixConfig, RWKV7ChannelMix),
}
"""Config and module by name. A module takes `layer` and `num_layers` if it sets `uses_depth`, as a mixer does."""


def _module(config: Any) -> Any:
    for own, module in FEEDFORWARDS.values():
        if type(config) is own:
            return module
    known = ", ".join(own.__name__ for own, _ in FEEDFORWARDS.values())
    raise ValueError(
        f"feedforward={config!r} is no feedforward's config; accepted are None and {known}"
    )


def check(config: Any, hidden_size: int) -> None:
    """Raise ValueError unless `config` is a feedforward's, and valid at this width."""
    _module(config)
    config.validate(hidden_size)


def build(
    config: Any,
    hidden_size: int,
    *,
    rngs: nnx.Rngs,
    init_std: float = 0.02,
    layer: jax.Array | int = 0,
    num_layers: int = 1,
) -> Any:
    """The feedforward a config describes, at this width; `layer` and `num_layers` as in `lsm_jax.mixers.build`."""
    check(config, hidden_size)
    module = _module(config)
    depth = dict(layer=layer, num_layers=num_layers) if module.uses_depth else {}
    return module(config, hidden_size, rngs=rngs, init_std=init_std, **depth)


__all__ = [
    "FEEDFORWARDS",
    "MoE",
    "MoEConfig",
    "RWKV7ChannelMix",
    "RWKV7ChannelMixConfig",
    "RWKV6ChannelMix",
    "RWKV6ChannelMixConfig",
    "SwiGLU",
    "SwiGLUConfig",
    "build",
    "check",
]
