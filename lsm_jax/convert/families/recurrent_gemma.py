"""RecurrentGemma of transformers (`model_type` recurrent_gemma): recurrent blocks with RG-LRU, in every third layer attention in a
window with one head of keys, and GeGLU (Griffin, arXiv 2402.19427). Without attention it is Hawk.

The embedding is multiplied by the root of the width, rounded to bfloat16. A query of transformers' code sees `attention_window_size`
tokens, its own included; one of the authors' code (google-deepmind/recurrentgemma 2a3dde4) sees one more.
"""

from __future__ import annotations

import itertools
from typing import Any

from lsm_jax.convert.families import mamba_hybrid as hybrid
from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Entry, Names, prefixed
from lsm_jax.feedforward import GeGLUConfig
from lsm_jax.mixers import RGLRUConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig, gemma_scale

_RECURRENT, _ATTENTION = "recurrent", "attention"
_LETTERS = {_RECURRENT: "L", _ATTENTION: "N"}
_ROTATED = 0.5  # of each head's channels
_TOP: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.final_norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_BLOCK: Names = {
    "mixer_norm.scale": "temporal_pre_norm.weight",
    "feedforward_norm.scale": "channel_pre_norm.weight",
    **{
        f"feedforward.{x}_proj.{ours}": f"mlp_block.{x}_proj.{theirs}"
        for x in ("gate", "up", "down")
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
}
_SOFTMAX: Names = {
    **{f"mixer.{x}_proj.kernel": f"temporal_block.{x}_proj.weight" for x in "qkvo"},
    "mixer.o_proj.bias": "temporal_block.o_proj.bias",
}
_RECURRENCE: Names = {
    **{
        f"mixer.{mine}_proj.{ours}": f"temporal_block.linear_{other}.{theirs}"
        for mine, other in (("x", "x"), ("y", "y"), ("o", "out"))
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    "mixer.conv.weight": "temporal_block.conv_1d.weight",
    "mixer.conv.bias": "temporal_block.conv_1d.bias",
    "mixer.rate": "temporal_block.rg_lru.recurrent_param",
}


def _types(values: dict[str, Any]) -> list[str]:
    """Return the kinds of all layers: those of `block_types`, again and again."""
    given = values["block_types"]
    if not given or set(given) - set(_LETTERS):
        raise ValueError(
            f"block_types={shown(given)}; accepted is a list of {' and '.join(map(repr, _LETTERS))}"
        )
    return list(itertools.islice(itertools.cycle(given), values["num_hidden_layers"]))


def _config(values: dict[str, Any]) -> ModelConfig:
    width, heads, inner = values["hidden_size"], values["num_attention_heads"], values["intermediate_size"]  # fmt: skip
    if width % heads or values["head_dim"] not in (None, width // heads):
        raise ValueError(
            f"num_attention_heads={heads}, head_dim={values['head_dim']}: accepted are a divisor of hidden_size={width}, and null or "
            "their quotient"
        )
    if inner % 2:
        raise ValueError(f"intermediate_size={inner}: accepted are even numbers, twice the width")
    softmax = hybrid.softmax(
        values, factor=_ROTATED, window=values["attention_window_size"], output_bias=True
    )
    recurrence = RGLRUConfig(
        num_heads=heads,
        expand=(values["lru_width"] or width) / width,
        conv_size=values["conv1d_width"],
    )
    mixers: dict[str, Any] = {_RECURRENT: recurrence, _ATTENTION: softmax}
    types = _types(values)
    feedforward = GeGLUConfig(intermediate_size=inner // 2)
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=width,
        num_layers=len(types),
        pattern="".join(_LETTERS[kind] for kind in types),
        layers={
            _LETTERS[kind]: LayerConfig(mixer=mixers[kind], feedforward=feedforward)
            for kind in dict.fromkeys(types)
        },
        tie_embeddings=values["tie_word_embeddings"],
        norm="zero_centred_rms",
        norm_eps=float(values["rms_norm_eps"]),
        embedding_scale=gemma_scale(width),
        logits_cap=float(values["logits_soft_cap"]),
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    if layer < 0:
        return _TOP
    mixer = config.layers[config.letters()[layer]].mixer
    table = dict(_SOFTMAX)
    if isinstance(mixer, RGLRUConfig):
        heads = mixer.num_heads
        size = mixer.channels(config.hidden_size) // heads
        table = dict(_RECURRENCE)
        for ours, theirs in (("reset", "recurrent"), ("write", "input")):
            name = f"temporal_block.rg_lru.{theirs}_gate"
            table[f"mixer.{ours}_gate.kernel"] = Entry(f"{name}_weight", shape=(heads, size, size))
            table[f"mixer.{ours}_gate.bias"] = Entry(f"{name}_bias", shape=(heads, size))
    return prefixed(f"model.layers.{layer}.", {**table, **_BLOCK})


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, letters = the_mixer(config, RGLRUConfig), config.letters()
    inner = config.layers[letters[0]].feedforward
    if not isinstance(inner, GeGLUConfig) or config.logits_cap is None:
        raise ValueError(
            f"model has feedforwards of {type(inner).__name__} and logits_cap={config.logits_cap}; accepted for an export are "
            "GeGLUConfig and a number"
        )
    kinds = [type(config.layers[letter].mixer) for letter in letters]
    types = [_ATTENTION if kind is SoftmaxConfig else _RECURRENT for kind in kinds]
    size = next(n for n in range(1, len(types) + 1) if (types[:n] * len(types))[: len(types)] == types)  # fmt: skip
    fields: dict[str, Any] = dict(
        num_attention_heads=mixer.num_heads, num_key_value_heads=mixer.num_heads
    )
    if SoftmaxConfig in kinds:
        softmax = the_mixer(config, SoftmaxConfig)
        if softmax.window is None:
            raise ValueError("SoftmaxConfig.window=None; accepted for an export is a number")
        described = hybrid.describe_softmax(softmax)
        described["rope_parameters"]["partial_rotary_factor"] = _ROTATED
        fields |= described | dict(attention_window_size=softmax.window)
    return fields | dict(
        block_types=types[:size],
        lru_width=mixer.channels(config.hidden_size),
        conv1d_width=mixer.conv_size,
        intermediate_size=2 * inner.width(config.hidden_size),
        logits_soft_cap=config.logits_cap,
        rms_norm_eps=config.norm_eps,
    )


FAMILY = Family(
    model_type="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    library="transformers",
    kinds={
        **dict.fromkeys(
            """
            num_attention_heads num_key_value_heads head_dim lru_width intermediate_size attention_window_size conv1d_width
            """.split(),
            "size",
        ),
        **dict.fromkeys(("rms_norm_eps", "rope_theta", "logits_soft_cap", "partial_rotary_factor"), "positive"),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), "object"),
        "block_types": "texts",
    },
    defaults=dict(
        num_attention_heads=10, num_key_value_heads=None, head_dim=None, lru_width=None, intermediate_size=7680,
        attention_window_size=2048, conv1d_width=4, rms_norm_eps=1e-6, rope_theta=None, rope_parameters=None, rope_scaling=None,
        logits_soft_cap=30.0, block_types=[_RECURRENT, _RECURRENT, _ATTENTION], tie_word_embeddings=True,
    ),
    only=dict(
        hidden_activation=("gelu_pytorch_tanh",), attention_bias=(False,), embeddings_scale_by_sqrt_dim=(True,),
    ),
    unused=frozenset({"attention_dropout", "w_init_variance_scale", "final_w_init_variance_scale"}),
    sizes=("num_attention_heads", "lru_width", "conv1d_width"),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
