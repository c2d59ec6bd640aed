"""Gated softmax attention (arXiv 2505.06708, as in Qwen3-Next and Qwen3.5): a sigmoid gate of the token multiplies the output of
each head; queries and keys are normalised, and a part of their channels is rotated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, recomputed
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig

GATES = ("channel", "head")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GatedAttentionConfig(SoftmaxConfig):
    """The config of gated softmax attention: the fields of softmax attention, with norms of queries and keys by default, and
    the gate.

    Attributes:
        output_gate: "channel", sigmoid(x W) for each channel of each head; "head", one number for each head.
        zero_centred_norm: whether the norms of queries and keys multiply by 1 + their learned scales.
    """

    qk_norm: bool = True
    output_gate: str = "channel"
    zero_centred_norm: bool = True

    @classmethod
    def for_width(cls, hidden_size: int) -> GatedAttentionConfig:
        """Return the config of gated softmax attention for a model of width `hidden_size`: the heads of softmax attention, of
        which a quarter of the channels is rotated, as published.
        """
        heads = SoftmaxConfig.for_width(hidden_size).num_heads
        return cls(num_heads=heads, rotary_dim=max(2, hidden_size // heads // 8 * 2))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of gated softmax attention is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        super().validate(hidden_size)
        checks.one_of(self, "output_gate", self.output_gate, GATES)

    def gate_size(self, hidden_size: int) -> int:
        """Return the number of the gate's outputs: the channels of all heads, or the heads."""
        return self.num_heads * (self.dim(hidden_size) if self.output_gate == "channel" else 1)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: softmax attention and the gate's projection."""
        gate = 2.0 * hidden_size * self.gate_size(hidden_size)
        return super().flops_per_token(hidden_size, seq_len) + gate


class GatedAttention(Softmax):
    """The layer of gated softmax attention: a mixer that maps [B, T, D] to [B, T, D]; `GatedAttentionConfig` says what its
    options mean.
    """

    config: GatedAttentionConfig

    def __init__(
        self, config: GatedAttentionConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):  # fmt: skip
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        if config.qk_norm:
            norm: dict[str, Any] = dict(eps=config.norm_eps, zero_centred=config.zero_centred_norm)
            self.q_norm = RMSNorm(self.head_dim, **norm)
            self.k_norm = RMSNorm(self.head_dim, **norm)
        size = config.gate_size(hidden_size)
        self.g_proj = Dense(
            hidden_size, size, axes=("embed", "heads"), rngs=rngs, init_std=init_std
        )

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: multiply by
        sigmoid(x W_g) and project the heads together.
        """

        @recomputed
        def gated(o, gate):
            gate = gate.reshape(*o.shape[:-1], -1)
            return (o * jax.nn.sigmoid(gate)).astype(o.dtype)

        wide = jnp.promote_types(x.dtype, jnp.float32)
        return self.o_proj(merge_heads(gated(o, self.g_proj(x, dtype=wide)))), context


METHOD = Method(
    name="gated_attention",
    paper="arXiv 2505.06708",
    op="attention",
    gate="none: keys and values are stored",
    write="k, v",
    read="softmax(q Kᵀ) V, each channel times sigmoid(x W)",
    state="k and v of every token, or of a window",
    forms=(),
    config=GatedAttentionConfig,
    module=GatedAttention,
    note="the memory grows with the sequence: no other forms; with q and k normalised, a quarter of their channels rotated",
)
