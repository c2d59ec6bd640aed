"""Mamba-2 of transformers and of flash-linear-attention (`model_type` mamba2), whose tensors have the same names."""

from __future__ import annotations

import math
from typing import Any

from lsm_jax.convert.families import mamba
from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.layout import Names
from lsm_jax.mixers import Mamba2Config
from lsm_jax.models import ModelConfig

MIXER: Names = {
    **{f"mixer.{x}_proj.kernel": "in_proj.weight" for x in ("z", "x", "b", "c", "dt")},
    **{f"mixer.{x}_conv.weight": "conv1d.weight" for x in "xbc"},
    **{f"mixer.{x}_conv.bias": "conv1d.bias" for x in "xbc"},
    "mixer.dt_bias": "dt_bias",
    "mixer.a_log": "A_log",
    "mixer.skip": "D",
    "mixer.norm_scale": "norm.weight",
    "mixer.o_proj.kernel": "out_proj.weight",
}
"""The names of the mixer's tensors, which other families use too."""


SIZES = dict(
    expand="expand",
    head_dim="head_dim",
    state_size="state_size",
    n_groups="num_groups",
    conv_kernel="conv_size",
)
"""The fields that Mamba-2, Mamba-3 (without a convolution) and log-linear Mamba-2 share, each with that of the mixer's config."""


def sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the mixer's config that `SIZES` names and `values` has.

    Raises:
        ValueError: `num_heads` is given and is not the number of heads of the inner width.
    """
    inner, heads = values["expand"] * values["hidden_size"], values["num_heads"]
    if heads is not None and heads * values["head_dim"] != inner:
        raise ValueError(
            f"num_heads={heads}: accepted is expand * hidden_size / head_dim = {inner / values['head_dim']:g}"
        )
    return {ours: values[theirs] for theirs, ours in SIZES.items() if theirs in values}


def describe_sizes(mixer: Any, hidden_size: int) -> dict[str, Any]:
    """Return the fields that `sizes` reads, of the config of a mixer in a model of width `hidden_size`."""
    fields = {theirs: getattr(mixer, ours) for theirs, ours in SIZES.items() if hasattr(mixer, ours)}  # fmt: skip
    return fields | dict(num_heads=mixer.num_heads(hidden_size))


_OF_FLA = frozenset(["norm_eps", "rmsnorm", "dt_limit"])
"""Fields that flash-linear-attention writes, and transformers by other names."""


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json without `norm_before_gate` of transformers' files, whose code does not read it."""
    given = dict(given)
    if "layer_norm_epsilon" in given and not _OF_FLA & set(given):
        given.pop("norm_before_gate", None)
    return given


def _config(values: dict[str, Any]) -> ModelConfig:
    inner = values["expand"] * values["hidden_size"]
    if values["intermediate_size"] not in (None, inner):
        raise ValueError(
            f"intermediate_size={values['intermediate_size']}; accepted is expand * hidden_size = {inner}"
        )
    mixer = Mamba2Config(**sizes(values), norm_eps=float(values["layer_norm_epsilon"]))
    return mamba.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer = the_mixer(config, Mamba2Config)
    return dict(
        **describe_sizes(mixer, config.hidden_size),
        layer_norm_epsilon=config.norm_eps,
    )


FAMILY = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    library="transformers",
    kinds=dict(
        expand="size", head_dim="size", num_heads="size", state_size="size", n_groups="size", conv_kernel="size",
        layer_norm_epsilon="positive", intermediate_size="size",
    ),
    defaults=dict(
        expand=2, intermediate_size=None, head_dim=64, num_heads=None, state_size=128, conv_kernel=4, layer_norm_epsilon=1e-5,
        tie_word_embeddings=False,
    ),
    only=dict(
        hidden_act=("silu", "swish"), use_bias=(False,), use_conv_bias=(True,), time_step_limit=([0.0, math.inf],),
        rms_norm=(True,), norm_before_gate=(False,), D_has_hdim=(False,),
    ),
    required=("n_groups",),
    unused=mamba.UNUSED | {"A_init_range", "time_step_rank"},
    renamed=mamba.RENAMED | dict(rmsnorm="rms_norm"),
    sizes=("num_heads", "state_size", "n_groups", "conv_kernel", ("expand", "hidden_size")),
    read=_read,
    prefix="backbone.layers.",
    config=_config,
    names=mamba.names(
        {"mixer_norm.scale": "norm.weight", **{key: f"mixer.{name}" for key, name in MIXER.items()}}
    ),
    describe=_describe,
)  # fmt: skip
