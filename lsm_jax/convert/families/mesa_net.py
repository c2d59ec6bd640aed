"""MesaNet of flash-linear-attention (`model_type` mesa_net)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.layout import Entry, Names
from lsm_jax.mixers import MesaNetConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    **{f"mixer.{x}_conv.weight": f"attn.{x}_conv1d.weight" for x in "qk"},
    **{
        f"mixer.{ours}_proj.{part}": f"attn.{theirs}_proj.{stored}"
        for ours, theirs in (("beta", "b"), ("decay", "a"))
        for part, stored in (("kernel", "weight"), ("bias", "bias"))
    },
    "mixer.norm.scale": "attn.o_norm.weight",
}


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    """Return the table of a layer; the regularisers of all heads are one vector in the file."""
    size = values["num_heads"] * values["head_dim"]
    regularizer = Entry("attn.lambda_params", shape=(size,))
    return fla.names({**_TABLE, "mixer.regularizer": regularizer})(values, config, layer)


def _config(values: dict[str, Any]) -> ModelConfig:
    mixer = MesaNetConfig(
        num_heads=values["num_heads"],
        head_dim=values["head_dim"],
        conv_size=values["conv_size"],
        steps=values["max_cg_step_training"],
        least_regularizer=float(values["lambda_lower_bound"]),
        output_gate=values["use_output_gate"],
        norm_eps=float(values["norm_eps"]),
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, MesaNetConfig)
    return fields | dict(
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        conv_size=mixer.conv_size,
        max_cg_step_training=mixer.steps,
        lambda_lower_bound=mixer.least_regularizer,
        use_output_gate=mixer.output_gate,
    )


# FLA's layer has convolutions whatever `use_short_conv` says. Its steps of decoding start elsewhere than those of training; ours
# are the same (see `lsm_jax.ops.mesa`).
FAMILY = fla.family(
    "mesa_net",
    "MesaNetForCausalLM",
    kinds=dict(
        head_dim="size", conv_size="size", max_cg_step_training="size", lambda_lower_bound="positive", use_output_gate="flag",
    ),
    defaults=dict(
        num_heads=16, head_dim=128, conv_size=4, max_cg_step_training=30, lambda_lower_bound=0.25, use_output_gate=False,
    ),
    only={},
    unused=frozenset({"max_cg_step_decoding", "use_short_conv"}),
    sizes=("conv_size", ("num_heads", "head_dim")),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
