"""Convert the config.json of the published checkpoints of FoX's paper to the models that it describes, and
back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lsm_jax.convert.checkpoint import Checkpoint
from lsm_jax.convert.fields import (
    COMPUTATION,
    check_auto_map,
    check_fields,
    check_sizes,
    listed,
    shown,
)
from lsm_jax.convert.fox_layout import DELTANET, FOX, HGRN2, KINDS, MAMBA2, TRANSFORMER
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import DeltaNetConfig, FoXConfig, HGRN2Config, Mamba2Config
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.training.config_json import flatten

# Fields of which only one value is accepted: the published code ignores or refuses others, or this library lacks them.
_ONLY: dict[str, dict[str, Any]] = {
    FOX: dict(
        hidden_act="swish", ogate_act="sigmoid", attention_bias=False, window_size=None, num_kv_heads=None,
        elementwise_affine=True,
    ),
    TRANSFORMER: dict(
        hidden_act="swish", attention_bias=False, qk_norm=False, use_rope=True, elementwise_affine=True
    ),
    MAMBA2: dict(
        hidden_act="silu", use_bias=False, use_conv_bias=True, n_groups=1, rms_norm=True, time_step_limit=[0.0, math.inf],
    ),
    HGRN2: dict(hidden_act="swish", use_short_conv=False, elementwise_affine=True),
    DELTANET: dict(
        hidden_act="swish", use_short_conv=True, use_beta=True, use_output_norm=True, qk_norm="l2", qk_activation="silu",
        norm_first=False,
    ),
}  # fmt: skip
_GATES = {"full": "data_dependent", "bias_only": "data_independent", "fixed": "fixed", "none": "none"}  # fmt: skip
_ALL = frozenset("model_type vocab_size hidden_size num_hidden_layers tie_word_embeddings".split())
_INNER = frozenset("hidden_ratio intermediate_size norm_eps".split())
_ATTENTION = _INNER | frozenset("num_heads num_kv_heads window_size use_rope rope_base".split())
_READ = {
    FOX: _ATTENTION
    | frozenset(
        """
        qk_norm_share_param_across_head fgate_type decay_time_min decay_time_max use_k_shift use_v_shift use_output_norm
        use_output_gate qk_norm
        """.split()
    ),
    TRANSFORMER: _ATTENTION,
    MAMBA2: frozenset(
        "num_heads head_dim state_size expand conv_kernel layer_norm_epsilon".split()
    ),
    # conv_size is the width of short convolutions, which use_short_conv=False leaves out.
    HGRN2: _INNER | frozenset("num_heads expand_ratio use_lower_bound conv_size".split()),
    DELTANET: _INNER | frozenset("num_heads expand_k expand_v use_gate conv_size".split()),
}
# Fields about initialisation, loading, precision, speed and decoding, which do not change the model's outputs. Pruning
# (log_pruning_tolerance) removes weights that are negligible.
_HOUSEKEEPING = frozenset(
    """
    architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version _name_or_path use_cache
    initializer_range fgate_bias_init max_position_embeddings fuse_norm fuse_cross_entropy return_dict output_attentions
    output_hidden_states log_pruning_tolerance attn_mode residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor
    rescale_prenorm_residual chunk_size _attn_implementation_autoset
    """.split()
)
_KINDS = {
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "window_size", "state_size", "expand", "conv_kernel", "conv_size", "expand_ratio",
        ),
        "size",
    ),
    **dict.fromkeys(
        (
            "hidden_ratio", "norm_eps", "layer_norm_epsilon", "rope_base", "expand_k", "expand_v", "decay_time_min",
            "decay_time_max",
        ),
        "positive",
    ),
    **dict.fromkeys(
        (
            "tie_word_embeddings", "use_rope", "qk_norm_share_param_across_head", "use_k_shift", "use_v_shift",
            "use_output_norm", "use_output_gate", "use_lower_bound", "use_gate",
        ),
        "flag",
    ),
    **dict.fromkeys(("model_type", "fgate_type"), "text"),
}  # fmt: skip
# In these fields null is a value: no window, no bound, or a size that follows from others.
_NULL_IS_A_VALUE = frozenset(
    "hidden_ratio intermediate_size num_heads num_kv_heads window_size expand_ratio decay_time_min decay_time_max".split()
)
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "state_size", "expand",
    "conv_kernel", "conv_size", "expand_ratio", "expand_k", "expand_v", "hidden_ratio", ("num_heads", "head_dim"),
    ("expand", "hidden_size"), ("expand_k", "hidden_size"), ("expand_v", "hidden_size"), ("hidden_ratio", "hidden_size"),
)  # fmt: skip
_REQUIRED = {
    FOX: ("num_heads",),
    TRANSFORMER: ("num_heads",),
    MAMBA2: ("num_heads", "head_dim", "state_size"),
    HGRN2: (),
    DELTANET: ("num_heads",),
}
_CLASSES = {
    FOX: "ForgettingTransformerForCausalLM",
    TRANSFORMER: "TransformerForCausalLM",
    MAMBA2: "Mamba2ForCausalLM",
    HGRN2: "HGRN2ForCausalLM",
    DELTANET: "DeltaNetForCausalLM",
}


def fox_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the config of the model that the config.json of a published checkpoint of FoX's paper
    describes.

    Raises:
        ValueError: the model is of another kind, a field is missing or unknown, or a value is not supported.
    """
    given, where = checkpoint.config, checkpoint.config_path
    prefix = "backbone.layers." if given.get("model_type") == MAMBA2 else "model.layers."
    check_fields(given, where, _KINDS)
    check_auto_map(given, where)
    if given.get("model_type") in _ONLY:
        unused = {"hidden_ratio"} if given.get("intermediate_size") is not None else set()
        used = {name: value for name, value in given.items() if name not in unused}
        check_sizes(used, where, checkpoint.shapes, _SIZES, prefix=prefix)
    # In older checkpoints the config does not say whether heads share the norm's weights, but the weights' length does.
    length = checkpoint.shapes.get("model.layers.0.attn.q_norm.weight")
    return model_of(given, where, length != (given.get("hidden_size"),))


