"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay for each key channel.

`M_t = (I - β_t k_tᵀ k_t) diag(α_t) M_{t-1} + β_t k_tᵀ v_t`, keys and queries of unit length.

Released layers differ in the decay and in the gates, which are fields here. With f the projection of the token, δ a
step bias and A a rate per head:

| layer | log α | matrices of f and of the output gate | config |
|---|---|---|---|
| Kimi-Linear-48B-A3B | -A softplus(f + δ) | low rank, no bias | `output_gate_bias=False` |
| GLM-5.3-Flash | -5 sigmoid(A (f + δ)) | low rank, no bias | `output_gate_bias=False, lower_bound=-5.0` |
| Ling-3.0-Flash | -5 sigmoid(A (f + δ)) | one full matrix, no bias | `full_rank_gates=True, lower_bound=-5.0` |
| flash-linear-attention | either | low rank, a bias of the output gate | the default; `lower_bound=-5.0` |

The bound ("safe gate") is in no paper; it is read from the code of these layers. They disagree on two points:

* The rates of a bounded decay start at A = 1, as in GLM and flash-linear-attention. Ling draws them from U(1, 16), as
  for the softplus, where sigmoid(A δ) with δ < -2.2 starts near 0 for most heads: they would forget nothing at first.
* The log decay stays float32, as in all but Ling, which rounds it to bfloat16 before the recurrence.

