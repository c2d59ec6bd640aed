"""Language models by method and size, in the proportions with which each method was published."""

from __future__ import annotations

import dataclasses
from typing import Any

from lsm_jax import mixers
from lsm_jax.feedforward import FEEDFORWARDS, SwiGLUConfig
from lsm_jax.models.config import LayerConfig, ModelConfig
from lsm_jax.names import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Width and depth of the models of one size; the feedforward's width is rounded to a multiple of
    `multiple_of`.
    """

    hidden_size: int
    num_layers: int
    multiple_of: int = 256


SIZES: dict[str, Size] = {
    "nano": Size(hidden_size=64, num_layers=4, multiple_of=32),
    "tiny": Size(hidden_size=64, num_layers=4, multiple_of=32),
    "10m": Size(hidden_size=256, num_layers=12, multiple_of=64),
    "125m": Size(hidden_size=768, num_layers=12),
    "340m": Size(hidden_size=1024, num_layers=24),
    "760m": Size(hidden_size=1536, num_layers=24),
    "1.3b": Size(hidden_size=2048, num_layers=24),
}


def _layer(method: mixers.Method, size: Size, feedforward: str | None) -> LayerConfig:
    inner, name = None, feedforward or method.feedforward
    if name is not None:
        config, _ = FEEDFORWARDS[name]
        inner = config.for_width(size.hidden_size, size.multiple_of)
    return LayerConfig(mixer=method.config.for_width(size.hidden_size), feedforward=inner)


def lm(
    method: str,
    size: str = "340m",
    pattern: str = "L",
    *,
    vocab_size: int = 32000,
    feedforward: str | None = None,
) -> ModelConfig:
    """Return the config of a language model: layers of the method (letter L of the pattern) and of softmax
    attention (letter N).

    A size sets width and depth. Its name is the number of parameters of a softmax transformer of that width
    and depth (from 125m on with an embedding of 32000 tokens); models of other methods have roughly as many,
    and `count_parameters` returns the exact number. Methods without a feedforward (Mamba2) have twice as many
    layers, unless `feedforward` is given.

    Args:
        method: a name in `lsm_jax.mixers.METHODS`.
        size: a name in `SIZES`.
        pattern: a string of the letters L and N.
        vocab_size: number of tokens in the vocabulary.
        feedforward: a name in `FEEDFORWARDS`, for every layer, in its customary proportions; None means the
            customary feedforward of each method.

    Raises:
        ValueError: a name does not exist, or the number of layers is no multiple of the pattern's length.
    """
    if size not in SIZES:
        near = did_you_mean(size, SIZES)
        raise ValueError(f"size={size!r} does not exist; accepted are {', '.join(SIZES)}{near}")
    if feedforward is not None and feedforward not in FEEDFORWARDS:
        raise ValueError(
            f"feedforward={feedforward!r} does not exist; accepted are {', '.join(FEEDFORWARDS)}"
            f"{did_you_mean(feedforward, FEEDFORWARDS)}"
        )
    chosen, found = mixers.get_method(method), SIZES[size]
    doubled = chosen.feedforward is None and feedforward is None
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=found.hidden_size,
        num_layers=found.num_layers * (2 if doubled else 1),
        pattern=pattern,
        layers={
            "L": _layer(chosen, found, feedforward),
            "N": _layer(mixers.METHODS["softmax"], found, feedforward),
        },
    )
    config.validate()
    return config


FOX_SIZES = {"125m": (768, 12), "360m": (1024, 24), "760m": (1536, 24)}
"""Width and depth of the sizes FoX was published at."""

_ROPE_BASE = 500000.0
_LLAMA: dict[str, Any] = dict(
    qk_norm=False, key_shift=False, value_shift=False, output_norm=False, output_gate=False
)
# The fields of `FoXConfig` in which each block differs from the default. Heads have 128 channels in
# transformers of 760m, and 64 in all other models.
_FOX_BLOCKS: dict[str, dict[str, Any]] = {
    "pro": {},
    "llama": _LLAMA,
    "transformer-pro": dict(forget_gate="none", rope_base=_ROPE_BASE),
    "transformer-llama": dict(_LLAMA, forget_gate="none", rope_base=_ROPE_BASE),
    "transformer-swa": dict(_LLAMA, forget_gate="none", rope_base=_ROPE_BASE, window=2048),
}
_FOX_BASELINES = ("mamba2", "hgrn2", "deltanet", "samba")
FOX_MODELS = (*_FOX_BLOCKS, *_FOX_BASELINES)
"""The models of FoX's paper: its two blocks, transformers of the same blocks, and its baselines."""

