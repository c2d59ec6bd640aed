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
from lsm_jax.mixers.fox import FoX, FoXConfig
from lsm_jax.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from lsm_jax.mixers.gated_retention import GatedRetention, GatedRetentionConfig
from lsm_jax.mixers.gateloop import GateLoop, GateLoopConfig
from lsm_jax.mixers.gfw import GFW, GFWConfig
from lsm_jax.mixers.gla import GLA, GLAConfig
from lsm_jax.mixers.gsa import GSA, GSAConfig
from lsm_jax.mixers.hgrn2 import HGRN2, HGRN2Config
from lsm_jax.mixers.kda import KDA, KDAConfig
from lsm_jax.mixers.layers import RopeScaling
from lsm_jax.mixers.liger import Liger, LigerConfig
from lsm_jax.mixers.lightning import Lightning, LightningConfig
from lsm_jax.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from lsm_jax.mixers.lolcats import Lolcats, LolcatsConfig
from lsm_jax.mixers.lora import LoRA, LoRAConfig, add_adapters
from lsm_jax.mixers.mamba import Mamba, MambaConfig
from lsm_jax.mixers.mamba2 import Mamba2, Mamba2Config
from lsm_jax.mixers.mlstm import MLSTM, MLSTMConfig
from lsm_jax.mixers.mom import MoM, MoMConfig
from lsm_jax.mixers.rebased import Rebased, RebasedConfig
from lsm_jax.mixers.retnet import RetNet, RetNetConfig
from lsm_jax.mixers.rwkv6 import RWKV6, RWKV6Config
from lsm_jax.mixers.rwkv7 import RWKV7, RWKV7Config
from lsm_jax.mixers.s4d import S4D, S4DConfig
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig
from lsm_jax.mixers.titans import Titans, TitansConfig
from lsm_jax.mixers.ttt_linear import TTTLinear, TTTLinearConfig
from lsm_jax.mixers.ttt_mlp import TTTMLP, TTTMLPConfig


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
        state: what one sequence keeps from token to token, in numbers: K and V are the key and value channels of a head, N
            those of a state.
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
    state: str
    forms: tuple[str, ...]
    config: type
    module: Any
    feedforward: str | None = "swiglu"
    note: str = ""


_ALL_FORMS = ("recurrent", "chunk", "associative")
_ONLINE_NOTE = "the gradient depends on the memory: updates do not compose"

