"""Gated linear attention (arXiv 2312.06635): `M_t = diag(α_t) M_{t-1} + k_tᵀ v_t`, α a low-rank function of
the token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks, feature_maps
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.gates import sigmoid_decay
from lsm_jax.mixers.heads import three_or_four
from lsm_jax.mixers.joined import unjoined
from lsm_jax.mixers.layers import Dense, RMSNorm, narrow_gradient, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.normed_product import normed_product
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GLAConfig(RecurrentConfig):
    """The config of a layer of gated linear attention, whose decay depends on the token, for each key channel.

    Attributes:
        num_heads: number of heads.
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all heads, divided by hidden_size.
        gate_rank: inner width of the decay's two projections.
        gate_temperature: log α = logsigmoid(gate) / gate_temperature (the paper's τ).
        feature_map: φ on queries and keys, "identity" or "silu"; Linear-MoE (arXiv 2503.05447, its code) has "silu".
        qkv_bias: whether the projections to queries, keys, values and the output gate have biases, as in Linear-MoE.
        conv_size: width of the short convolutions on q, k and v, each followed by SiLU, ahead of φ; 1, as published, is neither.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0
    gate_rank: int = 16
    gate_temperature: float = 16.0
    feature_map: str = "identity"
    qkv_bias: bool = False
    conv_size: int = 1
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> GLAConfig:
        """Return the config of gated linear attention for a model of width `hidden_size`, with the published
        proportions: four heads at any width, but three at widths such as 768 and 1,536.
        """
        return cls(num_heads=three_or_four(hidden_size))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of gated linear attention in a model of
        width `hidden_size`.
        """
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of gated linear attention is not accepted, or does not fit a model
        of width `hidden_size`.
        """
        self.validate_fields()
        self.head_dims(hidden_size)
        checks.one_of(self, "feature_map", self.feature_map, ("identity", "silu"))
        checks.positive(
            self,
            gate_rank=self.gate_rank,
            gate_temperature=self.gate_temperature,
            norm_eps=self.norm_eps,
        )
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory and 2 K V each to write and to read.
        """
        k, v = self.head_dims(hidden_size)
        gate = 2.0 * self.gate_rank * (hidden_size + self.num_heads * k)
        convolution = 2 * checks.convolution_taps(self) * self.num_heads * (2 * k + v)
        return (
            gate + convolution + self.num_heads * (2.0 * hidden_size * (2 * k + 3 * v) + 5 * k * v)
        )


class GLA(Mixer):
    """The layer of gated linear attention: a mixer that maps [B, T, D] to [B, T, D]; `GLAConfig` says what its options
    mean.
    """

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj", "decay_down", "decay_up")
    token_parts = ("q_proj", "k_proj", "v_proj", "decay_down")

    def __init__(
        self, config: GLAConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        keys, values = config.num_heads * self.key_dim, config.num_heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std, bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        small = dict(rngs=rngs, init_std=init_std)
        self.decay_down = Dense(hidden_size, config.gate_rank, axes=("embed", None), **small)
        self.decay_up = Dense(config.gate_rank, keys, axes=(None, "heads"), bias=True, **small)
        convolution = dict(
            width=config.conv_size, rngs=rngs, axis="heads", silu=config.conv_size > 1
        )
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _features(self, x: jax.Array) -> jax.Array:
        """Cut x, projected to queries or keys, into heads [B, T, H, K], and apply the config's feature map φ."""
        return feature_maps.FIXED[self.config.feature_map](split_heads(x, self.config.num_heads))

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], φ(x W_q) with the feature map φ of the config, after the
        short convolution if there is one, and the context.
        """
        q, context = self.q_conv(self.q_proj(unjoined(x, self.q_proj)), context)
        return self._features(q), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys φ(x W_k) [B,
        T, H, K] and values [B, T, H, V], after the short convolutions if there are any, and the log decay of each key
        channel [B, T, H, K].
        """
        heads = self.config.num_heads
        gate = narrow_gradient(self.decay_up(self.decay_down(x), dtype=jnp.float32), x.dtype)
        log_decay = sigmoid_decay(gate, self.config.gate_temperature)
        k, context = self.k_conv(self.k_proj(unjoined(x, self.k_proj, barriers=2)), context)
        v, context = self.v_conv(self.v_proj(x), context)
        return dict(
            k=self._features(k),
            v=split_heads(v, heads),
            log_decay=split_heads(log_decay, heads),
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return normed_product(self.norm, self.o_proj, o, gate), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(batch_size, self.config.num_heads, self.key_dim, self.value_dim)


METHOD = Method(
    name="gla",
    paper="arXiv 2312.06635",
    op="linear_memory",
    gate="sigmoid(x W₁ W₂ + b)^(1/16), each key channel",
    write="kᵀ v",
    read="q M",
    state="K × V a head",
    config=GLAConfig,
    module=GLA,
)