_TO_PRO = ("qk_norm", "output_gate", "output_norm")  # parts in the order in which Table 3 adds them
# The changes of each ablation in `FoXConfig`.
_FOX_ABLATIONS: dict[str, dict[str, Any]] = {
    "transformer-llama-no-rope": dict(_LLAMA, forget_gate="none"),
    "llama-rope": dict(_LLAMA, rope_base=_ROPE_BASE),
    "llama-qk-norm": _LLAMA | dict.fromkeys(_TO_PRO[:1], True),
    "llama-output-gate": _LLAMA | dict.fromkeys(_TO_PRO[:2], True),
    "llama-output-norm": _LLAMA | dict.fromkeys(_TO_PRO, True),
    "pro-no-qk-norm": dict(qk_norm=False),
    "pro-no-output-gate": dict(output_gate=False),
    "pro-no-output-norm": dict(output_norm=False),
    "pro-no-kv-shift": dict(key_shift=False, value_shift=False),
    "pro-rope": dict(rope_base=_ROPE_BASE),
    "pro-no-forget-gate": dict(forget_gate="none"),
    **{
        f"{block}-{name}-{longest}": _FOX_BLOCKS[block]
        | dict(forget_gate=gate, decay_time_min=2.0, decay_time_max=float(longest))
        for block in ("llama", "pro")
        for name, gate in (("independent", "data_independent"), ("fixed", "fixed"))
        for longest in (256, 2048, 16384)
    },
}
FOX_TABLE_3 = (
    "transformer-llama-no-rope", "transformer-llama", "llama-rope", "llama", "llama-qk-norm", "llama-output-gate",
    "llama-output-norm", "pro", "pro-no-qk-norm", "pro-no-output-gate", "pro-no-output-norm", "pro-no-kv-shift", "pro-rope",
    "transformer-pro", "pro-no-forget-gate",
)  # fmt: skip
"""The rows of the paper's Table 3, in its order: parts added to the LLaMA block one after another, then removed from Pro's."""
FOX_FIGURE_7 = ("llama", "pro", *(n for n in _FOX_ABLATIONS if n.rpartition("-")[2].isdecimal()))
"""The models of the paper's Figure 7: gates of the token, learned gates of a head, and fixed ones. The number is the last head's
time constant; the first head's is 2. Which of the three the figure has is not stated."""


def fox(name: str = "pro", size: str = "760m", *, vocab_size: int = 50257) -> ModelConfig:
    """Return the config of a model of FoX's paper (arXiv 2503.02130); its output head is not tied to the
    embedding.

    "pro" and "llama" are FoX's two blocks, "transformer-pro" and "transformer-llama" the same blocks with
    rotary positions in place of the forget gate, "transformer-swa" is "transformer-llama" in a window of
    2,048 tokens; "samba" alternates Mamba layers with layers of "transformer-swa". Models whose attention has
    an output gate have a narrower feedforward, so that all blocks have about as many parameters.

    Args:
        name: a name in `FOX_MODELS`, `FOX_TABLE_3` or `FOX_FIGURE_7`.
        size: a name in `FOX_SIZES`; "samba" and "transformer-swa" have 760m only.
        vocab_size: number of tokens in the vocabulary.

    Raises:
        ValueError: a name does not exist, or the model was not published at this size.
    """
    if name not in FOX_MODELS and name not in _FOX_ABLATIONS:
        accepted = (*FOX_MODELS, *_FOX_ABLATIONS)
        raise ValueError(
            f"model={name!r} does not exist; accepted are {', '.join(accepted)}{did_you_mean(name, accepted)}"
        )
    if size not in FOX_SIZES:
        near = did_you_mean(size, FOX_SIZES)
        raise ValueError(f"size={size!r} does not exist; accepted are {', '.join(FOX_SIZES)}{near}")
    if size != "760m" and name in ("samba", "transformer-swa"):
        raise ValueError(
            f"size={size!r}: model {name} was published at one size; accepted is '760m'"
        )
    hidden_size, num_layers = FOX_SIZES[size]
    if name in ("mamba2", "hgrn2", "deltanet"):
        config = lm(name, "340m" if size == "360m" else size, vocab_size=vocab_size)
    else:
        config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            layers={"L": _fox_layer("transformer-swa" if name == "samba" else name, size)},
        )
    if name == "samba":
        inner = SwiGLUConfig(hidden_ratio=3.0)
        config.pattern = "ML"
        config.layers["M"] = LayerConfig(mixer=mixers.MambaConfig(), feedforward=inner)
    config.tie_embeddings = False
    config.validate()
    return config


def _fox_layer(name: str, size: str) -> LayerConfig:
    hidden_size, _ = FOX_SIZES[size]
    head_dim = 128 if size == "760m" and name.startswith("transformer") else 64
    changes = (_FOX_BLOCKS | _FOX_ABLATIONS)[name]
    mixer = mixers.FoXConfig(num_heads=hidden_size // head_dim, **changes)
    ratio = 3.5 if mixer.output_gate else 4.0  # the output gate's parameters are taken from it
    return LayerConfig(mixer=mixer, feedforward=SwiGLUConfig(hidden_ratio=ratio))
