"""Gated DeltaNet (arXiv 2412.06464): `M ← α_t M`, then `M ← M + k_tᵀ β_t (v_t - k_t M)`; there may be more
value heads than key heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.delta_config import GroupedDeltaRuleConfig
from lsm_jax.mixers.heads import head_size
from lsm_jax.mixers.joined import project_together, unjoined
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    log_uniform_rate,
    log_uniform_step_bias,
    merge_heads,
    parameter,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.normed_product import normed_product


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GatedDeltaNetConfig(GroupedDeltaRuleConfig):
    """The config of a Gated DeltaNet layer, the delta rule with one decay for each head and token: the fields of
    `GroupedDeltaRuleConfig`, and

    Attributes:
        allow_negative_eigenvalues: β in (0, 2) instead of (0, 1) (arXiv 2411.12537).
        output_norm: whether each head's output is normalised ahead of the gate; Linear-MoE (arXiv 2503.05447, its code) has
            only the gate.
        qkv_bias: whether the projections to queries, keys, values and the output gate have biases, as in Linear-MoE.
    """

    allow_negative_eigenvalues: bool = False
    output_norm: bool = True
    qkv_bias: bool = False

    @classmethod
    def for_width(cls, hidden_size: int) -> GatedDeltaNetConfig:
        """Return the config of Gated DeltaNet for a model of width `hidden_size`, with the published proportions: heads
        of 256 channels (smaller ones below width 768), and at most 3/4 as many key channels in all heads as the width: 2/3 at 768.
        """
        head_dim = head_size(hidden_size, 256)
        return cls(head_dim=head_dim, num_heads=max(1, 3 * hidden_size // (4 * head_dim)))

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory and 2 K V each to erase, to write and to read.
        """
        keys, heads = self.num_heads * self.head_dim, self.value_heads()
        values = heads * self.value_dim()
        projections = 2.0 * hidden_size * (2 * keys + 3 * values + 2 * heads)
        return (
            projections
            + 2 * checks.convolution_taps(self) * (2 * keys + values)
            + 7 * self.head_dim * values
        )


class GatedDeltaNet(Mixer):
    """The layer of Gated DeltaNet: a mixer that maps [B, T, D] to [B, T, D]; `GatedDeltaNetConfig` says what its
    options mean.
    """

    op = ops.delta_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "beta_proj", "decay_proj")

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size)
        heads, value_dim = config.value_heads(), config.value_dim()
        keys, values = config.num_heads * config.head_dim, heads * value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        bias: dict[str, Any] = dict(bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, keys, **into, **bias)
        self.k_proj = Dense(hidden_size, keys, **into, **bias)
        self.v_proj = Dense(hidden_size, values, **into, **bias)
        self.g_proj = Dense(hidden_size, values, **into, **bias)
        self.beta_proj = Dense(hidden_size, heads, **into)
        self.decay_proj = Dense(hidden_size, heads, **into)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.dt_bias = parameter(log_uniform_step_bias(rngs, heads), **fixed)
        self.a_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=16.0), **fixed)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(value_dim, eps=config.norm_eps) if config.output_norm else None
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q after the short convolution, each of unit
        length, and the context.
        """
        q, context = self.q_conv(
            self.q_proj(unjoined(x, self.q_proj)), context, self.config.head_dim
        )
        return split_heads(q, self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `delta_memory` that update the memory, by name, and the context: keys of unit length
        and values after the short convolutions, and the write strength β and the log decay of each value head [B, T,
        G].
        """
        config = self.config
        wide = jnp.float32
        beta, step = project_together(x, (self.beta_proj, wide), (self.decay_proj, wide))
        beta = jax.nn.sigmoid(beta)
        step = jax.nn.softplus(step + self.dt_bias[...])
        k, context = self.k_conv(
            self.k_proj(unjoined(x, self.k_proj, barriers=2)), context, config.head_dim
        )
        v, context = self.v_conv(self.v_proj(x), context)
        written = dict(
            k=split_heads(k, config.num_heads),
            v=split_heads(v, config.value_heads()),
            beta=2 * beta if config.allow_negative_eigenvalues else beta,
            log_decay=-jnp.exp(self.a_log[...]) * step,
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, G, V]: normalise each
        head if the config says so, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.value_heads())
        if self.norm is None:
            return self.o_proj(merge_heads(o * jax.nn.silu(gate))), context
        return normed_product(self.norm, self.o_proj, o, gate), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, G, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.delta_state(
            batch_size, config.value_heads(), config.head_dim, config.value_dim()
        )


METHOD = Method(
    name="gated_deltanet",
    paper="arXiv 2412.06464",
    op="delta_memory",
    gate="(I - β kᵀ k) α, α each head",
    write="β kᵀ v",
    read="q M",
    state="K × V a head; 3 tokens of q, k, v",
    config=GatedDeltaNetConfig,
    module=GatedDeltaNet,
)