def model_of(given: dict[str, Any], where: Any, shared_norms: bool = True) -> ModelConfig:
    """Return the config of the model that the contents of a config.json of FoX's authors describe.

    Args:
        given: the contents of config.json.
        where: path of the config.json, for error messages.
        shared_norms: whether the heads share the scales of the norms of queries and keys, if the config does not say it.

    Raises:
        ValueError: the model is of another kind, a field is missing or unknown, or a value is not
            supported.
    """
    check_fields(given, where, _KINDS)
    kind = given.get("model_type")
    if kind not in _ONLY:
        raise ValueError(f"{where}: model_type={shown(kind)}; accepted are {', '.join(KINDS)}")
    for name, value in _ONLY[kind].items():
        if given.get(name, value) != value:
            raise ValueError(f"{where}: {name}={shown(given[name])}; accepted is {value!r}")
    required = ("vocab_size", "hidden_size", "num_hidden_layers", *_REQUIRED[kind])
    if missing := [name for name in required if given.get(name) is None]:
        raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
    known = _ALL | _READ[kind] | _HOUSEKEEPING | set(_ONLY[kind])
    if unknown := [f"{name}={shown(given[name])}" for name in sorted(set(given) - known)]:
        raise ValueError(
            f"{where}: unknown fields, which may change what a {kind} model computes: {listed(unknown)}"
        )
    eps = "layer_norm_epsilon" if kind == MAMBA2 else "norm_eps"
    nulls = [n for n in _KINDS if n in given and given[n] is None and n not in _NULL_IS_A_VALUE]
    if nulls:
        raise ValueError(f"{where}: {nulls[0]}=None; accepted is a value, or no such field")
    inner = SwiGLUConfig(
        hidden_ratio=given.get("hidden_ratio") or 4.0,
        intermediate_size=given.get("intermediate_size"),
    )
    mixers = {MAMBA2: _mamba2, HGRN2: _hgrn2, DELTANET: _deltanet}
    try:
        mixer = mixers[kind](given) if kind in mixers else _attention(given, kind, shared_norms)
        config = ModelConfig(
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            num_layers=given["num_hidden_layers"],
            layers={"L": LayerConfig(mixer=mixer, feedforward=None if kind == MAMBA2 else inner)},
            tie_embeddings=given.get("tie_word_embeddings", False),
            norm_eps=given.get(eps, 1e-5 if kind == MAMBA2 else 1e-6),
        )
        config.validate()
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def _attention(given: dict[str, Any], kind: str, shared_norms: bool) -> FoXConfig:
    gate = given.get("fgate_type", "full") if kind == FOX else "none"
    if gate not in _GATES:
        raise ValueError(f"fgate_type={shown(gate)}; accepted are {', '.join(_GATES)}")
    rotated = given.get("use_rope", kind == TRANSFORMER)
    return FoXConfig(
        num_heads=given["num_heads"],
        num_kv_heads=given.get("num_kv_heads"),
        window=given.get("window_size"),
        rope_base=given.get("rope_base", 500000.0) if rotated else None,
        qk_norm=given.get("qk_norm", False),
        qk_norm_per_head=not given.get("qk_norm_share_param_across_head", shared_norms),
        forget_gate=_GATES[gate],
        decay_time_min=given.get("decay_time_min"),
        decay_time_max=given.get("decay_time_max"),
        key_shift=given.get("use_k_shift", False),
        value_shift=given.get("use_v_shift", False),
        output_norm=given.get("use_output_norm", False),
        output_norm_eps=given.get("norm_eps", 1e-6),
        output_gate=given.get("use_output_gate", False),
    )


