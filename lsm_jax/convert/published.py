"""Convert a config.json of Hugging Face's transformers into a model config: Llama, Mistral, Qwen2, Qwen3.

Every field is either converted, or known not to change the model's outputs, or an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.fields import check_auto_map, check_fields, check_sizes, listed, shown
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import RopeScaling, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
# In these fields null means that the field is absent; in others it is a value, such as no window or no scaling.
_NULL_IS_ABSENT = (
    "rms_norm_eps", "rope_theta", "initializer_range", "max_window_layers", "max_position_embeddings",
)  # fmt: skip
_KINDS = {
    **dict.fromkeys((*_REQUIRED, "num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings"), "size"),
    "max_window_layers": "count",
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "initializer_range"), "positive"),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), "flag"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "object"),
    **dict.fromkeys(("architectures", "layer_types"), "texts"),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), "text"),
}  # fmt: skip
_SCALING_KINDS = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "rope_theta"), "positive"),
    "original_max_position_embeddings": "size",
    **dict.fromkeys(("rope_type", "type"), "text"),
}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim"),
)  # fmt: skip
# transformers' defaults of absent fields, if they are not None or False.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28),
    "qwen3": dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28, head_dim=128),
}
# Fields for which only one value is supported.
_ONLY: dict[str, Any] = dict(
    hidden_act="silu", attention_bias=False, mlp_bias=False, attention_dropout=0.0, rope_interleaved=False,
    quantization_config=None, auto_map=None, partial_rotary_factor=1.0, is_encoder_decoder=False, add_cross_attention=False,
    use_mrope=False,
)  # fmt: skip
_MAPPED = {
    *_REQUIRED, *_ONLY, "model_type", "architectures", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "initializer_range", "torch_dtype", "dtype", "max_position_embeddings",
}  # fmt: skip
# Fields about tokens, caching, returned values and the file's origin; pretraining_tp only changes the order of sums.
_HARMLESS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "transformers_version", "_name_or_path", "pretraining_tp",
    "is_llama_config", "transformers.js_config", "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "name_or_path", "unsloth_version", "unsloth_fixed", "is_decoder", "tokenizer_class", "prefix",
}  # fmt: skip


def model_of(source: Tensors, others: Iterable[str] = ()) -> ModelConfig:
    """Return the config of the model that a config.json of Hugging Face's transformers describes.

    In the model's pattern, letter L is a layer with full attention, and letter W one whose attention has a
    window; if all layers are of one kind, they are L. Activations are in float32 if the config's dtype is,
    otherwise in bfloat16.

    Args:
        source: the pretrained model.
        others: further values of `model_type` that are accepted elsewhere, for error messages.

    Raises:
        ValueError: the model is of another kind, or a field is missing, unknown or has an unsupported value.
    """
    given, where = source.config, source.config_path
    check_fields(given, where, _KINDS, source.label)
    check_auto_map(given, where)
    kind = given.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{where}: model_type={shown(kind)}; accepted are {', '.join((*ARCHITECTURES, *others))}"
        )
    named = given.get("architectures") or [ARCHITECTURES[kind]]
    if named != [ARCHITECTURES[kind]]:
        raise ValueError(
            f"{where}: architectures={shown(named)}; accepted is [{ARCHITECTURES[kind]!r}]"
        )
    if missing := [name for name in _REQUIRED if given.get(name) is None]:
        raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
    for name, value in _ONLY.items():
        if given.get(name) not in (None, value):
            raise ValueError(f"{where}: {name}={shown(given[name])}; accepted is {value!r}")
    if unknown := sorted(set(given) - _MAPPED - _HARMLESS):
        named = listed(f"{name}={shown(given[name])}" for name in unknown)
        raise ValueError(
            f"{where}: unknown fields, which may change what a {kind} model computes: {named}"
        )
    check_sizes(given, where, source.shapes, _SIZES, label=source.label)
    stated = {n: v for n, v in given.items() if v is not None or n not in _NULL_IS_ABSENT}
    given = _DEFAULTS[kind] | stated
    theta, scaling = read_rope(given, where)
    eps = float(given.get("rms_norm_eps", 1e-6))

    def layer(window: int | None) -> LayerConfig:
        mixer = SoftmaxConfig(
            num_heads=given["num_attention_heads"],
            num_kv_heads=given.get("num_key_value_heads"),
            head_dim=given.get("head_dim"),
            window=window,
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            rope_base=theta,
            rope_scaling=scaling,
            norm_eps=eps,
        )
        return LayerConfig(
            mixer=mixer, feedforward=SwiGLUConfig(intermediate_size=given["intermediate_size"])
        )

    windows = _windows(given, where)
    letters = "".join("L" if w is None or len(set(windows)) == 1 else "W" for w in windows)
    config = ModelConfig(
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        num_layers=given["num_hidden_layers"],
        pattern=letters if "W" in letters else "L",
        layers={letter: layer(w) for letter, w in zip(letters, windows, strict=True)},
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        norm_eps=eps,
        init_std=float(given.get("initializer_range", 0.02)),
        dtype="float32" if dtype_of(given) == "float32" else "bfloat16",
    )
    try:
        config.validate()
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def dtype_of(given: dict[str, Any]) -> str | None:
    """Return the dtype that a config.json of transformers gives for the model's tensors."""
    return given.get("dtype") or given.get("torch_dtype")


