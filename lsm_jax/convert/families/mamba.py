"""Mamba of transformers and of flash-linear-attention (`model_type` mamba), whose tensors have the same names."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.mixers import MambaConfig
from lsm_jax.models import LayerConfig, ModelConfig

TOP: Names = {
    "embedding": "backbone.embeddings.weight",
    "norm.scale": "backbone.norm_f.weight",
    "lm_head.kernel": "lm_head.weight",
}
UNUSED = frozenset(
    """
    chunk_size conv_init fuse_cross_entropy fuse_linear_cross_entropy fuse_norm rescale_prenorm_residual residual_in_fp32
    time_step_floor time_step_init_scheme time_step_max time_step_min time_step_scale use_l2warp
    """.split()
)
"""Fields about initialisation and precision."""
RENAMED = dict(
    norm_eps="layer_norm_epsilon",
    dt_init_floor="time_step_floor",
    dt_init_scheme="time_step_init_scheme",
    dt_limit="time_step_limit",
    dt_max="time_step_max",
    dt_min="time_step_min",
    dt_rank="time_step_rank",
    dt_scale="time_step_scale",
)
"""Names of fields in flash-linear-attention, and those in transformers."""
_TABLE: Names = {
    "mixer_norm.scale": "norm.weight",
    "mixer.x_proj.kernel": "mixer.in_proj.weight",
    "mixer.z_proj.kernel": "mixer.in_proj.weight",
    "mixer.conv.weight": "mixer.conv1d.weight",
    "mixer.conv.bias": "mixer.conv1d.bias",
    "mixer.dt_down.kernel": "mixer.x_proj.weight",
    "mixer.b_proj.kernel": "mixer.x_proj.weight",
    "mixer.c_proj.kernel": "mixer.x_proj.weight",
    "mixer.dt_up.kernel": "mixer.dt_proj.weight",
    "mixer.dt_bias": "mixer.dt_proj.bias",
    "mixer.a_log": "mixer.A_log",
    "mixer.skip": "mixer.D",
    "mixer.o_proj.kernel": "mixer.out_proj.weight",
}


_AGAIN = dict(d_model="hidden_size", n_layer="num_hidden_layers", d_inner="intermediate_size")
"""Fields that the released models of state-spaces have a second time, by the names of mamba_ssm."""


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json without the fields that are there a second time."""
    given = dict(given)
    for name, usual in _AGAIN.items():
        value = given.pop(name, None)
        if value is not None and given.get(usual) not in (None, value):
            raise ValueError(f"{name}={shown(value)}; accepted is {usual}={shown(given[usual])}")
        if value is not None:
            given[usual] = value
    return given


def _config(values: dict[str, Any]) -> ModelConfig:
    width, inner = values["hidden_size"], values["intermediate_size"]
    if inner not in (None, values["expand"] * width):
        raise ValueError(
            f"intermediate_size={inner}; accepted is expand * hidden_size = {values['expand'] * width}"
        )
    given, usual = values["time_step_rank"], -(-width // 16)
    rank = usual if given == "auto" else given
    if type(rank) is not int or rank < 1:
        raise ValueError(f"time_step_rank={shown(given)}; accepted are 'auto' and numbers from 1")
    mixer = MambaConfig(
        expand=values["expand"],
        state_size=values["state_size"],
        step_rank=None if rank == usual else rank,
        conv_size=values["conv_kernel"],
    )
    return decoder(values, mixer)


def decoder(values: dict[str, Any], mixer: Any) -> ModelConfig:
    """Return the config of a model of Mamba or Mamba-2."""
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        layers={"L": LayerConfig(mixer=mixer, feedforward=None)},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["layer_norm_epsilon"]),
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer = the_mixer(config, MambaConfig)
    rank = mixer.rank(config.hidden_size)
    return dict(
        expand=mixer.expand,
        intermediate_size=mixer.expand * config.hidden_size,
        state_size=mixer.state_size,
        time_step_rank=rank,
        conv_kernel=mixer.conv_size,
        layer_norm_epsilon=config.norm_eps,
    )


def names(table: Names) -> Any:
    """Return the function `Family.names` of a model of Mamba or Mamba-2."""

    def of_layer(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
        return TOP if layer < 0 else prefixed(f"backbone.layers.{layer}.", table)

    return of_layer


FAMILY = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    library="transformers",
    kinds=dict(
        expand="size", intermediate_size="size", state_size="size", conv_kernel="size", layer_norm_epsilon="positive",
    ),
    defaults=dict(
        expand=2, intermediate_size=None, state_size=16, conv_kernel=4, layer_norm_epsilon=1e-5, time_step_rank="auto",
        tie_word_embeddings=True,
    ),
    only=dict(hidden_act=("silu", "swish"), use_bias=(False,), use_conv_bias=(True,), rms_norm=(True,), ssm_cfg=({}, None)),
    unused=UNUSED | {"fused_add_norm", "pad_vocab_size_multiple", "use_associative_scan", "use_mambapy"},
    read=_read,
    renamed=RENAMED,
    sizes=("state_size", "conv_kernel", ("expand", "hidden_size")),
    prefix="backbone.layers.",
    config=_config,
    names=names(_TABLE),
    describe=_describe,
)  # fmt: skip