# fmt: off
METHODS: dict[str, Method] = {m.name: m for m in (
    Method(
        name="linear_attention", paper="arXiv 2006.16236", op="linear_memory",
        gate="1", write="φ(k)ᵀ v", read="φ(q) M, optionally over φ(q) z",
        state="K × V a head for K features; K more with the normaliser",
        forms=_ALL_FORMS, config=LinearAttentionConfig, module=LinearAttention),
    Method(
        name="retnet", paper="arXiv 2307.08621", op="linear_memory",
        gate="1 - 2^(-5-h), constant for each head", write="kᵀ v, k rotated", read="q M, q rotated",
        state="K × V a head",
        forms=_ALL_FORMS, config=RetNetConfig, module=RetNet),
    Method(
        name="lightning", paper="arXiv 2307.14995", op="linear_memory",
        gate="exp(-(8h / H)(1 - l / L)), constant for each head and layer", write="silu(k)ᵀ v", read="silu(q) M",
        state="K × V a head",
        forms=_ALL_FORMS, config=LightningConfig, module=Lightning),
    Method(
        name="gated_retention", paper="arXiv 2405.05254", op="linear_memory",
        gate="sigmoid(x W)^(1/16), each head", write="kᵀ v, k rotated", read="q M, q rotated",
        state="K × V a head",
        forms=_ALL_FORMS, config=GatedRetentionConfig, module=GatedRetention),
    Method(
        name="gla", paper="arXiv 2312.06635", op="linear_memory",
        gate="sigmoid(x W₁ W₂ + b)^(1/16), each key channel", write="kᵀ v", read="q M",
        state="K × V a head",
        forms=_ALL_FORMS, config=GLAConfig, module=GLA),
    Method(
        name="hgrn2", paper="arXiv 2404.07904", op="linear_memory",
        gate="f = γ + (1 - γ) sigmoid(x W), each key channel; γ learned across layers", write="(1 - f)ᵀ i", read="silu(q) M",
        state="K × V a head",
        forms=_ALL_FORMS, config=HGRN2Config, module=HGRN2),
    Method(
        name="rebased", paper="arXiv 2402.10644", op="linear_memory",
        gate="1", write="φ(k)ᵀ v, φ a learned quadratic", read="φ(q) M over φ(q) z",
        state="(V + 1) F (F + 1) / 2 a head for F channels",
        forms=_ALL_FORMS, config=RebasedConfig, module=Rebased,
        note="where a query meets no key its weights vanish like ε, and float32 rounding shows"),
    Method(
        name="gfw", paper="arXiv 2210.04243", op="linear_memory",
        gate="βᵀ α, sigmoids of x W: each key channel and each value channel", write="kᵀ v", read="q M",
        state="K × V a head",
        forms=_ALL_FORMS, config=GFWConfig, module=GFW),
    Method(
        name="rwkv6", paper="arXiv 2404.05892", op="linear_memory",
        gate="exp(-exp(d)), d low-rank in the token, each key channel", write="kᵀ v", read="r (M before + diag(u) kᵀ v)",
        state="K × V a head; a token",
        forms=_ALL_FORMS, config=RWKV6Config, module=RWKV6, feedforward="rwkv6_channel_mix"),
    Method(
        name="mlstm", paper="arXiv 2503.13427", op="linear_memory",
        gate="sigmoid(x W + b), each head", write="exp(x W + b) kᵀ v", read="q C over max(|q n|, 1)",
        state="K × V, K and the largest exponent a head",
        forms=_ALL_FORMS, config=MLSTMConfig, module=MLSTM),
    Method(
        name="mamba", paper="arXiv 2312.00752", op="selective_memory",
        gate="exp(-A Δ), each channel and state", write="Δ B x", read="C h + D x",
        state="N a channel; 3 tokens",
        forms=_ALL_FORMS, config=MambaConfig, module=Mamba, feedforward=None),
    Method(
        name="s4d", paper="arXiv 2206.11893", op="selective_memory",
        gate="exp(Δ A), A complex, constant for each channel and state", write="(exp(Δ A) - 1) / A x", read="2 Re(C h) + D x",
        state="N / 2 complex a channel",
        forms=_ALL_FORMS, config=S4DConfig, module=S4D,
        note="its default computes one document from an empty state as a convolution, by blocks"),
    Method(
        name="gateloop", paper="arXiv 2311.01927", op="selective_memory",
        gate="a complex, |a| = sigmoid(|z|) and arg a = arg z with z = x W + b, each head", write="kᵀ v", read="Re(q M)",
        state="1 complex a channel",
        forms=_ALL_FORMS, config=GateLoopConfig, module=GateLoop,
        note="one head a channel; wider heads (num_heads) run on linear_memory with rotated q and k"),
    Method(
        name="mamba2", paper="arXiv 2405.21060", op="linear_memory",
        gate="exp(-A Δ), each head", write="Δ Bᵀ x", read="C M + D x",
        state="N × V a head; 3 tokens of x, B, C",
        forms=_ALL_FORMS, config=Mamba2Config, module=Mamba2, feedforward=None),
    Method(
        name="deltanet", paper="arXiv 2406.06484", op="delta_memory",
        gate="I - β kᵀ k", write="β kᵀ v", read="q M",
        state="K × V a head; 3 tokens of q, k, v",
        forms=_ALL_FORMS, config=DeltaNetConfig, module=DeltaNet),
    Method(
        name="gated_deltanet", paper="arXiv 2412.06464", op="delta_memory",
        gate="(I - β kᵀ k) α, α each head", write="β kᵀ v", read="q M",
        state="K × V a head; 3 tokens of q, k, v",
        forms=_ALL_FORMS, config=GatedDeltaNetConfig, module=GatedDeltaNet),
    Method(
        name="kda", paper="arXiv 2510.26692", op="delta_memory",
        gate="(I - β kᵀ k) diag(α), α each key channel", write="β kᵀ v", read="q M",
        state="K × V a head; 3 tokens of q, k, v",
        forms=_ALL_FORMS, config=KDAConfig, module=KDA),
    Method(
        name="rwkv7", paper="arXiv 2503.14456", op="dplr_memory",
        gate="diag(w) - (κ ⊙ a)ᵀ κ; w each key channel in (0.545, 1), a each key channel", write="k̃ᵀ v",
        read="r M, and r · k̃ times v of this token",
        state="K × V a head; a token",
        forms=_ALL_FORMS, config=RWKV7Config, module=RWKV7, feedforward="rwkv7_channel_mix"),
    Method(
        name="ttt_linear", paper="arXiv 2407.04620", op="online_memory",
        gate="1", write="-η ∇_W ½‖f(k) - v‖² at the mini-batch's start", read="f(q) = q + LN(q W + b)",
        state="W, b and the mini-batch's sum of gradients: 2 V (K + 1) a head; 3 tokens of q, k",
        forms=("recurrent", "chunk"), config=TTTLinearConfig, module=TTTLinear, note=_ONLINE_NOTE),
    Method(
        name="ttt_mlp", paper="arXiv 2407.04620", op="online_memory",
        gate="1", write="-η ∇_W ½‖f(k) - v‖² at the mini-batch's start", read="f(q) = q + LN(gelu(q W₁ + b₁) W₂ + b₂)",
        state="W₁, b₁, W₂, b₂ and the mini-batch's sums of gradients; 3 tokens of q, k",
        forms=("recurrent", "chunk"), config=TTTMLPConfig, module=TTTMLP, note=_ONLINE_NOTE),
    Method(
        name="titans", paper="arXiv 2501.00663", op="online_memory",
        gate="1 - α, each head", write="S ← η S - θ ∇‖M(k) - v‖² at the mini-batch's start", read="M(q), M a matrix or an MLP",
        state="M, S and M at the mini-batch's start: 3 K × V a head for a matrix; 3 tokens of q, k, v",
        forms=("recurrent", "chunk"), config=TitansConfig, module=Titans,
        note=_ONLINE_NOTE + "; a pattern of it is the paper's MAL, and persistent-memory tokens, MAC and MAG are not here"),
    Method(
        name="gsa", paper="arXiv 2409.07146", op="slot_memory",
        gate="α = sigmoid(x W)^(1/8), each slot", write="kᵀ (1 - α) into keys, (1 - α)ᵀ v into values",
        read="softmax(q K) V over slots",
        state="M × (K + V) a head, M slots",
        forms=_ALL_FORMS, config=GSAConfig, module=GSA),
    Method(
        name="softmax", paper="arXiv 1706.03762", op="attention",
        gate="none: keys and values are kept", write="k, v", read="softmax(q Kᵀ) V",
        state="k and v of every token, or of a window",
        forms=(), config=SoftmaxConfig, module=Softmax, note="the memory grows with the sequence: no other forms"),
    Method(
        name="fox", paper="arXiv 2503.02130", op="attention",
        gate="sigmoid(x W + b), each head, on attention weights; or constant (ALiBi), or none",
        write="k, v, each mixed with the token before", read="softmax(q Kᵀ + sums of log gates) V",
        state="k, v and the gates' sum of every token, or of a window; a token of k, v",
        forms=(), config=FoXConfig, module=FoX, note="the memory grows with the sequence: no other forms"),
    Method(
        name="liger", paper="arXiv 2503.01496", op="linear_memory",
        gate="sigmoid(Pool(x W_k))^(1/16), each key channel; or mamba2's, hgrn2's, rwkv6's, mlstm's, gsa's from the same keys",
        write="softmax(k)ᵀ v, and k, v into a window", read="½ softmax(q) M + ½ softmax(q Kᵀ) V over the window",
        state="K × V a key head; k and v of a window",
        forms=_ALL_FORMS, config=LigerConfig, module=Liger,
        note="of a pretrained softmax layer's parameters alone; gsa's memory is slot_memory's"),
    Method(
        name="lolcats", paper="arXiv 2410.10254", op="linear_memory",
        gate="1", write="φ(k)ᵀ v, φ learned, and k, v into a window",
        read="φ(q) M beyond the window and γ softmax(q Kᵀ) V in it, over one sum of weights",
        state="2 F × (V + 1) a key head for F columns of φ; k and v of a window",
        forms=_ALL_FORMS, config=LolcatsConfig, module=Lolcats),
)}

