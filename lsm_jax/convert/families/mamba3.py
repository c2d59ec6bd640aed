"""Mamba-3 of flash-linear-attention (`model_type` mamba3), with one or several writes and reads for each token. Its rate is the
softplus of a projection. FLA has no code of its own for the recurrence: it calls the package mamba_ssm."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla, mamba, mamba2
from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.mixers import Mamba3Config, Mamba3MIMOConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    "mixer_norm.scale": "norm.weight",
    **{
        f"mixer.{x}_proj.kernel": "mixer.in_proj.weight"
        for x in ("z", "x", "b", "c", "dt", "rate", "trapezoid", "angle")
    },
    "mixer.dt_bias": "mixer.dt_bias",
    "mixer.b_bias": "mixer.B_bias",
    "mixer.c_bias": "mixer.C_bias",
    "mixer.b_norm.scale": "mixer.B_norm.weight",
    "mixer.c_norm.scale": "mixer.C_norm.weight",
    **{f"mixer.mimo_{x}": f"mixer.mimo_{x}" for x in "xzo"},
    "mixer.skip": "mixer.D",
    "mixer.norm.scale": "mixer.norm.weight",
    "mixer.o_proj.kernel": "mixer.out_proj.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    kind, ranks = Mamba3Config, {}
    if values["is_mimo"]:
        kind, ranks = Mamba3MIMOConfig, dict(mimo_rank=values["mimo_rank"])
    mixer = kind(
        **mamba2.sizes(values),
        rope_fraction=float(values["rope_fraction"]),
        rate="softplus",
        output_norm=values["is_outproj_norm"],
        norm_eps=float(values["norm_eps"]),
        **ranks,
    )
    return mamba.decoder(values | dict(layer_norm_epsilon=values["norm_eps"]), mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    kind = type(config.layers[config.letters()[0]].mixer)
    mixer = the_mixer(config, kind if kind is Mamba3MIMOConfig else Mamba3Config)
    return dict(
        **mamba2.describe_sizes(mixer, config.hidden_size),
        rope_fraction=mixer.rope_fraction,
        is_outproj_norm=mixer.output_norm,
        is_mimo=mixer.mimo_rank is not None,
        mimo_rank=4 if mixer.mimo_rank is None else mixer.mimo_rank,
        norm_eps=config.norm_eps,
    )


FAMILY = Family(
    model_type="mamba3",
    architecture="Mamba3ForCausalLM",
    library=fla.LIBRARY,
    kinds=dict(
        expand="size", head_dim="size", num_heads="size", state_size="size", n_groups="size", mimo_rank="size",
        norm_eps="positive", is_mimo="flag", is_outproj_norm="flag",
    ),
    defaults=dict(
        expand=2, head_dim=64, num_heads=None, state_size=128, n_groups=1, norm_eps=1e-5, is_mimo=False, mimo_rank=4,
        is_outproj_norm=False, tie_word_embeddings=False,
    ),
    only=dict(rope_fraction=(0.5, 1.0), use_bias=(False,), A_floor=(1e-4,), hidden_act=("silu", "swish")),
    unused=mamba.UNUSED | {"dt_init_floor", "dt_max", "dt_min"},
    sizes=("num_heads", "state_size", "n_groups", ("expand", "hidden_size")),
    prefix="backbone.layers.",
    config=_config,
    names=mamba.names(_TABLE),
    describe=_describe,
)  # fmt: skip
