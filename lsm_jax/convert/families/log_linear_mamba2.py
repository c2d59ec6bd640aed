"""Log-linear Mamba-2 of flash-linear-attention (`model_type` log_linear_mamba2), whose blocks have a SwiGLU."""

from __future__ import annotations

import math
from typing import Any

from lsm_jax.convert.families import fla, mamba, mamba2
from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import LogLinearMamba2Config
from lsm_jax.models import LayerConfig, ModelConfig

_LEVELS = 15  # of FLA's layer, whatever the length
_TOP: Names = {
    "embedding": "backbone.embeddings.weight",
    "norm.scale": "backbone.norm_f.weight",
    "lm_head.kernel": "lm_head.weight",
}
_TABLE: Names = {
    **{key: f"mixer.{name}" for key, name in mamba2.MIXER.items() if isinstance(name, str)},
    "mixer.level_scales.proj.kernel": "mixer.in_proj.weight",
    **{f"mixer.{x}_proj.bias": "mixer.in_proj.bias" for x in ("z", "x", "b", "c", "dt")},
    "mixer.level_scales.proj.bias": "mixer.in_proj.bias",
    "mixer.level_scales.gain": "mixer.L",
    "mixer.o_proj.bias": "mixer.out_proj.bias",
    **fla.BLOCK,
    "mixer_norm.scale": "mixer_norm.weight",
}


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    return _TOP if layer < 0 else prefixed(f"backbone.layers.{layer}.", _TABLE)


def _config(values: dict[str, Any]) -> ModelConfig:
    if not values["use_bias"] or values["use_conv_bias"]:
        raise ValueError(
            f"use_bias={values['use_bias']}, use_conv_bias={values['use_conv_bias']}; accepted are true and false, as in FLA's "
            "layer; its config's defaults are the opposite"
        )
    mixer = LogLinearMamba2Config(
        **mamba2.sizes(values),
        norm_eps=float(values["norm_eps"]),
        num_levels=_LEVELS,
    )
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        layers={"L": LayerConfig(mixer=mixer, feedforward=SwiGLUConfig())},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["norm_eps"]),
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer = the_mixer(config, LogLinearMamba2Config)
    if mixer.num_levels != _LEVELS:
        raise ValueError(f"num_levels={mixer.num_levels}; accepted for an export is {_LEVELS}")
    return dict(
        **mamba2.describe_sizes(mixer, config.hidden_size),
        norm_eps=config.norm_eps,
        use_bias=True,
        use_conv_bias=False,
    )


FAMILY = Family(
    model_type="log_linear_mamba2",
    architecture="LogLinearMamba2ForCausalLM",
    library=fla.LIBRARY,
    kinds=dict(
        expand="size", head_dim="size", num_heads="size", state_size="size", n_groups="size", conv_kernel="size",
        norm_eps="positive", use_bias="flag", use_conv_bias="flag",
    ),
    defaults=dict(
        expand=2, head_dim=64, num_heads=None, state_size=128, n_groups=1, conv_kernel=4, norm_eps=1e-5, use_bias=False,
        use_conv_bias=True, tie_word_embeddings=False,
    ),
    only=dict(
        hidden_act=("silu", "swish"), dt_limit=([0.0, math.inf],), rmsnorm=(True,), norm_before_gate=(False,),
        D_has_hdim=(False,), attnres_block_size=(None,),
    ),
    unused=mamba.UNUSED
    | {"A_init_range", "dt_init_floor", "dt_max", "dt_min", "intermediate_size"},
    sizes=("num_heads", "state_size", "n_groups", "conv_kernel", ("expand", "hidden_size")),
    prefix="backbone.layers.",
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