def read_rope(given: dict[str, Any], where: Any) -> tuple[float, RopeScaling | None]:
    """Read the rotary frequencies from config.json, as old or new versions of transformers write it: return
    their base (rope_theta) and their scaling for long contexts, None without scaling."""
    for name in ("rope_scaling", "rope_parameters"):
        check_fields(given.get(name) or {}, where, _SCALING_KINDS, f"{name}.{{}}".format)
    old, new = given.get("rope_scaling") or {}, given.get("rope_parameters") or {}
    if unequal := [name for name in old if name in new and old[name] != new[name]]:
        raise ValueError(
            f"{where}: rope_scaling.{unequal[0]}={shown(old[unequal[0]])}, but rope_parameters.{unequal[0]}="
            f"{shown(new[unequal[0]])}; accepted is one of the two fields, or equal values"
        )
    fields = {**old, **new}
    thetas = (fields.pop("rope_theta", None), given.get("rope_theta"), 10000.0)
    theta = float(next(value for value in thetas if value is not None))
    kind, old_kind = fields.pop("rope_type", None), fields.pop("type", None)
    kind = kind or old_kind or "default"
    if fields.get("partial_rotary_factor") == 1:
        fields.pop("partial_rotary_factor")
    accepted: dict[str, tuple[str, ...]] = dict(
        default=(),
        linear=("factor",),
        llama3=(
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    )
    if kind not in accepted:
        raise ValueError(
            f"{where}: rope_scaling of type {shown(kind)}; accepted are {', '.join(accepted)}"
        )
    if set(fields) != set(accepted[kind]):
        raise ValueError(
            f"{where}: rope_scaling of type {kind!r} has the fields {shown(sorted(fields))}; accepted are exactly "
            f"{sorted(accepted[kind])}"
        )
    if absent := [name for name in accepted[kind] if fields[name] is None]:
        raise ValueError(f"{where}: rope_scaling.{absent[0]}=None; accepted is a number")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=float(fields["factor"]))
    return theta, RopeScaling(
        kind=kind,
        factor=float(fields["factor"]),
        low_freq_factor=float(fields["low_freq_factor"]),
        high_freq_factor=float(fields["high_freq_factor"]),
        original_length=fields["original_max_position_embeddings"],
    )


def _windows(given: dict[str, Any], where: Any) -> list[int | None]:
    """Return for every layer the tokens of its attention window, from the fields of config.json; None is
    full attention."""
    number, window = given["num_hidden_layers"], given.get("sliding_window")
    kind, types = given["model_type"], given.get("layer_types")
    if kind == "llama" or (kind != "mistral" and not given.get("use_sliding_window")):
        if kind == "llama" and window is not None:
            raise ValueError(
                f"{where}: sliding_window={window}; accepted for a llama model is null"
            )
        window = None
    if types is None:
        first = 0 if kind == "mistral" else given.get("max_window_layers", 0)
        return [window if i >= first else None for i in range(number)]
    names = {"full_attention": None, "sliding_attention": window}
    if len(types) != number or set(types) - set(names):
        raise ValueError(
            f"{where}: layer_types={shown(types)}; accepted is a list of {number}, each one of {', '.join(names)}"
        )
    if window is None and "sliding_attention" in types:
        raise ValueError(
            f"{where}: layer_types has sliding_attention, which requires the field sliding_window"
        )
    return [names[t] for t in types]