flash-linear-attention bounds the decay where `lower_bound` is given, whatever its `safe_gate` is, and so does `lower_bound` here. Its
chunks measured bounded decays from their middle token up to version 0.5.2, so that later gates changed earlier outputs by rounding; here
none does, in no bit.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.delta_config import GroupedDeltaRuleConfig
from lsm_jax.mixers.gates import softplus_decay
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    log_uniform_rate,
    log_uniform_step_bias,
    parameter,
    recomputed,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.normed_product import apart_from_bias, normed_product


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class KDAConfig(GroupedDeltaRuleConfig):
    """The config of a layer of Kimi Delta Attention, the delta rule with a decay for each key channel and token: the fields of
    `GroupedDeltaRuleConfig`, and

    Attributes:
        head_dim: key channels of a head.
        gate_rank: inner width of the decay's and the output gate's two matrices; None means `head_dim`, as published. In
            flash-linear-attention it is the width of a head's values, `head_dim * expand_v`.
        allow_negative_eigenvalues: β in (0, 2) instead of (0, 1) (arXiv 2411.12537).
        lower_bound: the bound L < 0 of the log decay L sigmoid(A (f + δ)); None is the published -A softplus(f + δ).
        full_rank_gates: whether the decay's f and the output gate are one matrix each, instead of the product of two.
        output_gate_bias: whether the output gate's second matrix has a bias; a full matrix has none.
    """

    num_heads: int = 16
    head_dim: int = 128
    gate_rank: int | None = None
    expand_v: float = 1.0
    allow_negative_eigenvalues: bool = False
    lower_bound: float | None = None
    full_rank_gates: bool = False
    output_gate_bias: bool = True

    @classmethod
    def for_width(cls, hidden_size: int) -> KDAConfig:
        """Return the config of Kimi Delta Attention for a model of width `hidden_size`, with the published proportions:
        heads of 128 channels (smaller ones below width 512), and as many key channels in all heads as the width.
        """
        head_dim = min(128, hidden_size // 4)
        return cls(head_dim=head_dim, num_heads=hidden_size // head_dim)

    def rank(self) -> int:
        """Return the inner width of the decay's and the output gate's two matrices."""
        return self.head_dim if self.gate_rank is None else self.gate_rank

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Kimi Delta Attention is not accepted, or does not fit a model
        of width `hidden_size`.
        """
        super().validate(hidden_size)
        checks.positive(self, gate_rank=self.rank())
        if self.lower_bound is not None and self.lower_bound >= 0:
            raise ValueError(
                f"KDAConfig.lower_bound={self.lower_bound}: accepted are None and negative numbers"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory and 2 K V each to erase, to write and to read.
        """
        keys, heads = self.num_heads * self.head_dim, self.value_heads()
        values, rank = heads * self.value_dim(), self.rank()
        projections = 2.0 * hidden_size * (2 * keys + 2 * values + heads)
        gates = heads * self.head_dim + values
        if self.full_rank_gates:
            gates *= 2.0 * hidden_size
        else:
            gates = 2.0 * rank * (2 * hidden_size + gates)
        convolutions = 2 * checks.convolution_taps(self) * (2 * keys + values)
        return projections + gates + convolutions + 7 * self.head_dim * values


def bounded_log_decay(
    gate: jax.Array, bias: jax.Array, a_log: jax.Array, lower_bound: float
) -> jax.Array:
    """Return the bounded log decay L sigmoid(A (f + δ)) of each key channel, in (L, 0): L is `lower_bound`, f the gate
    [..., G, K], δ the bias [G, K] and log A `a_log` [G].
    """
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * (gate + bias))


class KDA(Mixer):
    """The layer of Kimi Delta Attention: a mixer that maps [B, T, D] to [B, T, D]; `KDAConfig` says what its options
    mean.
    """

    op = ops.delta_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj", "decay_proj", "decay_down", "decay_up")
    token_parts = ("q_proj", "k_proj", "v_proj", "beta_proj", "decay_down")

    def __init__(
        self, config: KDAConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, rank = config.value_heads(), config.rank()
        keys, values = config.num_heads * config.head_dim, heads * config.value_dim()
        decays = heads * config.head_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.beta_proj = Dense(hidden_size, heads, **into)
        small = dict(rngs=rngs, init_std=init_std)
        if config.full_rank_gates:
            self.decay_proj = Dense(hidden_size, decays, **into)
            self.gate_proj = Dense(hidden_size, values, **into)
        else:
            bias = config.output_gate_bias
            self.decay_down = Dense(hidden_size, rank, axes=("embed", None), **small)
            self.decay_up = Dense(rank, decays, axes=(None, "heads"), **small)
            self.gate_down = Dense(hidden_size, rank, axes=("embed", None), **small)
            self.gate_up = Dense(rank, values, axes=(None, "heads"), bias=bias, **small)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.dt_bias = parameter(log_uniform_step_bias(rngs, decays), **fixed)
        rates = log_uniform_rate(rngs, heads, low=1.0, high=16.0)
        self.a_log = parameter(
            rates if config.lower_bound is None else jnp.zeros_like(rates), **fixed
        )
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(config.value_dim(), eps=config.norm_eps)
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
        """Return the arguments of `delta_memory` that update the memory, by name, and the context: keys of unit length
        and values after the short convolutions, the write strength β of each value head [B, T, G], and its log decay
        for each key channel [B, T, G, K].
        """
        config, heads = self.config, self.config.value_heads()
        beta = jax.nn.sigmoid(self.beta_proj(x, dtype=jnp.float32))
        if config.full_rank_gates:
            gate = self.decay_proj(x, dtype=jnp.float32)
        else:
            gate = self.decay_up(self.decay_down(x), dtype=jnp.float32)
        gate, bias = split_heads(gate, heads), split_heads(self.dt_bias[...], heads)

        a_log = self.a_log[...]
        if config.lower_bound is None:
            log_decay = softplus_decay(gate, bias, a_log)
        else:
            bounded = functools.partial(bounded_log_decay, lower_bound=config.lower_bound)
            log_decay = recomputed(bounded)(gate, bias, a_log)

        k, context = self.k_conv(self.k_proj(x), context, config.head_dim)
        v, context = self.v_conv(self.v_proj(x), context)
        written = dict(
            k=split_heads(k, config.num_heads),
            v=split_heads(v, heads),
            beta=2 * beta if config.allow_negative_eigenvalues else beta,
            log_decay=log_decay,
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, G, V]: normalise each
        head, multiply by sigmoid(x W₁ W₂ + b) or sigmoid(x W), and project.
        """
        config, heads = self.config, self.config.value_heads()
        layer = self.gate_proj if config.full_rank_gates else self.gate_up
        inner = x if config.full_rank_gates else self.gate_down(x)
        gate, bias = apart_from_bias(layer, inner, jnp.float32)
        gate, bias = split_heads(gate, heads), None if bias is None else split_heads(bias, heads)
        y = normed_product(self.norm, self.o_proj, o, gate, bias, activation="sigmoid")
        return y, context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, G, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.delta_state(
            batch_size, config.value_heads(), config.head_dim, config.value_dim()
        )


METHOD = Method(
    name="kda",
    paper="arXiv 2510.26692",
    op="delta_memory",
    gate="(I - β kᵀ k) diag(α), α each key channel",
    write="β kᵀ v",
    read="q M",
    state="K × V a head; 3 tokens of q, k, v",
    config=KDAConfig,
    module=KDA,
    note="log α = -A softplus(f + δ), or L sigmoid(A (f + δ)) with the field `lower_bound` L",
)
