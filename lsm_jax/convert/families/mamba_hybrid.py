"""Fields and names that transformers' hybrids of Mamba-2 and softmax attention have in common: Granite-4.0-H, Bamba, Falcon-H1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lsm_jax.convert.families import mamba2
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Names
from lsm_jax.convert.published import read_rope
from lsm_jax.mixers import Mamba2Config, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

LINEAR, FULL = "linear_attention", "full_attention"
LAYER_TYPES = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}
"""The types of layers by their names in all versions of config.json."""
KINDS = {
    **dict.fromkeys(
        (
            "num_attention_heads", "num_key_value_heads", "intermediate_size", "mamba_n_heads", "mamba_n_groups", "mamba_d_state",
            "mamba_d_conv", "mamba_expand",
        ),
        "size",
    ),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), "positive"),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), "object"),
}  # fmt: skip
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=None, mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4,
    mamba_expand=2, tie_word_embeddings=False, rope_theta=None, rope_parameters=None, rope_scaling=None,
)  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = dict(
    hidden_act=("silu", "swish"), attention_bias=(False,), attention_dropout=(0.0,), mamba_conv_bias=(True,),
    mamba_proj_bias=(False,), time_step_limit=([0.0, math.inf],),
)  # fmt: skip
UNUSED = frozenset(["mamba_chunk_size", "num_logits_to_keep", "output_router_logits"])
SIZES = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "mamba_n_heads", "mamba_n_groups", "mamba_d_state",
    "mamba_d_conv",
)  # fmt: skip
ATTENTION: Names = {f"mixer.{x}_proj.kernel": f"self_attn.{x}_proj.weight" for x in "qkvo"}
MAMBA: Names = {f"mixer.{key[6:]}": f"mamba.{name}" for key, name in mamba2.MIXER.items()}


def mamba(values: Mapping[str, Any], inner: int | None = None, **fields: Any) -> Mamba2Config:
    """Return the config of a model's layers of Mamba-2.

    Args:
        values: the values of config.json.
        inner: number of inner channels; None is `mamba_expand` times the width.
        fields: further fields of the config.
    """
    total = values["mamba_expand"] * values["hidden_size"] if inner is None else inner
    heads, given = values["mamba_n_heads"], values["mamba_d_head"]
    if given not in ("auto", total / heads):
        raise ValueError(
            f"mamba_d_head={shown(given)}: accepted are 'auto' and the {total} inner channels / mamba_n_heads = {total / heads:g}"
        )
    if total % heads:
        raise ValueError(f"mamba_n_heads={heads}: accepted are divisors of {total}, the inner channels")  # fmt: skip
    return Mamba2Config(
        expand=values["mamba_expand"],
        inner_size=inner,
        head_dim=total // heads,
        state_size=values["mamba_d_state"],
        num_groups=values["mamba_n_groups"],
        conv_size=values["mamba_d_conv"],
        norm_eps=float(values["rms_norm_eps"]),
        **fields,
    )


def describe_mamba(mixer: Mamba2Config, width: int) -> dict[str, Any]:
    """Return the values of the fields that `mamba` reads, for a model of this width."""
    return dict(
        mamba_expand=mixer.expand,
        mamba_n_heads=mixer.num_heads(width),
        mamba_d_head=mixer.head_dim,
        mamba_d_state=mixer.state_size,
        mamba_n_groups=mixer.num_groups,
        mamba_d_conv=mixer.conv_size,
    )


def softmax(
    values: Mapping[str, Any], *, factor: float = 1.0, rotated: bool = True, **fields: Any
) -> SoftmaxConfig:
    """Return the config of a model's layers of softmax attention.

    Args:
        values: the values of config.json.
        factor: the part of a head's channels that is rotated; config.json may state it as `partial_rotary_factor`.
        rotated: whether there is a rotation.
        fields: further fields of the config.
    """
    names = ("rope_theta", "rope_scaling", "rope_parameters")
    rope = {name: dict(v) if isinstance(v := values[name], dict) else v for name in names}
    for place in (values, rope["rope_parameters"] or {}):
        if (given := place.get("partial_rotary_factor")) not in (None, factor):
            raise ValueError(f"partial_rotary_factor={shown(given)}; accepted is {factor}")
    (rope["rope_parameters"] or {}).pop("partial_rotary_factor", None)
    base, scaling = read_rope(rope, "rotation")
    config = SoftmaxConfig(
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        rope_base=base if rotated else None,
        rope_scaling=scaling if rotated else None,
        **fields,
    )
    if rotated and factor != 1:
        config.rotary_dim = int(factor * config.dim(values["hidden_size"]))
    return config


def describe_softmax(mixer: SoftmaxConfig) -> dict[str, Any]:
    """Return the values of the fields that `softmax` reads. A scaling of the rotation is not described, so that a model with one
    is refused."""
    return dict(
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.kv_heads(),
        rope_parameters=dict(rope_type="default", rope_theta=mixer.rope_base or 10000.0),
    )


def solve(function: Callable[[float], float], value: float, near: float) -> float:
    """Return the number x next to `near` with `function(x)` equal to a value, or `near` if rounding leaves none."""
    steps = (near, math.nextafter(near, math.inf), math.nextafter(near, 0.0))
    return next((x for x in steps if function(x) == value), near)


def layer_types(given: Any, count: int, name: str = "layer_types") -> list[str]:
    """Return the types of all layers, as today's names, from a list in config.json; None is Mamba-2 in all.

    Raises:
        ValueError: the list has another length or unknown types.
    """
    if given is None:
        return [LINEAR] * count
    known = isinstance(given, list) and all(isinstance(x, str) and x in LAYER_TYPES for x in given)
    if not known or len(given) != count:
        raise ValueError(f"{name}={shown(given)}; accepted is a list of {count}, each one of {', '.join(LAYER_TYPES)}")  # fmt: skip
    return [LAYER_TYPES[kind] for kind in given]


def decoder(
    values: Mapping[str, Any], types: Sequence[str], layers: Mapping[str, LayerConfig], **fields: Any
) -> ModelConfig:  # fmt: skip
    """Return the config of a hybrid. In its pattern, letter L is a layer of Mamba-2 and N one of softmax attention.

    Args:
        values: the values of config.json.
        types: the type of every layer, of `LAYER_TYPES`.
        layers: the config of the layers of each type.
        fields: further fields of the model's config.
    """
    pattern = "".join("N" if kind == FULL else "L" for kind in types)
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=len(pattern),
        pattern=pattern[0] if len(set(pattern)) == 1 else pattern,
        layers={letter: layers[FULL if letter == "N" else LINEAR] for letter in dict.fromkeys(pattern)},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["rms_norm_eps"]),
        **fields,
    )  # fmt: skip


def mixers_of(config: ModelConfig) -> dict[type, Any]:
    """Return the configs of a model's mixers by their classes.

    Raises:
        ValueError: two of a class differ.
    """
    found: dict[type, Any] = {}
    for letter in config.letters():
        mixer = config.layers[letter].mixer
        if found.setdefault(type(mixer), mixer) != mixer:
            raise ValueError(f"model.layers has several {type(mixer).__name__}s that differ; accepted are equal ones")  # fmt: skip
    return found


def describe_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the values of the fields that describe the mixers of all layers."""
    mixers, types = mixers_of(config), {Mamba2Config: LINEAR, SoftmaxConfig: FULL}
    if unknown := set(mixers) - set(types):
        names = ", ".join(sorted(kind.__name__ for kind in unknown))
        raise ValueError(f"model.layers has mixers of {names}; accepted are Mamba2Config and SoftmaxConfig")  # fmt: skip
    fields: dict[str, Any] = {}
    if Mamba2Config in mixers:
        fields |= describe_mamba(mixers[Mamba2Config], config.hidden_size)
    if SoftmaxConfig in mixers:
        fields |= describe_softmax(mixers[SoftmaxConfig])
    kinds = [types[type(config.layers[letter].mixer)] for letter in config.letters()]
    return fields | dict(layer_types=kinds, rms_norm_eps=config.norm_eps)


def mixer_names(config: ModelConfig, layer: int) -> Names:
    """Return the table of the mixer of a layer, without the layer's prefix."""
    attends = type(config.layers[config.letters()[layer]].mixer) is SoftmaxConfig
    return ATTENTION if attends else MAMBA
