"""Fields and names that the models of flash-linear-attention (FLA) have in common, and its hybrids: models in which some layers
are softmax attention, by the field `attn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.fields import check_fields, listed, shown
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig

LIBRARY = "flash-linear-attention"
UNUSED = frozenset(
    """
    attn_mode fuse_cross_entropy fuse_linear_cross_entropy fuse_swiglu max_position_embeddings use_l2warp
    """.split()
)
"""Fields that select kernels or the training loss."""
KINDS = {
    **dict.fromkeys(("num_heads", "intermediate_size"), "size"),
    **dict.fromkeys(("hidden_ratio", "norm_eps"), "positive"),
    "fuse_norm": "flag",
}
DEFAULTS: dict[str, Any] = dict(
    norm_eps=1e-6, tie_word_embeddings=False, hidden_ratio=4, intermediate_size=None, fuse_norm=True, attn=None,
)  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = dict(
    hidden_act=("swish", "silu"), elementwise_affine=(True,), attnres_block_size=(None,),
)  # fmt: skip
_ATTENTION_KINDS = {
    **dict.fromkeys(("num_heads", "num_kv_heads", "window_size"), "size"),
    "rope_theta": "positive",
    "qkv_bias": "flag",
}
_BASE = 10000.0  # of rotations, by default
_CONV_SIZE = 4
"""The default width of the short convolutions of delta rules."""
_LETTERS = "NOPQRSTUVWXYZ"
TOP: Names = {
    "embedding": "model.embeddings.weight",
    "norm.scale": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "lm_head.kernel": "lm_head.weight",
}
BLOCK: Names = {
    "mixer_norm.scale": "attn_norm.weight",
    "feedforward_norm.scale": "mlp_norm.weight",
    "feedforward.gate_proj.kernel": "mlp.gate_proj.weight",
    "feedforward.up_proj.kernel": "mlp.up_proj.weight",
    "feedforward.down_proj.kernel": "mlp.down_proj.weight",
}
PROJECTIONS: Names = {
    f"mixer.{x}_proj.{ours}": f"attn.{x}_proj.{theirs}"
    for x in "qkvgo"
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
}
CONVOLUTIONS: Names = {f"mixer.{x}_conv.weight": f"attn.{x}_conv1d.weight" for x in "qkv"}


def decoder(
    values: dict[str, Any], mixer: Any, feedforward: Any = None, **fields: Any
) -> ModelConfig:
    """Return the config of one of FLA's models.

    Args:
        values: the values of config.json.
        mixer: the config of the mixer of layers that are not softmax attention.
        feedforward: the config of the feedforward; None is FLA's SwiGLU.
        fields: further fields of the model's config.
    """
    if feedforward is None:
        inner = values["intermediate_size"]
        ratio = values["hidden_ratio"] or 4
        feedforward = SwiGLUConfig(hidden_ratio=float(ratio), intermediate_size=inner)
    layers = {"L": LayerConfig(mixer=mixer, feedforward=feedforward)}
    letters = ["L"] * values["num_hidden_layers"]
    for letter, spec in zip(_LETTERS, specs(values), strict=False):
        layers[letter] = LayerConfig(mixer=_softmax(spec), feedforward=feedforward)
        for number in spec["layers"]:
            letters[number] = letter
    pattern = "".join(letters)
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=len(letters),
        pattern="L" if set(letters) == {"L"} else pattern,
        layers={letter: layers[letter] for letter in dict.fromkeys(letters)},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["norm_eps"]),
        **fields,
    )


def specs(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the descriptions of softmax layers in the field `attn`, after checking them."""
    given, count = values["attn"], values["num_hidden_layers"]
    specs = [given] if isinstance(given, dict) else given or []
    if not isinstance(specs, list) or not all(isinstance(spec, dict) for spec in specs):
        raise ValueError(f"attn={shown(given)}; accepted is an object, a list of them, or null")
    if len(specs) > len(_LETTERS):
        raise ValueError(f"attn has {len(specs)} objects; accepted are up to {len(_LETTERS)}")
    used: set[int] = set()
    for spec in specs:
        check_fields(spec, "attn", _ATTENTION_KINDS)
        if unknown := sorted(set(spec) - set(_ATTENTION_KINDS) - {"layers"}):
            raise ValueError(f"attn has unknown fields: {listed(unknown)}")
        layers = spec.get("layers")
        numbers = layers if isinstance(layers, list) else []
        if not numbers or not all(type(n) is int and 0 <= n < count for n in numbers):
            raise ValueError(
                f"attn.layers={shown(layers)}; accepted is a list of layers from 0 to {count - 1}"
            )
        if spec.get("num_heads") is None:
            raise ValueError("attn has no num_heads; accepted is a whole number from 1")
        if used & set(numbers) or len(set(numbers)) < len(numbers):
            raise ValueError(f"attn.layers={shown(layers)} names a layer twice; accepted is once")
        used |= set(numbers)
    return specs


def check_base(values: dict[str, Any], model_type: str) -> None:
    """Raise ValueError if the field `attn` of a family whose code does not read `attn.rope_theta` has one other than 10,000."""
    for spec in specs(values):
        if spec.get("rope_theta") not in (None, _BASE):
            raise ValueError(
                f"attn.rope_theta={shown(spec['rope_theta'])}, which FLA's {model_type} does not read; accepted is {_BASE:g}"
            )


