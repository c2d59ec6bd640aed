"""LFM2 of transformers (`model_type` lfm2): gated short convolutions, and softmax attention with normalised queries and keys."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import mamba_hybrid as hybrid
from lsm_jax.convert.families.family import Family
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import ShortConvConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

_CONV, _FULL = "conv", "full_attention"
_TOP: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.embedding_norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_BLOCK: Names = {
    "mixer_norm.scale": "operator_norm.weight",
    "feedforward_norm.scale": "ffn_norm.weight",
    "feedforward.gate_proj.kernel": "feed_forward.w1.weight",
    "feedforward.up_proj.kernel": "feed_forward.w3.weight",
    "feedforward.down_proj.kernel": "feed_forward.w2.weight",
}
_MIXERS: dict[str, Names] = {
    _CONV: {
        **{f"mixer.{x}_proj.kernel": "conv.in_proj.weight" for x in "bcx"},
        "mixer.conv.weight": "conv.conv.weight",
        "mixer.o_proj.kernel": "conv.out_proj.weight",
    },
    _FULL: {
        **{f"mixer.{x}_proj.kernel": f"self_attn.{x}_proj.weight" for x in "qkv"},
        "mixer.q_norm.scale": "self_attn.q_layernorm.weight",
        "mixer.k_norm.scale": "self_attn.k_layernorm.weight",
        "mixer.o_proj.kernel": "self_attn.out_proj.weight",
    },
}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json with today's names of fields. As in transformers, a field by its old name counts, also
    where config.json has it by both."""
    renamed = dict(block_ff_dim="intermediate_size", tie_embedding="tie_word_embeddings")
    old = {new: given[name] for name, new in renamed.items() if name in given}
    return {name: value for name, value in given.items() if name not in renamed} | old


def _types(values: dict[str, Any]) -> list[str]:
    """Return the types of all layers: those of `layer_types`, or attention in `full_attn_idxs`, by default in all."""
    given, count = values["layer_types"], values["num_hidden_layers"]
    if given is None:
        full = range(count) if values["full_attn_idxs"] is None else values["full_attn_idxs"]
        if not isinstance(full, list | range) or not all(
            type(i) is int and 0 <= i < count for i in full
        ):
            raise ValueError(f"full_attn_idxs={shown(full)}; accepted is a list of layers from 0 to {count - 1}")  # fmt: skip
        return [_FULL if i in full else _CONV for i in range(count)]
    named = isinstance(given, list) and all(isinstance(x, str) and x in _MIXERS for x in given)
    if not named or len(given) != count:
        raise ValueError(f"layer_types={shown(given)}; accepted is a list of {count}, each one of {', '.join(_MIXERS)}")  # fmt: skip
    return given


def _width(values: dict[str, Any]) -> int:
    """Return the inner width of the feedforwards."""
    width = values["intermediate_size"]
    if not values["block_auto_adjust_ff_dim"]:
        return width
    width = int(values["block_ffn_dim_multiplier"] * int(2 * width / 3))
    multiple = values["block_multiple_of"]
    return -(-width // multiple) * multiple


def _config(values: dict[str, Any]) -> ModelConfig:
    inner = SwiGLUConfig(intermediate_size=_width(values))
    eps = float(values["norm_eps"])
    rope = values["rope_parameters"] or values["rope_scaling"] or values["rope_theta"]
    given = values if rope else {**values, "rope_theta": 1e6}
    softmax = hybrid.softmax(given, head_dim=values["head_dim"], qk_norm=True, norm_eps=eps)
    layers = {
        _FULL: LayerConfig(mixer=softmax, feedforward=inner),
        _CONV: LayerConfig(
            mixer=ShortConvConfig(conv_size=values["conv_L_cache"]), feedforward=inner
        ),
    }
    types = _types(values)
    pattern = "".join("N" if kind == _FULL else "L" for kind in types)
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=len(types),
        pattern=pattern,
        layers={"N" if kind == _FULL else "L": layers[kind] for kind in types},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=eps,
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixers, types = hybrid.mixers_of(config), {ShortConvConfig: _CONV, SoftmaxConfig: _FULL}
    if unknown := set(mixers) - set(types):
        names = ", ".join(sorted(kind.__name__ for kind in unknown))
        raise ValueError(f"model.layers has mixers of {names}; accepted are ShortConvConfig and SoftmaxConfig")  # fmt: skip
    fields: dict[str, Any] = dict(num_attention_heads=1, num_key_value_heads=1)
    if SoftmaxConfig in mixers:
        softmax = mixers[SoftmaxConfig]
        fields |= hybrid.describe_softmax(softmax)
        fields |= dict(head_dim=softmax.dim(config.hidden_size))
    if ShortConvConfig in mixers:
        fields |= dict(conv_L_cache=mixers[ShortConvConfig].conv_size)
    inner = config.layers[config.letters()[0]].feedforward
    if not isinstance(inner, SwiGLUConfig):
        raise ValueError("model.layers has other feedforwards than SwiGLU; accepted is SwiGLU")
    kinds = [types[type(config.layers[letter].mixer)] for letter in config.letters()]
    return fields | dict(
        layer_types=kinds,
        intermediate_size=inner.width(config.hidden_size),
        block_auto_adjust_ff_dim=False,
        norm_eps=config.norm_eps,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    kind = _types(values)[layer]
    return prefixed(f"model.layers.{layer}.", {**_BLOCK, **_MIXERS[kind]})


FAMILY = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    library="transformers",
    kinds={
        **dict.fromkeys(
            (
                "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "conv_L_cache",
                "block_multiple_of",
            ),
            "size",
        ),
        **dict.fromkeys(("norm_eps", "rope_theta", "block_ffn_dim_multiplier"), "positive"),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), "object"),
        "block_auto_adjust_ff_dim": "flag",
    },
    defaults=dict(
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=12288, conv_L_cache=3, block_multiple_of=256,
        block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, norm_eps=1e-5, tie_word_embeddings=True, rope_theta=None,
        rope_parameters=None, rope_scaling=None, layer_types=None, full_attn_idxs=None, head_dim=None,
    ),
    only=dict(conv_bias=(False,), block_use_swiglu=(True,), use_pos_enc=(True,)),
    unused=frozenset(
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_dim conv_dim_out
        conv_use_xavier_init num_heads theta
        """.split()
    ),
    read=_read,
    sizes=("num_attention_heads", "num_key_value_heads", "conv_L_cache"),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