# Mixers around another's memory: no rows of the table, but mixers everywhere else.
WRAPPERS: dict[str, Method] = {m.name: m for m in (
    Method(
        name="mom", paper="arXiv 2502.13685", op="the inner mixer's",
        gate="of the inner mixer, for tokens routed to the memory; else 1", write="of the inner mixer, for tokens routed to the memory",
        read="Σ g_m (what memory m gives), and what the shared one gives", state="the inner mixer's for each memory",
        forms=_ALL_FORMS, config=MoMConfig, module=MoM),
)}
# fmt: on


def method_of(config: Any) -> Method:
    """The registered method whose config this is.

    Raises:
        ValueError: no method has a config of this type.
    """
    every = (*METHODS.values(), *WRAPPERS.values())
    for method in every:
        if type(config) is method.config:
            return method
    known = ", ".join(m.config.__name__ for m in every)
    raise ValueError(f"mixer={config!r} is no mixer's config; accepted are {known}")


def get_method(name: str) -> Method:
    """The method registered under `name`.

    Raises:
        ValueError: there is none; the message lists what exists.
    """
    every = METHODS | WRAPPERS
    if name not in every:
        raise ValueError(f"method={name!r} does not exist; accepted are {', '.join(every)}")
    return every[name]


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
    "GFW",
    "GLA",
    "HGRN2",
    "METHODS",
    "WRAPPERS",
    "MLSTM",
    "RWKV6",
    "RWKV7",
    "S4D",
    "Clock",
    "Context",
    "DeltaNet",
    "DeltaNetConfig",
    "FoX",
    "FoXConfig",
    "GFWConfig",
    "GLAConfig",
    "GateLoop",
    "GateLoopConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedRetention",
    "GatedRetentionConfig",
    "HGRN2Config",
    "Liger",
    "LigerConfig",
    "Lightning",
    "LightningConfig",
    "LinearAttention",
    "LinearAttentionConfig",
    "LoRA",
    "Lolcats",
    "LolcatsConfig",
    "LoRAConfig",
    "MLSTMConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "MambaConfig",
    "Method",
    "Mixer",
    "MoM",
    "MoMConfig",
    "MixerState",
    "RWKV7Config",
    "RWKV6Config",
    "Rebased",
    "RebasedConfig",
    "RetNet",
    "RetNetConfig",
    "S4DConfig",
    "Softmax",
    "RopeScaling",
    "SoftmaxConfig",
    "TTTLinear",
    "TTTLinearConfig",
    "TTTMLP",
    "TTTMLPConfig",
    "Titans",
    "TitansConfig",
    "add_adapters",
    "advance",
    "build",
    "fresh_clock",
    "get_method",
    "method_of",
    "GSA",
    "GSAConfig",
    "KDA",
    "KDAConfig",
]
