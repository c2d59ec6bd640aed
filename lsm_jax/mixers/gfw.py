"""Gated fast weights (Mao 2022, arXiv 2210.04243): `M_t = (β_tᵀ α_t) ⊙ M_{t-1} + k_tᵀ v_t`, `o_t = q_t M_t`.

The gate has rank one: β decays key channels, α value channels, both functions of the token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GFWConfig(RecurrentConfig):
    """The config of a layer of gated fast weights: linear attention with decays for each key and each value channel.

    The published models are transformers that were tuned into this form, without norm and output gate. For
    training from scratch this layer has those of Linear-MoE (arXiv 2503.05447): a norm over each head's
    output, multiplied by silu(x W_g).

    Attributes:
        num_heads: number of heads.
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all heads, divided by hidden_size.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 16
    expand_k: float = 1.0
    expand_v: float = 1.0
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> GFWConfig:
        """Return the config of gated fast weights for a model of width `hidden_size`, with the published proportions,
        those of GPT-2: heads of 64 channels, smaller ones below width 256.
        """
        return cls(num_heads=hidden_size // min(64, hidden_size // 4))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of gated fast weights in a model of
        width `hidden_size`.
        """
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of gated fast weights is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        self.validate_fields()
        self.head_dims(hidden_size)
        checks.positive(self, norm_eps=self.norm_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head K
        V each to compute the gate and to decay the memory, and 2 K V each to write and to read.
        """
        k, v = self.head_dims(hidden_size)
        return self.num_heads * (2.0 * hidden_size * (3 * k + 4 * v) + 6 * k * v)


class GFW(Mixer):
    """The layer of gated fast weights: a mixer that maps [B, T, D] to [B, T, D]; `GFWConfig` says what its options
    mean.
    """

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj", "key_decay_proj", "value_decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "key_decay_proj", "value_decay_proj")

    def __init__(
        self, config: GFWConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        keys, values = config.num_heads * self.key_dim, config.num_heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        self.key_decay_proj = Dense(hidden_size, keys, bias=True, **into)
        self.value_decay_proj = Dense(hidden_size, values, bias=True, **into)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q cut into heads, and the context."""
        return split_heads(self.q_proj(x), self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys, values, and
        the log decays log sigmoid(x W + b) of key channels [B, T, H, K] and of value channels [B, T, H, V].
        """

        def log_gate(projection):
            gate = split_heads(projection(x, dtype=jnp.float32), self.config.num_heads)
            return jax.nn.log_sigmoid(gate)

        return dict(
            k=split_heads(self.k_proj(x), self.config.num_heads),
            v=split_heads(self.v_proj(x), self.config.num_heads),
            log_decay=log_gate(self.key_decay_proj),
            value_log_decay=log_gate(self.value_decay_proj),
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(batch_size, self.config.num_heads, self.key_dim, self.value_dim)


METHOD = Method(
    name="gfw",
    paper="arXiv 2210.04243",
    op="linear_memory",
    gate="βᵀ α, sigmoids of x W: each key channel and each value channel",
    write="kᵀ v",
    read="q M",
    state="K × V a head",
    config=GFWConfig,
    module=GFW,
)