def _mamba2(given: dict[str, Any]) -> Mamba2Config:
    expand, heads, head_dim = given.get("expand", 2), given["num_heads"], given["head_dim"]
    if heads * head_dim != expand * given["hidden_size"]:
        raise ValueError(
            f"num_heads={heads}: accepted is expand * hidden_size / head_dim = "
            f"{expand * given['hidden_size'] / head_dim:g}"
        )
    return Mamba2Config(
        expand=expand,
        head_dim=head_dim,
        state_size=given["state_size"],
        conv_size=given.get("conv_kernel", 4),
        norm_eps=given.get("layer_norm_epsilon", 1e-5),
    )


def _hgrn2(given: dict[str, Any]) -> HGRN2Config:
    width, heads, ratio = given["hidden_size"], given.get("num_heads"), given.get("expand_ratio")
    if ratio is None:
        ratio = 128 if heads is None else width // heads
    if heads is not None and heads * ratio != width:
        raise ValueError(
            f"num_heads={heads}: accepted is hidden_size / expand_ratio = {width / ratio:g}"
        )
    return HGRN2Config(head_dim=ratio, norm_eps=given.get("norm_eps", 1e-6))


def _deltanet(given: dict[str, Any]) -> DeltaNetConfig:
    return DeltaNetConfig(
        num_heads=given["num_heads"],
        expand_k=float(given.get("expand_k", 1)),
        expand_v=float(given.get("expand_v", 1)),
        conv_size=given.get("conv_size", 4),
        output_gate=given.get("use_gate", False),
        norm_eps=given.get("norm_eps", 1e-6),
    )


# Fields that say how a model is computed, initialised or trained.
_COMPUTATION = COMPUTATION | {"multiple_of"}


