"""Mixers: one file a method, each a config and a module around one op; `METHODS` lists them.

To add a method, write its file and add its row here. Models, training, decoding and the test suite take it from there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax.mixers.base import Clock, Context, Mixer, MixerState, advance, fresh_clock
from lsm_jax.mixers.deltanet import DeltaNet, DeltaNetConfig
from lsm_jax.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from lsm_jax.mixers.gated_retention import GatedRetention, GatedRetentionConfig
from lsm_jax.mixers.gla import GLA, GLAConfig
from lsm_jax.mixers.lightning import Lightning, LightningConfig
from lsm_jax.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from lsm_jax.mixers.mamba2 import Mamba2, Mamba2Config
from lsm_jax.mixers.retnet import RetNet, RetNetConfig
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table of methods.

    Attributes:
        name: what presets and configs call it.
        paper: where it was published.
        op: the function of `lsm_jax.ops` it is built on.
        gate: what multiplies the memory at each token.
        write: what is added to the memory.
        read: how the output is taken from it.
        forms: forms of the op; empty where it has none.
        config: its dataclass.
        module: its class, a `Mixer`.
        feedforward: name of its published block's feedforward in `lsm_jax.feedforward.FEEDFORWARDS`; None where it has none.
        note: why it lacks a form, or anything else a reader of the table must know.
    """

    name: str
    paper: str
    op: str
    gate: str
    write: str
    read: str
    forms: tuple[str, ...]
    config: type
    module: Any
    feedforward: str | None = "swiglu"
    note: str = ""


_ALL_FORMS = ("recurrent", "chunk", "associative")

# fmt: off
METHODS: dict[str, Method] = {m.name: m for m in (
    Method(
        name="linear_attention", paper="arXiv 2006.16236", op="linear_memory",
        gate="1", write="φ(k)ᵀ v", read="φ(q) M, optionally over φ(q) z",
        forms=_ALL_FORMS, config=LinearAttentionConfig, module=LinearAttention),
    Method(
        name="retnet", paper="arXiv 2307.08621", op="linear_memory",
        gate="1 - 2^(-5-h), constant for each head", write="kᵀ v, k rotated", read="q M, q rotated",
        forms=_ALL_FORMS, config=RetNetConfig, module=RetNet),
    Method(
        name="lightning", paper="arXiv 2307.14995", op="linear_memory",
        gate="exp(-(8h / H)(1 - l / L)), constant for each head and layer", write="silu(k)ᵀ v", read="silu(q) M",
        forms=_ALL_FORMS, config=LightningConfig, module=Lightning),
    Method(
        name="gated_retention", paper="arXiv 2405.05254", op="linear_memory",
        gate="sigmoid(x W)^(1/16), each head", write="kᵀ v, k rotated", read="q M, q rotated",
        forms=_ALL_FORMS, config=GatedRetentionConfig, module=GatedRetention),
    Method(
        name="gla", paper="arXiv 2312.06635", op="linear_memory",
        gate="sigmoid(x W₁ W₂ + b)^(1/16), each key channel", write="kᵀ v", read="q M",
        forms=_ALL_FORMS, config=GLAConfig, module=GLA),
    Method(
        name="mamba2", paper="arXiv 2405.21060", op="linear_memory",
        gate="exp(-A Δ), each head", write="Δ Bᵀ x", read="C M + D x",
        forms=_ALL_FORMS, config=Mamba2Config, module=Mamba2, feedforward=None),
    Method(
        name="deltanet", paper="arXiv 2406.06484", op="delta_memory",
        gate="I - β kᵀ k", write="β kᵀ v", read="q M",
        forms=_ALL_FORMS, config=DeltaNetConfig, module=DeltaNet),
    Method(
        name="gated_deltanet", paper="arXiv 2412.06464", op="delta_memory",
        gate="(I - β kᵀ k) α, α each head", write="β kᵀ v", read="q M",
        forms=_ALL_FORMS, config=GatedDeltaNetConfig, module=GatedDeltaNet),
    Method(
        name="softmax", paper="arXiv 1706.03762", op="attention",
        gate="none: keys and values are kept", write="k, v", read="softmax(q Kᵀ) V",
        forms=(), config=SoftmaxConfig, module=Softmax, note="the memory grows with the sequence: no other forms"),
)}
# fmt: on


def method_of(config: Any) -> Method:
    """The registered method whose config this is.

    Raises:
        ValueError: no method has a config of this type.
    """
    for method in METHODS.values():
        if type(config) is method.config:
            return method
    known = ", ".join(m.config.__name__ for m in METHODS.values())
    raise ValueError(f"mixer={config!r} is no mixer's config; accepted are {known}")


def get_method(name: str) -> Method:
    """The method registered under `name`.

    Raises:
        ValueError: there is none; the message lists what exists.
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} does not exist; accepted are {', '.join(METHODS)}")
    return METHODS[name]


def build(
    config: Any,
    hidden_size: int,
    *,
    rngs: nnx.Rngs,
    init_std: float = 0.02,
    layer: jax.Array | int = 0,
    num_layers: int = 1,
) -> Mixer:
    """The mixer a config describes, at this width.

    Args:
        config: of a type in `METHODS`.
        hidden_size: channels of the residual stream.
        rngs: source of the initial parameters.
        init_std: of projections, except where the method has its own.
        layer: its place in the model, for methods whose initial parameters depend on it.
        num_layers: the model's depth, for the same.
    """
    module = method_of(config).module
    depth = dict(layer=layer, num_layers=num_layers) if module.uses_depth else {}
    return module(config, hidden_size, rngs=rngs, init_std=init_std, **depth)


__all__ = [
    "GLA",
    "METHODS",
    "Clock",
    "Context",
    "DeltaNet",
    "DeltaNetConfig",
    "GLAConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedRetention",
    "GatedRetentionConfig",
    "Lightning",
    "LightningConfig",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba2",
    "Mamba2Config",
    "Method",
    "Mixer",
    "MixerState",
    "RetNet",
    "RetNetConfig",
    "Softmax",
    "SoftmaxConfig",
    "advance",
    "build",
    "fresh_clock",
    "get_method",
    "method_of",
]
