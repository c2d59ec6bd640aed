"""Feedforwards: the layers after mixers, which treat each token alone (or with the token before it).

A feedforward is called with the same arguments as a mixer.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lsm_jax.feedforward.geglu import GeGLU, GeGLUConfig
from lsm_jax.feedforward.moe import MoE, MoEConfig
from lsm_jax.feedforward.relu2 import ReLU2, ReLU2Config
from lsm_jax.feedforward.rwkv7_channel_mix import RWKV7ChannelMix, RWKV7ChannelMixConfig
from lsm_jax.feedforward.rwkv_channel_mix import RWKV6ChannelMix, RWKV6ChannelMixConfig
from lsm_jax.feedforward.swiglu import SwiGLU, SwiGLUConfig

FEEDFORWARDS: dict[str, tuple[type, Any]] = {
    "swiglu": (SwiGLUConfig, SwiGLU),
    "geglu": (GeGLUConfig, GeGLU),
    "relu2": (ReLU2Config, ReLU2),
    "moe": (MoEConfig, MoE),
    "rwkv6_channel_mix": (RWKV6ChannelMixConfig, RWKV6ChannelMix),
    "rwkv7_channel_mix": (RWKV7ChannelMixConfig, RWKV7ChannelMix),
}
"""(config class, module class) by name. A module whose `uses_depth` is True has the arguments `layer` and
`num_layers`."""


def _module_class(config: Any) -> Any:
    for config_class, module_class in FEEDFORWARDS.values():
        if type(config) is config_class:
            return module_class
    accepted = ", ".join(config_class.__name__ for config_class, _ in FEEDFORWARDS.values())
    raise ValueError(
        f"feedforward={config!r} is not the config of a feedforward; accepted are None and {accepted}"
    )


def check(config: Any, hidden_size: int) -> None:
    """Raise ValueError unless `config` is the config of a feedforward (SwiGLU, mixture of experts, channel mix) and
    valid for a model of width `hidden_size`.
    """
    _module_class(config)
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
    """Build the feedforward layer that `config` describes, for a model of width `hidden_size`.

    `layer` is the layer's index and `num_layers` their number, on which the initial parameters of some feedforwards
    depend.
    """
    check(config, hidden_size)
    module_class = _module_class(config)
    depth = dict(layer=layer, num_layers=num_layers) if module_class.uses_depth else {}
    return module_class(config, hidden_size, rngs=rngs, init_std=init_std, **depth)


__all__ = [
    "FEEDFORWARDS",
    "GeGLU",
    "GeGLUConfig",
    "MoE",
    "MoEConfig",
    "ReLU2",
    "ReLU2Config",
    "RWKV7ChannelMix",
    "RWKV7ChannelMixConfig",
    "RWKV6ChannelMix",
    "RWKV6ChannelMixConfig",
    "SwiGLU",
    "SwiGLUConfig",
    "build",
    "check",
]
