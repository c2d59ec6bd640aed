"""Gated DeltaNet-2 (arXiv 2605.22791): the gated delta rule that erases and writes by channels.

`M_t = (I - k_tᵀ (b_t ⊙ k_t)) diag(α_t) M_{t-1} + k_tᵀ (w_t ⊙ v_t)`, with an erase gate b of each key channel and a write
gate w of each value channel. With b = w = β it is Kimi Delta Attention; with b = 0, gated linear attention.

`dplr_memory` computes it with a = -b ⊙ k ⊙ α, which reads the memory ahead of the decay, and b = k. In bfloat16 `a` is rounded
with the decay inside, which is one relative rounding as that of b ⊙ k alone would be (docs/decisions.md has the errors).

Three implementations of the layer agree on the recurrence and differ in the output gate and the initial rates. Here they
are those of the authors' file (NVIDIA, lit_gpt/gdn2.py): a norm times SiLU of a low-rank gate with a bias, and rates
from U(1, 16). flash-linear-attention has a sigmoid in place of SiLU; jax-linear-attention a full matrix without a bias,
and rates from U(0, 16). The authors' config of 1.3B has 18 heads of 128 channels at width 2304, their README 16: here, as
in the config, all heads have as many channels as the width. The authors draw matrices by Xavier with gain 2^-2.5, which a
model's `mixer_init="xavier"` does.
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
from lsm_jax.mixers.gates import softplus
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    log_uniform_rate,
    log_uniform_step_bias,
    merge_heads,
    parameter,
    recomputed,
    split_heads,
)
from lsm_jax.mixers.method import Method


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GatedDeltaNet2Config(GroupedDeltaRuleConfig):
    """The config of a Gated DeltaNet-2 layer, the delta rule with a decay, an erase gate and a write gate for each channel:
    the fields of `GroupedDeltaRuleConfig`, and

    Attributes:
        num_heads: heads of queries, keys, decays and erase gates.
        num_value_heads: heads of values, write gates and memories, a multiple of `num_heads`; None is `num_heads`.
        expand_v: number of value channels of a head, divided by head_dim; they are also the inner width of the decay's and
            the output gate's two matrices.
        allow_negative_eigenvalues: erase gates in (0, 2) instead of (0, 1); write gates are always in (0, 1).
    """

    num_heads: int = 16
    head_dim: int = 128
    expand_v: float = 1.0
    allow_negative_eigenvalues: bool = False

    @classmethod
    def for_width(cls, hidden_size: int) -> GatedDeltaNet2Config:
        """Return the config of Gated DeltaNet-2 for a model of width `hidden_size`, with the published proportions:
        heads of 128 channels (smaller ones below width 512), and as many key channels in all heads as the width.
        """
        head_dim = min(128, hidden_size // 4)
        return cls(head_dim=head_dim, num_heads=hidden_size // head_dim)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory and 2 K V each to erase, to write and to read.
        """
        keys, rank = self.num_heads * self.head_dim, self.value_dim()
        values = self.value_heads() * rank
        projections = 2.0 * hidden_size * (3 * keys + 3 * values)
        gates = 2.0 * rank * (2 * hidden_size + keys + values)
        convolutions = 2 * checks.convolution_taps(self) * (2 * keys + values)
        return projections + gates + convolutions + 7 * self.head_dim * values


def erase_and_write(
    k: jax.Array, v: jax.Array, erase: jax.Array, write: jax.Array, log_decay: jax.Array
) -> dict[str, jax.Array]:
    """Return the arguments of `dplr_memory` of one update of Gated DeltaNet-2, by name.

    Args:
        k: [B, T, H, K] keys of unit length.
        v: [B, T, G, V] values.
        erase: [B, T, H, K], b, float32 as `write` and `log_decay`.
        write: [B, T, G, V], w.
        log_decay: [B, T, H, K], log α; each key head's is that of G / H neighbouring memories.
    """
    wide = jnp.promote_types(k.dtype, jnp.float32)
    return dict(
        k=k,
        v=(write * v.astype(wide)).astype(v.dtype),
        a=(-erase * k.astype(wide) * jnp.exp(log_decay)).astype(k.dtype),
        b=k,
        log_decay=jnp.repeat(log_decay, v.shape[2] // k.shape[2], axis=2),
    )


class GatedDeltaNet2(Mixer):
    """The layer of Gated DeltaNet-2: a mixer that maps [B, T, D] to [B, T, D]; `GatedDeltaNet2Config` says what its
    options mean.
    """

    op = ops.dplr_memory
    memory_parts = ("k_proj", "v_proj", "erase_proj", "write_proj", "decay_down", "decay_up")
    token_parts = ("q_proj", "k_proj", "v_proj", "erase_proj", "write_proj", "decay_down")

    def __init__(
        self,
        config: GatedDeltaNet2Config,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size)
        heads, rank = config.num_heads, config.value_dim()
        keys, values = heads * config.head_dim, config.value_heads() * rank
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.erase_proj = Dense(hidden_size, keys, **into)
        self.write_proj = Dense(hidden_size, values, **into)
        small = dict(rngs=rngs, init_std=init_std)
        self.decay_down = Dense(hidden_size, rank, axes=("embed", None), **small)
        self.decay_up = Dense(rank, keys, axes=(None, "heads"), **small)
        self.gate_down = Dense(hidden_size, rank, axes=("embed", None), **small)
        self.gate_up = Dense(rank, values, axes=(None, "heads"), bias=True, **small)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.dt_bias = parameter(log_uniform_step_bias(rngs, keys), **fixed)
        self.a_log = parameter(log_uniform_rate(rngs, heads, low=1.0, high=16.0), **fixed)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(rank, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q after the short convolution, each of unit
        length, and the context.
        """
        q, context = self.q_conv(self.q_proj(x), context, self.config.head_dim)
        return split_heads(q, self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `dplr_memory` that update the memory, by name, as `erase_and_write` does, and the
        context.
        """
        config, heads = self.config, self.config.num_heads
        most = 2 if config.allow_negative_eigenvalues else 1

        @recomputed
        def update(k, v, erase, write, gate, bias, a_log):
            log_decay = -jnp.exp(a_log)[:, None] * softplus(gate + bias)
            gates = most * jax.nn.sigmoid(erase), jax.nn.sigmoid(write)
            return erase_and_write(k, v, *gates, log_decay)

        k, context = self.k_conv(self.k_proj(x), context, config.head_dim)
        v, context = self.v_conv(self.v_proj(x), context)
        gate = self.decay_up(self.decay_down(x), dtype=jnp.float32)
        written = update(
            split_heads(k, heads),
            split_heads(v, config.value_heads()),
            split_heads(self.erase_proj(x, dtype=jnp.float32), heads),
            split_heads(self.write_proj(x, dtype=jnp.float32), config.value_heads()),
            split_heads(gate, heads),
            split_heads(self.dt_bias[...], heads),
            self.a_log[...],
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, G, V]: normalise each
        head, multiply by silu(x W₁ W₂ + b), and project.
        """
        gate = split_heads(self.gate_up(self.gate_down(x)), self.config.value_heads())
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, G, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.delta_state(
            batch_size, config.value_heads(), config.head_dim, config.value_dim()
        )


METHOD = Method(
    name="gated_deltanet2",
    paper="arXiv 2605.22791",
    op="dplr_memory",
    gate="(I - kᵀ (b ⊙ k)) diag(α), b and α each key channel",
    write="kᵀ (w ⊙ v), w each value channel",
    read="q M",
    state="K × V a head; 3 tokens of q, k, v",
    config=GatedDeltaNet2Config,
    module=GatedDeltaNet2,
)