def json_of(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json with which the code of FoX's authors computes what `config`'s
    model computes.

    Raises:
        ValueError: the published code has no such model; the message names the fields.
    """
    layer = config.layers["L"]
    mixer, inner = layer.mixer, layer.feedforward
    makers = {FoXConfig: _attention_json, Mamba2Config: _mamba2_json, HGRN2Config: _hgrn2_json, DeltaNetConfig: _deltanet_json}  # fmt: skip
    if type(mixer) not in makers:
        accepted = ", ".join(kind.__name__ for kind in makers)
        raise ValueError(f"layers.L.mixer is a {type(mixer).__name__}; accepted are {accepted}")
    if inner is not None and not isinstance(inner, SwiGLUConfig):
        raise ValueError(
            f"layers.L.feedforward is a {type(inner).__name__}; accepted is a SwiGLUConfig"
        )
    made = makers[type(mixer)](mixer, config)
    if isinstance(inner, SwiGLUConfig):
        width = inner.width(config.hidden_size)
        ratio = inner.hidden_ratio
        plain = SwiGLUConfig(hidden_ratio=ratio).width(config.hidden_size) == width
        made |= dict(hidden_ratio=ratio, intermediate_size=None if plain else width)
    made |= dict(
        architectures=[_CLASSES[made["model_type"]]],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        tie_word_embeddings=config.tie_embeddings,
        torch_dtype="float32",
    )
    _check_same(model_of(made, "the exported config"), config)
    return made


def _check_same(published: ModelConfig, config: ModelConfig) -> None:
    """Raise ValueError unless a model that the published code can compute, `published`, computes the same
    function as the model to export, `config`.

    Raises:
        ValueError: the two models compute different functions; the message names the config fields that
            differ.
    """

    def fields(model: ModelConfig) -> dict[str, Any]:
        used = dataclasses.replace(model, layers={"L": model.layers["L"]})
        rows = {n: v for n, v in flatten(used).items() if not _COMPUTATION & set(n.split("."))}
        inner = model.layers["L"].feedforward
        if isinstance(inner, SwiGLUConfig):
            del rows["layers.L.feedforward.hidden_ratio"]
            rows["layers.L.feedforward.intermediate_size"] = inner.width(model.hidden_size)
        if not getattr(model.layers["L"].mixer, "qk_norm", True):
            del rows["layers.L.mixer.norm_eps"], rows["layers.L.mixer.qk_norm_per_head"]
        return rows

    accepted, given = fields(published), fields(config)
    different = [
        f"{name}={value!r} (accepted is {accepted.get(name)!r})"
        for name, value in given.items()
        if accepted.get(name) != value
    ]
    if different:
        raise ValueError(f"the published code has no model with {', '.join(different)}")


def _attention_json(mixer: FoXConfig, config: ModelConfig) -> dict[str, Any]:
    rotated = mixer.rope_base is not None
    gates = {ours: theirs for theirs, ours in _GATES.items()}
    parts = dict(
        qk_norm=mixer.qk_norm,
        use_k_shift=mixer.key_shift,
        use_v_shift=mixer.value_shift,
        use_output_norm=mixer.output_norm,
        use_output_gate=mixer.output_gate,
    )
    shared = dict(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        window_size=mixer.window,
        use_rope=rotated,
        rope_base=mixer.rope_base if rotated else 500000.0,
        norm_eps=config.norm_eps,
        hidden_act="swish",
        attention_bias=False,
    )
    if rotated and mixer.forget_gate == "none" and not any(parts.values()):
        return dict(model_type=TRANSFORMER) | shared
    return (
        dict(model_type=FOX)
        | shared
        | parts
        | dict(
            num_kv_heads=None,
            window_size=None,
            ogate_act="sigmoid",
            qk_norm_share_param_across_head=not mixer.qk_norm_per_head,
            fgate_type=gates.get(mixer.forget_gate, "full"),
            fgate_bias_init=mixer.decay_time_min is not None,
            decay_time_min=mixer.decay_time_min,
            decay_time_max=mixer.decay_time_max,
        )
    )


def _mamba2_json(mixer: Mamba2Config, config: ModelConfig) -> dict[str, Any]:
    return dict(
        model_type=MAMBA2,
        num_heads=mixer.num_heads(config.hidden_size),
        head_dim=mixer.head_dim,
        state_size=mixer.state_size,
        expand=mixer.expand,
        conv_kernel=mixer.conv_size,
        n_groups=1,
        layer_norm_epsilon=mixer.norm_eps,
        hidden_act="silu",
        use_bias=False,
        use_conv_bias=True,
    )


def _hgrn2_json(mixer: HGRN2Config, config: ModelConfig) -> dict[str, Any]:
    return dict(
        model_type=HGRN2,
        num_heads=None,
        expand_ratio=mixer.head_dim,
        use_lower_bound=True,
        use_short_conv=False,
        norm_eps=config.norm_eps,
        hidden_act="swish",
    )


def _deltanet_json(mixer: DeltaNetConfig, config: ModelConfig) -> dict[str, Any]:
    return dict(
        model_type=DELTANET,
        num_heads=mixer.num_heads,
        expand_k=mixer.expand_k,
        expand_v=mixer.expand_v,
        use_gate=mixer.output_gate,
        use_short_conv=True,
        conv_size=mixer.conv_size,
        use_beta=True,
        use_output_norm=True,
        qk_norm="l2",
        qk_activation="silu",
        norm_first=False,
        norm_eps=config.norm_eps,
        hidden_act="swish",
    )
