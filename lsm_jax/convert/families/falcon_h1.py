"""Falcon-H1 of transformers (`model_type` falcon_h1): Mamba-2 and softmax attention side by side in every layer, with constant
multipliers of most projections."""

from __future__ import annotations

import math
from typing import Any

from lsm_jax.convert.families import mamba_hybrid as hybrid
from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import Mamba2Config, ParallelConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

_SCALARS = (
    "lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
    "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
_TABLE: Names = {
    "mixer_norm.scale": "input_layernorm.weight",
    "feedforward_norm.scale": "pre_ff_layernorm.weight",
    **{f"feedforward.{x}_proj.kernel": f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"mixer.first.{key.removeprefix('mixer.')}": name for key, name in hybrid.MAMBA.items()},
    **{f"mixer.second.{key.removeprefix('mixer.')}": name for key, name in hybrid.ATTENTION.items()},
}  # fmt: skip
_TOP: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.final_layernorm.weight",
    "lm_head.kernel": "lm_head.weight",
}


def _multipliers(values: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """Return the numbers of a field that has a list of them, or null for ones."""
    given = [1.0] * count if values[name] is None else values[name]
    numbers = isinstance(given, list) and all(type(x) in (int, float) and math.isfinite(x) and x > 0 for x in given)  # fmt: skip
    if not numbers or len(given) != count:
        raise ValueError(f"{name}={shown(given)}; accepted is a list of {count} numbers above 0")
    return tuple(float(x) for x in given)


def _config(values: dict[str, Any]) -> ModelConfig:
    gate, down = _multipliers(values, "mlp_multipliers", 2)
    order = "before_gate" if values["mamba_norm_before_gate"] else "after_gate"
    first = hybrid.mamba(
        values,
        inner=values["mamba_d_ssm"],
        norm=order if values["mamba_rms_norm"] else "none",
        projection_scales=_multipliers(values, "ssm_multipliers", 5),
    )
    second = hybrid.softmax(values, head_dim=values["head_dim"])
    second.scale = values["key_multiplier"] * second.dim(values["hidden_size"]) ** -0.5
    mixer = ParallelConfig(
        first=first,
        second=second,
        input_scales=(float(values["ssm_in_multiplier"]), float(values["attention_in_multiplier"])),
        output_scales=(float(values["ssm_out_multiplier"]), float(values["attention_out_multiplier"])),
    )  # fmt: skip
    inner = SwiGLUConfig(
        intermediate_size=values["intermediate_size"], gate_scale=gate, output_scale=down
    )
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        layers={"L": LayerConfig(mixer=mixer, feedforward=inner)},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["rms_norm_eps"]),
        embedding_scale=float(values["embedding_multiplier"]),
        logits_scale=float(values["lm_head_multiplier"]),
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer = the_mixer(config, ParallelConfig)
    mamba, softmax = mixer.first, mixer.second
    inner = config.layers[config.letters()[0]].feedforward
    if not (isinstance(mamba, Mamba2Config) and isinstance(softmax, SoftmaxConfig)):
        raise ValueError(
            f"ParallelConfig has {type(mamba).__name__} and {type(softmax).__name__}; accepted are Mamba2Config and SoftmaxConfig"
        )
    if not isinstance(inner, SwiGLUConfig):
        raise ValueError("model.layers has other feedforwards than SwiGLU; accepted is SwiGLU")
    width = config.hidden_size
    root = softmax.dim(width) ** -0.5
    scale = root if softmax.scale is None else softmax.scale
    fields = hybrid.describe_mamba(mamba, width) | hybrid.describe_softmax(softmax)
    return fields | dict(
        mamba_d_ssm=mamba.inner(width),
        mamba_rms_norm=mamba.norm != "none",
        mamba_norm_before_gate=mamba.norm != "after_gate",
        ssm_multipliers=list(mamba.projection_scales),
        head_dim=softmax.dim(width),
        key_multiplier=hybrid.solve(lambda key: key * root, scale, scale / root),
        ssm_in_multiplier=mixer.input_scales[0],
        attention_in_multiplier=mixer.input_scales[1],
        ssm_out_multiplier=mixer.output_scales[0],
        attention_out_multiplier=mixer.output_scales[1],
        mlp_multipliers=[inner.gate_scale, inner.output_scale],
        intermediate_size=inner.width(width),
        embedding_multiplier=config.embedding_scale,
        lm_head_multiplier=config.logits_scale,
        rms_norm_eps=config.norm_eps,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    return _TOP if layer < 0 else prefixed(f"model.layers.{layer}.", _TABLE)


FAMILY = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    library="transformers",
    kinds=hybrid.KINDS | dict(
        **dict.fromkeys(_SCALARS, "positive"), mamba_d_ssm="size", head_dim="size", mamba_norm_before_gate="flag",
        mamba_rms_norm="flag",
    ),
    defaults=hybrid.DEFAULTS | dict(
        **dict.fromkeys(_SCALARS, 1.0), rms_norm_eps=1e-5, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        mamba_d_ssm=1024, head_dim=None, mamba_norm_before_gate=True, mamba_rms_norm=False, mlp_multipliers=None,
        ssm_multipliers=None,
    ),
    only=hybrid.ONLY | dict(
        mlp_bias=(False,), projectors_bias=(False,), attn_layer_indices=(None,), mamba_use_mlp=(True,),
    ),
    unused=hybrid.UNUSED | {
        "mlp_expansion_factor", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank",
    },
    null_is_value=frozenset(["mamba_d_ssm", "num_key_value_heads"]),
    sizes=(*hybrid.SIZES, "mamba_d_ssm", ("num_attention_heads", "head_dim")),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