def head_dim(values: dict[str, Any]) -> int:
    """Return the channels of a head, of which config.json has `expand_ratio`, the number `num_heads`, or both.

    Raises:
        ValueError: it has none, or heads that do not divide the model's width.
    """
    width, heads, ratio = values["hidden_size"], values["num_heads"], values["expand_ratio"]
    if ratio is None and heads is None:
        raise ValueError("expand_ratio=None and num_heads=None; accepted is a number for one")
    ratio = width // heads if ratio is None else ratio
    if heads is not None and heads * ratio != width:
        raise ValueError(
            f"num_heads={heads}: accepted is hidden_size / expand_ratio = {width / ratio:g}"
        )
    return ratio


def _softmax(spec: dict[str, Any]) -> SoftmaxConfig:
    theta = spec.get("rope_theta")
    return SoftmaxConfig(
        num_heads=spec["num_heads"],
        num_kv_heads=spec.get("num_kv_heads"),
        window=spec.get("window_size"),
        qkv_bias=bool(spec.get("qkv_bias")),
        rope_base=_BASE if theta is None else float(theta),
    )


def describe(
    config: ModelConfig, kind: type, norm_eps: bool = True, softmax: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Return the config of a model's linear mixers, and the values of the fields of config.json that all of FLA's models have.

    Args:
        config: the model.
        kind: the class of the mixers' config.
        norm_eps: whether FLA computes the norms of mixers with the same epsilon as those of blocks.
        softmax: whether the family has layers of softmax attention, too.

    Raises:
        ValueError: the mixers are others, or differ from each other; or there are layers of softmax attention.
    """
    mixer = the_mixer(config, kind)
    letters = config.letters()
    specs = []
    for letter in dict.fromkeys(letters):
        attention = config.layers[letter].mixer
        if type(attention) is not SoftmaxConfig:
            continue
        specs.append(
            dict(
                layers=[i for i, x in enumerate(letters) if x == letter],
                num_heads=attention.num_heads,
                num_kv_heads=attention.kv_heads(),
                qkv_bias=attention.qkv_bias,
                window_size=attention.window,
                rope_theta=attention.rope_base or _BASE,
            )
        )
    if specs and not softmax:
        raise ValueError(
            f"model.layers has mixers of SoftmaxConfig beside {kind.__name__}; accepted for an export is {kind.__name__} alone"
        )
    fields: dict[str, Any] = dict(norm_eps=config.norm_eps, attn=specs or None)
    if len(specs) == 1:
        fields["attn"] = specs[0]
    inner = config.layers[letters[0]].feedforward
    if inner is not None and hasattr(inner, "width"):
        fields |= dict(intermediate_size=inner.width(config.hidden_size))
    return mixer, fields


def names(
    table: Names, block: Names = BLOCK
) -> Callable[[dict[str, Any], ModelConfig, int], Names]:
    """Return the function `Family.names` of a model of FLA.

    Args:
        table: the names of a linear layer's mixer, without the layer's prefix.
        block: the names of a layer's other parameters.
    """

    def of_layer(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
        if layer < 0:
            return TOP
        softmax = type(config.layers[config.letters()[layer]].mixer) is SoftmaxConfig
        return prefixed(f"model.layers.{layer}.", {**(PROJECTIONS if softmax else table), **block})

    return of_layer


def gated_norm(table: Names) -> Callable[[dict[str, Any], ModelConfig, int], Names]:
    """Return `names(table)` of a mixer with a gated norm, whose name depends on `fuse_norm`."""
    plain = names({**table, "mixer.norm.scale": "attn.g_norm.weight"})
    fused = names({**table, "mixer.norm.scale": "attn.g_norm_swish_gate.weight"})
    return lambda values, config, layer: (fused if values["fuse_norm"] else plain)(values, config, layer)  # fmt: skip


def family(
    model_type: str, architecture: str, kinds: dict[str, str], defaults: dict[str, Any], only: dict[str, tuple[Any, ...]],
    **rest: Any,
) -> Family:  # fmt: skip
    """Return the description of one of FLA's families: its own fields and those that all have."""
    rest.setdefault("unused", frozenset())
    unused = UNUSED | rest.pop("unused")
    sizes = ("num_heads", "intermediate_size", *rest.pop("sizes", ()))
    return Family(
        model_type=model_type,
        architecture=architecture,
        library=LIBRARY,
        kinds=KINDS | kinds,
        defaults=DEFAULTS | defaults,
        only=ONLY | only,
        unused=unused,
        sizes=sizes,
        **rest,
    )


def delta_family(
    model_type: str, architecture: str, kinds: dict[str, str], defaults: dict[str, Any], only: dict[str, tuple[Any, ...]],
    **rest: Any,
) -> Family:  # fmt: skip
    """Return `family` of a delta rule, which has the fields of short convolutions of queries, keys and values, too."""
    return family(
        model_type,
        architecture,
        kinds | dict(conv_size="size", use_short_conv="flag"),
        defaults | dict(conv_size=_CONV_SIZE, use_short_conv=True),
        only,
        **rest | dict(sizes=("conv_size", *rest.get("sizes", ()))),
    )


def conv_size(values: dict[str, Any]) -> int:
    """Return the width of a mixer's short convolutions, of the values of config.json; 1 is none."""
    return values["conv_size"] if values["use_short_conv"] else 1


def convolutions(mixer: Any) -> dict[str, Any]:
    """Return the values of the fields of short convolutions for a mixer's config."""
    size = mixer.conv_size
    return dict(use_short_conv=size > 1, conv_size=size if size > 1 else _CONV_SIZE)
